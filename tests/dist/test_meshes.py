"""Every mesh trains like one rank: loss, gradient norm, weights and optimizer state after three steps."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from mesh_runs import CASES, NUM_STEPS, Case, build, policy_of, train
from ranks import run_ranks

SECONDS_PER_CASE = 20.0
"""Ten times what one takes on two quiet cores."""


@functools.cache
def alone(kind, sharing="auto"):
    torch.set_num_threads(1)
    return train(build(kind, {"shared_prefixes": sharing}), kind)


def of_cases(cases):
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * case.is_slow) for case in cases]
    )


@pytest.fixture(scope="session")
def on_meshes(request, tmp_path_factory):
    """Results of the cases that this session asks for; one process group for each number of ranks."""
    folders: dict[int, Path] = {}
    names = {str(case) for item in request.session.items if (case := _case_of(item))}

    def result(case):
        if case.world_size not in folders:
            folders[case.world_size] = folder = tmp_path_factory.mktemp("ranks")
            log = folder / "log"
            mine = sorted(name for name in names if name.startswith(f"{case.world_size}-"))
            run_ranks(
                "mesh_runs.py",
                folder,
                *mine,
                world_size=case.world_size,
                log=log,
                deadline_s=100.0 + SECONDS_PER_CASE * len(mine),
            )
        path = folders[case.world_size] / f"{case}.pt"
        assert path.exists(), (folders[case.world_size] / "log").read_text()[-6000:]
        return torch.load(path, weights_only=False)

    return result


def _case_of(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    case = callspec and callspec.params.get("case")
    return case if isinstance(case, Case) else None


@of_cases(CASES)
def test_a_mesh_trains_like_one_rank(case, on_meshes):
    got, want = on_meshes(case), alone(case.kind, "off" if "shared_prefixes" in case.model else "auto")
    assert len(got["metrics"]) == NUM_STEPS
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        if case.model.get("cp_style") == "ring" or "shared_prefixes" in case.model:
            # A ring computes shared prompts once for every document, and counts their tokens as often; a tree shares
            # more than prompts.
            ours, theirs = (
                {k: v for k, v in m.items() if "max_vio" not in k and "routing" not in k} for m in (ours, theirs)
            )
        # The delta rule divides by the lengths of its keys: weights changed in their last bit change a norm by 1e-3.
        rel = 1e-3 if "qwen3_5" in case.kind or "delta" in case.kind else 1e-5
        assert ours == pytest.approx(theirs, rel=rel, abs=1e-5)
    assert got["tensors"].keys() == want["tensors"].keys()
    for name, tensor in want["tensors"].items():
        if name.startswith("rng."):
            continue
        assert (got["tensors"][name] - tensor).abs().max() < 1e-5, name
    for name, tensor in want["exported"].items():
        torch.testing.assert_close(got["exported"][name], tensor, rtol=1e-5, atol=1e-5)
    for when in ("before", "after"):
        np.testing.assert_allclose(got[when], want[when], rtol=1e-4, atol=1e-4)


@of_cases(CASES)
def test_every_tensor_is_published_by_one_rank_and_none_by_a_replica(case, on_meshes):
    owned = on_meshes(case)["owned"]
    names = [name for mine in owned for name in mine]
    assert sorted(names) == sorted(alone(case.kind)["exported"])
    num_senders = case.world_size // case.model.get("dp_replicate", 1)
    assert [bool(mine) for mine in owned] == [True] * num_senders + [False] * (case.world_size - num_senders)
    sizes = {name: tensor.nbytes for name, tensor in alone(case.kind)["exported"].items()}
    loads = [sum(sizes[name] for name in mine) for mine in owned[:num_senders]]
    assert max(loads) < 2 * min(loads), "each sends about as many bytes"


@of_cases([c for c in CASES if c.model.get("ep", 1) > 1 and "lora" not in c.kind])
def test_an_expert_is_published_by_a_rank_that_has_it(case, on_meshes):
    degrees = case.model
    ep, tp = degrees["ep"], 1 if degrees.get("sequence_parallel") else degrees.get("tp", 1)
    count = policy_of(case.kind).config.moe.num_experts
    for rank, mine in enumerate(on_meshes(case)["owned"]):
        numbers = [name.split(".experts.")[1].split(".")[0] for name in mine if ".experts." in name]
        experts = {int(number) for number in numbers if number.isdigit()}
        each, place = count // ep, rank // tp % ep
        assert experts <= set(range(place * each, (place + 1) * each))


@of_cases(CASES)
def test_a_state_loads_as_it_was_saved(case, on_meshes):
    got = on_meshes(case)
    assert got["reloaded"].keys() == got["tensors"].keys()
    for name, tensor in got["tensors"].items():
        assert torch.equal(got["reloaded"][name], tensor), name
