"""Models that vLLM is known not to compute are refused, before it starts and in a dry run."""

from __future__ import annotations

import json

import pytest
import torch
from processes.add_ons import is_here, needs
from safetensors.torch import save_file

from stretto.base.errors import ConfigError
from stretto.check.models import check_served, needs_vllm
from stretto.config.sections.inference import InferenceSection
from stretto_vllm.command import build_command

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
REFUSED_ON_CPUS = {
    "bfloat16 only": {"model_type": "qwen3_5_text"},
    "experts without gates": {"model_type": "nemotron_h", "n_routed_experts": 8},
    "with latent attention": LATENT,
    "the experts of gpt_oss": {"model_type": "gpt_oss"},
    "does not let deepseek_v32 choose": LATENT | {"model_type": "deepseek_v32"},
    "heads have 16 dimensions": {"model_type": "glm4", "head_dim": 16},
}
OF_FAMILIES = ("bfloat16 only", "experts without gates", "the experts of gpt_oss", "does not let deepseek_v32 choose")


def save(directory, **config) -> str:
    (directory / "config.json").write_text(json.dumps(SHAPE | config))
    return str(directory)


def words_of(section: InferenceSection, directory, *, is_cpu: bool) -> str:
    return " ".join(build_command(section, directory, is_cpu=is_cpu).words)


@pytest.mark.parametrize(
    "message", [pytest.param(each, marks=needs("families") if each in OF_FAMILIES else ()) for each in REFUSED_ON_CPUS]
)
def test_what_a_cpu_cannot_run_is_refused_there_only(tmp_path, message):
    name, section = save(tmp_path, **REFUSED_ON_CPUS[message]), InferenceSection(engine="vllm")
    for check in (
        lambda: build_command(section, tmp_path, is_cpu=True),
        lambda: check_served(section, name, is_cpu=True),
    ):
        with pytest.raises(ConfigError, match=f"{message}.*embedded"):
            check()
    build_command(section, tmp_path, is_cpu=False)
    check_served(section, name, is_cpu=False)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_tied_head_is_refused_where_vllm_does_not_tie_it(tmp_path, is_cpu):
    section = InferenceSection(engine="vllm")
    with pytest.raises(ConfigError, match=r"tie_word_embeddings.*glm4_moe.*embedded"):
        check_served(section, save(tmp_path, model_type="glm4_moe", tie_word_embeddings=True), is_cpu=is_cpu)
    check_served(section, save(tmp_path, model_type="glm4", tie_word_embeddings=True), is_cpu=is_cpu)


def test_more_positions_than_the_model_has_are_refused(tmp_path, monkeypatch):
    name, section = save(tmp_path, model_type="qwen3", max_position_embeddings=40960), InferenceSection(engine="vllm")
    longer = section.model_copy(update={"max_model_len": 65536})
    with pytest.raises(ConfigError, match=r"max_model_len = 65536: .*has 40960 positions"):
        check_served(longer, name, is_cpu=False)
    check_served(section.model_copy(update={"max_model_len": 40960}), name, is_cpu=False)
    check_served(longer.model_copy(update={"vllm_extra": {"hf_overrides": {}}}), name, is_cpu=False)
    check_served(longer.model_copy(update={"env_vars": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}), name, is_cpu=False)
    save(tmp_path, model_type="qwen3", max_position_embeddings=32768, rope_scaling={"type": "dynamic", "factor": 2.0})
    check_served(longer, name, is_cpu=False)


def test_drafts_by_layers_that_the_model_lacks_are_refused(tmp_path):
    section = InferenceSection(engine="vllm", speculation={"method": "mtp"})
    for lacks in ({"model_type": "qwen3"}, {"model_type": "glm4_moe", "num_nextn_predict_layers": 0}):
        with pytest.raises(ConfigError, match=r"speculation\.method.*num_nextn_predict_layers.*suffix"):
            check_served(section, save(tmp_path, **lacks), is_cpu=False)
    check_served(section, save(tmp_path, model_type="glm4_moe", num_nextn_predict_layers=1), is_cpu=False)
    qwen = save(tmp_path, model_type="qwen3_5_text", mtp_num_hidden_layers=1)
    if not is_here("families"):
        with pytest.raises(ConfigError, match=r'method = "mtp" for a qwen3_5_text needs the add-on stretto_families'):
            check_served(section, qwen, is_cpu=False)
        return
    check_served(section, qwen, is_cpu=False)
    # vLLM reads one key, and has no layers for further tokens of other families.
    for other in (
        {"model_type": "minimax_m2", "num_mtp_modules": 3},
        {"model_type": "nemotron_h", "mtp_layers_block_type": ["moe"], "num_nextn_predict_layers": 0},
    ):
        with pytest.raises(ConfigError, match=r"speculation\.method.*num_nextn_predict_layers.*suffix"):
            check_served(section, save(tmp_path, **other), is_cpu=False)


