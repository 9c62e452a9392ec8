"""`stretto show` and `stretto plot`: rollouts as conversations in a terminal, metrics as a picture."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from stretto.base.errors import ConfigError
from stretto.view.run import Run, compare
from stretto.view.run import plot as draw

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rollouts; give 1 or more")
    return int(text)


def show(words: Sequence[str]) -> int:
    """Print rollouts of a run: what was asked, what the policy said, what it earned."""
    parser = argparse.ArgumentParser(
        prog="stretto show",
        description="Print rollouts of a run as conversations: by default the newest of the last trained step.",
        allow_abbrev=False,
    )
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument("--step", type=int, help="rollouts that this step trained on; default: the last one")
    parser.add_argument(
        "--best",
        type=_count,
        metavar="N",
        help="the N with the largest reward (of all steps, without --step)",
    )
    parser.add_argument("--worst", type=_count, metavar="N", help="the N with the smallest reward")
    parser.add_argument("--failed", action="store_true", help="those whose environment or engine failed")
    parser.add_argument("--env", help="of this environment only")
    parser.add_argument("--limit", type=_count, default=3, metavar="N", help="at most N (3)")
    parser.add_argument(
        "--raw", action="store_true", help="text with all special tokens, as the model saw it"
    )
    args = parser.parse_args(list(words))
    run = Run(args.run)
    step = args.step
    if step is None and not (args.best or args.worst or args.failed):
        trained = [row["step"] for row in run.metrics() if row["step"] > 0]
        step = trained[-1] if trained else None
    rows = run.rollouts(
        step=step,
        env=args.env,
        status="failed" if args.failed else None,
        best=args.best,
        worst=args.worst,
        limit=args.limit,
    )
    if not rows and args.failed and not (args.step or args.env):
        print(f"{run.dir}: no rollout failed. {_what_there_is(run)}")
        return 0
    if not rows:
        raise ConfigError(f"{run.dir}: no such rollouts. {_what_there_is(run)}")
    for row in rows:
        print(as_text(row, is_raw=args.raw), end="\n\n")
    return 0


def plot(words: Sequence[str]) -> int:
    """Write a picture of the metrics of runs, and print a table of them."""
    parser = argparse.ArgumentParser(
        prog="stretto plot",
        description="Draw metrics of one run or several over their steps.",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="+", help="run directories")
    parser.add_argument(
        "--key", action="append", default=[], help="a metric, such as entropy/mean; may be repeated"
    )
    parser.add_argument("--out", default="plot.png", help="the picture (plot.png)")
    args = parser.parse_args(list(words))
    runs = [Run(path) for path in args.run]
    draw(runs, *args.key, path=args.out)
    print(table(compare(runs)))
    print(f"\npicture  {args.out}")
    return 0


def as_text(row: dict[str, Any], *, is_raw: bool = False) -> str:
    """One rollout as a headline and its conversation."""
    step = (
        f"step {row['step']}"
        if row["step"]
        else f"trained by no step ({row['group_reason'] or row['group_state']})"
    )
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
    if row["error"]:
        lines.append(f"   error: {row['error']}")
    if row["prompt"] is None:
        lines.append("   (its tokens are no longer kept)")
    for branch in row["branches"]:
        lines.extend(_conversation(branch, is_raw=is_raw or not _TURN.search(branch["prompt"])))
    return "\n".join(lines)


def _conversation(branch: dict[str, Any], *, is_raw: bool) -> list[str]:
    who = "" if branch["agent"] == "policy" else f"   [{branch['agent']}]"
    if is_raw:
        return [*([who] if who else []), _indented(branch["prompt"] + "▶" + branch["reply"], "   ")]
    lines = [who] if who else []
    for role, text in _TURN.findall(branch["prompt"] + branch["reply"]):
        lines.append(_indented(text.strip(), f"   {role:>9}: "))
    return lines


def _indented(text: str, first: str) -> str:
    return first + textwrap.indent(text, " " * len(first)).lstrip(" ")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as an aligned table."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _what_there_is(run: Run) -> str:
    from stretto.ledger.reader import LedgerReader

    with LedgerReader(run.dir) as ledger:
        steps, counts = [row["step"] for row in ledger.batches()], ledger.rollouts_by_status()
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none"
    return (
        f"Steps {steps[0]} to {steps[-1]}; rollouts: {said}." if steps else f"No step yet; rollouts: {said}."
    )
