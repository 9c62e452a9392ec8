"""Which GPUs the ranks of `sft` get, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import build, load
from stretto.config.root import SFTConfig
from stretto_sft.check import check_devices
from stretto_sft.plan import find_gpus, plan_ranks, table
from stretto_sft.ranks import start_ranks

DATA = {"data": {"type": "environment", "id": "sort-letters"}, "max_steps": 1}


def config(**settings) -> SFTConfig:
    return build(SFTConfig, DATA | settings)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "gpus"),
    [
        ({}, 1, []),
        ({"trainer_gpu_ids": "1"}, 1, ["b"]),
        ({"trainer_gpu_ids": "2,0"}, 2, ["c", "a"]),
        ({"trainer_gpu_ids": [0, 1], "deployment": {"num_train_gpus": 2}}, 2, ["a", "b"]),
        ({"deployment": {"num_train_gpus": 3}}, 3, ["a", "b", "c"]),
    ],
)
def test_each_rank_has_one_of_the_visible_gpus(monkeypatch, settings, num_ranks, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c")
    cfg = config(**settings)
    assert cfg.num_ranks == num_ranks and find_gpus(cfg) == gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus(cfg) == [], "as many ranks, on the CPU"


def test_missing_gpus_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a")
    with pytest.raises(ConfigError, match=r"GPU 1, 2, .*shows 1"):
        find_gpus(config(deployment={"num_train_gpus": 3}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trainer_gpu_ids": "0,0"}, "a GPU is named twice"),
        ({"trainer_gpu_ids": "0,1", "deployment": {"num_train_gpus": 3}}, "are 2, not deployment.num_train_gpus = 3"),
        ({"trainer_gpu_ids": []}, "at least 1 item"),
        ({"deployment": {"type": "multi_node"}, "trainer_gpu_ids": "0"}, "names what is on one machine"),
        ({"deployment": {"type": "multi_node", "hosts": ["a", "b"]}}, "2 are given, and deployment.num_train_nodes"),
        ({"deployment": {"type": "multi_node", "node_rank": 1}}, "the 1 nodes are counted from 0"),
    ],
)  # fmt: skip
def test_settings_that_disagree_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        config(**settings)


def test_one_rank_is_this_process_and_sees_its_gpu_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b")
    assert start_ranks(config(trainer_gpu_ids="1"), []) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "b"


def test_the_number_of_ranks_must_match_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert start_ranks(config(deployment={"num_train_gpus": 2}), []) is None
    with pytest.raises(ConfigError, match=r"3 ranks, .*torchrun has started 2"):
        start_ranks(config(deployment={"num_train_gpus": 3}), [])


NEED_A_GPU = [
    (["--model.fp8"], "fp8 = true needs a GPU"),
    (["--model.optim-cpu-offload"], "optim_cpu_offload = true"),
    (["--model.fsdp-cpu-offload"], "fsdp_cpu_offload = true"),
    (["--model.ac-offloading"], r"\[model.ac_offloading\]"),
]


@pytest.mark.parametrize(("words", "rule"), NEED_A_GPU)
def test_what_needs_a_gpu_is_refused_on_a_machine_without_gpus_and_planned_for_counted_ones(
    tmp_path: Path, words: Sequence[str], rule: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    base = ["--max-steps", "1", "--data.name", str(data), "--output-dir", str(tmp_path), *words]
    with pytest.raises(ConfigError, match=rule):
        check_devices(load(SFTConfig, base))
    check_devices(load(SFTConfig, [*base, "--dry-run", "--deployment.num-train-gpus", "1"]))


SFT = """
max_steps = 1
[data]
type = "environment"
id = "sort-letters"
[deployment]
type = "multi_node"
num_train_nodes = 2
gpus_per_node = 0
"""


def wide(folder: Path, *words: str) -> SFTConfig:
    (folder / "sft.toml").write_text(SFT)
    return load(SFTConfig, ["@", str(folder / "sft.toml"), "--output-dir", str(folder), *words])


def test_ranks_of_sft_meet_at_the_first_node(tmp_path):
    hosts, specs = plan_ranks(wide(tmp_path, "--deployment.gpus-per-node", "4", "--dry-run"), ["@", "f"])
    assert hosts == ["node-0", "node-1"] and [spec.node for spec in specs] == [0] * 4 + [1] * 4
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    wanted |= {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "1"}
    assert wanted.items() <= specs[5].env.items() and specs[5].argv[-2:] == ("@", "f")
    assert specs[0].ports == {"rendezvous": 29500} and specs[4].ports == {}
    assert "sft_0    0: node-0" in table(wide(tmp_path, "--dry-run"))