def test_a_draft_is_as_long_as_layers_that_take_turns_make_it(tmp_path):
    served = save(tmp_path, model_type="glm4_moe", num_nextn_predict_layers=2)
    for number in (1, 2, 4):
        section = InferenceSection(engine="vllm", speculation={"method": "mtp", "num_speculative_tokens": number})
        check_served(section, served, is_cpu=False)
    section = InferenceSection(engine="vllm", speculation={"method": "mtp", "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=r"num_speculative_tokens = 3.*give a multiple of 2"):
        check_served(section, served, is_cpu=False)


def test_a_draft_model_is_one_for_the_method_and_the_model(tmp_path):
    (tmp_path / "draft").mkdir()
    served = save(tmp_path, model_type="qwen3", vocab_size=100)
    speculation = {"method": "eagle3", "model": str(tmp_path / "draft")}
    section = InferenceSection(engine="vllm", speculation=speculation)
    with pytest.raises(ConfigError, match=r"no such directory with a config\.json"):
        check_served(section, served, is_cpu=False)
    save(tmp_path / "draft", architectures=["LlamaForCausalLMEagle3"], vocab_size=100, model_type="llama")
    check_served(section, served, is_cpu=False)
    with pytest.raises(ConfigError, match=r'method = "eagle".*of a model for "eagle3"'):
        check_served(
            InferenceSection(engine="vllm", speculation=speculation | {"method": "eagle"}), served, is_cpu=False
        )
    save(tmp_path / "draft", architectures=["Eagle3LlamaForCausalLM"], vocab_size=200, model_type="llama")
    with pytest.raises(ConfigError, match="vocab_size = 200, and the model that it is to draft for has 100"):
        check_served(section, served, is_cpu=False)


@pytest.mark.parametrize("name", ["model.layers.2.eh_proj.weight", "mtp.fc.weight"])
def test_drafts_by_layers_whose_weights_are_not_in_the_files_are_refused(tmp_path, name):
    section = InferenceSection(engine="vllm", speculation={"method": "mtp"})
    served = save(tmp_path, model_type="glm4_moe", num_nextn_predict_layers=1)
    exported = {"model.layers.0.mlp.gate.weight": torch.zeros(2), "lm_head.weight": torch.zeros(2)}
    save_file(exported, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no weights of the layers for further tokens.*suffix"):
        check_served(section, served, is_cpu=False)
    save_file(exported | {name: torch.zeros(2)}, tmp_path / "model.safetensors")
    check_served(section, served, is_cpu=False)


def test_auto_means_vllm_for_families_that_the_embedded_engine_lacks(tmp_path):
    name = save(tmp_path, model_type="olmo2")
    check_served(InferenceSection(), name, is_cpu=True)
    assert needs_vllm(InferenceSection(), name) and not needs_vllm(InferenceSection(engine="embedded"), name)
    assert InferenceSection().chosen_engine(has_gpu=False, is_own=False) == "vllm"
    with pytest.raises(ConfigError, match=r'engine = "embedded" has no olmo2'):
        check_served(InferenceSection(engine="embedded"), name, is_cpu=True)
    assert not needs_vllm(InferenceSection(), save(tmp_path, model_type="qwen3"))


@needs("families")
def test_a_model_that_chooses_its_keys_is_served_by_the_embedded_engine_or_on_gpus(tmp_path):
    name = save(tmp_path, model_type="glm_moe_dsa")
    for engine, is_cpu in (("embedded", True), ("embedded", False), ("auto", True), ("vllm", False)):
        check_served(InferenceSection(engine=engine), name, is_cpu=is_cpu)
    with pytest.raises(ConfigError, match=r"glm_moe_dsa .*embedded"):
        check_served(InferenceSection(engine="vllm"), name, is_cpu=True)


def test_patches_are_normalised_once_and_positions_of_images_are_the_models(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    text = {"model_type": "qwen3_vl_text", "rope_parameters": rope | {"mrope_interleaved": True}}
    save(tmp_path, model_type="qwen3_vl", vision_config={}, text_config=text)
    for is_cpu in (True, False):
        assert "--no-mm-device-do-normalize" in words_of(InferenceSection(), tmp_path, is_cpu=is_cpu)
    with pytest.raises(ConfigError, match="mm_device_do_normalize is not yours to set"):
        words_of(InferenceSection(vllm_extra={"mm_device_do_normalize": True}), tmp_path, is_cpu=True)
    name = save(tmp_path, model_type="qwen3_vl", vision_config={}, text_config=text | {"rope_parameters": rope})
    with pytest.raises(ConfigError, match=r"no mrope_interleaved = true.*embedded"):
        check_served(InferenceSection(engine="vllm"), name, is_cpu=False)


@needs("families")
def test_states_are_not_shared_between_prompts_on_a_cpu(tmp_path):
    save(tmp_path, model_type="nemotron_h")
    assert "--no-enable-prefix-caching" in words_of(InferenceSection(), tmp_path, is_cpu=True)
    assert "--no-enable-prefix-caching" not in words_of(InferenceSection(), tmp_path, is_cpu=False)
