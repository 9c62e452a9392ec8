"""Frozen models of a run over several nodes: where their engines are, and which key they have."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.base.secret import load_secret
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.distill import MODEL_KEY_VAR
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.serving import plan_serving

FROZEN = """
max_steps = 5
[model]
name = "PrimeIntellect/INTELLECT-3"
[orchestrator]
batch_size = 64
group_size = 8
[[orchestrator.env]]
id = "sort-letters"
[weight_broadcast]
type = "collective"
[deployment]
type = "multi_node"
[inference.parallel]
tp = 8
[models.ref]
model = "r"
parallel.tp = 2
deployment.num_replicas = 2
[models.big]
model = "b"
parallel.tp = 8
[models.judge]
model = "j"
parallel.tp = 4
[models.far]
base_url = "http://elsewhere:1/v1"
"""


def config(tmp_path: Path, *words: str, text: str = FROZEN) -> RLConfig:
    file = tmp_path / "rl.toml"
    file.write_text(text)
    return load(RLConfig, ["@", str(file), "--output-dir", str(tmp_path / "out"), *words])


def test_frozen_models_come_after_the_nodes_of_inference_and_share_one_where_they_fit(tmp_path):
    cfg = config(tmp_path, "--dry-run", text=FROZEN)
    plan = plan_nodes(cfg, cfg.run_dir, secret=load_secret(cfg.run_dir))
    assert cfg.num_nodes == len(plan.hosts) == 4
    found = {spec.name: spec for spec in plan.processes}
    places = {name: (spec.node, spec.devices) for name, spec in found.items() if name.startswith("model_")}
    assert places == {
        "model_ref": (2, ("0", "1", "2", "3")),
        "model_big": (3, tuple("01234567")),
        "model_judge": (2, ("4", "5", "6", "7")),
    }
    asked = plan.config.orchestrator.frozen_models
    assert {name: section.base_url for name, section in asked.items()} == {
        "ref": "http://node-2:8060/v1",
        "big": "http://node-3:8061/v1",
        "judge": "http://node-2:8062/v1",
        "far": "http://elsewhere:1/v1",
    }
    served = plan.configs()["model_judge"].server
    assert (served.host, served.port) == ("node-2", 8062)
    own, policys = (found["orchestrator"].env[name] for name in (MODEL_KEY_VAR, "VLLM_API_KEY"))
    assert own and {found[name].env["VLLM_API_KEY"] for name in places} == {own} != {policys}
    assert asked["ref"].api_key_var == MODEL_KEY_VAR != asked["far"].api_key_var


def test_frozen_models_on_nodes_have_the_key_that_a_user_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", "t3acher")
    cfg = config(tmp_path, "--dry-run", text=FROZEN)
    plan = plan_nodes(cfg, cfg.run_dir, secret=load_secret(cfg.run_dir))
    keys = {spec.env["VLLM_API_KEY"] for spec in plan.processes if spec.role.startswith("model_")}
    places = plan.config.orchestrator.frozen_models.values()
    assert keys == {"t3acher"} and {place.api_key_var for place in places} == {"TEACHER_API_KEY"}


OVER_NODES = """
parallel.tp = 16
[models.big.deployment]
type = "multi_node"
nodes_per_engine = 2
"""


@needs("routers", "vllm")
def test_a_frozen_model_larger_than_a_node_has_nodes_of_its_own(tmp_path):
    cfg = config(tmp_path, "--dry-run", text=FROZEN.replace('"b"\nparallel.tp = 8', f'"b"{OVER_NODES}'))
    plan = plan_nodes(cfg, cfg.run_dir)
    assert cfg.num_nodes == len(plan.hosts) == 5
    found = [spec for spec in plan.processes if spec.role == "model_big"]
    assert [(spec.name, spec.node, spec.devices) for spec in found] == [
        ("model_big_0", 2, tuple("01234567")),
        ("model_big_1", 3, tuple("01234567")),
    ]
    assert [spec.argv[-2:] for spec in found] == [("--node-rank", "0"), ("--node-rank", "1")]
    places = {spec.name: spec.node for spec in plan.processes if spec.role in ("model_ref", "model_judge")}
    assert places == {"model_ref": 4, "model_judge": 4}
    served = plan.configs()["model_big"]
    assert served.hosts == ["node-2", "node-3"] and served.server.host == "node-2"
    assert plan.config.orchestrator.frozen_models["big"].base_url == f"http://node-2:{served.server.port}/v1"
    engines = plan_serving(served, cfg.run_dir).engines
    assert [(e.node, e.section.vllm_extra["node_rank"], e.is_served) for e in engines.engines] == [
        (0, 0, True),
        (1, 1, False),
    ]


@pytest.mark.parametrize(
    ("line", "more", "message"),
    [
        ("parallel.tp = 2", "parallel.tp = 16", "models.ref takes 32 GPUs, and a node of models has 8; lower its"),
        ('model = "r"', 'model = "r"\ngpu_ids = [0, 1, 2, 3]', "over several nodes it gets the first that are free"),
        ('type = "multi_node"', 'type = "multi_node"\nhosts = ["a", "b"]', "it takes 4, 1 of the trainer and 3 of"),
    ],
)
def test_models_that_fit_on_no_node_are_refused(line, more, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, "--dry-run", text=FROZEN.replace(line, more, 1))
