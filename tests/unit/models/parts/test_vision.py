"""Models with images against transformers: positions, logits, gradients, packing, and weights bit for bit."""

from __future__ import annotations

import json
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases.float64 import InFloat64, assert_gradients_as_exact_as_theirs
from cases.vision import IMAGE, VISION_CASES, VOCAB, config_keys, image_document, patches_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from stretto.base.errors import DataError
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.config import parse_config, to_hf
from stretto.models.parts.image_positions import image_positions
from stretto.models.parts.vision import ImageBatch

GRIDS = [(1, 4, 6), (1, 2, 2), (2, 6, 4)]


def build_theirs(case: str):
    family, keys = config_keys(case)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **keys), dtype=torch.float32)
    with torch.no_grad():  # so that distributions are not flat and errors show; biases are not 0
        for parameter in theirs.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs


@pytest.fixture(params=VISION_CASES)
def pair(request, tmp_path):
    """The same network twice: transformers', and ours loaded from its files."""
    theirs = build_theirs(request.param)
    theirs.save_pretrained(tmp_path / "theirs")
    return theirs, hub.load_model(tmp_path / "theirs", dtype=torch.float32), tmp_path


def positions_of(ids, bounds, grids):
    return image_positions(
        ids, np.array(bounds), np.array(grids, int).reshape(-1, 3), image_token_id=IMAGE, merge_size=2
    )


def our_logits(model, ids: np.ndarray, bounds, grids, patches):
    tokens = torch.from_numpy(ids).long()
    positions = torch.from_numpy(positions_of(ids, bounds, grids))
    layout = PackedLayout(tuple(bounds), tokens.device, image_positions=positions)
    rows = (tokens == IMAGE).nonzero().squeeze(1)
    images = ImageBatch(patches, np.array(grids), rows) if grids else None
    return model.hidden(tokens, layout, images=images) @ model.output_weight.T


def their_logits(theirs, ids: np.ndarray, grids, patches):
    tokens = torch.from_numpy(ids).long()[None]
    images = {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)} if grids else {}
    types = (tokens == IMAGE).int()
    return theirs(input_ids=tokens, mm_token_type_ids=types, use_cache=False, **images).logits[0]


def test_positions_are_those_of_transformers_in_every_document():
    theirs = build_theirs("qwen3_vl").model
    by_document = [GRIDS, [], GRIDS[1:], [(1, 8, 2)]]
    documents = [image_document(grids, seed) for seed, grids in enumerate(by_document)]
    bounds = np.cumsum([0, *map(len, documents)])
    found = positions_of(np.concatenate(documents), bounds, list(chain.from_iterable(by_document)))
    for (a, b), ids, grids in zip(pairwise(bounds), documents, by_document, strict=True):
        tokens = torch.from_numpy(ids).long()[None]
        expected, _ = theirs.get_rope_index(tokens, (tokens == IMAGE).int(), torch.tensor(grids) if grids else None)
        np.testing.assert_array_equal(found[:, a:b], expected[:, 0].numpy())


@pytest.mark.parametrize(
    ("ids", "grids", "words"),
    [
        ([1, IMAGE, IMAGE], [(1, 2, 2)], "2 image tokens for 1 images, which take 1"),
        ([1, IMAGE], [], "1 image tokens for 0 images"),
        ([IMAGE, 1, IMAGE], [(1, 4, 2)], "must follow each other"),
    ],
)
def test_images_without_their_placeholders_are_refused(ids, grids, words):
    with pytest.raises(DataError, match=words):
        positions_of(np.array(ids), [0, len(ids)], grids)


def gradients_of_both(theirs, ours, ids, patches, folder) -> tuple[dict, dict, list[torch.Tensor]]:
    """Gradients of our network and of theirs by checkpoint name; logits and losses of both, theirs first."""
    both = [their_logits(theirs, ids, GRIDS, patches), our_logits(ours, ids, (0, len(ids)), GRIDS, patches)]
    losses = [F.cross_entropy(logits[:-1], torch.from_numpy(ids[1:]).long()) for logits in both]
    for loss in losses:
        loss.backward()
    for parameter in theirs.parameters():
        parameter.data, parameter.grad = parameter.grad, None
    theirs.save_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    got = ours.tensor_map.export({name: p.grad for name, p in ours.named_parameters()})
    return {n: x if x.shape == expected[n].shape else x.mT for n, x in got}, expected, [*both, *losses]


