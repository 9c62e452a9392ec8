"""A plan as tables for a terminal, and as one JSON object with the same figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stretto.config.sections.run import BudgetSection
from stretto_plan.memory import Memory, Phase
from stretto_plan.setup import Setup

if TYPE_CHECKING:
    from stretto_plan.compare import Line
    from stretto_plan.proposals import Proposal, Setting
    from stretto_plan.simulation.run import SftTimes, Times

WIDTH = 116
_UNITS = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def size(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    return f"{num_bytes:.0f} B"


def seconds(value: float) -> str:
    """Seconds as people read them."""
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.2g} ms" if value < 0.1 else f"{1e3 * value:.0f} ms"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns: the first is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) if i < len(row) else 0 for row in rows) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def listed(heading: str, lines: Sequence[str]) -> str:
    """A heading and lines, each wrapped under its dash; nothing for none."""
    import textwrap

    wrapped = [textwrap.fill(line, WIDTH, initial_indent="  - ", subsequent_indent="    ") for line in lines]
    return "\n".join([heading, *wrapped]) if lines else ""


# -- what runs where --


def setup_text(setup: Setup) -> str:
    """What is planned: the network, the trainer's mesh, the engines."""
    size_, degrees, hardware = setup.size, setup.degrees, setup.hardware
    experts = f", {size_.active / 1e9:.3g} B of them per token" if size_.experts else ""
    mesh = " x ".join(
        f"{name} {value}"
        for name, value in (
            ("dp_replicate", degrees.dp_replicate),
            ("dp_shard", degrees.dp_shard),
            ("cp", degrees.cp),
            ("tp", degrees.tp),
        )
        if value > 1
    )
    mesh += " with split tokens" * degrees.splits_tokens + f", ep {degrees.ep}" * (degrees.ep > 1)
    rows = [
        ["network", f"{setup.shape.family}, {_count(size_.total)} weights{experts}"],
        ["hardware", f"{hardware.name}, {size(hardware.memory_bytes)} each" + _devices(setup)],
        [
            "trainer",
            f"{setup.num_ranks} rank{'s' * (setup.num_ranks > 1)} {mesh}, {setup.train_dtype}".replace(" ,", ","),
        ],
    ]
    for engine in setup.engines:
        devices = f" of {engine.devices} GPUs" if not setup.is_cpu else ""
        spread = f", experts over {engine.experts_over}" if engine.experts_over > engine.tp else ""
        rows.append([engine.role, f"{engine.count}{devices}, {engine.kind}, tp {engine.tp}{spread}, {engine.dtype}"])
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)


def _devices(setup: Setup) -> str:
    return "" if setup.is_cpu else f"; {setup.num_devices} GPUs in all"


