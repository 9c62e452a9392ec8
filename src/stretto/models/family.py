"""A family of models as data: its settings, weight names and tensor-parallel plan.

The forward pass of every family is decoder.py; a family says which options are on. docs/add_a_model.md explains how
to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.models.shape import LayerAttention, ModelConfig, MoEShape, Rope

if TYPE_CHECKING:
    from stretto.config.sections.model import ScratchSection

DENSE_TP_PLAN: dict[str, str] = {
    "model.embed_tokens": "vocab",
    "model.layers.{layer}.self_attn.q_proj": "column",
    "model.layers.{layer}.self_attn.k_proj": "column",
    "model.layers.{layer}.self_attn.v_proj": "column",
    "model.layers.{layer}.self_attn.o_proj": "row",
    "model.layers.{layer}.mlp.gate_proj": "column",
    "model.layers.{layer}.mlp.up_proj": "column",
    "model.layers.{layer}.mlp.down_proj": "row",
    "lm_head": "vocab",
}
"""Module -> how its weight is cut over the tensor-parallel axis.

column: by output features (weight dim 0, bias too). row: by input features (weight dim 1; the partial sums
are added over the axis, the bias once). vocab: by vocabulary (dim 0). Other modules are whole on every rank."""


@dataclass(frozen=True)
class WeightRule:
    """Parameters with other names or another layout in a checkpoint.

    `{layer}` is a number on both sides.

    may_be_swapped: a checkpoint may have the last two dims the other way round.

    One of ours and several of theirs: ours is theirs concatenated along dim 0 (each has the same number of rows).
    Several of ours and one of theirs: theirs is ours concatenated. `{expert}` in theirs: ours has one more dim in
    front, the experts.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    may_be_swapped: bool = False

    def __post_init__(self) -> None:
        assert min(len(self.ours), len(self.theirs)) == 1, f"{self}: one side must be a single tensor"
        assert not (len(self.ours) > 1 and self.is_stacked), f"{self}: experts cannot be split as well"

    @property
    def is_stacked(self) -> bool:
        return "{expert}" in self.theirs[0]


STACKED_EXPERTS = (
    WeightRule(
        ("model.layers.{layer}.mlp.experts.gate_up_proj",),
        tuple(f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")),
    ),
    WeightRule(
        ("model.layers.{layer}.mlp.experts.down_proj",),
        ("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",),
    ),
)
"""The experts of most families: one tensor per expert and matrix in a checkpoint."""
EXPERT_BIAS = WeightRule(
    ("model.layers.{layer}.mlp.gate.expert_bias",),
    ("model.layers.{layer}.mlp.gate.e_score_correction_bias",),
)
"""The bias on the choice of experts under its usual name."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face configs.

    fields: reads the settings of config.json that only this family has, as fields of ModelConfig.
    to_hf: the inverse: these settings as keys of config.json.
    required: keys that a config.json of this family must have.
    defaults: what keys mean that config.json leaves out, where transformers has a value of its own for this family.
    fixed_values: keys that are supported with one value only (a missing key counts as that value).
    key_aliases: other names of keys that some versions of transformers write.
    normalise: gives a config.json the usual keys, where a family has others.
    nest: the inverse: a config.json of this family from the usual keys.
    text_prefix: what names of the decoder's weights begin with in a checkpoint.
    layer_types: the values of `layer_types` that are supported.
    weights: weights whose names or layout differ from the checkpoint's.
    tp_plan: how modules are cut over tensor-parallel ranks.
    rotary_fraction: share of a head's dims that is rotated if config.json does not say; None: always all.
    rotary_sections: `Rope.sections` of a model with images, if config.json does not say.
    is_rotary_interleaved: neighbouring dims are rotated (parts/rope.py).
    has_windows: layers may have sliding windows; `fields` reads them from layer_types.
    scratch: the fields of ModelConfig special to this family for a model that is created from scratch.
    """

    name: str
    architecture: str
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    required: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed_values: Mapping[str, Any] = field(default_factory=dict)
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    normalise: Callable[[dict[str, Any]], dict[str, Any]] = dict
    nest: Callable[[dict[str, Any], ModelConfig], dict[str, Any]] = lambda hf, cfg: hf
    text_prefix: str = "model."
    layer_types: tuple[str, ...] = ("full_attention",)
    weights: tuple[WeightRule, ...] = ()
    tp_plan: Mapping[str, str] = field(default_factory=lambda: DENSE_TP_PLAN)
    rotary_fraction: float | None = None
    rotary_sections: tuple[int, ...] = ()
    is_rotary_interleaved: bool = False
    has_windows: bool = False
    scratch: Callable[[ScratchSection], dict[str, Any]] = lambda scratch: {}


def scratch_moe(scratch: ScratchSection, first_dense: int = 0, **options: Any) -> MoEShape:
    """The mixture of a model from scratch; blocks before `first_dense` are dense."""
    return MoEShape(
        num_experts=scratch.num_experts,
        top_k=scratch.num_experts_per_tok,
        intermediate_size=scratch.moe_intermediate_size,
        norm_topk_prob=True,
        sparse_layers=tuple(range(min(first_dense, scratch.num_layers - 1), scratch.num_layers)),
        **{"has_expert_bias": scratch.has_expert_bias} | options,
    )


def scratch_layers(
    scratch: ScratchSection, is_windowed: Callable[[int], bool], *, rotates_all: bool = True
) -> tuple[LayerAttention, ...]:
    """The attention of a model from scratch with windows in some layers; rotates_all=False: only these rotate."""
    rope = Rope(theta=10_000.0)
    windowed = LayerAttention(scratch.num_heads, rope, scratch.sliding_window)
    whole = LayerAttention(scratch.num_heads, rope if rotates_all else None)
    return tuple(windowed if is_windowed(layer) else whole for layer in range(scratch.num_layers))
