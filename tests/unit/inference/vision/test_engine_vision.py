"""Images in the engine: its log-probabilities are those of training, in pieces, from the cache, and over turns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from cases.vision import (
    END,
    IMAGE,
    PATCH_VALUES,
    START,
    VISION_CASES,
    build_vision_policy,
    image,
    image_document,
    logprobs_alone,
)
from engine_runs import ask, audit, bits, build_core, build_model, finish, run, submit
from processes.add_ons import needs
from tiny import randomly_adapted

from stretto.config.sections.model import LoRASection
from stretto.inference.embedded.core import EngineCore
from stretto.inference.embedded.vision.store import ImageStore
from stretto.models.decoder import Decoder
from stretto.models.hub import export_tensors
from stretto.models.lora import Adapter
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.images import Image, image_of

pytestmark = pytest.mark.usefixtures("both_engines")

SMALL, LARGE, OTHER = image((1, 2, 4), 0), image((1, 6, 4), 1), image((1, 2, 4), 2)
FAMILIES = ["qwen3_vl", "qwen3_vl-heads-of-16", "qwen3_vl_moe"]
RECURRENT = pytest.param("qwen3_5", marks=needs("families"))


def show(name: str, images: Sequence[Image], seed: int = 0, **more) -> GenerateRequest:
    """A request whose prompt shows these images between texts."""
    ids = image_document([each.grid for each in images], seed)
    placeholder = IMAGE if images else None
    more = {"max_tokens": 6} | more
    return msgspec.structs.replace(ask(name, ids, **more), images=tuple(images), image_token_id=placeholder)


def assert_as_in_training(
    core: EngineCore, spec: GenerateRequest, completion: Completion, model: Decoder | None = None
) -> None:
    ids, start = np.concatenate((spec.prompt_ids, completion.token_ids)), len(spec.prompt_ids)
    if (completion.token_ids == IMAGE).any():  # no image of the prompt: training refuses it
        return
    expected = logprobs_alone(model or core.model, ids, spec.images)
    np.testing.assert_allclose(completion.logprobs, expected[start - 1 :], atol=1e-5, rtol=0)
    if completion.prompt_logprobs is not None:
        np.testing.assert_allclose(completion.prompt_logprobs[1:], expected[: start - 1], atol=1e-5, rtol=0)


@pytest.mark.heavy
@pytest.mark.parametrize("case", VISION_CASES)
def test_logprobs_are_those_of_training(case):
    core = build_core(build_vision_policy(case))
    shown = [[SMALL], [], [LARGE, SMALL], [SMALL, OTHER, SMALL]]
    specs = [show(f"r{i}", each, i, n=3, scored=True) for i, each in enumerate(shown)]
    for spec, completions in zip(specs, run(core, *specs), strict=True):
        for completion in completions:
            assert_as_in_training(core, spec, completion)
    assert core.images.num_encoded == 3, "an image is encoded once"


def test_logprobs_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForImageTextToText

    from stretto.models.hub import save_hf

    model, spec = build_vision_policy("qwen3_vl"), show("r", [LARGE, SMALL], max_tokens=8)
    save_hf(model, tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    completion = run(build_core(model), spec)[0][0]
    ids = torch.from_numpy(np.concatenate((spec.prompt_ids, completion.token_ids))).long()[None]
    with torch.no_grad():
        logits = theirs(
            input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), use_cache=False,
            pixel_values=torch.from_numpy(np.concatenate([each.patches for each in spec.images])),
            image_grid_thw=torch.tensor([each.grid for each in spec.images]),
        ).logits[0]  # fmt: skip
    expected = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    np.testing.assert_allclose(completion.logprobs, expected[-8:], atol=2e-5, rtol=0)


@pytest.mark.heavy
@pytest.mark.parametrize("case", [*FAMILIES, RECURRENT])
@pytest.mark.parametrize("step", [3, 7])
def test_prompts_that_are_cut_through_images_have_the_same_bits(case, step):
    model = build_vision_policy(case)
    specs = [show(f"r{i}", [LARGE, SMALL], i, n=2, scored=True) for i in range(2)]
    whole = run(build_core(model), *specs)
    pieces = run(build_core(model, max_num_batched_tokens=step), *specs)
    for one, other in zip(whole, pieces, strict=True):
        assert [bits(each) for each in one] == [bits(each) for each in other]
        np.testing.assert_array_equal(one[0].prompt_logprobs, other[0].prompt_logprobs)


@pytest.mark.heavy
@pytest.mark.parametrize("case", FAMILIES)
def test_the_prefix_cache_knows_images_and_not_their_placeholders(case):
    core = build_core(build_vision_policy(case), block_size=4)
    first, other, again = (show(name, [each], n=1) for name, each in zip("abc", (SMALL, OTHER, SMALL)))
    assert (first.prompt_ids == other.prompt_ids).all()
    [a], [b], [c] = (run(core, spec)[0] for spec in (first, other, again))
    assert b.cached_tokens == 4, "the text before the image"
    assert c.cached_tokens == (len(first.prompt_ids) - 1) // 4 * 4 and bits(a) == bits(c)
    assert bits(a) != bits(b), "the control: the images differ"
    for spec, completion in ((first, a), (other, b), (again, c)):
        assert_as_in_training(core, spec, completion)


def test_images_in_one_block_are_told_apart_by_their_order():
    core = build_core(build_vision_policy("qwen3_vl"), block_size=16)
    tiny, small = image((1, 2, 2), 5), image((1, 2, 2), 6)
    pairs = [(tiny, small), (small, tiny), (tiny, tiny)]
    found = [run(core, show(f"r{i}", pair, scored=True))[0][0] for i, pair in enumerate(pairs)]
    for i, (pair, completion) in enumerate(zip(pairs, found, strict=True)):
        assert completion.cached_tokens == 0
        assert_as_in_training(core, show(f"r{i}", pair), completion)


@pytest.mark.heavy
@pytest.mark.parametrize("case", [*FAMILIES, RECURRENT])
def test_a_later_turn_continues_the_cache_and_may_show_more_images(case):
    core = build_core(build_vision_policy(case), block_size=4)
    first = show("a", [LARGE], max_tokens=9, stop_token_ids=())
    reply = run(core, first)[0][0]
    kept = reply.token_ids[reply.token_ids != IMAGE]
    tail = [START, *[IMAGE] * 2, END, 3, 4]
    ids = np.concatenate((first.prompt_ids, kept, tail)).astype(np.int32)
    second = msgspec.structs.replace(ask("b", ids, max_tokens=5), images=(LARGE, SMALL), image_token_id=IMAGE)
    done = run(core, second)[0][0]
    if core.pool.is_caching:
        assert done.cached_tokens >= len(first.prompt_ids) // 4 * 4
    assert_as_in_training(core, second, done)


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["qwen3_vl", "qwen3_vl-heads-of-16", RECURRENT])
def test_preempted_sequences_with_images_have_the_same_bits(case):
    model = build_vision_policy(case)
    specs = [show(f"r{i}", [LARGE, SMALL], i, n=3, max_tokens=20) for i in range(3)]
    calm = run(build_core(model), *specs)
    core = build_core(model, kv_cache_tokens=160, max_model_len=100)
    tight = run(core, *specs)
    assert core.scheduler.counters.num_preemptions > 0
    assert [list(map(bits, each)) for each in calm] == [list(map(bits, each)) for each in tight]


def test_new_weights_drop_images_if_they_change_the_tower_and_only_then():
    model = build_vision_policy("qwen3_vl")
    core = build_core(model)
    run(core, show("a", [SMALL, LARGE]))
    assert len(core.images) == 2 and core.images.num_bytes > 0
    tensors = {name: tensor.clone() for name, tensor in export_tensors(model)}
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    core.load_weights(1, (tensors | {name: tensors[name] * 1.1}).items())
    assert len(core.images) == 2, "a frozen tower encodes nothing again"
    spec = show("b", [SMALL])
    assert_as_in_training(core, spec, run(core, spec)[0][0])
    assert core.images.num_encoded == 2
    name = "model.visual.merger.linear_fc2.bias"
    core.load_weights(2, (tensors | {name: tensors[name] + 0.5}).items())
    assert len(core.images) == 0 and core.images.num_bytes == 0
    spec = show("c", [SMALL])
    assert_as_in_training(core, spec, run(core, spec)[0][0])
    assert core.images.num_encoded == 3


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_an_engine_that_sleeps_keeps_no_images(keeps_weights):
    model = build_vision_policy("qwen3_vl")
    core, spec = build_core(model), show("a", [LARGE])
    tensors = {name: tensor.clone() for name, tensor in export_tensors(model)}
    before = run(core, spec)[0][0]
    core.put_away(keeps_weights=keeps_weights)
    assert len(core.images) == 0 and core.images.num_bytes == 0
    assert core.bring_back(["weights", "kv_cache"])
    if not keeps_weights:
        core.load_weights(1, tensors.items())
    again = run(core, spec)[0][0]
    assert again.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_array_equal(again.logprobs, before.logprobs)


@pytest.mark.heavy
@pytest.mark.parametrize("case", FAMILIES)
def test_adapters_see_images_as_their_merged_models_do_and_share_their_vectors(case):
    plain, tuned = (build_vision_policy(case) for _ in range(2))
    randomly_adapted(tuned, LoRASection(rank=4, alpha=8.0), 0, 0.15)
    core = build_core(build_vision_policy(case), block_size=4)
    core.load_adapter("a", Adapter.of(tuned))
    base = show("base", [LARGE, SMALL], n=2, scored=True)
    for name in ("b", "c"):  # from the first pass, and from the prefix cache
        spec = msgspec.structs.replace(base, request_id=name, adapter="a", prompt_logprobs=name == "b")
        beside = msgspec.structs.replace(base, request_id=f"beside {name}")
        ours, others = run(core, spec, beside)
        for completion in ours:
            assert (completion.cached_tokens > 0) == (name == "c")
            assert_as_in_training(core, spec, completion, tuned)
        for completion in others:
            assert_as_in_training(core, beside, completion, plain)
    assert core.images.num_encoded == 2, "an adapter leaves the tower as it is"


def test_images_are_kept_up_to_a_bound_and_encoded_again():
    model = build_vision_policy("qwen3_vl")
    core = build_core(model, enable_prefix_caching=False)
    size = _size_of(core, SMALL)
    core.images.max_bytes = 2 * size
    specs = [show(f"r{i}", [each]) for i, each in enumerate((SMALL, OTHER, image((1, 2, 4), 3), SMALL))]
    found = [run(core, spec)[0][0] for spec in specs]
    assert len(core.images) == 2 and core.images.num_bytes == 2 * size
    assert core.images.num_encoded == 1 + 2 + 1, "SMALL was dropped and is encoded again"
    assert bits(found[0]) == bits(found[3])
    run(core, show("large", [LARGE, LARGE]))
    assert len(core.images) >= 1, "the image used last stays"


def _size_of(core: EngineCore, shown: Image) -> int:
    core.images.encode(shown)
    return core.images.num_bytes


def test_an_image_has_equal_bits_beside_others():
    model = build_vision_policy("qwen3_vl")
    alone = run(build_core(model), show("a", [SMALL]))[0][0]
    beside = run(build_core(model), show("b", [LARGE, OTHER], 3), show("a", [SMALL]))[1][0]
    assert bits(alone) == bits(beside)


def test_aborted_requests_leave_no_images_behind():
    core = build_core(build_vision_policy("qwen3_vl"), max_num_batched_tokens=4)
    submit(core, show("a", [LARGE], n=2), show("b", [SMALL]))
    core.step()
    core.abort(["a"])
    assert audit(core) == []
    finish(core)
    assert not core.slots.images
    text = show("c", [], scored=True)
    assert_as_in_training(core, text, run(core, text)[0][0])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": (), "image_token_id": None}, "2 placeholders of images .token 50., but no images"),
        ({"images": (LARGE,)}, r"placeholders in token_ids are not those of the images, \[6\]"),
        ({"images": (SMALL, SMALL)}, r"not those of the images, \[2, 2\]"),
        ({"image_token_id": START}, "not those of the images"),
        ({"images": (image_of(np.zeros((8, 5), np.float32), (1, 2, 4)),)}, "patches of 5 numbers"),
        ({"images": (image_of(np.zeros((8, PATCH_VALUES), np.float32), (1, 1, 8)),)}, "a multiple of 2"),
    ],
)
def test_requests_whose_images_do_not_fit_are_refused(change, words):
    core = build_core(build_vision_policy("qwen3_vl"))
    spec = msgspec.structs.replace(show("r", [SMALL]), **change)
    with pytest.raises(AssertionError, match=words):
        submit(core, spec)
    assert run(core, show("good", [SMALL])), "nothing is lost"


def test_another_placeholder_than_the_models_is_refused():
    core = build_core(build_vision_policy("qwen3_vl"))
    spec = show("r", [SMALL])
    ids = np.where(spec.prompt_ids == IMAGE, 51, spec.prompt_ids)
    spec = msgspec.structs.replace(spec, prompt_ids=ids, image_token_id=51)
    assert "this model's are token 50" in core.refusal_reason(spec)


def test_a_model_of_text_refuses_images():
    core = build_core(build_model())
    spec = msgspec.structs.replace(ask("r", [2, 3]), images=(SMALL,), image_token_id=3)
    assert "this model is one of text; it takes no images" in core.refusal_reason(spec)
    assert core.images is None


def test_a_store_encodes_what_the_tower_does():
    tower = build_vision_policy("qwen3_vl").model.visual
    store = ImageStore(tower, torch.device("cpu"))
    found = store.encode(LARGE)
    assert found is store.encode(LARGE) and len(found.deepstack) == 2 and len(found.embeddings) == 6


@needs("speculation")
@pytest.mark.heavy
@pytest.mark.parametrize("case", VISION_CASES)
def test_drafts_behind_prompts_with_images_change_no_bit(case):
    """Also drafts that copy the placeholders of an image into a reply."""
    from stretto_speculation.speculator import SpeculationSettings

    model, always = build_vision_policy(case), SpeculationSettings(prompt_lookup_min=1, is_always_on=True)
    sampling = {"n": 2, "max_tokens": 40, "temperature": 0.2, "scored": True}
    specs = [show(f"r{i}", [LARGE, SMALL][i % 2 :], i // 2, **sampling) for i in range(6)] + [
        show("none", [], **sampling)
    ]
    drafting = build_core(model, build_drafter=always.build)
    with_drafts, without = run(drafting, *specs), run(build_core(model), *specs)
    if drafting.drafter is None:  # layers with a state
        return
    for one, other in zip(with_drafts, without, strict=True):
        assert [bits(each) for each in one] == [bits(each) for each in other]
    assert drafting.drafter.counts.num_accepted_tokens > 20
