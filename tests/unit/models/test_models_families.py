"""Every family against transformers: logits, loss, gradients, packing, and weights bit for bit."""

from __future__ import annotations

import json
import re
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases.families import CASES, LLAMA3, MIXER_CASES, PARTIAL, SHAPE, VOCAB, build_theirs, our_logits
from cases.float64 import InFloat64, assert_gradients_as_exact_as_theirs
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.check.degrees import read_shape
from stretto.config.sections.model import ScratchSection
from stretto.data.model_file import ModelFile
from stretto.families.shape import MoEShape
from stretto.families.table import FAMILIES, SPARSE_FAMILIES, VISION_FAMILIES
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.config import parse_config, to_hf
from stretto.models.moe import Routing
from stretto.models.parts.router import Router
from stretto.models.tensor_map import as_whole_slices

SCRATCH_FAMILIES = sorted(set(FAMILIES) - set(VISION_FAMILIES))


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """The same network twice: transformers', and ours loaded from its files."""
    theirs = build_theirs(request.param)
    theirs.save_pretrained(tmp_path / "theirs")
    return theirs, hub.load_model(tmp_path / "theirs", dtype=torch.float32), tmp_path


def gradients_of_both(theirs, ours, ids) -> tuple[dict, dict, list[torch.Tensor]]:
    """Gradients of our network and of theirs by checkpoint name; logits and losses of both, theirs first."""
    both = [theirs(input_ids=ids[None], use_cache=False).logits[0], our_logits(ours, ids, (0, len(ids)))]
    losses = [F.cross_entropy(logits[:-1], ids[1:]) for logits in both]
    for loss in losses:
        loss.backward()
    # Their gradients under checkpoint names come the way their weights do.
    for parameter in theirs.parameters():
        if parameter.grad is not None:  # indexers have none
            parameter.data, parameter.grad = parameter.grad, None
    from stretto.models.hf import HFDecoder

    expected = dict(HFDecoder(theirs).export_tensors())
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    # In `expected` they are the weights themselves.
    assert frozen == ours.unsharded_names | {name for name in frozen if ".indexer." in name}
    found = {n: p if n in frozen else p.grad for n, p in ours.named_parameters()}
    return dict(ours.tensor_map.export(found)), expected, [*both, *losses]


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_transformers(case, tmp_path):
    build_theirs(case).save_pretrained(tmp_path)
    ids = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(1))
    networks = lambda: (build_theirs(case), hub.load_model(tmp_path, dtype=torch.float32))
    ours, theirs = {}, {}
    *pair, (their_logits, logits, their_loss, loss) = gradients_of_both(*networks(), ids)
    ours[torch.float32], theirs[torch.float32] = pair
    torch.testing.assert_close(logits, their_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(loss, their_loss, atol=1e-6, rtol=1e-6)
    wide = [network.double() for network in networks()]
    with InFloat64():
        *pair, _ = gradients_of_both(*wide, ids)
    ours[torch.float64], theirs[torch.float64] = pair
    is_recurrent = hub.load_config(tmp_path).shape_of("gated_delta") is not None
    assert_gradients_as_exact_as_theirs(ours, theirs, 1e-4 if is_recurrent else 1e-5)


@pytest.mark.heavy
@torch.no_grad()
def test_packed_documents_equal_each_alone_and_positions_matter(pair):
    _, ours, _ = pair
    ids = torch.randint(0, VOCAB, (33,), generator=torch.Generator().manual_seed(2))
    bounds = (0, 11, 12, 33)
    packed = our_logits(ours, ids, bounds)
    alone = [our_logits(ours, ids[a:b], (0, b - a)) for a, b in pairwise(bounds)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)
    leaky = our_logits(ours, ids, (0, 33))
    assert (leaky[12:] - packed[12:]).abs().max() > 0.05, "the control must fail"


TREE = ((0, 14, 18, 38, 45, 51, 56), (-1, -1, 0, 0, 2, 2))
"""Two replies to the first document, 20 and 7 tokens; to the longer one two more, 6 and 5 tokens."""


def logits_of_tree(model, ids):
    """Logits by segment: each document by itself, and all as a tree."""
    first, other, long, short, late, later = parts = ids.split([14, 4, 20, 7, 6, 5])
    documents = ((first, long, late), (first, long, later), (first, short), (other,))
    rows = [part for document in documents for part in document]
    bounds = torch.tensor([0, *(sum(map(len, document)) for document in documents)]).cumsum(0).tolist()
    logits = our_logits(model, torch.cat(rows), bounds).split([len(part) for part in rows])
    places = [next(i for i, row in enumerate(rows) if row is part) for part in parts]
    layout = PackedLayout(TREE[0], ids.device, TREE[1])
    return torch.cat([logits[place] for place in places]), model.hidden(ids, layout) @ model.output_weight.T


@pytest.mark.heavy
def test_a_shared_prompt_is_computed_once_with_the_same_logits_and_gradients(pair):
    """Also what turns and branches share; to 1e-6 of the largest gradient in float64, and within float32's rounding."""
    _, ours, _ = pair
    if not ours.shares_prefixes:
        assert ours.config.has_recurrence, "only a state that is read in order must be computed per reply"
        return
    ids = torch.randint(0, VOCAB, (56,), generator=torch.Generator().manual_seed(3))
    weights = torch.linspace(-1, 1, VOCAB)

    def gradients(logits):
        ours.zero_grad()
        (logits.log_softmax(-1) @ weights.to(logits.dtype)).sum().backward()
        return [p.grad.clone() for p in ours.parameters() if p.grad is not None]

    whole, shared = logits_of_tree(ours, ids)
    torch.testing.assert_close(shared, whole, atol=1e-5, rtol=0)
    for one, two in zip(gradients(shared), gradients(whole), strict=True):
        torch.testing.assert_close(one, two, atol=2e-4, rtol=2e-4)
    ours.double()
    with InFloat64():
        whole, shared = logits_of_tree(ours, ids)
        torch.testing.assert_close(shared, whole, atol=1e-6, rtol=0)
        found = gradients(shared), gradients(whole)
    largest = max(float(gradient.abs().max()) for gradient in found[1])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6 * largest, rtol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_weights_and_config_survive_the_way_there_and_back(case, dtype, tmp_path):
    theirs = build_theirs(case).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hub.load_model(tmp_path / "theirs", dtype=dtype)
    hub.save_hf(ours, tmp_path / "ours")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    # Biases on the choice of experts are float32 here, whatever the dtype.
    assert all(torch.equal(files[0][name], files[1][name].to(files[0][name].dtype)) for name in files[0])
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, a), b in zip(theirs.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b.to(a.dtype)), name


