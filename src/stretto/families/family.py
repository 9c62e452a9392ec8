"""A family of models as data: its settings, weight names and tensor-parallel plan.

The forward pass of every family is models/decoder.py; a family says which options are on. docs/add_a_model.md explains
how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from stretto.base.errors import DataError
from stretto.families.shape import LayerAttention, ModelConfig, MoEShape, Rope
from stretto.families.traits import Traits

MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""The linear layers of a gated MLP."""
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
"""Module -> how its weight is divided over the tensor-parallel axis.

column: by output features (weight dim 0, bias too). row: by input features (weight dim 1; the partial sums
are added over the axis, the bias once). vocab: by vocabulary (dim 0). Other modules are whole on every rank."""


@dataclass(frozen=True)
class WeightRule:
    """Parameters with other names or another layout in a checkpoint.

    `{layer}` is the same number on both sides. may_be_swapped: a checkpoint may have the last two dims swapped.

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


def renamed_in_layers(names: Mapping[str, str]) -> tuple[WeightRule, ...]:
    """Rules for weights below `model.layers.N.` that only have other names: ours -> theirs."""
    prefix = "model.layers.{layer}"
    return tuple(WeightRule((f"{prefix}.{ours}",), (f"{prefix}.{theirs}",)) for ours, theirs in names.items())


STACKED_EXPERTS = (
    WeightRule(
        ("model.layers.{layer}.mlp.experts.gate_up_proj",),
        tuple(f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up")),
    ),
    *renamed_in_layers({"mlp.experts.down_proj": "mlp.experts.{expert}.down_proj.weight"}),
)
"""The experts of most families: one tensor per expert and matrix in a checkpoint."""
EXPERT_BIAS = renamed_in_layers({"mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias"})
"""The bias on the choice of experts under its usual name."""
SHARED_EXPERT = renamed_in_layers(
    {f"mlp.shared_experts.{part}.weight": f"mlp.shared_expert.{part}.weight" for part in MLP_LINEARS}
)
"""The MLP beside the experts, where checkpoints name it in the singular."""


class Keys(dict[str, str | tuple[str, Any]]):
    """Fields of a shape -> key in config.json, or (key, default) if it is not required."""

    def __or__(self, other: Mapping[str, str | tuple[str, Any]]) -> Keys:  # type: ignore[override]  # dict.__or__ returns a dict
        return Keys({**self, **other})

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields from a config.json; required keys were checked before."""
        return {field: hf[entry] if isinstance(entry, str) else hf.get(*entry) for field, entry in self.items()}

    def write(self, shape: Any) -> dict[str, Any]:
        """The reverse: keys of config.json from the attributes of a shape."""
        return {entry if isinstance(entry, str) else entry[0]: getattr(shape, field) for field, entry in self.items()}

    @property
    def required(self) -> tuple[str, ...]:
        """The keys that have no default."""
        return tuple(entry for entry in self.values() if isinstance(entry, str))


ATTENTION_BIAS = Keys(out_bias=("attention_bias", False), qkv_bias=("attention_bias", False))
"""One key for the biases of all projections of attention, as most families have it."""
MOE_KEYS = Keys(num_experts="num_experts", top_k="num_experts_per_tok", intermediate_size="moe_intermediate_size")
"""Fields of MoEShape and their most common keys."""
LOCAL_MOE_KEYS = MOE_KEYS | {"num_experts": "num_local_experts", "intermediate_size": "intermediate_size"}
"""The same for families whose MLPs are all experts."""
GROUPED_MOE_KEYS = MOE_KEYS | {
    "num_experts": "n_routed_experts",
    "norm_topk_prob": ("norm_topk_prob", True),
    "num_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
    "gate_scale": ("routed_scaling_factor", 1.0),
}
"""Fields of MoEShape as DeepSeek's config.json names them."""
BALANCED_SIGMOID: dict[str, Any] = {"is_sigmoid": True, "has_expert_bias": True}
"""Options of MoEShape for a router with sigmoid scores and a bias that balances loads."""


