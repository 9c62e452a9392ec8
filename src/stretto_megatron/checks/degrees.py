"""Degrees of the training mesh of Megatron-Core; what tp, cp and pp leave is dp."""

from __future__ import annotations

import math
from typing import Any

from stretto.base.errors import ConfigError
from stretto.check.degrees import Degrees, divides, divisors, listed
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import MegatronSection


def find_degrees(model: ModelSection, section: MegatronSection, world_size: int, shape: Any) -> Degrees:
    """The degrees with trainer.backend = "megatron"; what tp, cp and pp leave is dp.

    shape: a Shape, or a model's own config, which has the same fields.

    Raises: ConfigError naming the key, and the values it may have.
    """
    cut, stages = model.tp * model.cp * section.pp, "trainer.megatron"
    if world_size % cut:
        raise ConfigError(
            f"[model] tp = {model.tp} x cp = {model.cp} x {stages}.pp = {section.pp} does not divide the {world_size} "
            f"trainer ranks; valid products: {listed(divisors(world_size))}"
        )
    if model.dp_replicate > 1:
        raise ConfigError(
            f"[model] dp_replicate = {model.dp_replicate}: Megatron has whole weights on each rank that tp, pp and ep "
            "leave; leave dp_replicate out"
        )
    divides("tp", model.tp, shape.num_kv_heads, f"the {shape.num_kv_heads} key and value heads of this model")
    divides("tp", model.tp, shape.intermediate_size, f"intermediate_size = {shape.intermediate_size}")
    _check_stages(section, shape.num_layers)
    dp = world_size // cut
    return Degrees(
        dp_shard=dp, cp=model.cp, tp=model.tp, ep=_expert_degree(model, section, dp, shape), pp=section.pp,
        splits_tokens=model.tp > 1,
    )  # fmt: skip


def _check_stages(section: MegatronSection, num_layers: int) -> None:
    """Raises: ConfigError for stages that would not have equally many layers, but for those that are given."""
    key, given = "trainer.megatron", [n for n in (section.first_stage_layers, section.last_stage_layers) if n]
    if section.pp == 1:
        if given or section.virtual_stages > 1:
            raise ConfigError(
                f"{key}: first_stage_layers, last_stage_layers and virtual_stages are of pipelines, and pp = 1; raise "
                "pp, or leave them out"
            )
        return
    if not num_layers:
        return
    left, others = num_layers - sum(given), section.pp - len(given)
    if left < others or (left % others if others else left):
        raise ConfigError(
            f"{key}.pp = {section.pp}: the {num_layers} layers of this model"
            + (f", {sum(given)} of them in stages of their own," if given else "")
            + f" do not make equal stages; valid without first_stage_layers and last_stage_layers: "
            f"{listed(divisors(num_layers))}"
        )
    sizes = {*given, *([left // others] if others else [])}
    if uneven := [size for size in sizes if size % section.virtual_stages]:
        raise ConfigError(
            f"{key}.virtual_stages = {section.virtual_stages} does not divide the {uneven[0]} layers of a stage; "
            f"valid: {listed(divisors(math.gcd(*sizes)))}"
        )


def _expert_degree(model: ModelSection, section: MegatronSection, dp: int, shape: Any) -> int:
    ranks = dp * model.cp * model.tp
    if not shape.num_experts:
        if model.ep not in ("auto", 1) or section.etp > 1:
            raise ConfigError(
                f"[model] ep = {model.ep} and trainer.megatron.etp = {section.etp}, but the policy has no experts; "
                "leave them out"
            )
        return 1
    if ranks % section.etp:
        raise ConfigError(
            f"trainer.megatron.etp = {section.etp} does not divide tp x cp x dp = {ranks} ranks; valid: "
            f"{listed(divisors(ranks))}"
        )
    valid = [n for n in divisors(ranks // section.etp) if shape.num_experts % n == 0]
    if model.ep == "auto":
        return valid[-1]
    if model.ep not in valid:
        raise ConfigError(
            f"[model] ep = {model.ep} must divide both tp x cp x dp / etp = {ranks // section.etp} ranks and the "
            f'{shape.num_experts} experts; valid: {listed(valid)}, or "auto"'
        )
    return int(model.ep)
