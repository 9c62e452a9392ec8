"""What rules, renderers, engines and flags must know about a family beside its network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class VllmTraits:
    """How vLLM 0.32 computes a family otherwise than the model, found by tests/contract/families.

    has_own_head: vLLM gives it a separate output head, also if the checkpoint has none: its logits would be random.
    always_normalises_gates: it normalises the gates of experts whether or not config.json says norm_topk_prob.
    is_bfloat16_on_cpu: its CPU build computes the recurrent layers in bfloat16 only.
    cpu_fault: why its CPU build cannot run the family, in words that follow "on a CPU vLLM".
    cpu_fault_key: the key of config.json that a model with this fault has; None: all models have the fault.
    adapts: its LoRA kernels compute adapters of attention and MLPs as the model does: tests have tried it.
    adapts_experts: it can compute adapters of its experts too, on GPUs, which no test has tried.
    prediction_key: the key of config.json that counts the layers for further tokens with which it drafts (`mtp`); None:
        it drafts with those of no model of the family.
    """

    has_own_head: bool = False
    always_normalises_gates: bool = False
    is_bfloat16_on_cpu: bool = False
    cpu_fault: str | None = None
    cpu_fault_key: str | None = None
    adapts: bool = False
    adapts_experts: bool = True
    prediction_key: str | None = None


@dataclass(frozen=True)
class Implied:
    """What holds for all models of a family though their config.json does not say it; None: not known.

    Marked with *: true also for families whose names begin with this one's.

    expert_scores: how the router scores experts; with sigmoid, a bias balances the choice of them.
    has_shared_gate: the output of the shared expert has a gate.
    has_qk_norm: queries and keys are normalised; True*.
    has_qkv_bias: the projections of queries, keys and values have biases.
    has_centred_norms: norms multiply by 1 + weight; True*.
    has_output_gate: attention has a gate at its output; True*.
    has_post_norms: norms behind attention and MLP, before both are added.
    """

    expert_scores: Literal["sigmoid", "softmax"] | None = None
    has_shared_gate: bool | None = None
    has_qk_norm: bool | None = None
    has_qkv_bias: bool | None = None
    has_centred_norms: bool | None = None
    has_output_gate: bool | None = None
    has_post_norms: bool | None = None


@dataclass(frozen=True)
class Traits:
    """One family.

    renderer: its renderer in the renderers library; None: the library has none.
    aliases: other values of `model_type` that are the same network, each with its renderer.
    uncut: axes of the training mesh that must be 1, each with the part of the model that stays whole.
    undivided_heads: why tp ranks cannot divide its heads, in words that follow the family's name; None: they can.
    is_recurrent: it has layers that pass a state from token to token.
    chooses_keys: its queries attend to the keys that an indexer chooses.
    has_vision: it has a vision tower.
    packs_in_transformers: packed rows of transformers' own modules equal each document alone (impl = "hf").
    is_all_sparse: all blocks have experts, and config.json has no `intermediate_size`.
    may_be_transposed: its files have experts either way round, which a square matrix does not show.
    vllm: what vLLM does otherwise.
    is_in_megatron: the layers of Megatron-Core compute the same, but for parts that config.json may ask for.
    implied: what config.json leaves unsaid.
    public: config.json of public models by their names on the Hub, without `model_type`, so that they can be planned
    without the Hub.
    """

    renderer: str | None = None
    aliases: Mapping[str, str | None] = field(default_factory=dict)
    uncut: Mapping[str, str] = field(default_factory=dict)
    undivided_heads: str | None = None
    is_recurrent: bool = False
    chooses_keys: bool = False
    has_vision: bool = False
    packs_in_transformers: bool = False
    is_all_sparse: bool = False
    may_be_transposed: bool = False
    vllm: VllmTraits = field(default_factory=VllmTraits)
    is_in_megatron: bool = False
    implied: Implied = field(default_factory=Implied)
    public: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
