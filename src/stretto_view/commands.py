"""`stretto runs`, `show`, `rollouts` and `plot`: runs as a list, how one went, its rollouts as conversations in a
terminal, metrics as a picture. `--json` prints the first three for programs.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto import state
from stretto.base.errors import ConfigError
from stretto.base.status import duration, harmless
from stretto.config.reading.plain import PlainParser, count
from stretto.ledger.audit import report_of
from stretto.ledger.reader import LedgerReader
from stretto.records.outcomes import OUTCOMES
from stretto_python.run import Run, compare
from stretto_python.run import plot as draw
from stretto_view.page import logs
from stretto_view.roles import stretches, without_end


def runs(words: Sequence[str]) -> int:
    """Print one line per run: state, step, reward, age."""
    parser = PlainParser("runs", "List runs with how far they are, the newest first.")
    parser.add_argument("place", nargs="*", type=Path, help="directories that hold runs (default: outputs)")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    args = parser.parse_args(list(words))
    places = args.place or [Path("outputs")]
    rows = [state.describe(run) for run in state.find(places)]
    rows.sort(key=lambda row: -(row["changed"] or 0.0))
    if args.json:
        _print_json(rows)
    elif not rows:
        raise ConfigError(state.no_runs_text(places))
    else:
        print(harmless(table([_listed(row) for row in rows])))
    return 0


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `stretto runs`."""
    of = f" of {row['max_steps']}" if row["max_steps"] else ""
    return {
        "run": row["path"],
        "verb": row["verb"],
        "state": row["state"],
        "step": "-" if row["step"] is None else f"{row['step']}{of}",
        "reward": row["reward"],
        "loss": row["loss"],
        "age": "-" if row["age_s"] is None else duration(row["age_s"]),
    }


def show(words: Sequence[str]) -> int:
    """Print a run's summary: its state, whether it learned, warnings, latest metrics, evals, how its rollouts ended."""
    about = "Print how a run went: whether it learned, warnings, latest metrics, evals, rollouts."
    parser = PlainParser("show", about, missing=state.runs_here)
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--audit", action="store_true", help="also check the ledger, and read every rollout that is kept"
    )
    args = parser.parse_args(list(words))
    found_run = Run(args.run)
    found = summary(found_run)
    if args.audit:
        found["ledger"] = report_of(found_run.dir, payloads=True)
    if args.json:
        _print_json(found)
    else:
        print(harmless(_summary_text(found)))
    return 0


_MOST_WARNINGS = 8
_SHOWN = ("reward/mean", "nll/mean", "val/loss", "entropy/mean", "completion/mean", "mismatch_kl/mean", "tokens_per_s")


def summary(run: Run) -> dict[str, Any]:
    """What `stretto show` prints: what `state.describe` says, and more.

    metrics: the latest. evals: of the first and the last version. rollouts: how many in each status. warnings: of all
    processes, the newest first. result: what the run reported at its end.
    """
    latest: dict[str, float] = {}
    for row in run.metrics():
        latest |= {key: row[key] for key in _SHOWN if row.get(key) is not None}
    evals = run.evals()
    ends = {row["version"] for row in (evals[:1] + evals[-1:])}
    statuses: dict[str, int] = {}
    if run.dir.ledger.exists():
        with LedgerReader(run.dir) as ledger:
            statuses = ledger.rollouts_by_status()
    shown = [{key: row[key] for key in ("version", "env", "mode", "mean")} for row in evals if row["version"] in ends]
    about = state.describe(run.dir)
    result = run.summary if about["state"] != "running" else {}  # while it runs again, that of its start before
    said = {"warnings": logs.warnings(run.dir), "result": result}
    return {**about, "metrics": latest, "evals": shown, "rollouts": statuses, **said}


def _summary_text(found: dict[str, Any]) -> str:
    row = _listed(found)
    step = "no step yet" if found["step"] is None else f"step {row['step']}, last one {row['age']} ago"
    lines = [f"{found['path']}: {found['verb']}, {found['state']}, {step}"]
    if found["missing"]:
        lines.append(found["missing"])
    if verdict := found["result"].get("verdict"):
        lines += ["", verdict]
    for warning in found["warnings"][:_MOST_WARNINGS]:
        times = f" ({warning['count']} times)" if warning["count"] > 1 else ""
        lines += ["", f"{warning['level']} ({warning['process']}): {warning['text'].splitlines()[0]}{times}"]
    if found["metrics"]:
        lines += ["", table([{"metric": key, "latest": value} for key, value in found["metrics"].items()])]
    if found["evals"]:
        lines += ["", table(found["evals"])]
    if found["rollouts"]:
        counts = _counts_text(found["rollouts"])
        lines += ["", f"rollouts: {counts}", f"read some: stretto rollouts {found['path']} --worst 3"]
    if "ledger" in found:
        lines += ["", f"ledger: {found['ledger']}"]
    return "\n".join(lines)