class Scratch(Protocol):
    """[model.scratch] (config/sections/model.py), as families read it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def has_expert_bias(self) -> bool: ...
    @property
    def sliding_window(self) -> int: ...
    @property
    def index_topk(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def vision(self) -> Any: ...


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face configs.

    traits: what is to be known of it beside its network.
    constants: fields of ModelConfig that are equal for all models of this family.
    keys: fields of ModelConfig with a key of config.json, none of them required.
    fields: reads all other settings of config.json that only this family has, as fields of ModelConfig.
    to_hf: the inverse of `fields`: these settings as keys of config.json.
    required: keys that a config.json of this family must have.
    defaults: values of keys that config.json leaves out, if transformers has other defaults for this family.
    fixed_values: keys that are supported with one value only (a missing key counts as that value).
    key_aliases: other names of keys that some versions of transformers write.
    normalise: replaces the family's special keys by the usual ones.
    nest: the inverse: a config.json of this family from the usual keys.
    text_prefix: the prefix of the decoder's weights in a checkpoint.
    layer_types: the values of `layer_types` that are supported.
    weights: weights whose names or layout differ from the checkpoint's.
    tp_plan: how modules are divided over tensor-parallel ranks.
    rotary_fraction: share of a head's dims that is rotated if config.json has none; None: always all.
    rotary_sections: `Rope.sections` of a model with images if config.json has none.
    is_rotary_interleaved: True if neighbouring dims are rotated (parts/rope.py).
    has_windows: True if layers may have sliding windows; `fields` reads them from layer_types.
    scratch: for a model that is created from scratch: fields of ModelConfig besides `constants` and the defaults of
    `keys`.
    """

    name: str
    architecture: str
    traits: Traits = field(default_factory=Traits)
    constants: Mapping[str, Any] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys)
    fields: Callable[[dict[str, Any]], dict[str, Any]] = lambda hf: {}
    to_hf: Callable[[ModelConfig], dict[str, Any]] = lambda cfg: {}
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
    scratch: Callable[[Scratch], dict[str, Any]] = lambda scratch: {}


def sparse_layers(hf: dict[str, Any], first_sparse: int) -> tuple[int, ...]:
    """The layers with experts: by `mlp_layer_types`, or without it from `first_sparse` on.

    Raises: DataError for a list of another length, or with other kinds.
    """
    count, kinds = hf["num_hidden_layers"], hf.get("mlp_layer_types")
    if kinds is None:
        return tuple(range(min(first_sparse, count), count))
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise DataError(
            f'config.json: mlp_layer_types must give "dense" or "sparse" for each of the {count} layers, not {kinds}'
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def mlp_layer_types(cfg: ModelConfig) -> list[str]:
    """The reverse of `sparse_layers`."""
    return ["sparse" if cfg.is_sparse(layer) else "dense" for layer in range(cfg.num_layers)]


def first_sparse_layer(cfg: ModelConfig) -> int:
    """The number of blocks before the first one with experts."""
    assert cfg.moe is not None
    return cfg.moe.sparse_layers[0] if cfg.moe.sparse_layers else cfg.num_layers


def scratch_moe(scratch: Scratch, first_sparse: int = 0, **options: Any) -> MoEShape:
    """The mixture of a model from scratch; blocks before `first_sparse` are dense."""
    return MoEShape(
        num_experts=scratch.num_experts,
        top_k=scratch.num_experts_per_tok,
        intermediate_size=scratch.moe_intermediate_size,
        sparse_layers=tuple(range(min(first_sparse, scratch.num_layers - 1), scratch.num_layers)),
        **{"has_expert_bias": scratch.has_expert_bias} | options,
    )


def scratch_rope(fraction: float | None = None) -> Rope:
    """The rotation of a model from scratch; fraction: the family's `rotary_fraction`."""
    return Rope(theta=10_000.0, fraction=fraction or 1.0)


def scratch_layers(
    scratch: Scratch, is_windowed: Callable[[int], bool], *, rotates_all: bool = True
) -> tuple[LayerAttention, ...]:
    """The attention of a model from scratch with windows in some layers.

    rotates_all: False if only these layers rotate queries and keys.
    """
    rope = scratch_rope()
    windowed = LayerAttention(scratch.num_heads, rope, scratch.sliding_window)
    whole = LayerAttention(scratch.num_heads, rope if rotates_all else None)
    return tuple(windowed if is_windowed(layer) else whole for layer in range(scratch.num_layers))


def scratch_shared_moe(scratch: Scratch, first_sparse: int = 0, **options: Any) -> MoEShape:
    """The same with one shared expert, a sigmoid router and a bias that balances loads."""
    options = BALANCED_SIGMOID | {"shared_size": scratch.moe_intermediate_size} | options
    return scratch_moe(scratch, first_sparse, **options)
