"""A family of models as data: its settings, weight names and tensor-parallel plan.

The forward pass of every family is decoder.py; a family says which options are on. docs/add_a_model.md explains how
to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.models.shape import ModelConfig
from stretto.models.tensor_map import WeightRule

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
class Family:
    """One `model_type` of Hugging Face configs.

    fields: reads the settings of config.json that only this family has, as fields of ModelConfig.
    to_hf: the inverse: these settings as keys of config.json.
    required: keys that a config.json of this family must have.
    fixed_values: keys that are supported with one value only (a missing key counts as that value).
    key_aliases: other names of keys that some versions of transformers write.
    weights: weights whose names or layout differ from the checkpoint's.
    tp_plan: how modules are cut over tensor-parallel ranks.
    """

    name: str
    architecture: str
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    required: tuple[str, ...] = ()
    fixed_values: Mapping[str, Any] = field(default_factory=dict)
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[WeightRule, ...] = ()
    tp_plan: Mapping[str, str] = field(default_factory=lambda: DENSE_TP_PLAN)
