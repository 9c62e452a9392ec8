"""A user's functions in the trainer make on several ranks what they make on one."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from hook_runs import HOOKS, MESHES, QUICK, play
from ranks import run_ranks


@functools.cache
def alone(kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return play(kind, {})


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of what this session asks for."""
    folder = tmp_path_factory.mktemp("hooks")
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = {f"{each['mesh']}-{each['kind']}" for each in asked if each.keys() == {"mesh", "kind"}}
    names |= {f"{mesh}-{kind}" for mesh, kind in QUICK}
    run_ranks("hooks/hook_runs.py", folder, *sorted(names), world_size=2, log=folder / "log")
    return folder


def result(folder: Path, mesh: str, kind: str) -> dict[str, Any]:
    return torch.load(folder / f"{mesh}-{kind}.pt", weights_only=False)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        pytest.param(mesh, kind, marks=[pytest.mark.slow] * ((mesh, kind) not in QUICK))
        for mesh in MESHES
        for kind in HOOKS
    ],
)
def test_two_ranks_train_like_one(folder, mesh, kind):
    got, want = result(folder, mesh, kind), alone(kind)
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert got["tensors"].keys() == want["tensors"].keys()
    moments = [name for name in want["tensors"] if "exp_avg" in name]
    assert moments, "the gradients are compared too"
    for name, tensor in want["tensors"].items():
        if not name.startswith("rng."):
            assert (got["tensors"][name] - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_sees_of_its_rows_what_one_rank_sees_of_them(folder, mesh):
    by_rank, (theirs,) = result(folder, mesh, "loss")["seen"], alone("loss")["seen"]
    if "cp" in MESHES[mesh] or "tp" in MESHES[mesh]:
        assert [each[0] for each in by_rank[0]] == [each[0] for each in by_rank[1]], "both have the same samples"
        by_rank = by_rank[:1]
    ours, wanted = by_sample(*by_rank), by_sample(theirs)
    assert ours.keys() == wanted.keys()
    for key, sights in wanted.items():
        for mine, other in zip(ours[key], sights, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def by_sample(*ranks: list[Any]) -> dict[tuple[Any, ...], list[Any]]:
    """Advantages and logits of each sample, pass after pass."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for name, tokens, *rest in (each for seen in ranks for each in seen):
        found.setdefault((name, *tokens.tolist()), []).append(rest)
    return found


def test_every_rank_calls_its_functions_at_the_same_points_with_its_own_samples(folder):
    by_rank, (theirs,) = result(folder, "fsdp", "data")["seen"], alone("data")["seen"]
    points = [[each for each in seen if isinstance(each, str)] for seen in (*by_rank, theirs)]
    assert points[0] == points[1] == points[2] and points[2][:3] == ["init", "log_prob", "step 0.0"]
    samples = [[each for each in seen if isinstance(each, list)] for seen in (*by_rank, theirs)]
    assert [sorted(a + b) for a, b in zip(samples[0], samples[1])] == samples[2]
    assert samples[1][-1] == [], "a rank without samples is called with empty lists"
