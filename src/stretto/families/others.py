"""Families that only transformers computes (impl = "hf"), and what flags are compared with for them."""

from __future__ import annotations

from stretto.families.traits import Implied, Traits, VllmTraits

_ADAPTS = VllmTraits(adapts=True)

OTHERS: dict[str, Traits] = {
    "gemma": Traits(implied=Implied(has_qk_norm=False, has_centred_norms=True)),
    "gemma2": Traits(implied=Implied(has_qk_norm=False, has_centred_norms=True)),
    "gemma3": Traits(implied=Implied(has_qk_norm=True, has_centred_norms=True)),
    "gemma3_text": Traits(vllm=_ADAPTS),
    "granite": Traits(vllm=_ADAPTS),
    "ministral": Traits(vllm=_ADAPTS),
    "mistral": Traits(vllm=_ADAPTS, implied=Implied(has_qk_norm=False)),
    "mixtral": Traits(implied=Implied(expert_scores="softmax", has_qk_norm=False)),
    "olmo2": Traits(vllm=_ADAPTS, implied=Implied(has_qk_norm=True)),
    "olmo3": Traits(implied=Implied(has_qk_norm=True)),
    "olmoe": Traits(implied=Implied(expert_scores="softmax")),
    "phi3": Traits(vllm=_ADAPTS, implied=Implied(has_qk_norm=False)),
    "qwen2_moe": Traits(implied=Implied(expert_scores="softmax", has_shared_gate=True)),
    "qwen3_next": Traits(
        implied=Implied(
            expert_scores="softmax",
            has_shared_gate=True,
            has_qk_norm=True,
            has_centred_norms=True,
            has_output_gate=True,
        )
    ),
    "smollm3": Traits(vllm=_ADAPTS, implied=Implied(has_qk_norm=False)),
}
"""Traits by `model_type`. A family without a row has no trait that is known here."""
