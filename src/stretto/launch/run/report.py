"""The report of a run: a header before it; after it the result, the curve and the next commands.

In: the plan, RUN/summary.json and RUN/metrics/orchestrator.jsonl (both written by the orchestrator). Out:
text, and the curve as RUN/curve.png. matplotlib is imported only when a curve is drawn.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import EngineError, boundary
from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.base.rundir import COMMAND_VAR, WITHOUT_NEXT_VAR
from stretto.base.status import duration, quantity
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.run import BudgetSection
from stretto.launch.plan.plan import LaunchPlan, eval_config
from stretto.launch.plan.processes import ProcessSpec
from stretto.launch.plan.table import resume_text
from stretto.ledger.audit import report_of
from stretto.ledger.schema import is_damaged
from stretto.monitors.file import is_number, moving_mean, read_metrics
from stretto.monitors.purse import Purse, amounts_of_summary, larger_bounds, used_by_metrics

logger = logging.getLogger(__name__)

VIME_FLAG = "--hf-checkpoint"  # in every command line of vime, and in no other
_CURVE_CELLS = (64, 10)  # columns, lines
_RAW, _SMOOTH, _SAMPLED, _GREEDY, _INK = "#a9c7e8", "#1f5fa8", "#d1495b", "#2a9d6f", "#333333"


def header(plan: LaunchPlan, changed: Sequence[str] = ()) -> str:
    """The lines before the first step: run, batch, processes, logs, changed keys of a resumed run, and notes."""
    start = "" if plan.config.resume is None else f", {resume_text(plan.config.resume)}"
    placement = ", ".join(f"{spec.name} on {_placed(spec)}" for spec in plan.processes)
    lines = [
        f"run {plan.run}{start}",
        f"  batch    {plan.batch}",
        f"  running  {placement}",
        f"  logs     {plan.run.logs}",
    ]
    lines += [f"  changed  {line}" for line in changed]
    return "\n".join([*lines, *(f"  note     {note}" for note in plan.notes)])


def _placed(spec: ProcessSpec) -> str:
    if spec.devices:
        return f"GPU {','.join(spec.devices)}"
    return f"{spec.threads} CPU thread{'s' * (spec.threads != 1)}"


def ending(plan: LaunchPlan, *, is_complete: bool, stopped_early: bool) -> str:
    """The lines after a run: summary, curve and next commands; after a failure, how to continue."""
    names_commands = WITHOUT_NEXT_VAR not in os.environ
    if not is_complete:
        return how_to_continue(plan.run, plan.config) if names_commands else _locations(plan, stopped_early=False)
    parts: list[str] = []
    if summary := read_json(plan.run.summary):
        rows = summary_rows(summary)
        if plan.run.ledger.exists():
            rows["ledger"] = report_of(plan.run)
        parts.append("\n".join(f"{name:<26}{value}" for name, value in rows.items()))
    if len((curve := Curve.read(plan.run)).steps) >= 2:
        parts.append(curve.as_text())
        try:
            with boundary(EngineError, f"drawing {plan.run.curve}"):
                curve.save(plan.run.curve, plan.config.run_name)
        except EngineError as error:  # the run succeeded: a missing picture must not fail it
            logger.warning("%s", error)
            parts.append(f"no picture: {error}")
    parts.append(_locations(plan, stopped_early))
    if summary and not summary.get("steps") and (reason := summary.get("stopped_because")):
        parts.append(f"nothing was trained: {reason}, before the first step. There is no checkpoint to continue from")
    if names_commands and (commands := next_commands(plan)):
        parts.append("\n".join(["next:", *(f"  {command}" for command in commands)]))
    return "\n" + "\n\n".join(parts)


def _locations(plan: LaunchPlan, stopped_early: bool) -> str:
    lines = [f"run directory  {plan.run}"]
    if plan.run.curve.exists():
        lines.append(f"curve          {plan.run.curve}")
    if stopped_early:
        step = plan.run.latest_complete_checkpoint()
        lines.append(f"stopped early  {f'saved as checkpoint {step}' if step else 'no checkpoint was asked for'}")
    return "\n".join(lines)


def summary_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """The result in words, by what it is; missing values are omitted."""

    def change(before: str, after: str) -> str | None:
        values = [summary.get(before), summary.get(after)]
        return None if None in values else f"{values[0]:.3f} -> {values[1]:.3f}"

    used = summary.get("used") or {}
    cost = "" if used.get("cost") is None else f", cost {used['cost']:.4g}"

    def shown(key: str, form: Callable[[Any], str]) -> str | None:
        return None if summary.get(key) is None else form(summary[key])

    rows = {
        "held-out reward, sampled": change("reward_before", "reward_after"),
        "held-out reward, greedy": change("greedy_before", "greedy_after"),
        "steps": shown("steps", str),
        "time": shown("wall_s", duration),
        "used, all starts": f"{used['hours']:.4g} h, {quantity(used['tokens'])} trained tokens{cost}" if used else None,
        "tokens per second": shown("tokens_per_s", quantity),
        "largest mismatch KL": shown("mismatch_kl_max", lambda value: f"{value:.1e}"),
        "resumed": shown("resumed", lambda value: "yes" if value else "no"),
    }
    return {name: value for name, value in rows.items() if value is not None}


# -- what to type next --


def next_commands(plan: LaunchPlan) -> list[str]:
    """Commands to copy, for the directory in which the run was started."""
    commands = []
    if plan.run.latest_weights.exists():
        if _has_held_out(plan):
            commands.append(f"{program('eval')} @ {shlex.quote(str(plan.run.config('eval')))}")
        commands.append(f"{program('inference')} --model {shlex.quote(str(plan.run.latest_weights))}")
    step, larger = plan.run.latest_complete_checkpoint(), _larger_budget(plan.run, plan.config.budget)
    last = f" --max-steps {plan.config.max_steps}" if plan.config.max_steps else ""
    budget, options = " ".join(larger), [words.partition(" ")[0] for words in larger]
    if step and larger:
        commands.append(f"{resume_command(plan.run, without=options)}{last} {budget}")
    elif step:
        target = plan.config.max_steps or step
        more = step + max(1, math.ceil(target / 2)) if step >= target else target
        commands.append(f"{resume_command(plan.run)} --max-steps {more}")
    elif larger:
        commands.append(f"{restart_command(plan.run, without=options)} --clean{last} {budget}")
    return commands


def _has_held_out(plan: LaunchPlan) -> bool:
    """Whether every environment of an eval may have held-out tasks; files of rows need a path of their own for them."""
    envs = eval_config(plan.config, plan.run).eval.env
    return all(env.id != "dataset" or env.args.get("eval_path") for env in envs)


def _larger_budget(run: RunDir, budget: BudgetSection | None, verb: str = "rl") -> list[str]:
    """The words that raise the bounds that the run has reached, with which alone it can go on; none if it has not."""
    summary = read_json(run.summary)
    if budget is None:
        return []
    # A run that failed has written no summary.
    by_metrics = used_by_metrics(run.metrics("orchestrator" if verb == "rl" else verb))
    amounts = Purse(budget, by_metrics).amounts(by_metrics)
    amounts = {key: max(amounts[key], amount) for key, amount in amounts_of_summary(summary).items()}
    reason = str(summary.get("stopped_because") or "")
    ended = [key for key in budget.bounds if reason.startswith(f"budget.{key} ")]
    return larger_bounds(budget.bounds, amounts, also=ended)


def how_to_continue(run: RunDir, cfg: RLConfig | SFTConfig, verb: str = "rl") -> str:
    """What to type after a failure: on from the newest checkpoint, or anew."""
    step = run.latest_complete_checkpoint()
    keep = f" --max-steps {cfg.max_steps}" if cfg.max_steps else ""
    if not step:
        again = f"{restart_command(run, keeps_resume=True, verb=verb)} --clean{keep}"
        return f"no checkpoint was complete yet; start over:\n  {again}"
    larger = _larger_budget(run, cfg.budget, verb)
    command = resume_command(run, without=[words.partition(" ")[0] for words in larger], verb=verb)
    keep += "".join(f" {words}" for words in larger)
    text = f"continue from step {step}:\n  {command}{keep}"
    if is_damaged(run.ledger):
        aside = f"{shlex.quote(str(run.path))}/damaged"
        files = f"{shlex.quote(str(run.ledger))}*"
        text = f"the ledger is damaged; move it aside, and continue from step {step} without it:\n"
        return text + f"  mkdir -p {aside} && mv {files} {aside}/\n  {command}{keep}"
    resume, before = cfg.resume, [each for each in run.complete_checkpoints() if each < step]
    if resume is not None and resume.dir is None and resume.step == step and before:
        text += "\nif that checkpoint is the reason, from the one before it:"
        text += f"\n  {command}.step {before[-1]}{keep}"
    return text


def resume_command(run: RunDir, *, without: Sequence[str] = (), verb: str = "rl") -> str:
    return f"{restart_command(run, without=without, verb=verb)} --resume"


def restart_command(
    run: RunDir,
    argv: Sequence[str] | None = None,
    *,
    keeps_resume: bool = False,
    without: Sequence[str] = (),
    verb: str = "rl",
) -> str:
    """The command of this process without --clean, --max-steps and, unless keeps_resume, the --resume options.

    without: further options that are left out.

    For a run that was started by `vime` it is the verb with the run's config, whose options these are.
    """
    typed = shlex.split(os.environ.get(COMMAND_VAR, "")) or sys.argv[1:]
    words = list(typed if argv is None else argv)
    if any(word.partition("=")[0] == VIME_FLAG for word in words):
        words = ["@", str(run.config("run"))]
    if words[:1] == [verb]:
        words = words[1:]
    kept = []
    while words:
        word = words.pop(0)
        name = word.partition("=")[0].replace("_", "-")
        is_start = name.startswith(("--resume", "--no-resume", "--ckpt.resume-step"))
        if name in ("--clean", "--no-clean", "--max-steps", *without) or (is_start and not keeps_resume):
            if "=" not in word and words and not words[0].startswith(("-", "@")):
                words.pop(0)
            continue
        kept.append(word)
    return shlex.join([*shlex.split(program(verb)), *kept]).replace(" '@' ", " @ ")


def program(verb: str) -> str:
    """The command for a verb as the user can type it: its name if the shell finds it, else its path."""
    # There is no command `eval`: it is a word of the shell.
    name, rest = ("stretto", " eval") if verb == "eval" else (verb, "")
    beside_python = Path(sys.executable).with_name(name)
    in_shell = shutil.which(name)
    if in_shell and Path(in_shell).resolve() == beside_python.resolve():
        return name + rest
    if beside_python.exists():
        with suppress(FileNotFoundError):  # the directory in which the command was typed may be gone
            if beside_python.is_relative_to(Path.cwd()):
                beside_python = Path(os.path.relpath(beside_python))
        return shlex.quote(str(beside_python)) + rest
    return f"{shlex.quote(sys.executable)} -m stretto {verb}"


# -- the learning curve --


@dataclass(frozen=True)
class Curve:
    """Mean training reward per step, and held-out rewards where there was an eval."""

    steps: list[int]
    rewards: list[float]
    sampled: list[tuple[int, float]]
    greedy: list[tuple[int, float]]

    @classmethod
    def read(cls, run: RunDir) -> Curve:
        """Read the curve of a run from its metrics file; repeated steps of a resumed run count once."""
        rows = read_metrics(run.metrics("orchestrator"))
        trained = [(row["step"], row["reward/mean"]) for row in rows if is_number(row.get("reward/mean"))]
        return cls(
            steps=[step for step, _ in trained],
            rewards=[reward for _, reward in trained],
            sampled=_eval_points(rows, "sampled"),
            greedy=_eval_points(rows, "greedy"),
        )

    def smoothed(self) -> list[float]:
        """The moving mean of the rewards."""
        return moving_mean(self.rewards)

    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest reward with a margin; within 0 and 1 if all rewards are."""
        values = [*self.rewards, *(value for _, value in (*self.sampled, *self.greedy))]
        low, high = min(values), max(values)
        margin = max(0.05 * (high - low), 0.01)
        if low >= 0 and high <= 1:
            return max(low - margin, 0.0), min(high + margin, 1.0)
        return low - margin, high + margin

    def as_text(self, cells: tuple[int, int] = _CURVE_CELLS) -> str:
        """The smoothed reward as a braille line, held-out sampled rewards as circles."""
        columns, lines = cells
        low, high = self.bounds()
        first, last = self._span()

        def place(step: float, value: float) -> tuple[int, int]:
            x = (step - first) / (last - first) * (columns * 2 - 1)
            y = (high - value) / (high - low) * (lines * 4 - 1)
            return round(x), round(min(max(y, 0), lines * 4 - 1))

        dots = _line_dots([place(step, value) for step, value in zip(self.steps, self.smoothed())])
        grid = [[_braille(dots, column, line) for column in range(columns)] for line in range(lines)]
        for step, value in self.sampled:
            x, y = place(step, value)
            grid[y // 4][x // 2] = "o"
        labels = {0: f"{high:.2f}", lines // 2: f"{(low + high) / 2:.2f}", lines - 1: f"{low:.2f}"}
        width = max(map(len, labels.values()))
        rows = [f"{labels.get(i, ''):>{width}} │{''.join(cells_)}".rstrip() for i, cells_ in enumerate(grid)]
        axis = f"{'':>{width}} └{'─' * columns}"
        steps = f"{'':>{width}}  {first}{f'step {last}':>{columns - len(str(first))}}"
        legend = "reward in training (smoothed)" + (", held-out o" if self.sampled else "")
        return "\n".join([legend, *rows, axis, steps])

    def save(self, path: Path, title: str) -> None:
        """Draw the curve as a picture. Raises: EngineError without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise EngineError("curves are drawn by matplotlib; pip install 'stretto[plot]'") from None

        figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.steps, self.rewards, color=_RAW, linewidth=1, label="training batch")
        axes.plot(self.steps, self.smoothed(), color=_SMOOTH, linewidth=2.2, label="training batch, smoothed")
        _draw_points(axes, self.greedy, _GREEDY, "D", "held-out, greedy", label_above=True)
        _draw_points(axes, self.sampled, _SAMPLED, "o", "held-out, sampled", label_above=False)
        low, high = self.bounds()
        first, last = self._span()
        axes.set_ylim(low - 0.02 * (high - low), high + 0.06 * (high - low))
        axes.set_xlim(first - 0.02 * (last - first), last + 0.02 * (last - first))
        axes.set_xlabel("step", color=_INK)
        axes.set_ylabel("mean reward", color=_INK)
        axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#bbbbbb")
        axes.tick_params(colors=_INK, length=0)
        figure.legend(frameon=False, loc="outside lower center", ncols=4, fontsize=9, labelcolor=_INK)
        figure.savefig(path)

    def _span(self) -> tuple[int, int]:
        steps = [*self.steps, *(step for step, _ in (*self.sampled, *self.greedy))]
        return min(steps), max(max(steps), min(steps) + 1)


def _eval_points(rows: Sequence[Mapping[str, Any]], mode: str) -> list[tuple[int, float]]:
    """(step, mean over environments) of every eval; keys are eval/<environment>/<mode>/mean."""
    name = re.compile(rf"eval/.+/{mode}/mean")
    points = []
    for row in rows:
        values = [value for key, value in row.items() if name.fullmatch(key) and is_number(value)]
        if values:
            points.append((row["step"], sum(values) / len(values)))
    return points


def _draw_points(
    axes: Any, points: list[tuple[int, float]], color: str, marker: str, name: str, *, label_above: bool
) -> None:
    """Draw evals as joined markers; the first and the last show their values, which readers compare."""
    if not points:
        return
    steps, values = zip(*points)
    style = {"marker": marker, "markersize": 6, "linewidth": 1, "linestyle": ":", "zorder": 3}
    axes.plot(steps, values, color=color, label=name, **style)
    for (step, value), side in {points[0]: "left", points[-1]: "right"}.items():
        offset = (8 if side == "left" else -8, 7 if label_above else -14)
        text = {"textcoords": "offset points", "color": color, "fontsize": 9, "ha": side}
        axes.annotate(f"{value:.2f}", (step, value), offset, **text)


def _line_dots(points: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """The dots of a line through the points, without gaps."""
    dots = set(points)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(length):
            dots.add((round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length)))
    return dots


# Bit of each of the 2 x 4 dots of a braille character, by (column, row).
_DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def _braille(dots: set[tuple[int, int]], column: int, line: int) -> str:
    bits = sum(_DOT_BITS[x][y] for x in range(2) for y in range(4) if (column * 2 + x, line * 4 + y) in dots)
    return chr(0x2800 + bits) if bits else " "
