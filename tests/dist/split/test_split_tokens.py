"""Ranks of tp that split the tokens of a pass keep less of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from ranks import run_ranks

from stretto.trainer.parallel.sequence import own_rows, own_tokens


@pytest.mark.heavy
def test_split_tokens_are_kept_once(tmp_path):
    run_ranks("split/split_ranks.py", tmp_path, world_size=2, log=tmp_path / "log")
    kept = json.loads((tmp_path / "kept.json").read_text())
    # Inputs of norms, of projections and of MLPs are half; what tp cuts is half with whole tokens, too.
    assert kept["split"] < 0.8 * kept["whole"]
    assert kept["split, ac"] < 0.6 * kept["whole, ac"]
    assert kept["split, groups"] < kept["split, ac"]


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 11])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_every_token_and_every_row_is_of_one_rank(num_tokens, degree):
    counts = own_tokens(num_tokens, degree)
    assert sum(counts) == num_tokens and max(counts) - min(counts) <= 1
    rows = torch.arange(0, num_tokens, 2)
    owners = torch.repeat_interleave(torch.arange(degree), torch.tensor(counts))
    assert own_rows(rows, num_tokens, degree) == torch.bincount(owners[rows], minlength=degree).tolist()
