"""The text families of the renderers library."""

from __future__ import annotations

# All but gpt-oss, whose vocabulary the library fetches from the network.
FAMILIES = [
    "deepseek-r1", "deepseek-v3", "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3",
    "hy3", "inkling", "kimi-k2", "kimi-k2.5", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1",
    "laguna-xs.2", "llama-3", "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5",
    "prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8",
]  # fmt: skip