def rollouts(words: Sequence[str]) -> int:
    """Print rollouts of a run: prompt, reply and reward of each."""
    parser = PlainParser(
        "rollouts",
        "Print rollouts of a run as conversations: by default the newest of the last trained step.",
        missing=state.runs_here,
    )
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument("--step", type=int, help="rollouts that this step trained on; default: the last one")
    parser.add_argument(
        "--best", type=count, metavar="N", help="the N with the largest reward (of all steps, without --step)"
    )
    parser.add_argument("--worst", type=count, metavar="N", help="the N with the smallest reward")
    parser.add_argument(
        "--min-reward", type=float, metavar="R", help="with at least this reward (of all steps, without --step)"
    )
    parser.add_argument("--failed", action="store_true", help="those whose environment or engine failed")
    parser.add_argument("--env", help="of this environment only")
    parser.add_argument("--limit", type=count, default=3, metavar="N", help="at most N (3)")
    parser.add_argument("--raw", action="store_true", help="text with all special tokens, as the model saw it")
    parser.add_argument("--json", action="store_true", help="one JSON list, tokens included")
    args = parser.parse_args(list(words))
    run = Run(args.run)
    step = args.step
    if step is None and not (args.best or args.worst or args.failed or args.min_reward is not None):
        step = _last_trained(run)
    rows = run.rollouts(
        step=step,
        env=args.env,
        status="failed" if args.failed else None,
        min_reward=args.min_reward,
        best=args.best,
        worst=args.worst,
        limit=args.limit,
    )
    if args.json:
        _print_json(list(rows))
        return 0
    if not rows and args.failed and not (args.step or args.env):
        print(harmless(f"{run.dir}: no rollout failed. {_what_there_is(run)}"))
        return 0
    if not rows:
        raise ConfigError(f"{run.dir}: no such rollouts. {_what_there_is(run)}")
    for row in rows:
        print(harmless(as_text(row, is_raw=args.raw)), end="\n\n")
    return 0


def _last_trained(run: Run) -> int | None:
    if not run.dir.ledger.exists():
        return None
    with LedgerReader(run.dir) as ledger:
        return max((row["step"] for row in ledger.batches() if row["state"] == "trained"), default=None)


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=lambda array: array.tolist() if isinstance(array, np.ndarray) else str(array)))


def plot(words: Sequence[str]) -> int:
    """Write a picture of the metrics of runs, and print a table of them."""
    parser = PlainParser("plot", "Draw metrics of one run or several over their steps.", missing=state.runs_here)
    parser.add_argument("run", nargs="+", help="run directories")
    parser.add_argument("--key", action="append", default=[], help="a metric, such as entropy/mean; may be repeated")
    parser.add_argument("--out", default="plot.png", help="the picture (plot.png)")
    args = parser.parse_args(list(words))
    runs = [Run(path) for path in args.run]
    draw(runs, *args.key, path=args.out)
    print(harmless(table(compare(runs))))
    print(f"\npicture  {args.out}")
    return 0


def _credit(turn: dict[str, Any]) -> str:
    """What the environment said of a turn, and its advantage beside the rollout's."""
    numbers = [f"{key} {turn[key]:+.3f}" for key in ("reward", "value", "advantage") if key in turn]
    return "   ".join([*numbers, *([f"state {turn['state'] or '(empty)'}"] if "state" in turn else [])])


def as_text(row: dict[str, Any], *, is_raw: bool = False) -> str:
    """One rollout as a headline and its conversation."""
    step = f"step {row['step']}" if row["step"] else f"trained by no step ({row['group_reason'] or row['group_state']})"
    advantage = "" if row["advantage"] is None else f"   advantage {row['advantage']:+.3f}"
    reward = "" if row["reward"] is None else f"   reward {row['reward']:.3f}"
    versions = "" if row["first_version"] is None else f"   version {row['first_version']}"
    if row["last_version"] not in (None, row["first_version"]):
        versions += f" to {row['last_version']}"
    head = (
        f"── g{row['group_id']}.{row['member']}  {row['env']} {row['task_id']}   {step}   {row['status']}"
        f"{reward}{advantage}{versions}   {row['num_sampled_tokens'] or 0} tokens"
    )
    lines = [head]
    if row["label"] is not None:
        lines.append(f"   label: {row['label']}")
    if row["dropped_by"]:
        lines.append(f"   dropped by filter {row['dropped_by']}")
    if row["reason"]:
        lines.append(f"   ended by {row['reason']}: {OUTCOMES[row['reason']].meaning}")
    if row["error"]:
        lines.append(f"   error: {row['error']}")
    lines += [f"   turn {number}: {_credit(turn)}" for number, turn in enumerate(row["turns"])]
    if row["prompt"] is None:
        lines.append("   (its tokens are no longer kept)")
    for branch in row["branches"]:
        lines.extend(_conversation(branch, is_raw=is_raw))
    return "\n".join(lines)


def _conversation(branch: dict[str, Any], *, is_raw: bool) -> list[str]:
    who = "" if branch["agent"] == "policy" else f"   [{branch['agent']}]"
    lines = [who] if who else []
    text = branch["prompt"] + branch["reply"]
    turns = [] if is_raw else list(stretches(text))
    if not turns:
        return [*lines, _indented(branch["prompt"] + "▶" + branch["reply"], "   ")]
    for turn in turns:
        if own := without_end(text[turn.body : turn.end]):
            lines.append(_indented(own, f"   {turn.role:>9}: "))
    return lines


def _indented(text: str, first: str) -> str:
    return first + textwrap.indent(text, " " * len(first)).lstrip(" ")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as an aligned table."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _what_there_is(run: Run) -> str:
    with LedgerReader(run.dir) as ledger:
        steps, counts = [row["step"] for row in ledger.batches()], ledger.rollouts_by_status()
    trained = f"Steps {steps[0]} to {steps[-1]}" if steps else "No step yet"
    return f"{trained}; rollouts: {_counts_text(counts)}."


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none"