def _count(number: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


# -- time --


def time_text(times: Times, setup: Setup, num_steps: int | None) -> str:
    """What a step takes, who waits for whom, and how old rollouts are."""
    rows = [
        ["trainer: passes and update", seconds(times.train_s)],
        ["trainer: hands the version over", seconds(times.publish_s)],
        ["trainer: waits for a batch", f"{seconds(times.trainer_wait_s)} ({times.trainer_idle:.0%})"],
        ["engines: busy", seconds(times.write_s)],
        ["engines: load the version", seconds(times.load_s)],
        ["engines: without work", f"{times.engine_idle:.0%}"],
        ["rollout, mean and 95 %", f"{seconds(times.rollout_s_mean)}, {seconds(times.rollout_s_p95)}"],
        ["staleness, mean and 95 %", f"{times.staleness_mean:.2f}, {times.staleness_p95:.0f} versions"],
        ["sampled tokens", f"{times.sampled_tokens:,.0f} per step, {times.tokens_per_s:,.0f} per second"],
        ["trained tokens", f"{times.trained_tokens:,.0f} per step"],
    ]
    if times.read_s:
        rows.insert(4, ["engines that read prompts: busy", seconds(times.read_s)])
    rows += _total(times.step_s, setup, num_steps)
    ends = budget_ends(setup.rl.budget, times)
    rows += [[f"budget.{key}", f"ends the run at about step {step:,}"] for key, step in ends.items()]
    found = f"time of a step: {seconds(times.step_s)} ({_simulated(times)})\n{columns(rows)}"
    if times.late_share > 0.005:
        found += (
            f"\n  {times.late_share:.0%} of the rollouts take longer than rollout_timeout_s and would fail: raise it "
            f"above {seconds(times.rollout_s_p95)}"
        )
    return found


def budget_ends(budget: BudgetSection | None, times: Times) -> dict[str, int]:
    """The step at which each bound of a budget ends the run."""
    if budget is None:
        return {}
    prices = budget.prices
    tokens = (times.sampled_tokens * prices.sampled_tokens + times.trained_tokens * prices.trained_tokens) / 1e6
    per_step = {
        "max_hours": times.step_s / 3600,
        "max_tokens": times.trained_tokens,
        "max_cost": times.step_s / 3600 * prices.hour + tokens,
    }
    return {key: math.ceil(bound / per_step[key]) for key, bound in budget.bounds.items() if per_step[key] > 0}


def steering_text(settings: Mapping[Setting, Times]) -> str:
    """Where steering settles, and how fast the settings on the way are."""
    rows = [["max_async_level", "updates", "step", "tokens per second", "trainer waits"]]
    for each, times in settings.items():
        every = "every step" if each.update_interval == 1 else f"every {each.update_interval} steps"
        speed, idle = f"{times.tokens_per_s:,.0f}", f"{times.trainer_idle:.0%}"
        rows.append([str(each.level), every, seconds(times.step_s), speed, idle])
    last = [*settings][-1]
    updates = "" if last.update_interval == 1 else f" and updates every {last.update_interval} steps"
    return f"steering settles at level {last.level}{updates}, if all tokens count\n{columns(rows)}"


def sft_text(times: SftTimes, setup: Setup, num_steps: int | None) -> str:
    """What a step of `sft` takes."""
    rows = [
        ["passes of the slowest rank", seconds(times.passes_s)],
        ["update", seconds(times.update_s)],
        ["tokens", f"{times.tokens:,.0f} per step, {times.tokens_per_s:,.0f} per second"],
        ["rows", f"{times.rows:.1f} per step, {times.fill:.0%} full"],
    ]
    if setup.degrees.dp > 1:
        rows.insert(2, ["a rank waits for the slowest", f"{times.rank_idle:.0%} of the passes"])
    rows += _total(times.step_s, setup, num_steps)
    return f"time of a step: {seconds(times.step_s)}\n{columns(rows)}"


def _simulated(times: Times) -> str:
    """How well the mean is known."""
    spread = f", +- {times.spread:.1%} by chance" if times.spread >= 0.001 else ""
    return f"mean of {times.num_steps} simulated steps{spread}"


def _total(step_s: float, setup: Setup, num_steps: int | None) -> list[list[str]]:
    if num_steps is None:
        return []
    whole_s = num_steps * step_s
    total = seconds(whole_s) + ("" if setup.is_cpu else f", {whole_s / 3600 * setup.num_devices:,.3g} GPU hours")
    return [[f"{num_steps} steps", total]]


def proposals_text(proposals: Sequence[Proposal]) -> str:
    """What to change, the best first."""
    if not proposals:
        return "proposals: none of those that were tried is 2 % faster"
    rows = [["", "step", "gain", "staleness 95 %", "trainer's peak"]]
    rows += [[p.text, seconds(p.step_s), f"{p.gain:.0%}", _staleness(p), size(p.peak_bytes)] for p in proposals]
    if all(p.staleness_p95 is None for p in proposals):  # of sft
        rows = [[*row[:3], row[4]] for row in rows]
    return "proposals, one at a time, as words to add to the command\n" + columns(rows)


def _staleness(proposal: Proposal) -> str:
    return "" if proposal.staleness_p95 is None else f"{proposal.staleness_p95:.0f}"


def comparison_text(lines: Sequence[Line]) -> str:
    """Predicted and measured figures of a run, side by side."""
    rows = [["", "predicted", "measured", "error"]]
    for line in lines:
        error = "" if line.error is None else f"{line.error:+.0%}"
        rows.append([line.name, f"{line.predicted:.4g}", f"{line.measured:.4g}", error])
    return "prediction beside measurement\n" + columns(rows)


# -- memory --


def memory_text(memories: Sequence[Memory]) -> str:
    """One table per kind of process: phases as columns, the peak marked."""
    return "\n\n".join(_one(memory) for memory in memories)


def _one(memory: Memory) -> str:
    peak = memory.peak
    names = list(dict.fromkeys(name for phase in memory.phases for name in phase.parts))
    head = ["", *(f"{phase.name}{' *' if phase is peak else ''}" for phase in memory.phases)]
    rows = [head]
    rows += [
        [name, *(size(phase.parts[name]) if name in phase.parts else "" for phase in memory.phases)] for name in names
    ]
    rows.append(["all", *(size(phase.total) for phase in memory.phases)])
    verdict = f"peak {size(peak.total)} of {size(memory.capacity_bytes)} in: {peak.name}"
    if not memory.fits:
        verdict += f". DOES NOT FIT: {size(peak.total - memory.capacity_bytes)} too much"
    notes = "".join(f"\n  {note}" for note in memory.notes)
    return f"memory of each {memory.who}: {verdict}\n{columns(rows)}{notes}"


def memory_json(memory: Memory) -> dict[str, Any]:
    """The same as data; bytes."""

    def phase_json(phase: Phase) -> dict[str, Any]:
        return {"phase": phase.name, "total_bytes": round(phase.total), "parts_bytes": {
            name: round(value) for name, value in phase.parts.items()
        }}  # fmt: skip

    return {
        "process": memory.who,
        "capacity_bytes": round(memory.capacity_bytes),
        "peak_bytes": round(memory.peak.total),
        "peak_phase": memory.peak.name,
        "fits": memory.fits,
        "phases": [phase_json(phase) for phase in memory.phases],
        "notes": list(memory.notes),
    }


def setup_json(setup: Setup) -> dict[str, Any]:
    """What is planned, as data."""
    degrees = setup.degrees
    return {
        "family": setup.shape.family,
        "weights": setup.size.total,
        "active_weights": round(setup.size.active),
        "hardware": setup.hardware.name,
        "hardware_sources": setup.hardware.sources,
        "gpus": setup.num_devices,
        "trainer": {
            "ranks": setup.num_ranks, "dp_replicate": degrees.dp_replicate, "dp_shard": degrees.dp_shard,
            "cp": degrees.cp, "tp": degrees.tp, "ep": degrees.ep, "splits_tokens": degrees.splits_tokens,
            "dtype": setup.train_dtype,
        },
        "engines": [
            {"role": e.role, "count": e.count, "gpus": e.devices, "tp": e.tp, "experts_over": e.experts_over,
             "kind": e.kind, "dtype": e.dtype, "cache_dtype": e.cache_dtype}
            for e in setup.engines
        ],
    }  # fmt: skip
