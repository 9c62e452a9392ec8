"""The mesh of the trainer for Megatron-LM's TP, CP and EP, where a family's layers cannot be cut as TP would.

TP whose ranks cannot divide the heads of a model becomes CP, whose ranks share a row's tokens: each has as many tokens
as with --sequence-parallel. What CP cannot take becomes more replicas, whose weights are sharded; results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.base.errors import ConfigError
from stretto.check.degrees import find_degrees, read_shape
from stretto.check.models import check_family, find_model
from stretto.config.sections.model import ModelSection
from stretto_vime.flags.flag import Values


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes of the trainer's mesh."""

    tp: int
    cp: int
    ep: int


def axes(flags: Values) -> Axes:
    """The axes nearest to those that were typed that the model allows; those that were typed if none are."""
    tp, cp, ep = flags.tensor_model_parallel_size, flags.context_parallel_size, flags.expert_model_parallel_size
    ranks = flags.actor_num_nodes * flags.actor_num_gpus_per_node
    typed = Axes(tp, cp, math.gcd(ep, ranks // tp) if ranks else ep)
    if tp * cp == 1 and ep == 1:
        return typed
    try:
        here = find_model(flags.hf_checkpoint)
        if here is None:
            return typed
        check_family(here, "--hf-checkpoint")
        shape = read_shape(here)
    except (ConfigError, OSError, ValueError, KeyError):
        return typed  # said where the model is checked
    if shape is None:  # a model of transformers'
        return Axes(1, 1, 1)
    for each in _candidates(tp, cp, ep, max(ranks, 1)):
        section = ModelSection(tp=each.tp, cp=each.cp, cp_style="ring" if each.cp > 1 else "auto", ep=each.ep)
        try:
            find_degrees(section, max(ranks, 1), shape)
        except ConfigError:
            continue
        return each
    return typed


def _candidates(tp: int, cp: int, ep: int, ranks: int) -> Iterator[Axes]:
    """Meshes of these ranks, the nearest to what was typed first."""
    for fewer in _divisors(tp):
        for more in _divisors(cp * tp // fewer):
            if more % cp == 0 or cp % more == 0:
                yield Axes(fewer, more, math.gcd(ep, ranks // fewer))


def _divisors(number: int) -> list[int]:
    return [n for n in range(number, 0, -1) if number % n == 0]


def notes(flags: Values) -> Iterator[str]:
    """How the mesh is another than the one that was typed."""
    found = axes(flags)
    tp, cp, ep = flags.tensor_model_parallel_size, flags.context_parallel_size, flags.expert_model_parallel_size
    if (found.tp, found.cp) != (tp, cp):
        names = flags.typed("--tensor-model-parallel-size", "--context-parallel-size")
        rest = tp * cp // (found.tp * found.cp)
        more = f", and {rest} times as many replicas" if rest > 1 else ""
        yield (
            f"{names}: the layers of this model are cut otherwise, tp = {found.tp} and cp = {found.cp}{more}; results "
            "are the same"
        )
    if flags.moe_enable_deepep and found.ep == 1:
        yield "--moe-enable-deepep does nothing: every rank has its part of all experts' weights, and no token travels"
    if found.ep != ep:
        yield (
            f"{flags.typed('--expert-model-parallel-size')}: ranks that share tokens are not among those that share "
            f"experts, which are {found.ep}; weights are sharded over all, and results are the same"
        )
