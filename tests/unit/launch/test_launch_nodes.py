"""Plans of a run over several machines: processes, nodes, and addresses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.base.secret import load_secret
from stretto.check.nodes import find_node_rank
from stretto.config.load import load
from stretto.config.root import OrchestratorConfig, RLConfig, TrainerConfig
from stretto.config.sections.distill import MODEL_KEY_VAR
from stretto.launch.plan import plan as planning
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.serving import plan_serving

# The last example of disaggregation in the documents: 3 x (2 x 2 + 1 x 2) inference nodes, 4 trainer nodes.
TOML = """
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
num_train_nodes = 4
num_infer_nodes = 6
num_infer_replicas = 3
[inference]
enable_expert_parallel = true
[inference.parallel]
tp = 2
[inference.deployment]
type = "disaggregated"
num_prefill_nodes = 2
num_decode_nodes = 2
num_prefill_replicas = 2
num_decode_replicas = 1
"""


FROZEN = (
    TOML.partition("[deployment]")[0]
    + """
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
)


def config(tmp_path: Path, *words: str, text: str = TOML) -> RLConfig:
    file = tmp_path / "rl.toml"
    file.write_text(text)
    return load(RLConfig, ["@", str(file), "--output-dir", str(tmp_path / "out"), *words])


@pytest.mark.heavy
def test_the_example_of_the_documents_has_eighteen_inference_nodes_and_three_routers(tmp_path):
    cfg = config(tmp_path, "--dry-run")
    plan = plan_nodes(cfg, cfg.run_dir)
    assert plan.hosts == tuple(f"node-{i}" for i in range(22))
    planning.write(plan, tmp_path / "written")
    for cls in (RLConfig, TrainerConfig, OrchestratorConfig):  # what each process is started from
        assert load(cls, ["@", str(tmp_path / "written" / "configs" / "run.json"), "--dry-run"])
    by_node = {node: [spec.name for spec in plan.processes if spec.node == node] for node in range(22)}
    assert by_node[0] == ["orchestrator", *(f"trainer_{rank}" for rank in range(8))]
    assert by_node[3] == [f"trainer_{rank}" for rank in range(24, 32)]
    assert [by_node[node] for node in (4, 5, 10, 21)] == [
        ["inference_0", "router_0"],
        ["inference_1"],
        ["inference_6", "router_1"],
        ["inference_17"],
    ]
    client = plan.config.orchestrator.client
    assert client.base_url == [f"http://node-{node}:8000/v1" for node in (4, 10, 16)]
    assert client.admin_base_url[:5:4] == ["http://node-4:8100/v1", "http://node-8:8200/v1"]
    assert len(client.admin_base_url) == 18 and client.split_samples
    assert plan.config.control.host == plan.config.rollout_transport.host == "node-0"
    assert plan.config.weight_broadcast.host == "node-0"


@needs("routers", "vllm")
def test_ranks_meet_at_the_first_node_and_see_one_gpu_each(tmp_path):
    cfg = config(tmp_path, "--dry-run")
    [spec] = [spec for spec in plan_nodes(cfg, cfg.run_dir).processes if spec.name == "trainer_13"]
    assert spec.node == 1 and spec.devices == ("5",)
    wanted = {
        "RANK": "13",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "32",
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "5",
    }
    assert wanted.items() <= spec.env.items()


@needs("routers", "vllm")
def test_each_engine_process_has_its_own_config_and_listens_at_its_address(tmp_path):
    cfg = config(tmp_path, "--dry-run")
    plan = plan_nodes(cfg, cfg.run_dir)
    planning.write(plan, cfg.run_dir.path)
    [spec] = [spec for spec in plan.processes if spec.name == "inference_8"]  # of the second replica
    own = json.loads(Path(spec.argv[-1]).read_text())
    assert own["server"] == own["server"] | {"host": "node-12", "port": 8100}
    assert own["deployment"]["type"] == "single_node" and own["engine"] == "vllm"
    assert own["vllm_extra"]["data_parallel_address"] == "node-12"
    assert own["vllm_extra"]["all2all_backend"] == "deepep_high_throughput"
    assert spec.ports == {"http": 8100, "data_parallel_rpc": 29550, "nixl": 5602}
    assert spec.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "node-12" and spec.env["STRETTO_HOLD"] == "1"
    written = json.loads(cfg.run_dir.plan.read_text())
    assert written["hosts"][12] == "node-12"
    assert [p["node"] for p in written["processes"] if p["name"] == "router_1"] == [10]


@needs("routers", "vllm")
def test_wide_expert_parallelism_gives_each_node_its_ranks(tmp_path):
    text = TOML.partition("[deployment]")[0] + (
        '[deployment]\ntype = "multi_node"\n[inference]\nenable_expert_parallel = true\n'
        "[inference.parallel]\ntp = 2\ndp = 8\n"
        '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\n'
    )
    cfg = config(tmp_path, "--deployment.hosts", "a", "b", "c", text=text)
    plan = plan_nodes(cfg, cfg.run_dir)
    assert [(s.name, s.node) for s in plan.processes if s.role != "trainer"] == [
        ("orchestrator", 0),
        ("inference_0", 1),
        ("inference_1", 2),
        ("router", 1),
    ]
    assert plan.config.orchestrator.client.base_url == "http://b:8000/v1"


def test_one_engine_per_replica_needs_no_router(tmp_path):
    text = TOML.partition("[deployment]")[0] + '[deployment]\ntype = "multi_node"\nnum_infer_replicas = 2\n'
    cfg = config(tmp_path, "--deployment.hosts", "a", "b", "c", text=text)
    plan = plan_nodes(cfg, cfg.run_dir)
    client = plan.config.orchestrator.client
    assert client.base_url == ["http://b:8000/v1", "http://c:8000/v1"] and not client.split_samples
    assert not any(spec.role == "router" for spec in plan.processes)


@needs("routers", "vllm")
def test_given_ports_and_hosts_are_kept(tmp_path):
    words = ("--control.host", "10.9.9.9", "--weight-broadcast.port", "3333", "--inference.server.host", "0.0.0.0")
    cfg = config(tmp_path, "--dry-run", *words)
    plan = plan_nodes(cfg, cfg.run_dir)
    assert plan.config.control.host == "10.9.9.9" and plan.config.weight_broadcast.port == 3333
    assert all(engine.section.server.host == "0.0.0.0" for engine in plan.engines.engines)
    assert plan.config.orchestrator.client.base_url[0] == "http://node-4:8000/v1"


@pytest.mark.parametrize("host", ["a", "gpu_1.local", "10.0.0.1", "fd00::1", "fe80::1%eth0"])
def test_names_and_addresses_are_hosts(tmp_path, host):
    assert host in config(tmp_path, "--deployment.hosts", *map(str, range(21)), host).deployment.hosts


def test_a_node_finds_its_number(monkeypatch):
    hosts = ["198.51.100.1", "127.0.0.1", "198.51.100.2"]
    assert find_node_rank(2, hosts, "deployment.node_rank") == 2
    assert find_node_rank(None, hosts, "deployment.node_rank") == 1
    assert find_node_rank(None, ["198.51.100.1", socket.gethostname()], "deployment.node_rank") == 1
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert find_node_rank(None, hosts, "deployment.node_rank") == 0


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
