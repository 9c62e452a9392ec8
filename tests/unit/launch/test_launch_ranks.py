"""Which GPUs the ranks of `sft` get, and what is refused."""

from __future__ import annotations

import os

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import build
from stretto.config.root import SFTConfig
from stretto.launch.plan.sft_ranks import find_gpus
from stretto.launch.run.ranks import start_ranks

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
