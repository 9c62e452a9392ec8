"""Dense families: llama, qwen2, qwen3; they differ in biases and norms."""

from __future__ import annotations

from stretto.models.family import Family

_NO_WINDOW = {"use_sliding_window": False}

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    fields=lambda hf: {
        "has_qk_norm": False,
        "qkv_bias": hf.get("attention_bias", False),
        "out_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
    },
    to_hf=lambda cfg: {"attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias},
    scratch=lambda scratch: {"has_qk_norm": False},
)

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=lambda hf: {"has_qk_norm": False, "qkv_bias": True},
    to_hf=lambda cfg: {"use_sliding_window": False},
    scratch=lambda scratch: {"has_qk_norm": False, "qkv_bias": True},
    fixed_values=_NO_WINDOW,
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=lambda hf: {
        "qkv_bias": hf.get("attention_bias", False),
        "out_bias": hf.get("attention_bias", False),
    },
    to_hf=lambda cfg: {"attention_bias": cfg.qkv_bias, "use_sliding_window": False},
    defaults={"head_dim": 128},
    fixed_values=_NO_WINDOW,
)
