"""Which adapters vLLM computes beside its weights: what engines decide at their start, and a dry run says before."""

from __future__ import annotations

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from processes.add_ons import needs
from tiny import randomly_adapted

from stretto.base.errors import ConfigError
from stretto.config.root import InferenceConfig
from stretto.config.sections.inference import SERVED_LORA_TARGETS, InferenceSection
from stretto.config.sections.model import LoRASection, ScratchSection
from stretto.data.model_file import ModelFile
from stretto.models.hub import random_model
from stretto.models.lora import Adapter, save_adapter
from stretto_vllm.base import names_in_files
from stretto_vllm.command import COMPUTES_POLICY, PATCHES_VAR, build_command
from stretto_vllm.patches.adapters import _without_layers
from stretto_vllm.plan.adapters import EXPERT_COUNTS, drafted_tokens, why_merged, with_policy_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = {"model_type": "deepseek_v3", "n_routed_experts": 8, "kv_lora_rank": 512}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8}
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`")


def decided(directory, trained: dict | None, config: dict | None = None, *, is_cpu: bool = True, **inference):
    """The resolved config of an engine whose run trains this adapter, and why it is merged."""
    (directory / "config.json").write_text(json.dumps(SHAPE | (config or {"model_type": "qwen3"})))
    data = {"model": str(directory), "policy_lora": trained, **inference}
    return with_policy_adapter(InferenceConfig.model_validate(data), directory, is_cpu=is_cpu)


def test_a_vllm_has_room_for_the_adapter_of_its_run_alone_and_computes_it(tmp_path):
    cfg, reason = decided(tmp_path, {"rank": 20})
    assert reason is None
    assert (cfg.lora.compute_policy, cfg.lora.max_loras, cfg.lora.max_lora_rank) == (True, 0, 20)
    command = build_command(cfg, tmp_path, is_cpu=True)
    words = command.words
    assert words[words.index("--max-loras") + 1] == words[words.index("--max-cpu-loras") + 1] == "1"
    assert words[words.index("--max-lora-rank") + 1] == "32"
    assert COMPUTES_POLICY in command.env[PATCHES_VAR].split()
    assert "experts" not in cfg.lora.target_modules  # a name that a dense model does not have


def test_named_adapters_keep_their_room_beside_it(tmp_path):
    served = {"max_loras": 3, "max_lora_rank": 64, "target_modules": ["q_proj", "up_proj"]}
    cfg, _ = decided(tmp_path, {"rank": 8, "target_modules": ["q_proj", "v_proj"]}, lora=served)
    assert cfg.lora.compute_policy is True
    assert (cfg.lora.max_loras, cfg.lora.max_lora_rank) == (3, 64)
    assert cfg.lora.target_modules == ("q_proj", "up_proj", "v_proj")
    words = build_command(cfg, tmp_path, is_cpu=True).words
    assert words[words.index("--max-loras") + 1] == "4"


@pytest.mark.parametrize("lora", [None, {"max_loras": 2}])
def test_an_engine_of_no_run_decides_nothing(tmp_path, lora):
    """Its requests without an adapter are for the base model."""
    cfg, reason = decided(tmp_path, None, lora=lora)
    assert reason is None
    assert COMPUTES_POLICY not in build_command(cfg, tmp_path, is_cpu=True).env[PATCHES_VAR]
    assert (cfg.lora is None) == (lora is None)


MERGED = {
    "ranks up to 512": ({"rank": 600}, None, {}),
    "not tried with olmo3": ({}, {"model_type": "olmo3"}, {}),
    "no kernels for adapters of experts": ({}, MIXTURE, {}),
    "not tried with adapters of in_proj_qkv": ({"target_modules": ["in_proj_qkv"]}, None, {}),
    "not tried with deepseek_v3": ({"target_modules": ["o_proj"]}, LATENT, {}),
    "max_num_batched_tokens = 25600": ({}, None, {"speculation": {}}),
    "max_num_batched_tokens = 10240": (
        {},
        None,
        {"vllm_extra": {"speculative-config": {"method": "ngram", "num_speculative_tokens": 9}}},
    ),
    "compute_policy = false": ({}, None, {"lora": {"compute_policy": False}}),
}


@pytest.mark.parametrize("word", MERGED)
def test_what_vllm_is_not_known_to_compute_it_merges_with_a_reason(tmp_path, word):
    lora, config, inference = MERGED[word]
    cfg, reason = decided(tmp_path, lora, config, **inference)
    assert word in reason and (cfg.lora is None or cfg.lora.compute_policy is False)


REFUSED = {
    "ranks up to 512": ({"rank": 600}, None, {}, True),
    "on a CPU it has no kernels for adapters of experts": ({}, MIXTURE, {}, True),
    "does not adapt experts like those of gpt_oss": ({}, MIXTURE | {"model_type": "gpt_oss"}, {}, False),
    "multiplies kv_b_proj with other layers": ({"target_modules": ["kv_b_proj"]}, LATENT, {}, False),
    "moves experts and not their adapters": ({}, MIXTURE, {"enable_expert_parallel": True, "enable_eplb": True}, False),
    "allgather_reducescatter only": ({}, MIXTURE, {"vllm_extra": {"all2all_backend": "pplx"}}, False),
    "moe_backend = triton only": ({}, MIXTURE, {"vllm_extra": {"moe-backend": "cutlass"}}, False),
}


@pytest.mark.parametrize(
    "word", [pytest.param(word, marks=needs("families") if "gpt_oss" in word else ()) for word in REFUSED]
)
def test_what_vllm_cannot_compute_is_refused_if_it_is_asked_for(tmp_path, word):
    lora, config, inference, is_cpu = REFUSED[word]
    with pytest.raises(ConfigError, match=rf"inference\.lora\.compute_policy = true: .*{word}"):
        decided(tmp_path, lora, config, is_cpu=is_cpu, lora={"compute_policy": True}, **inference)


@pytest.mark.parametrize(
    ("lora", "config", "is_cpu"),
    [({}, {"model_type": "olmo3"}, True), ({}, MIXTURE, False), ({"target_modules": ["o_proj"]}, LATENT, False)],
)
def test_what_was_not_tried_is_done_if_it_is_asked_for(tmp_path, lora, config, is_cpu):
    cfg, reason = decided(tmp_path, lora, config, is_cpu=is_cpu, lora={"compute_policy": True})
    assert reason is None
    words = build_command(cfg, tmp_path, is_cpu=is_cpu).words
    has_experts = any(key in config for key in EXPERT_COUNTS) and not lora
    assert ("--enable-mixed-moe-lora-format" in words) == ("experts" in cfg.lora.target_modules) == has_experts


def test_names_of_layers_that_never_have_an_adapter_change_nothing(tmp_path):
    """A run ignores them, and vLLM's output head must not have an adapter."""
    cfg, reason = decided(tmp_path, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]})
    assert reason is None and cfg.lora.target_modules == ("q_proj",)
    build_command(cfg, tmp_path, is_cpu=True)


def test_attention_of_a_mixture_is_computed_on_a_cpu_too(tmp_path):
    cfg, reason = decided(tmp_path, {"target_modules": ATTENTION}, MIXTURE)
    assert reason is None and cfg.lora.target_modules == tuple(ATTENTION)
    patches = build_command(cfg, tmp_path, is_cpu=True).env[PATCHES_VAR].split()
    assert "adapters.disable_expert_adapters" in patches


@pytest.mark.parametrize(
    ("speculation", "number"),
    [
        (None, 0),
        ({}, 24),
        ({"suffix_decoding_max_tree_depth": 8}, 8),
        ({"method": "ngram"}, 4),
        ({"method": "ngram", "num_speculative_tokens": 2}, 2),
        ({"method": "mtp"}, 1),
    ],
)
def test_drafts_of_some_length_need_room_in_a_batch_with_adapters(tmp_path, speculation, number):
    section = InferenceSection.model_validate({"speculation": speculation, "engine": "vllm"})
    assert drafted_tokens(section) == number
    model, lora = ModelFile(tmp_path, {"model_type": "qwen3"}), LoRASection()
    for room, is_merged in (((number + 1) * 1024, False), ((number + 1) * 1024 - 1, number > 0)):
        wide = section.model_copy(update={"max_num_batched_tokens": room})
        assert (why_merged(wide, lora, model, is_cpu=True) is not None) == is_merged


@pytest.mark.parametrize(
    ("extra", "number"),
    [
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 9}'}, 9),
        ({"spec-method": "ngram", "spec-tokens": 5}, 5),
        ({"speculative_config": "{"}, 0),
        ({"spec_method": "mtp"}, 0),
    ],
)
def test_vllms_own_options_say_the_length_of_drafts_too(extra, number):
    assert drafted_tokens(InferenceSection.model_validate({"vllm_extra": extra})) == number


@pytest.mark.heavy
@needs_vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own, when it is imported
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", pytest.param("minimax_m2", marks=needs("families"))])
def test_stacked_experts_of_an_adapter_are_what_vllm_splits_them_into(tmp_path, family):
    """Its kernels for them run on GPUs only, so what they would multiply is compared here, without them."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    lora = LoRASection(rank=4, alpha=12.0)
    model = random_model(ScratchSection(family=family, tie_word_embeddings=False), 64, eos_token_id=2)
    adapter = Adapter.of(randomly_adapted(model, lora, 0, 0.2))
    save_adapter(adapter, tmp_path, lora)
    layers = {*SERVED_LORA_TARGETS, "experts"}
    helper = PEFTHelper.from_local_dir(str(tmp_path), None)
    loaded = LoRAModel.from_local_checkpoint(str(tmp_path), layers, helper, lora_model_id=1, device="cpu")
    names = {name.rpartition(".")[0] for name in adapter.pairs if name.endswith(".gate_up_proj")}
    assert names
    for name in names:
        num = len(adapter.pairs[f"{name}.gate_up_proj"][0])
        manager = SimpleNamespace(
            model=SimpleNamespace(config=SimpleNamespace(architectures=[family])),
            _get_lora_layer_weights=lambda found, name: found.loras.get(name),
        )
        module = SimpleNamespace(local_num_experts=num, global_num_experts=num, ep_rank=0)
        LoRAModelManager._convert_3d_to_2d_moe_lora(manager, loaded, module, name)
        found = loaded.loras[name]
        gate, down, up = (
            (found.scaling if isinstance(found.scaling, float | int) else 1.0) * (b.float() @ a.float())
            for a, b in zip(found.lora_a, found.lora_b)
        )
        for part, computed in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            for expert in range(num):
                expected = adapter.delta(f"{name}.{part}", (expert, slice(None), slice(None)))
                torch.testing.assert_close(computed[expert], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "name", "in_files"),
    [
        pytest.param(
            {"family": "laguna"},
            "model.layers.1.mlp.shared_experts.up_proj.weight",
            "model.layers.1.mlp.shared_expert.up_proj.weight",
            marks=needs("families"),
        ),
        (
            {"family": "qwen3_vl", "vision": {}},
            "model.layers.0.mlp.up_proj.weight",
            "model.language_model.layers.0.mlp.up_proj.weight",
        ),
        ({"family": "glm4"}, "model.layers.0.mlp.up_proj.weight", None),  # a part of a larger matrix
    ],
)
def test_layers_of_the_policys_adapter_get_the_names_of_the_files(shape, name, in_files):
    """vLLM leaves out what it has no layer for, without a word."""
    table = random_model(ScratchSection.model_validate(shape), 64, eos_token_id=2, image_token_id=5).tensor_map
    assert name in table.shapes and names_in_files(table).get(name) == in_files


@pytest.mark.heavy
@needs_vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_for_which_vllm_has_no_layer_is_found_but_not_one_of_another_stage():
    from vllm.model_executor.models.utils import PPMissingLayer

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module(), PPMissingLayer()])
    manager = SimpleNamespace(
        modules={"layers.0.qkv_proj": 0, "layers.0.experts": 0},
        packed_modules={"layers.0.qkv_proj": ["layers.0.q_proj", "layers.0.k_proj"]},
        model=model,
    )
    names = ["layers.0.q_proj", "layers.0.experts.base_layer", "layers.0.experts", "layers.1.mlp.up_proj"]
    assert _without_layers(manager, names) == []
    assert _without_layers(manager, [*names, "layers.0.shared.up_proj"]) == ["layers.0.shared.up_proj"]
