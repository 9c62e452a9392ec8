"""What makes a family of models one: its settings, its weight names, its tensor-parallel plan. All data.

The forward pass is decoder.py's for every family; a family says which of its parts are on. How to add one:
docs/add_a_model.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.models.tensor_map import Rule

if TYPE_CHECKING:
    from stretto.models.config import ModelConfig

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

column: by output features (weight dim 0, bias too); row: by input features (weight dim 1; the partial sums
are added over the axis, the bias once); vocab: by vocabulary (dim 0). Modules that are not named are whole on
every rank."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face configs.

    fields: the settings of config.json that are this family's own, as fields of ModelConfig.
    to_hf: the way back, keys of config.json.
    only: settings that are computed for one value only (missing counts as that value).
    spellings: other names of keys, as some versions of transformers write them.
    """

    name: str
    architecture: str
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    required: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[Rule, ...] = ()
    tp_plan: Mapping[str, str] = field(default_factory=lambda: DENSE_TP_PLAN)