@pytest.mark.heavy
@pytest.mark.parametrize("case", VISION_CASES)
def test_logits_and_every_gradient_equal_transformers(case, tmp_path):
    build_theirs(case).save_pretrained(tmp_path / "theirs")
    ids, patches = image_document(GRIDS, 1), patches_of(GRIDS, 2)
    networks = lambda: (build_theirs(case), hub.load_model(tmp_path / "theirs", dtype=torch.float32))
    ours, theirs = {}, {}
    *pair, (expected, logits, their_loss, loss) = gradients_of_both(*networks(), ids, patches, tmp_path / "32")
    ours[torch.float32], theirs[torch.float32] = pair
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    blind = our_logits(networks()[1], ids, (0, len(ids)), GRIDS, torch.zeros_like(patches))
    assert (blind - logits).abs().max() > 0.05, "the control must fail"
    torch.testing.assert_close(loss, their_loss, atol=1e-6, rtol=1e-6)
    wide = [network.double() for network in networks()]
    with InFloat64():
        *pair, _ = gradients_of_both(*wide, ids, patches.double(), tmp_path / "64")
    ours[torch.float64], theirs[torch.float64] = pair
    is_recurrent = "gated_delta" in hub.load_config(tmp_path / "theirs").mixers
    assert_gradients_as_exact_as_theirs(ours, theirs, 1e-4 if is_recurrent else 1e-5)


@pytest.mark.heavy
@torch.no_grad()
def test_packed_documents_equal_each_alone_with_images_or_without(pair):
    theirs, ours, _ = pair
    by_document = [GRIDS[:1], [], GRIDS[1:], GRIDS[:1]]
    documents = [image_document(grids, seed) for seed, grids in enumerate(by_document)]
    images = [patches_of(grids, seed) for seed, grids in enumerate(by_document)]
    bounds = np.cumsum([0, *map(len, documents)]).tolist()
    packed = our_logits(
        ours, np.concatenate(documents), bounds, list(chain.from_iterable(by_document)), torch.cat(images)
    )
    for (a, b), ids, grids, patches in zip(pairwise(bounds), documents, by_document, images, strict=True):
        torch.testing.assert_close(packed[a:b], our_logits(ours, ids, (0, b - a), grids, patches), atol=1e-5, rtol=0)
        torch.testing.assert_close(packed[a:b], their_logits(theirs, ids, grids, patches), atol=1e-5, rtol=0)


