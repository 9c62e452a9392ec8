"""transformers models as policies: packed if these tests show it is correct, else padded; saved under their names."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from cases.families import SHAPE
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import ModelSection, ScratchSection
from stretto.families.table import FAMILIES as OURS
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.hf import PACKED_FAMILIES, HFDecoder, build_meta_hf_model, load_hf_model
from stretto.models.lm_head import head_logits
from stretto.trainer.learner import load_policy

VOCAB = 64
BOUNDS = (0, 5, 10, 21, 28)
BASE = SHAPE | {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "qwen3": {},
    "qwen3_moe": MOE | {"num_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "laguna": MOE | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "glm4_moe": MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
    "glm_moe_dsa": MOE | {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
        "index_topk": 64, "index_head_dim": 8, "index_n_heads": 2,
    },
    "llama": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
}  # fmt: skip
FAMILIES = {name: keys for name, keys in FAMILIES.items() if name in OURS}
"""Those that are here: some are an add-on's."""


def build_hf(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(BASE | FAMILIES[family]))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def random_ids():
    return torch.randint(2, VOCAB, (BOUNDS[-1],), generator=torch.Generator().manual_seed(1))


def hidden_alone(model, ids):
    with torch.no_grad():
        parts = [
            model.base_model(input_ids=ids[a:b][None], use_cache=False).last_hidden_state[0]
            for a, b in pairwise(BOUNDS)
        ]
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_is_as_if_it_stood_alone(family):
    model, ids = build_hf(family), random_ids()
    expected = hidden_alone(model, ids)
    with torch.no_grad():
        together = HFDecoder(model).hidden(ids, PackedLayout(BOUNDS, torch.device("cpu")))
        leaking = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    assert expected.abs().max() > 1
    torch.testing.assert_close(together, expected, atol=2e-5, rtol=2e-5)
    assert (leaking - expected).abs().max() > 0.1, "the control: documents that see each other must show"


def test_every_family_that_packs_is_tested_here():
    assert FAMILIES.keys() > PACKED_FAMILIES
    assert {f for f in FAMILIES if HFDecoder(build_hf(f)).is_packable} == PACKED_FAMILIES


def test_some_rows_are_rows_of_all():
    model, ids, layout = HFDecoder(build_hf("llama")), random_ids(), PackedLayout(BOUNDS, torch.device("cpu"))
    rows = torch.tensor([0, 7, 27])
    assert torch.equal(model.hidden(ids, layout, rows), model.hidden(ids, layout)[rows])


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_export_has_the_checkpoints_names_and_bits(tmp_path, family):
    build_hf(family).save_pretrained(tmp_path / "theirs")
    policy = load_hf_model(tmp_path / "theirs", dtype=torch.float32)
    hub.save_hf(policy, tmp_path / "ours", tmp_path / "theirs")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_where_transformers_puts_every_weight(tmp_path, family):
    model = HFDecoder(build_hf(family))
    theirs = dict(model.export_tensors())
    model.prepare_for_sharding()
    table = model.tensor_map
    ours = dict(table.export(dict(model.named_parameters())))
    assert model.unsharded_names <= dict(model.named_parameters()).keys()
    assert theirs.keys() == ours.keys() and table.their_shapes == {n: tuple(t.shape) for n, t in theirs.items()}
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_weight_that_is_turned_round_in_a_checkpoint_is_refused(monkeypatch):
    def turned(model, tensors):
        return {name: tensor.T if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", turned)
    with pytest.raises(ConfigError, match=r"'model.embed_tokens.weight' .*cannot be spread over ranks"):
        HFDecoder(build_hf("llama")).prepare_for_sharding()


def test_an_outline_has_buffers_and_no_weights(tmp_path):
    build_hf("llama").save_pretrained(tmp_path)
    whole = load_hf_model(tmp_path, dtype=torch.float32)
    outline = build_meta_hf_model(tmp_path, dtype=torch.float32)
    assert {p.is_meta for p in outline.parameters()} == {True}
    ours, theirs = (dict(model.named_buffers()) for model in (outline, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    files = load_file(tmp_path / "model.safetensors")
    del files["model.norm.weight"]
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert build_meta_hf_model(tmp_path, dtype=torch.float32) is None, "transformers may know what to do"


def test_auto_takes_transformers_for_families_that_are_not_ours(tmp_path):
    config = AutoConfig.for_model("mistral", **BASE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert isinstance(load_policy(ModelSection(name=str(tmp_path))), HFDecoder)
    with pytest.raises(DataError, match=r"model_type = 'mistral' .*impl"):
        load_policy(ModelSection(name=str(tmp_path), impl="custom"))


def test_logits_that_are_not_a_plain_product_are_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", **BASE))
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.add_(0.1)  # phi's head has a bias, which starts at 0
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"phi changes its logits after the output head"):
        load_hf_model(tmp_path, dtype=torch.float32)


def test_soft_caps_of_head_and_attention_are_those_of_transformers(tmp_path):
    settings = {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma2", **(BASE | settings)), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)  # so that caps matter
    model.save_pretrained(tmp_path)
    decoder = load_hf_model(tmp_path, dtype=torch.float32)
    ids = torch.arange(12) % 7
    logits = model(input_ids=ids[None]).logits[0]
    hidden = decoder.hidden(ids, PackedLayout((0, 12), "cpu"))
    uncapped, found = (head_logits(hidden, decoder.output_weight, cap) for cap in (None, decoder.logit_cap))
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
    assert (uncapped - logits).abs().max() > 0.1


@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_quantized_weights_are_not_trained(tmp_path, impl):
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **BASE)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(DataError, match=r"quantization_config fp8: .*cannot be trained"):
        load_policy(ModelSection(name=str(tmp_path), impl=impl))


def test_an_unknown_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(DataError, match=f"{tmp_path}: model_type = .*neither of stretto .*transformers"):
        load_hf_model(tmp_path, dtype=torch.float32)


def test_weights_that_do_not_fit_config_json_are_named_and_not_made_up(tmp_path):
    build_hf("llama").save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    norm = files.pop("model.norm.weight")
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"do not fit: model\.norm\.weight is missing$"):
        load_hf_model(tmp_path, dtype=torch.float32)
    files["model.norm.weight"] = norm.repeat(2)
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        DataError, match=rf"norm\.weight is \[{2 * len(norm)}\], and config.json makes it \[{len(norm)}\]"
    ):
        load_hf_model(tmp_path, dtype=torch.float32)


def test_scratch_models_are_ours_only():
    with pytest.raises(ConfigError, match=r"model\.scratch"):
        load_policy(ModelSection(impl="hf", scratch=ScratchSection()), vocab_size=9)
