"""Rules between the keys that trade memory for time: recomputation, offloading, compiling, 8-bit products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config.shared import Problem

if TYPE_CHECKING:
    from stretto.config.roots import SFTConfig
    from stretto.config.trainer import TrainerSection


def check_memory(section: TrainerSection | SFTConfig, prefix: str) -> list[Problem]:
    """Settings that would do nothing beside others, or do not go together."""
    model, lead = section.model, f"{prefix}." if prefix else ""
    path = f"{lead}model"
    problems = []
    if (ac := model.ac) is not None:
        # By value: a section that was written out and read back has all its fields set.
        if ac.mode == "full" and ac.targets != type(ac).model_fields["targets"].default:
            paths = (f"{path}.ac.targets", f"{path}.ac.mode")
            rule = f'{paths[1]} = "full" computes whole blocks again; set it to "selective", or leave targets out'
            problems.append(Problem(paths, f"{paths[0]} has no effect: {rule}"))
        if ac.mode == "selective" and not ac.targets:
            own = f"{path}.ac.targets"
            problems.append(
                Problem((own,), f"{own} is empty: nothing would be computed again; name some parts")
            )
        if ac.mode == "selective" and model.impl == "hf":
            paths = (f"{path}.ac.mode", f"{path}.impl")
            rule = f'knows the parts of our own modules only, not {paths[1]} = "hf"; use mode = "full"'
            problems.append(Problem(paths, f'{paths[0]} = "selective" {rule}'))
    if model.fp8:
        own = f"{path}.fp8"
        if model.impl == "hf":
            other = f"{path}.impl"
            problems.append(
                Problem((own, other), f'{own} replaces layers of our own modules, not {other} = "hf"')
            )
        if not model.moe_use_grouped_mm:
            other = f"{path}.moe_use_grouped_mm"
            rule = "computes experts in grouped products"
            problems.append(Problem((own, other), f"{own} {rule}; leave {other} = false out"))
        if model.compile is not None and model.compile.fullgraph:
            other = f"{path}.compile.fullgraph"
            rule = "multiplies outside of compiled graphs"
            problems.append(Problem((own, other), f"{own} {rule}; leave {other} = true out"))
    if model.fsdp_cpu_offload:
        own = f"{path}.fsdp_cpu_offload"
        if model.optim_cpu_offload:
            other = f"{path}.optim_cpu_offload"
            problems.append(
                Problem((own, other), f"{own} = true keeps optimizer state on the CPU already; drop {other}")
            )
        if section.optim.type == "muon":
            other = f"{lead}optim.type"
            rule = "updates on the CPU, where orthogonalising matrices takes too long; use optim_cpu_offload"
            problems.append(Problem((own, other), f'{own} = true with {other} = "muon" {rule}'))
    return problems
