"""The mesh of the trainer for Megatron-LM's TP, CP and EP, where a family's layers cannot be cut as TP would.

TP whose ranks cannot divide the heads of a model becomes CP, whose ranks share a row's tokens: each has as many tokens
as with --sequence-parallel. What CP cannot take becomes more replicas, whose weights are sharded; results are the same.
TP of the experts becomes EP: as many ranks share an expert's weights or have different experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stretto.base.errors import ConfigError
from stretto.check.degrees import divisors, find_degrees, read_shape
from stretto.check.models import check_family, find_model
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import MegatronSection
from stretto_megatron.backend import Megatron, find_python
from stretto_vime.flags.flag import Values

BACKEND = "--train-backend"
_OWN = (
    "--colocate", "--lora-rank", "--use-rollout-routing-replay", "--optimizer-cpu-offload", "--fp8-format",
    "--custom-model-provider-path", "--moe-router-enable-expert-bias", "--loss-type",
)  # fmt: skip
"""Flags that stretto's own trainer honours alone: of the last fine-tuning, of that before a bias that moves."""
EXPERTS = ("--expert-model-parallel-size", "--expert-tensor-parallel-size")


def has_megatron(flags: Values) -> bool:
    """Whether Megatron-Core trains: it is asked for by name, and does all that is asked for."""
    return flags.has(BACKEND) and why_not_megatron(flags) is None


def has_plugin(flags: Values) -> bool:
    """Whether the model's builder is one of vime's plug-ins, whose families are here themselves."""
    return str(flags.custom_model_provider_path).startswith("vime_plugins.")


def why_not_megatron(flags: Values) -> str | None:
    """Why stretto's own trainer trains, though --train-backend is given; None if Megatron-Core can."""
    if find_python() is None:
        return "there is no Megatron-Core here (`make megatron` installs it)"
    is_fine = {
        "--lora-rank": not flags.lora_rank,
        "--loss-type": flags.loss_type != "sft_loss",
        "--moe-router-enable-expert-bias": not flags.moe_router_bias_update_rate,
        "--custom-model-provider-path": has_plugin(flags),
    }
    if own := [flags.given[name] for name in _OWN if flags.has(name) and not is_fine.get(name, False)]:
        return f"{own[0]} is of its own"
    for key, (value, source) in flags.critic.items():
        if key.startswith("recompute_") and value != getattr(flags, key):
            return f"{source}: Megatron's arguments are those of actor and critic"
        if key == "optimizer" and value != "adam":
            return f"{source} is of its own"
    if flags.optimizer != "adam":
        return f"{flags.typed('--optimizer')} is of its own"
    try:
        if (here := find_model(flags.hf_checkpoint)) is not None:
            model = ModelSection(name=flags.hf_checkpoint, cp=flags.context_parallel_size)
            section = MegatronSection(etp=flags.expert_tensor_parallel_size or 1)
            Megatron(section).check(here.family, here.found, model)
    except ConfigError as error:
        return (
            str(error)
            .replace('trainer.backend = "megatron"', "Megatron-Core")
            .removesuffix("; leave trainer.backend out")
        )
    except (OSError, ValueError, KeyError):
        return None
    return None


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes of the trainer's mesh."""

    tp: int
    cp: int
    ep: int


def axes(flags: Values) -> Axes:
    """The axes nearest to those that were typed that the model allows; those that were typed if none are."""
    tp, cp, ep = flags.tensor_model_parallel_size, flags.context_parallel_size, flags.expert_model_parallel_size
    if has_megatron(flags):  # Megatron cuts what it is told to
        return Axes(tp, cp, ep)
    ep *= flags.expert_tensor_parallel_size or 1
    ranks = flags.actor_num_nodes * flags.actor_num_gpus_per_node
    typed = Axes(tp, cp, math.gcd(ep, ranks // (1 if flags.sequence_parallel else tp)) if ranks else ep)
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
    for each in _candidates(typed, ep, max(ranks, 1), flags, shape.num_experts):
        style: Literal["ring", "auto"] = "ring" if each.cp > 1 else "auto"
        splits = splits_tokens(flags, each)
        section = ModelSection(tp=each.tp, cp=each.cp, cp_style=style, sequence_parallel=splits, ep=each.ep)
        try:
            find_degrees(section, max(ranks, 1), shape)
        except ConfigError:
            continue
        return each
    return typed


def splits_tokens(flags: Values, mesh: Axes) -> bool:
    """Ranks of TP split tokens."""
    return bool(flags.sequence_parallel) and mesh.tp > 1


def _candidates(typed: Axes, ep: int, ranks: int, flags: Values, num_experts: int) -> Iterator[Axes]:
    """Meshes of these ranks, the nearest to what was typed first."""
    for fewer in reversed(divisors(typed.tp)):
        for more in reversed(divisors(typed.cp * typed.tp // fewer)):
            if more % typed.cp == 0 or typed.cp % more == 0:
                most = math.gcd(ep, ranks // (1 if splits_tokens(flags, Axes(fewer, more, ep)) else fewer))
                yield from (Axes(fewer, more, each) for each in reversed(divisors(most) if num_experts else [most]))


def notes(flags: Values) -> Iterator[str]:
    """How the mesh is another than the one that was typed."""
    if has_megatron(flags):
        return
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
    if found.ep != ep * (flags.expert_tensor_parallel_size or 1):
        why = "" if flags.sequence_parallel or tp == 1 else " (ranks of TP are among them with --sequence-parallel)"
        names = flags.typed(*(name for name in EXPERTS if name in flags.given))
        yield (f"{names}: model.ep is {found.ep}{why}; weights are sharded over all ranks, and results are the same")
    elif found.ep != ep:
        yield (
            f"{flags.typed('--expert-tensor-parallel-size')}: an expert is whole on its rank, and {found.ep} ranks "
            "(EP x ETP) have different experts; results are the same"
        )
    if flags.sequence_parallel and tp == 1:
        yield f"{flags.typed('--sequence-parallel')} does nothing with {flags.typed('--tensor-model-parallel-size')}"
