"""A transformers model on two ranks loads, trains, publishes, exports and resumes as on one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_runs import FAMILIES, STAGES, STEP, make_models, play, run_of
from ranks import run_ranks
from safetensors.torch import load_file

from stretto.models import hub
from stretto.models.lora import load_adapter

KINDS = tuple(FAMILIES)
HSDP = pytest.param("hsdp", marks=pytest.mark.slow)
TWO_AGAIN = pytest.param("two_again", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """Run the stages that this session asks for, in order; their results and folder."""
    asked = {getattr(item, "callspec", None) and item.callspec.params.get("stage") for item in request.session.items}
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hf")
    (folder / "results").mkdir()
    make_models(folder)
    results = {}
    for stage, (world_size, _, _) in STAGES.items():
        if stage not in asked | {"one", "two"}:
            continue
        if world_size > 1:
            run_ranks("hf_runs.py", folder, stage, world_size=world_size, log=folder / f"{stage}.log")
        for kind in KINDS:
            path = folder / "results" / f"{stage}-{kind}.pt"
            results[stage, kind] = (
                play(kind, folder, stage) if world_size == 1 else torch.load(path, weights_only=False)
            )
    return results, folder


@pytest.mark.parametrize("stage", ["two", HSDP])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_like_one(played, kind, stage):
    want, got = played[0]["one", kind], played[0][stage, kind]
    assert got["is_on_meta"] == (kind != "other_names") and not want["is_on_meta"], "each rank reads its shards"
    assert len(got["metrics"]) == STEP + 1
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert got["tensors"].keys() == want["tensors"].keys()
    for name, tensor in want["tensors"].items():
        if not name.startswith("rng."):
            assert (got["tensors"][name] - tensor).abs().max() < 1e-5, name
    np.testing.assert_allclose(got["logprobs"], want["logprobs"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", ["two", HSDP])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_is_published_once(played, kind, stage):
    want, got = played[0]["one", kind]["published"], played[0][stage, kind]
    assert got["published"].keys() == want.keys() and got["num_published"] == len(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got["published"][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_load_what_ranks_exported_under_its_own_names(played, kind):
    from transformers import AutoModelForCausalLM

    folder = played[1]
    one, two = (run_of(folder, stage, kind).latest_weights for stage in ("one", "two"))
    want = load_file(one / "model.safetensors")
    got = {name: source[...] for name, _, source in hub.read_tensors(two)}
    assert got.keys() == want.keys()
    if kind != "other_names":
        assert got.keys() == load_file(folder / "models" / kind / "model.safetensors").keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)
    AutoModelForCausalLM.from_pretrained(two)


@pytest.mark.parametrize("stage", ["one_again", TWO_AGAIN])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_continued_on_another_number_of_ranks(played, kind, stage):
    [got], want = played[0][stage, kind]["metrics"], played[0]["one", kind]["metrics"][-1]
    assert abs(got["loss/mean"] - want["loss/mean"]) < 1e-6
    assert got["optim/grad_norm"] == pytest.approx(want["optim/grad_norm"], rel=1e-5)


def test_an_adapter_is_exported_by_its_names(played):
    one, two = (
        load_adapter(run_of(played[1], stage, "lora").latest_weights / "lora_adapters") for stage in ("one", "two")
    )
    assert one.pairs.keys() == two.pairs.keys()
    for name, pair in one.pairs.items():
        for ours, theirs in zip(two.pairs[name], pair, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
