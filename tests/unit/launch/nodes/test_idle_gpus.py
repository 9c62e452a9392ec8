"""Engines over several machines take all GPUs of their nodes, unless the config says otherwise; then a note says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import plans
from processes.add_ons import needs

from stretto.base.paths import RunDir
from stretto.cli import main
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.plan import LaunchPlan
from stretto.launch.plan.table import gpu_sum

WIDE = "--deployment.type multi_node --deployment.num-train-nodes 2 --deployment.num-infer-replicas 2 "


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LaunchPlan]:
    config = plans.loader(tmp_path, monkeypatch, plans.TOML.replace("32", "64"), num_gpus=0)
    return lambda words: plan_nodes(config(WIDE + words), RunDir(tmp_path / "run"))


def idle(plan: LaunchPlan) -> list[str]:
    return [note for note in plan.notes if "given to nobody" in note]


@needs("routers", "vllm")
@pytest.mark.parametrize(
    "words",
    [
        "",
        "--inference.parallel.tp 4",
        "--inference.parallel.tp 2 --inference.parallel.pp 2",
        "--deployment.num-infer-nodes 1",
        "--inference.engine embedded",
        "--inference.engine vllm --inference.parallel.tp 8",
        "--deployment.infer-gpus-per-node 8",
    ],
)
def test_all_gpus_of_the_nodes_are_used(planned: Callable[[str], LaunchPlan], words: str) -> None:
    plan = planned(words)
    assert (gpu_sum(plan), idle(plan)) == ("16 trainer + 16 inference = 32", [])


@needs("routers", "vllm")
def test_an_engine_over_all_nodes_of_a_replica_takes_all_their_gpus(planned) -> None:
    words = "--deployment.num-infer-nodes 2 --inference.enable-expert-parallel true --inference.parallel.tp 2"
    plan = planned(words)
    assert (gpu_sum(plan), idle(plan)) == ("16 trainer + 32 inference = 48", [])
    assert plan.config.inference.parallel.dp == 8


@needs("routers", "vllm")
@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--inference.parallel.dp 1", "14 of 32 GPUs of the nodes are given to nobody (7 of 8 on node 2, 7"),
        ("--inference.parallel.tp 3", "10 of 32 GPUs"),
        ("--inference.deployment.num-replicas 2", "12 of 32 GPUs"),
        ("--deployment.num-infer-nodes 1 --inference.parallel.tp 4 --inference.parallel.dp 1", "8 of 32 GPUs"),
        ("--inference.deployment.type multi_node --inference.parallel.tp 2", "24 of 48 GPUs"),
    ],
)  # fmt: skip
def test_gpus_that_nobody_gets_are_said(planned: Callable[[str], LaunchPlan], words: str, left: str) -> None:
    (note,) = idle(planned(words))
    assert note.startswith(left) and "inference.parallel.dp" in note


def test_nodes_of_a_smaller_kind_are_full_but_not_as_nodes_of_a_job(planned) -> None:
    """A job's nodes all have the GPUs of the fullest."""
    words = "--deployment.infer-gpus-per-node 4 "
    assert idle(planned(words)) == [] == idle(planned("--inference.device cpu"))
    assert idle(planned(words + "--slurm.partition p"))[0].startswith("8 of 32 GPUs")
    assert idle(planned("--inference.device cpu --slurm.partition p"))[0].startswith("16 of 32 GPUs")


@needs("routers", "vllm")
def test_inference_alone_says_which_gpus_are_idle(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inference", "--model", "m", "--deployment.type", "multi_node", "--parallel.tp", "4", "--dry-run"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "note: 8 of 16 GPUs of the nodes are given to nobody (4 of 8 on node 0, 4 of 8 on node 1)" in shown
    assert "raise parallel.dp or tp, or deployment.num_replicas" in shown
    assert main([*words, "--parallel.dp", "2"]) == 0
    assert "nobody" not in capsys.readouterr().out


def test_a_given_shape_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(plans.TOML.replace("32", "64"))
    at = ["@", str(tmp_path / "rl.toml"), *WIDE.split()]
    for key, value in (("parallel.dp", 2), ("deployment.num_replicas", 3)):
        section = load(RLConfig, [*at, f"--inference.{key}", str(value)]).inference
        assert section is not None
        assert (section.parallel.dp, section.deployment.num_engines) == ((2, 1) if "dp" in key else (1, 3))
