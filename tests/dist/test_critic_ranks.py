"""A critic whose shards are read by their ranks trains like one that is loaded whole."""

from __future__ import annotations

import pytest
import torch
from critic_runs import KINDS, play
from mesh_runs import policy_of
from ranks import run_ranks

from stretto.models import hub
from stretto.models.value_head import SCORE_NAME


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of models, and the results of two ranks."""
    torch.set_num_threads(1)
    folder, policy = tmp_path_factory.mktemp("critics"), policy_of("ppo")
    hub.save_hf(policy, folder / "language_model")
    score = torch.randn(1, policy.config.hidden_size, generator=torch.Generator().manual_seed(5)) / 10
    tensors = [*hub.export_tensors(policy), (SCORE_NAME, score)]
    hub.save_model_directory(torch.float32, folder / "reward_model", None, policy.config.hf, tensors)
    run_ranks("critic_runs.py", folder, world_size=2, log=folder / "log")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_like_one(folder, kind):
    want, got = play(folder / kind), torch.load(folder / f"{kind}.pt", weights_only=False)
    assert got["is_on_meta"] and not want["is_on_meta"], "each rank reads its shards"
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert got["tensors"].keys() == want["tensors"].keys()
    for name, tensor in want["tensors"].items():
        if not name.startswith("rng."):
            assert (got["tensors"][name] - tensor).abs().max() < 1e-5, name
