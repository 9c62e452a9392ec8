"""`stretto rescore RUN --reward my:fn`: what a run would have learned from another reward."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto import state
from stretto.base.errors import ConfigError
from stretto.base.process import num_cores
from stretto.base.status import harmless
from stretto.config.reading.plain import PlainParser
from stretto.ledger.reader import LedgerReader
from stretto_python.run import Run
from stretto_review import scores
from stretto_review.judging import Job, Judged, Replies, Reply
from stretto_review.pool import judge_all
from stretto_review.report import DOMINATED, SATURATED, Columns, Report, report

LIMIT_S = 30.0
MOST_ERRORS = 3
MOST_CHARACTERS = 600


def rescore(words: Sequence[str]) -> int:
    """Judge the rollouts of a run anew and print what changes; exit status 1 if no reply could be judged."""
    args = _parse(words)
    run, began = Run(args.run), time.monotonic()
    if args.write:
        scores.make_place(run.dir, args.write)  # it is known now whether they can be kept, not after all is judged
    groups = groups_of(run, args.steps)
    job = Job(run.path.absolute(), tuple(args.reward), args.timeout)
    judged = sorted(judge_all(job, groups, args.workers), key=lambda each: each.group_id)
    found = summary(run, judged, job)
    found["seconds"] = round(time.monotonic() - began, 2)
    if args.write and found["rollouts"]:
        lines = (scores.Line(g.group_id, r.member, r.score or 0.0, r.old) for g, r in _scored(judged))
        found["written"] = str(scores.save(run.dir, args.write, job.rewards, lines, _finite(found)))
    if args.json:
        print(json.dumps(_finite(found)))
    else:
        print(harmless(as_text(found)))
    return 0 if found["rollouts"] else 1


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = PlainParser(
        "rescore", "Judge the saved rollouts of a run by another reward, and say what changes.", missing=state.runs_here
    )
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument(
        "--reward", action="append", default=[], metavar="NAME[=WEIGHT]",
        help="module:function, a built-in reward, or env, the run's environment as it is now; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=step_range, metavar="A:B", help="rollouts that these steps trained on; default: all"
    )
    parser.add_argument("--workers", type=_count, default=num_cores(), metavar="N", help="processes (one per core)")
    parser.add_argument(
        "--timeout", type=_seconds, default=LIMIT_S, metavar="S", help=f"seconds per reply ({LIMIT_S:g})"
    )
    parser.add_argument(
        "--write", nargs="?", const="rescored", metavar="NAME", help="keep the scores as RUN/scores/NAME.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(list(words))
    if not args.reward:
        raise ConfigError("stretto rescore: which reward? Name one: --reward my_rewards:fn, or --reward math")
    return args


def step_range(text: str) -> tuple[int, int]:
    """`3:7`, `3:`, `:7` or `3` as the first and the last step."""
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 1
        high = low if not colon else int(last) if last else 2**62
    except ValueError:
        low, high = 1, 0
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} are no steps; write 3:7, 3: or 5")
    return low, high


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; give 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds")
    return value


def groups_of(run: Run, steps: tuple[int, int] | None) -> list[int]:
    """The finished groups of a run, or those that these steps trained on, in draw order.

    Raises: ConfigError if there are none.
    """
    if not run.dir.ledger.exists():
        raise ConfigError(
            f"{run.dir}: this run has no rollouts (there is no {run.dir.ledger.name}); runs of `rl` have them."
        )
    with LedgerReader(run.dir) as ledger:
        if steps is None:
            query = "SELECT DISTINCT group_id FROM rollouts WHERE status IN ('finished', 'truncated') ORDER BY group_id"
            rows = ledger.rows(query)
        else:
            query = "SELECT DISTINCT group_id FROM live_rollouts WHERE step BETWEEN ? AND ? ORDER BY group_id"
            rows = ledger.rows(query, *steps)
        known = [row["step"] for row in ledger.batches()]
    if not rows:
        of = f"its steps are {known[0]} to {known[-1]}" if known else "it has trained no step"
        raise ConfigError(f"{run.dir}: no finished rollouts{' of these steps' if steps else ''}; {of}.")
    return [row["group_id"] for row in rows]


def _scored(judged: Sequence[Judged]) -> list[tuple[Judged, Reply]]:
    return [(group, reply) for group in judged for reply in group.replies if reply.score is not None]


def summary(run: Run, judged: Sequence[Judged], job: Job) -> dict[str, Any]:
    """What rescore found, as numbers and texts."""
    errors = [(f"g{g.group_id}.{r.member}", r.error) for g in judged for r in g.replies if r.error]
    gone = [(f"g{each.group_id}", each.error) for each in judged if each.error]
    columns = columns_of(judged)
    found = report(columns)
    signals = Counter((each.had_signal, each.has_signal) for each in judged if not each.error)
    keys = ("rank_correlation", "rank_correlation_within_groups", "sign_changes", "muted", "woken", "by_length")
    return {
        "run": str(run.dir),
        "rewards": list(job.rewards),
        "groups": len(judged),
        "rollouts": found.rollouts,
        "failed": len(errors),
        "unread_groups": len(gone),
        "errors": [{"rollout": name, "error": text} for name, text in [*errors, *gone]],
        "mean": {"old": found.old_mean, "new": found.new_mean},
        **{key: getattr(found, key) for key in keys},
        "groups_gain_signal": signals[False, True],
        "groups_lose_signal": signals[True, False],
        "is_dominated_by_length": found.is_dominated_by_length,
        "components": [
            dataclasses.asdict(each) | {"dominates": each.dominates, "is_saturated": each.is_saturated}
            for each in found.components
        ],
        "disagreements": _disagreements(run, columns, found),
    }


def columns_of(judged: Sequence[Judged]) -> Columns:
    """The replies with both rewards as arrays."""
    rows = _scored(judged)
    names = dict.fromkeys(name for _, reply in rows for name in reply.parts)

    def numbers(values: list[Any]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    return Columns(
        groups=np.array([group.group_id for group, _ in rows], dtype=np.int64),
        members=np.array([reply.member for _, reply in rows], dtype=np.int64),
        old=numbers([reply.old for _, reply in rows]),
        new=numbers([reply.score for _, reply in rows]),
        old_advantages=numbers([reply.old_advantage for _, reply in rows]),
        advantages=numbers([reply.advantage for _, reply in rows]),
        lengths={
            "tokens": numbers([reply.num_tokens for _, reply in rows]),
            "characters": numbers([reply.num_characters for _, reply in rows]),
        },
        parts={name: numbers([reply.parts.get(name, 0.0) for _, reply in rows]) for name in names},
    )


def _disagreements(run: Run, columns: Columns, found: Report) -> list[dict[str, Any]]:
    """The rollouts about which both rewards disagree most, with their text."""
    replies = Replies(run)
    shown = []
    with LedgerReader(run.dir) as ledger:
        for index in found.disagreements:
            group, member = ledger.group(int(columns.groups[index])), int(columns.members[index])
            [rollout] = [each for each in group.rollouts if each.member == member]
            branch = rollout.branches[-1]
            shown.append(
                {
                    "rollout": rollout.rollout_id,
                    "task": rollout.task.task_id,
                    "old": float(columns.old[index]),
                    "new": float(columns.new[index]),
                    "old_advantage": float(columns.old_advantages[index]),
                    "advantage": float(columns.advantages[index]),
                    "prompt": replies.prompt_of(branch),
                    "reply": replies.text_of(branch),
                }
            )
    return shown


def as_text(found: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"{found['rollouts']} rollouts of {found['run']}, judged by {', '.join(found['rewards'])}"]
    if failed := found["failed"] + found["unread_groups"]:
        lines.append(f"NOT JUDGED: {found['failed']} rollouts, and {found['unread_groups']} whole groups")
        lines += [f"  {each['rollout']}: {each['error']}" for each in found["errors"][:MOST_ERRORS]]
        lines += [f"  and {failed - MOST_ERRORS} more (--json has all)"] if failed > MOST_ERRORS else []
    if not found["rollouts"]:
        return "\n".join(lines)
    mean, length = found["mean"], found["by_length"]
    lines += [
        "",
        f"mean reward           {mean['old']:.4g} -> {mean['new']:.4g}",
        f"rank correlation      {_shown(found['rank_correlation'])} of all, "
        f"{_shown(found['rank_correlation_within_groups'])} within groups",
        f"advantages            {found['sign_changes']:.2%} change sign, {found['muted']:.2%} become 0, "
        f"{found['woken']:.2%} were 0",
        f"groups                {found['groups_gain_signal']} gain their signal, "
        f"{found['groups_lose_signal']} lose it, of {found['groups']}",
        f"explained by length   {_shown(length['old'])} of the variance of the old, {_shown(length['new'])} of the new",
    ]
    lines += [""] * bool(found["components"]) + [_component_text(each) for each in found["components"]]
    if found["is_dominated_by_length"]:
        lines += ["", f"DOMINATED BY LENGTH: the length of a reply explains {length['new']:.0%} of this reward."]
    if found["disagreements"]:
        lines += ["", "largest disagreements:"] + [_conversation(each) for each in found["disagreements"]]
    if "written" in found:
        lines += ["", f"scores                {found['written']}"]
    return "\n".join(lines)


def _component_text(each: dict[str, Any]) -> str:
    marks = [f"DOMINATES (over {DOMINATED:.0%})"] if each["dominates"] else []
    marks += [f"SATURATED (over {SATURATED:.0%} are equal)"] if each["is_saturated"] else []
    text = (
        f"{each['name']:<21} mean {each['mean']:.4g}, {_shown(each['share'])} of the variance, {each['same']:.0%} equal"
    )
    return "  ".join([text, *marks])


def _conversation(each: dict[str, Any]) -> str:
    head = (
        f"\n── {each['rollout']}  {each['task']}   reward {each['old']:.3f} -> {each['new']:.3f}   "
        f"advantage {each['old_advantage']:+.3f} -> {each['advantage']:+.3f}"
    )
    return f"{head}\n{_cut(each['prompt'])}\n▶ {_cut(each['reply'])}"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ... ({len(text)} characters)"


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _finite(value: Any) -> Any:
    """None in place of nan, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