@pytest.mark.heavy
@pytest.mark.parametrize("case", [case for case in MIXER_CASES if case in CASES])
def test_our_config_json_says_what_theirs_did(case, tmp_path):
    """The table of a family in both directions, and transformers reads what we write."""
    build_theirs(case).save_pretrained(tmp_path / "theirs")
    ours = hub.load_model(tmp_path / "theirs", dtype=torch.float32)
    written = to_hf(ours.config)
    assert parse_config(written, "ours") == ours.config
    ours.config.hf.clear()
    ours.config.hf.update(written)
    hub.save_hf(ours, tmp_path / "ours")
    theirs, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("theirs", "ours")
    )
    ids = torch.arange(VOCAB)[None]
    with torch.no_grad():
        expected, got = (model(input_ids=ids, use_cache=False).logits for model in (theirs, again))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    """Its checkpoints have a `model_type` of their own."""
    build_theirs("deepseek_v3").save_pretrained(tmp_path)
    same, path = hub.load_model(tmp_path, dtype=torch.float32), tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    assert hub.has_custom_module(tmp_path) and read_shape(ModelFile.read(tmp_path)).family == "deepseek_v3"
    kimi = hub.load_model(tmp_path, dtype=torch.float32)
    assert kimi.config.family == "deepseek_v3"
    assert all(map(torch.equal, kimi.parameters(), same.parameters()))
    hub.save_hf(kimi, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "kimi_k2"


@pytest.mark.heavy
@pytest.mark.parametrize("family", SCRATCH_FAMILIES)
def test_transformers_builds_the_same_network_from_our_config(family, tmp_path):
    ours = hub.random_model(
        ScratchSection(
            family=family,
            hidden_size=32,
            num_layers=4,
            tie_word_embeddings=False,
            num_experts=4,
            sliding_window=8,
            index_topk=7,
            # With few heads many scores are exactly 0, and transformers leaves the order of equal scores open.
            num_heads=16 if family in SPARSE_FAMILIES else 4,
        ),
        VOCAB,
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(2)
    hub.save_hf(ours, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(VOCAB)
    with torch.no_grad():
        their_logits = theirs(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(our_logits(ours, ids, (0, VOCAB)), their_logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe-normed-mixed"])
def test_the_tensor_parallel_plan_names_modules_that_exist(case, tmp_path):
    build_theirs(case).save_pretrained(tmp_path)
    ours = hub.load_model(tmp_path, dtype=torch.float32)
    modules = {name for name, _ in ours.named_modules()}
    for template, style in FAMILIES[ours.config.family].tp_plan.items():
        names = {template.format(layer=layer) for layer in range(3)}
        assert style in ("column", "row", "vocab")
        assert names & modules or template == "lm_head"


def test_loading_is_complete_checked_by_expert(tmp_path):
    build_theirs("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    del tensors[name]
    hub.save_file(tensors, path)
    with pytest.raises(hub.DataError, match=rf"1 of \d+ tensors are missing: {name}"):
        hub.load_model(tmp_path, dtype=torch.float32)
    tensors[name] = torch.zeros(3, 32)
    hub.save_file(tensors, path)
    with pytest.raises(hub.DataError, match=r"experts.4.up_proj.weight' has shape \(3, 32\).* \(16, 32\)"):
        hub.load_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be 1 to num_experts = 6"),
        ({"num_experts": None}, "no value for num_experts"),
        ({"layer_types": ["sliding_attention"]}, "layer_types sliding_attention"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor = 1 must be less"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, r"rope_type = 'longrope' .*llama3, yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, words, tmp_path):
    build_theirs("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(hub.DataError, match=words):
        hub.load_config(tmp_path)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("glm4_moe", {"n_group": 3}, "n_group = 3 and topk_group = 1 do not fit 8 experts, of which 3 are chosen"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "has 1 entries for 3 layers"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config = .*mxfp4.* is not"),
        ("laguna-varied", {"num_attention_heads_per_layer": [4, 3, 2]}, "heads_per_layer 3 must be a multiple of .* 2"),
        ("afmoe", {"sliding_window": 0}, "sliding_window = 0 must be at least 1 token"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head' is not supported"),
        ("laguna", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must give .* for each of the 3 layers"),
        ("laguna", PARTIAL, "rope_parameters partial_rotary_factor, rope_theta, rope_type is not supported"),
        ("nemotron_h", {"n_routed_experts": None}, "no value for n_routed_experts; a nemotron_h"),
        ("deepseek_v3", {"num_attention_heads": None}, "no value for num_attention_heads"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("glm4", {"layer_types": ["sliding_attention"] * 3}, "layer_types sliding_attention is not supported"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_itself_or_the_family_is_refused(case, change, words, tmp_path):
    build_theirs(case).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(hub.DataError, match=words):
        hub.load_config(tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_a_key_that_is_left_out_means_what_transformers_takes_it_for(case):
    """Or it is refused by name: nothing is computed with a value of our own."""
    config = AutoConfig.for_model(CASES[case][0], **SHAPE | {"tie_word_embeddings": False} | CASES[case][1])
    full, compared = json.loads(config.to_json_string()), 0
    for key in full.keys() - {"model_type", "q_lora_rank"}:  # null is a value of q_lora_rank
        rest = {name: value for name, value in full.items() if name != key}
        try:
            theirs = json.loads(type(config).from_dict(dict(rest)).to_json_string(use_diff=False))
            expected = parse_config(theirs, case)
        except Exception:  # the default of a real model does not fit this small one
            continue
        try:
            ours = parse_config(rest, case)
        except hub.DataError:
            continue
        compared += 1
        assert ours == expected, key
    # transformers does not read all of its own JSON of this family
    assert compared > 10 or CASES[case][0] == "nemotron_h"


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_checkpoint_is_refused_before_its_tensors_are_read(case, tmp_path):
    settings = SHAPE | CASES[case][1]
    build = AutoConfig.for_model(CASES[case][0], **settings)
    config = json.loads(build.to_json_string()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(hub.DataError, match=r"quantization_config = .*fp8.* is not supported"):
        hub.load_config(tmp_path)
    assert not hub.has_custom_module(tmp_path)


def test_experts_that_are_chosen_without_any_score_get_no_gate_instead_of_nan():
    shape = MoEShape(4, 2, 8, norm_topk_prob=True, sparse_layers=(0,), has_expert_bias=True, is_sigmoid=True)
    router = Router(8, shape)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([30.0, 30.0, -30.0, -30.0])[:, None].expand(4, 8))
        router.expert_bias.copy_(torch.tensor([0.0, 0.0, 2.0, 2.0]))
    x = torch.ones(3, 8, requires_grad=True)
    chosen, gates = router(x, 0, Routing(), None)
    assert sorted(chosen[0].tolist()) == [2, 3], "by their bias alone"
    gates.sum().backward()
    assert (gates == 0).all() and x.grad.isfinite().all() and router.weight.grad.isfinite().all()


def test_layers_for_the_prediction_of_several_tokens_are_not_read(tmp_path):
    build_theirs("glm4_moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    hub.save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, path)
    hub.load_model(tmp_path, dtype=torch.float32)
    hub.save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(hub.DataError, match=r"layers.4.eh_proj.weight' is not part of a glm4_moe"):
        hub.load_model(tmp_path, dtype=torch.float32)


def test_a_model_loads_in_place_without_new_memory(tmp_path):
    theirs = build_theirs("qwen3_moe")
    theirs.save_pretrained(tmp_path)
    ours = hub.load_model(tmp_path, dtype=torch.float32)
    before = {name: p.data_ptr() for name, p in ours.named_parameters()}
    hub.load_tensors(ours, [(name, tensor.clone()) for name, tensor in hub.export_tensors(ours)])
    assert before == {name: p.data_ptr() for name, p in ours.named_parameters()}
    views = [t for _, t in hub.export_tensors(ours)]
    owned = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    assert all(view.untyped_storage().data_ptr() in owned for view in views), "export copies nothing"
    assert as_whole_slices(ours.named_parameters()).keys() == ours.tensor_map.shapes.keys()


def test_the_template_of_the_guide_is_a_working_family(tmp_path, monkeypatch):
    """phi3 as in docs/add_a_model.md; its checkpoints fuse weights that are separate here."""
    page = (Path(__file__).parents[3] / "docs" / "add_a_model.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict = {}
    exec(source, names)
    monkeypatch.setitem(FAMILIES, "phi3", names["PHI3"])
    monkeypatch.setitem(CASES, "phi3", ("phi3", {"pad_token_id": 0}))
    theirs = build_theirs("phi3")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hub.load_model(tmp_path / "theirs", dtype=torch.float32)
    assert "model.layers.2.self_attn.k_proj.weight" in ours.tensor_map.shapes
    ids = torch.arange(VOCAB)
    with torch.no_grad():
        expected = theirs(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(our_logits(ours, ids, (0, VOCAB)), expected, atol=1e-5, rtol=0)
    hub.save_hf(ours, tmp_path / "ours")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
