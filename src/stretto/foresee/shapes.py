"""The shape of a model: from [model.scratch], its config.json, or the file of --model-config. Weights are not needed.

The shapes of a few public models are in a table here, so that their examples can be planned without the Hub. A plan
that uses the table says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.model_file import read_model_file
from stretto.config.sections.model import ModelSection
from stretto.data.hub_model import find_config
from stretto.models.config import parse_config, scratch_config
from stretto.models.shape import ModelConfig

_GLM_5 = {
    "model_type": "glm_moe_dsa", "vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 2048, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 32, "first_k_dense_replace": 3, "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "zai-org/GLM-5": _GLM_5,
    "zai-org/GLM-5.1": _GLM_5,
    "zai-org/GLM-5-FP8": _GLM_5 | {"quantization_config": {"quant_method": "fp8"}},
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""What the config.json of these models says, by name. Source: transformers' classes of these families (GLM-5: the
defaults of GlmMoeDsaConfig), and the models' cards."""


@dataclass(frozen=True)
class FoundShape:
    """A model's shape, whether its checkpoint is in 8 bits, and the source of both."""

    shape: ModelConfig
    is_quantized: bool
    source: str


def find_shape(section: ModelSection, given: Path | None = None) -> FoundShape:
    """The shape of the model of a section; `given`: a config.json, or a directory with one, to use instead.

    Raises: ConfigError if there is none, or if it is of no family that is known here.
    """
    if given is not None:
        return _parse(_read(given), str(given), f"config.json of {given}")
    if section.scratch is not None:
        with TemporaryDirectory() as directory:
            tokenizer = load_tokenizer(build_letters_tokenizer(directory, phrases=section.scratch.phrases))
        shape = scratch_config(section.scratch, tokenizer.vocab_size)
        return FoundShape(shape, is_quantized=False, source="[model.scratch]")
    return named_shape(section.name)


def named_shape(name: str) -> FoundShape:
    """The shape of a model directory or of a model of the Hub.

    Raises: ConfigError if its config.json cannot be had.
    """
    if (directory := find_config(name)) is not None:
        return _parse(read_model_file(directory), name, f"config.json of {name}")
    if name in KNOWN:
        source = f"the table of this version of stretto; the Hub has not answered for {name}"
        return _parse(KNOWN[name], name, source)
    where = "there is no config.json in that directory" if Path(name).is_dir() else "it is not here"
    raise ConfigError(
        f"[model] name = {name!r}: a plan needs the model's config.json, but {where}, and the Hub did not send it; "
        "copy that one file here and pass it with --model-config FILE. Weights are not needed."
    )


def _read(given: Path) -> dict[str, Any]:
    directory = given.parent if given.name == "config.json" or given.is_file() else given
    if given.is_file() and given.name != "config.json":
        raise ConfigError(f"--model-config {given}: give a file named config.json, or its directory")
    return read_model_file(directory)


def _parse(raw: dict[str, Any], where: str, source: str) -> FoundShape:
    is_quantized = raw.get("quantization_config") is not None
    try:
        shape = parse_config({key: v for key, v in raw.items() if key != "quantization_config"}, where)
    except DataError as error:
        text = str(error).replace('use impl = "hf"', "a plan knows our own families only")
        raise ConfigError(f"no plan for this model: {text}") from None
    except (KeyError, TypeError, ValueError) as cause:
        raise ConfigError(f"{where}: its config.json cannot be understood: {cause!r}") from cause
    return FoundShape(shape, is_quantized, source)
