"""Trained tokens are written down once, by the rank that received them, on every mesh as on one rank."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
import torch
from ranks import run_ranks
from token_runs import MESHES, record

from stretto.records.trained_tokens import find_trained

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tokens")
    record(folder / "alone", {}, 1)
    run_ranks("records/token_runs.py", folder, *MESHES, world_size=2, log=folder / "log")
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_writes_the_tokens_of_one_rank(mesh, written):
    assert {path.name for path in (written / mesh).iterdir()} == ({"rank_0", "rank_1"} if mesh == "dp" else {"rank_0"})
    for step in (1, 2):
        alone, split = (
            sorted(find_trained(written / name, step), key=lambda each: each.sample_id) for name in ("alone", mesh)
        )
        assert [(each.sample_id, each.spans) for each in split] == [(each.sample_id, each.spans) for each in alone]
        assert len(alone) > 3
        for ours, theirs in zip(split, alone):
            num_tokens = theirs.spans[-1][1]
            for name, stream in theirs.streams(num_tokens).items():
                np.testing.assert_allclose(ours.streams(num_tokens)[name], stream, rtol=2e-3, atol=1e-3)
