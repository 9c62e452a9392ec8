"""config.json of the models that examples and the configs of prime-rl name, in their real sizes.

The files of tests/cases/model_configs have the numbers of transformers' default config of each family; a model of
another size is given as the keys that differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.chat.tokenizer import build_letters_tokenizer
from stretto_plan.shapes import KNOWN

CONFIGS = Path(__file__).parent / "model_configs"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def family(name: str, **keys: object) -> dict[str, Any]:
    """The config.json of a family with other numbers."""
    return _read(CONFIGS / f"{name}.json") | keys


def dense(layers: int, width: int, inner: int, heads: int, kv_heads: int = 8) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "layer_types": ["full_attention"] * layers, "max_window_layers": layers,
    }  # fmt: skip


def vision(text: dict[str, Any]) -> dict[str, Any]:
    found = family("qwen3_vl")
    found["text_config"] |= text
    found["vision_config"]["out_hidden_size"] = text["hidden_size"]
    return found


def glm5() -> dict[str, dict[str, Any]]:
    """The variants of GLM-5 by name; none without the add-on that has the family."""
    if (found := KNOWN.get("zai-org/GLM-5")) is None:
        return {}
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    in_8_bits = found | {"quantization_config": quantization}
    return {"zai-org/GLM-5.1-FP8": in_8_bits, "zai-org/GLM-5-FP8": in_8_bits, "zai-org/GLM-5.3-BF16": found}


_QWEN3_4B = family("qwen3", **dense(36, 2560, 9728, 32), head_dim=128)
MODELS = {
    **KNOWN,
    **glm5(),
    "zai-org/GLM-4.5-Air": family("glm4_moe"),
    "PrimeIntellect/INTELLECT-3-Base": family("glm4_moe"),
    "poolside/Laguna-XS-2.1": family("laguna"),
    "lmsys/gpt-oss-20b-bf16": family(
        "gpt_oss", num_hidden_layers=24, num_local_experts=32, layer_types=["sliding_attention", "full_attention"] * 12
    ),
    "Qwen/Qwen3-VL-4B-Instruct": vision(dense(36, 2560, 9728, 32)),
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": family("qwen2", **dense(28, 1536, 8960, 12, 2)),
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": KNOWN["Qwen/Qwen3-0.6B"],
    "PrimeIntellect/Qwen3-1.7B-Wordle-SFT": family("qwen3", **dense(28, 2048, 6144, 16), head_dim=128),
}  # fmt: skip
"""By name on the Hub: its config.json."""


def fill_cache(cache: Path, *, has_tokenizers: bool = False) -> None:
    """Write the config.json of every model into a cache of the Hub, with the class that its family has there."""
    classes = {each["model_type"]: each["architectures"] for each in map(_read, sorted(CONFIGS.glob("*.json")))}
    for name, config in MODELS.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0")
        whole = {"architectures": classes[config["model_type"]]} | config
        (snapshot / "config.json").write_text(json.dumps(whole))
        if has_tokenizers:
            build_letters_tokenizer(snapshot)
