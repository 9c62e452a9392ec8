"""Every mesh trains on pairs as one rank does, with DPO and with a reward model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
import torch
from pair_runs import CASES, NUM_STEPS, QUICK, build, train
from ranks import run_ranks


@pytest.fixture(scope="module")
def on_meshes(request, tmp_path_factory):
    """Results of the cases that this session asks for; one process group for each number of ranks."""
    folder = tmp_path_factory.mktemp("pairs")
    asked = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    found = [case for case in CASES if case in asked]
    for world_size in (2, 4):
        names = [case for case in found if case.startswith(f"{world_size}-")]
        run_ranks("pairs/pair_runs.py", folder, *names, world_size=world_size, log=folder / "log", deadline_s=300.0)
    return {case: torch.load(folder / f"{case}.pt", weights_only=False) for case in found}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES])
def test_a_mesh_trains_on_pairs_like_one_rank(case, on_meshes, tmp_path):
    torch.set_num_threads(1)
    got, want = on_meshes[case], train(build(case), case, tmp_path)
    assert len(got["metrics"]) == NUM_STEPS
    assert want["after"]["loss"] < want["before"]["loss"], "it learns"
    if want["reference"] is not None:
        np.testing.assert_allclose(got["reference"], want["reference"], rtol=1e-5, atol=1e-4)
    if want["reference"] is not None:  # the start's rewards are 0 but for rounding, so which is higher says nothing
        for each in (got, want):
            del each["metrics"][0]["rewards/accuracies"], each["before"]["rewards/accuracies"]
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    for when in ("before", "after"):
        assert got[when] == pytest.approx(want[when], rel=1e-4, abs=1e-4)
    assert got["weights"].keys() == want["weights"].keys()
    for name, tensor in want["weights"].items():
        assert (got["weights"][name] - tensor).abs().max() < 1e-5, name
