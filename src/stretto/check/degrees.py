"""Degrees of the training mesh, from [model], the number of ranks and the model's shape.

trainer/ranks/mesh.py builds the mesh; a dry run checks the same, with the model's config.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection, cp_style
from stretto.data.model_file import ModelFile
from stretto.families.table import FAMILIES, VISION_FAMILIES, traits_of


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that degrees must divide; num_experts is 0 for a dense model.

    num_state_heads: greatest common divisor of the heads of the gated delta rule, for keys and values; 0 without them.
    """

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_experts: int = 0
    family: str = ""
    num_state_heads: int = 0
    num_layers: int = 0
    """0: not known."""


def read_shape(model: ModelFile) -> Shape | None:
    """The shape of a model of one of our own families; None for any other.

    Raises: ConfigError for a config.json without a number that is needed here.
    """
    family, found = model.family, model.text
    if family not in FAMILIES:
        return None
    if traits_of(family).is_all_sparse:
        found.setdefault("intermediate_size", found.get("moe_intermediate_size"))
    if missing := [key for key in ("num_attention_heads", "intermediate_size") if not found.get(key)]:
        what = f"no value for {', '.join(missing)}; a {family} config.json must give every one"
        raise ConfigError(f"{model.path}: {what}")
    experts = (found.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    return Shape(
        model.num_heads,
        model.num_kv_heads,
        found["intermediate_size"],
        next((number for number in experts if number), 0),
        family,
        math.gcd(*(found.get(f"linear_num_{part}_heads") or 0 for part in ("key", "value"))),
        found.get("num_hidden_layers") or 0,
    )


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes of the training mesh."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    splits_tokens: bool = False
    """Ranks of tp split the tokens of a pass outside the layers that they cut, and may have different experts."""

    @property
    def experts_over(self) -> int:
        """Ranks that together have all experts: those of one replica with different tokens or weights."""
        return self.dp_shard * self.cp * (self.tp if self.splits_tokens else 1)

    @property
    def dp(self) -> int:
        """Ranks that train on different micro batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp


def find_degrees(section: ModelSection, world_size: int, shape: Any) -> Degrees:
    """The degrees of [model] on a number of ranks; dp_shard is the rest.

    shape: a Shape, or a model's own config, which has the same fields.

    Raises: ConfigError naming the key, and the values it may have.
    """
    _check_uncut(section, shape)
    if world_size % (section.cp * section.tp):
        raise ConfigError(
            f"[model] cp = {section.cp} x tp = {section.tp} does not divide the {world_size} trainer ranks; valid "
            f"products: {listed(divisors(world_size))}"
        )
    if section.tp > 1 and (reason := traits_of(shape.family).undivided_heads):
        raise ConfigError(
            f"[model] tp = {section.tp}: a {shape.family} {reason}, so its attention is not spread over tp; "
            "use tp = 1, and cp, ep or more dp_shard instead"
        )
    style = cp_style(section, shape) if section.cp > 1 else None
    if style == "ulysses" and traits_of(shape.family).chooses_keys:
        raise ConfigError(
            f'[model] cp_style = "ulysses" gives each of cp = {section.cp} ranks some heads, but the indexer of '
            f'{shape.family} chooses the same keys for all heads; leave cp_style out, or set "ring", which takes any cp'
        )
    number: int = shape.num_state_heads
    if section.cp > 1 and number:
        divides("cp", section.cp, number, f"the {number} heads of the gated delta rule ({shape.family})")
    left = world_size // (section.cp * section.tp)
    divides("dp_replicate", section.dp_replicate, left, f"the {left} ranks that cp and tp leave")
    island = left // section.dp_replicate * section.cp
    kv_heads, heads = shape.num_kv_heads, shape.num_heads
    divides("tp", section.tp, kv_heads, f"the {kv_heads} key and value heads of this model")
    divides("tp", section.tp, shape.intermediate_size, f"intermediate_size = {shape.intermediate_size}")
    if style == "ulysses":
        heads, kv_heads = heads // section.tp, kv_heads // section.tp
        divides("cp", section.cp, heads, f'the {heads} query heads of a rank (cp_style = "ulysses")')
        if kv_heads % section.cp and section.cp % kv_heads:
            valid = [n for n in divisors(heads) if not (kv_heads % n and n % kv_heads)]
            raise ConfigError(
                f"[model] cp = {section.cp} neither divides the {kv_heads} key and value heads of a rank nor is a "
                f'multiple of them; valid: {listed(valid)}, or cp_style = "ring"'
            )
    return Degrees(
        dp_replicate=section.dp_replicate,
        dp_shard=island // section.cp,
        cp=section.cp,
        tp=section.tp,
        ep=_expert_degree(section, island, shape),
        splits_tokens=section.sequence_parallel and section.tp > 1,
    )


def check_vision(section: ModelSection, family: str, *, has_other_tower: bool = False) -> None:
    """Check that [model.vlm] is given for models with images and for no others.

    has_other_tower: the model has a vision tower, of a family that is not computed with images here.

    Raises: ConfigError if not.
    """
    if section.vlm is None and family in VISION_FAMILIES:
        raise ConfigError(f"[model]: a {family} has a vision tower; add [model.vlm], which says whether to train it")
    if section.vlm is not None and has_other_tower:
        raise ConfigError(
            f"[model.vlm]: images are computed for the families {', '.join(VISION_FAMILIES)} only, and a {family} has "
            "a vision tower of another kind, whatever attributes name it; choose a model of these families"
        )
    if section.vlm is not None and family not in VISION_FAMILIES:
        raise ConfigError(
            f"[model.vlm] is for models with a vision tower ({', '.join(VISION_FAMILIES)}), and this is a {family}; "
            "leave it out"
        )


def find_plain_degrees(section: ModelSection, world_size: int) -> Degrees:
    """The degrees for a model of transformers, whose weights are sharded and whose layers are not cut.

    Raises: ConfigError naming the key.
    """
    parts = {"tp": "the features of its layers", "cp": "the tokens of a row", "ep": "its experts"}
    for key, what in parts.items():
        if (value := getattr(section, key)) not in (1, "auto"):
            raise ConfigError(
                f"[model] {key} = {value} cuts {what}, which only modules of our own can; a model of transformers' "
                f'(impl = "hf") is sharded over all ranks, so leave {key} out'
            )
    divides("dp_replicate", section.dp_replicate, world_size, f"the {world_size} trainer ranks")
    return Degrees(dp_replicate=section.dp_replicate, dp_shard=world_size // section.dp_replicate)


def _check_uncut(section: ModelSection, shape: Any) -> None:
    """Check that no axis cuts layers of a family that must stay whole.

    Raises: ConfigError naming the axis.
    """
    uncut = traits_of(getattr(shape, "family", "")).uncut
    for key, what in uncut.items():
        if (value := getattr(section, key)) != 1:
            others = [axis for axis in ("cp", "tp") if axis not in uncut]
            usable = ["sharding (dp_shard is what is left)", "dp_replicate", *others]
            usable += ["ep"] if shape.num_experts else []
            raise ConfigError(
                f"[model] {key} = {value} cannot cut {what} ({shape.family}); leave {key} out and use "
                f"{', '.join(usable)}"
            )


def _expert_degree(section: ModelSection, island: int, shape: Any) -> int:
    ep, folded = section.ep, island * section.tp
    if not shape.num_experts:
        if ep not in ("auto", 1):
            raise ConfigError(f"[model] ep = {ep}, but the policy has no experts; leave ep out")
        return 1
    experts = shape.num_experts
    valid = [n for n in divisors(folded if section.sequence_parallel else island) if experts % n == 0]
    if ep == "auto":
        return valid[-1]
    if ep not in valid:
        ranks = f"dp_shard x cp x tp = {folded}" if section.sequence_parallel else f"dp_shard x cp = {island}"
        more = ""
        if not section.sequence_parallel and not folded % ep and not experts % ep:
            more = "; or set sequence_parallel = true, with which ranks of tp have different experts too"
        raise ConfigError(
            f"[model] ep = {ep} must divide both {ranks} ranks and the {experts} experts; "
            f'valid: {listed(valid)}, or "auto"{more}'
        )
    return int(ep)


def divides(key: str, value: int, number: int, what: str) -> None:
    """Raises: ConfigError if a key of [model] does not divide a number, with those that do."""
    if number % value:
        raise ConfigError(f"[model] {key} = {value} does not divide {what}; valid: {listed(divisors(number))}")


def divisors(number: int) -> list[int]:
    """The numbers that divide it, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(values: Sequence[int]) -> str:
    """Numbers in a sentence."""
    return ", ".join(map(str, values))