@pytest.mark.heavy
@torch.no_grad()
def test_an_image_that_stands_twice_is_computed_once_and_one_in_no_token_changes_nothing(pair):
    _, ours, _ = pair
    ids = np.concatenate([image_document(GRIDS[:1], seed) for seed in (1, 2)])
    bounds, tokens = (0, len(ids) // 2, len(ids)), torch.from_numpy(ids).long()
    patches = patches_of(GRIDS[:1], 1)
    whole = our_logits(ours, ids, bounds, GRIDS[:1] * 2, torch.cat((patches, patches)))
    positions = torch.from_numpy(positions_of(ids, bounds, GRIDS[:1] * 2))
    layout = PackedLayout(bounds, tokens.device, image_positions=positions)
    rows = (tokens == IMAGE).nonzero().squeeze(1)
    again = torch.arange(6).repeat(2)
    shared = ours.hidden(tokens, layout, images=ImageBatch(patches, np.array(GRIDS[:1]), rows, again))
    torch.testing.assert_close(shared @ ours.output_weight.T, whole, atol=1e-5, rtol=0)
    text = torch.arange(10)
    plain = PackedLayout((0, 10), tokens.device)
    unused = ImageBatch.unused(ours.config.vision, tokens.device)
    assert torch.equal(ours.hidden(text, plain, images=unused), ours.hidden(text, plain))


@pytest.mark.heavy
@torch.no_grad()
def test_hidden_states_of_chosen_rows_are_those_of_all_rows(pair):
    _, ours, _ = pair
    ids, patches = image_document(GRIDS, 1), patches_of(GRIDS, 2)
    tokens = torch.from_numpy(ids).long()
    layout = PackedLayout((0, len(ids)), tokens.device)
    images = ImageBatch(patches, np.array(GRIDS), (tokens == IMAGE).nonzero().squeeze(1))
    some = torch.tensor([3, 9, len(ids) - 1])
    whole = ours.hidden(tokens, layout, images=images)
    torch.testing.assert_close(ours.hidden(tokens, layout, some, images=images), whole[some], atol=1e-5, rtol=0)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", VISION_CASES)
def test_weights_and_config_survive_the_way_there_and_back(case, dtype, tmp_path):
    theirs = build_theirs(case).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hub.load_model(tmp_path / "theirs", dtype=dtype)
    hub.save_hf(ours, tmp_path / "ours")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        is_swapped = case == "qwen3_vl_moe" and ".experts." in name
        assert torch.equal(files[1][name].mT if is_swapped else files[1][name], tensor), name
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, a), b in zip(theirs.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    back = hub.load_model(tmp_path / "ours", dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), back.parameters(), strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("case", VISION_CASES)
def test_our_config_json_says_what_theirs_did(case, tmp_path):
    theirs = build_theirs(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hub.load_model(tmp_path / "theirs", dtype=torch.float32)
    written = to_hf(ours.config)
    assert parse_config(written, "ours") == ours.config
    ours.config.hf.clear()
    ours.config.hf.update(written)
    hub.save_hf(ours, tmp_path / "ours")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    ids, patches = image_document(GRIDS, 1), patches_of(GRIDS, 2)
    with torch.no_grad():
        expected, got = (their_logits(model, ids, GRIDS, patches) for model in (theirs, again))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_config": None}, "no value for vision_config; a qwen3_vl"),
        ({"image_token_id": None}, "no value for image_token_id"),
        ({"text_config": "qwen3"}, "text_config = 'qwen3' must be a table of keys"),
        ({"vision_config": [1]}, "vision_config = .1. must be a table of keys"),
        ({"text_config": None}, "no value for vocab_size, hidden_size"),
        ({"vision_config": {"hidden_act": "silu"}}, "hidden_act = 'silu' is not supported .only 'gelu_pytorch_tanh'"),
        ({"vision_config": {"out_hidden_size": 8}}, "out_hidden_size = 8 must be .* hidden_size = 32"),
        ({"vision_config": {"num_position_embeddings": 15}}, "num_position_embeddings = 15 must be the square"),
        ({"vision_config": {"num_heads": 5}}, "num_heads = 5: hidden_size = 1152"),
        ({"vision_config": {"deepstack_visual_indexes": [27]}}, "deepstack_visual_indexes"),
        ({"image_token_id": VOCAB}, f"image_token_id = {VOCAB} must be less than vocab_size"),
    ],
)
def test_a_half_known_config_is_refused_by_name(change, words, tmp_path):
    family, keys = config_keys("qwen3_vl")
    config = json.loads(AutoConfig.for_model(family, **keys).to_json_string())
    if isinstance(change.get("vision_config"), dict):
        change = {"vision_config": {"out_hidden_size": 32, "num_position_embeddings": 2304} | change["vision_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DataError, match=words):
        hub.load_config(tmp_path)


@pytest.mark.parametrize("width", [16, 32])
def test_square_experts_are_refused_as_nothing_says_which_way_round_they_are(width, tmp_path):
    """transformers and vLLM read them differently."""
    family, keys = config_keys("qwen3_vl_moe")
    keys["text_config"]["moe_intermediate_size"] = width
    (tmp_path / "config.json").write_text(AutoConfig.for_model(family, **keys).to_json_string())
    with pytest.raises(DataError, match=f"moe_intermediate_size = {width} with hidden_size = 32"):
        hub.load_config(tmp_path)


def test_loading_is_complete_checked_in_the_tower_too(tmp_path):
    build_theirs("qwen3_vl").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.visual.blocks.1.attn.qkv.weight"
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(DataError, match=rf"1 of \d+ tensors are missing: {name}"):
        hub.load_model(tmp_path, dtype=torch.float32)
