"""`stretto diff RUN OTHER`: the first step at which two runs differ, and in what, with both values.

Of each step are compared, in the order in which one follows from the other: the tasks that were drawn (draw), what the
policy was shown (prompt), which draws make the batch (order), the versions that sampled (version), sampled tokens
(token), their log-probabilities (logprob), rewards (reward), advantages (advantage), what was logged (metric), and the
exported weights (weight). What else differs at that step is told too: it may follow from the first.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto import state
from stretto.base.errors import ConfigError, DataError
from stretto.base.status import harmless
from stretto.config.changes import differences
from stretto.config.reading.plain import PlainParser
from stretto.data.weight_files import HeaderTensor, read_weight_files
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics
from stretto.records.rollout import Branch, Group, Rollout
from stretto_python.run import Run

Pairs = list[tuple[Rollout, Rollout]]
NOT_COMPARED = ("run", "output_dir", "monitors", "resume", "env_vars", "deployment")
"""Sections of the configuration that name places, not what is learned."""
MOST_KEYS = 20
TIMES = ("time", "perf", "inference", "trainer", "incarnation", "progress", "publish", "budget", "canary")
"""First parts of metrics that tell of times and machines, or are of whatever was the latest at that time."""
OF_ALL_PLAYED = (
    "groups", "outcomes", "filter", "env", "curriculum", "models", "concurrency", "steering", "speculation",
)  # fmt: skip
"""First parts of metrics about all that ended since the last batch: which that is goes by when it was shipped."""
ALL_PLAYED = ("reward/mean", "reward/std", "off_policy/dropped")
"""Further ones; the rollouts of the batch alone are in `reward/trained`."""
OF_BATCH = ("tokens", "sampled_tokens", "micro_batches")
"""Last parts of those metrics of `batch/` that are no names of environments."""
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@dataclass(frozen=True)
class Difference:
    """One quantity with its values in both runs; where: the rollout, metric or tensor."""

    step: int
    quantity: str
    where: str
    first: Any
    second: Any


class Side:
    """One of the two runs."""

    def __init__(self, path: str) -> None:
        """Raises: ConfigError if there is no run, or none with a ledger."""
        self.run = Run(path)
        if not self.run.dir.ledger.exists():
            raise ConfigError(
                f"{self.run.dir}: this run has no rollouts (there is no {self.run.dir.ledger.name}); runs of `rl` "
                "have them."
            )
        self.ledger = LedgerReader(self.run.dir)
        rows = self.ledger.rows("SELECT DISTINCT step, group_id FROM live_rollouts ORDER BY step, group_id")
        self.batches: dict[int, list[int]] = {row["step"]: [] for row in self.ledger.batches()}
        for row in rows:
            self.batches[row["step"]].append(row["group_id"])
        self.tasks = {
            row["group_id"]: row for row in self.ledger.rows("SELECT group_id, env, task_id, data FROM draws")
        }
        self.metrics = {row["step"]: row for row in self.run.metrics()}
        self.trained = {row["step"]: row for row in read_metrics(self.run.dir.metrics("trainer"))}
        sent = [event["data"] for event in self.ledger.events("weights")]  # of a version that was made again, the last
        self.fingerprints: dict[int, str] = {each["version"]: each["fingerprint"] for each in sent}
        self.gone: set[int] = set()  # groups that were asked for and whose tokens are no longer kept

    def group(self, group_id: int) -> Group | None:
        """None if its tokens are no longer kept."""
        try:
            return self.ledger.group(group_id)
        except DataError:
            self.gone.add(group_id)
            return None


@dataclass
class Comparison:
    """Compares two runs.

    tolerance: relative and absolute, of numbers with a fraction. is_whole: what was played is compared, too; otherwise
    the training alone, on equal batches.
    """

    one: Side
    two: Side
    tolerance: float
    is_whole: bool = True

    def at(self, step: int) -> Iterator[Difference]:
        """What differs at a step, one example of each quantity."""
        for quantity, compare in self.quantities(step):
            if (found := next(compare, None)) is not None:
                yield Difference(step, quantity, *found)

    def quantities(self, step: int) -> Iterator[tuple[str, Iterator[tuple[str, Any, Any]]]]:
        """The quantities of a step in their order, each with an iterator over its differences."""
        if self.is_whole:
            yield from self._played(step)
        yield "metric", self._metrics(step)
        yield "weight", self._weights(step)

    def _played(self, step: int) -> Iterator[tuple[str, Iterator[tuple[str, Any, Any]]]]:
        ours, theirs = self.one.batches[step], self.two.batches[step]
        yield "draw", self._draws(sorted({*ours, *theirs}), "task_id")
        yield "prompt", self._draws(sorted({*ours, *theirs}), "data")
        pairs = self._pairs([number for number in ours if number in theirs])
        yield "prompt", self._tokens(pairs, is_sampled=False)
        yield "order", iter([] if ours == theirs else [("the draws of its batch", ours, theirs)])
        yield "version", self._branches(pairs, lambda branch: [list(span) for span in map(_span, branch.versions)])
        yield "token", self._tokens(pairs, is_sampled=True)
        yield "logprob", self._logprobs(pairs)
        yield "reward", self._numbers(pairs, lambda rollout: rollout.reward)
        yield "advantage", self._advantages([number for number in ours if number in theirs])

    def _pairs(self, numbers: Sequence[int]) -> Pairs:
        pairs = []
        for number in numbers:
            one, two = self.one.group(number), self.two.group(number)
            if one is not None and two is not None:
                others = {each.member: each for each in two.rollouts}
                pairs += [(each, others[each.member]) for each in one.rollouts if each.member in others]
        return pairs

    def _draws(self, numbers: Sequence[int], key: str) -> Iterator[tuple[str, Any, Any]]:
        for number in numbers:
            one, two = self.one.tasks.get(number), self.two.tasks.get(number)
            if one is not None and two is not None and one[key] != two[key]:
                yield f"draw {number}", one[key], two[key]

    def _tokens(self, pairs: Pairs, *, is_sampled: bool) -> Iterator[tuple[str, Any, Any]]:
        for one, two in pairs:
            if len(one.branches) != len(two.branches):
                yield f"number of branches of {one.rollout_id}", len(one.branches), len(two.branches)
            for ours, theirs in zip(one.branches, two.branches):
                at = _first_difference(ours.token_ids, theirs.token_ids)
                if at is None:
                    continue
                longer = ours if len(ours.token_ids) >= len(theirs.token_ids) else theirs
                if bool(longer.is_sampled[at]) == is_sampled:
                    yield (
                        f"token {at} of {one.rollout_id}",
                        self._shown(self.one, ours, at),
                        self._shown(self.two, theirs, at),
                    )

    @staticmethod
    def _shown(side: Side, branch: Branch, at: int) -> str:
        if at >= len(branch.token_ids):
            return "none: it has ended"
        token, tokenizer = int(branch.token_ids[at]), side.run.tokenizer
        return f"{token}" if tokenizer is None else f"{token} {tokenizer.decode([token])!r}"

    def _branches(self, pairs: Pairs, value: Callable[[Branch], Any]) -> Iterator[tuple[str, Any, Any]]:
        for one, two in pairs:
            for ours, theirs in zip(one.branches, two.branches):
                if value(ours) != value(theirs) and np.array_equal(ours.token_ids, theirs.token_ids):
                    yield one.rollout_id, value(ours), value(theirs)

    def _logprobs(self, pairs: Pairs) -> Iterator[tuple[str, Any, Any]]:
        for one, two in pairs:
            for ours, theirs in zip(one.branches, two.branches):
                if np.array_equal(ours.token_ids, theirs.token_ids):
                    far = ~np.isclose(ours.logprobs, theirs.logprobs, self.tolerance, self.tolerance, equal_nan=True)
                    if far.any():
                        at = int(far.argmax())
                        yield f"token {at} of {one.rollout_id}", float(ours.logprobs[at]), float(theirs.logprobs[at])

    def _numbers(self, pairs: Pairs, value: Callable[[Rollout], float]) -> Iterator[tuple[str, Any, Any]]:
        for one, two in pairs:
            if not self._is_close(value(one), value(two)):
                yield one.rollout_id, value(one), value(two)

    def _advantages(self, numbers: Sequence[int]) -> Iterator[tuple[str, Any, Any]]:
        query = "SELECT group_id, member, advantage FROM live_rollouts WHERE group_id = ? ORDER BY member"
        for number in numbers:
            ours, theirs = (side.ledger.rows(query, number) for side in (self.one, self.two))
            for one, two in zip(ours, theirs):
                if not self._is_close(one["advantage"] or 0.0, two["advantage"] or 0.0):
                    yield f"g{number}.{one['member']}", one["advantage"], two["advantage"]

    def _metrics(self, step: int) -> Iterator[tuple[str, Any, Any]]:
        ours, theirs = (
            (side.metrics if self.is_whole else side.trained).get(step, {}) for side in (self.one, self.two)
        )
        names = [name for name in ours if name in theirs and _is_learned(name)]
        for name in sorted(names, key=lambda name: name != "optim/lr"):  # it is set, others follow
            one, two = ours[name], theirs[name]
            if isinstance(one, float | int) and isinstance(two, float | int) and not self._is_close(one, two):
                yield name, one, two

    def _weights(self, step: int) -> Iterator[tuple[str, Any, Any]]:
        directories = [side.run.dir.weights_step(step) for side in (self.one, self.two)]
        if not all(each.is_dir() for each in directories):
            ours, theirs = (side.fingerprints.get(step, "") for side in (self.one, self.two))
            if ours != theirs and ours.rpartition("/")[0] == theirs.rpartition("/")[0] and not self.tolerance:
                yield "as they are sent to engines", ours, theirs
            return
        one, two = (_tensors(each) for each in directories)
        for name in [*one, *(name for name in two if name not in one)]:
            if name not in one or name not in two:
                yield name, "there" if name in one else "not there", "there" if name in two else "not there"
            elif (found := _tensor_difference(one[name], two[name], self.tolerance)) is not None:
                yield f"{name}{found[0]}", *found[1:]

    def _is_close(self, one: float, two: float) -> bool:
        are_both_nan = math.isnan(one) and math.isnan(two)
        return are_both_nan or math.isclose(one, two, rel_tol=self.tolerance, abs_tol=self.tolerance)


def _span(span: Any) -> tuple[int, int, int]:
    return span.version, span.start, span.end


def _first_difference(one: np.ndarray, two: np.ndarray) -> int | None:
    """The first index at which two rows of tokens differ; the shorter length, if one begins the other."""
    length = min(len(one), len(two))
    differs = one[:length] != two[:length]
    if differs.any():
        return int(differs.argmax())
    return None if len(one) == len(two) else length


def _is_learned(name: str) -> bool:
    """Whether it follows from what was trained alone, and not from the moment at which a batch was shipped."""
    parts = name.split("/")
    first, last = parts[0], parts[-1]
    of_env = (first == "reward" and len(parts) > 2) or (first == "batch" and last not in OF_BATCH)
    is_played = of_env or first in OF_ALL_PLAYED or name in ALL_PLAYED
    return not is_played and first not in TIMES and not last.endswith(("_s", "_per_s"))


def _tensors(directory: Path) -> dict[str, HeaderTensor]:
    return {name: tensor for file in read_weight_files(directory).values() for name, tensor in file.tensors.items()}


def _tensor_difference(one: HeaderTensor, two: HeaderTensor, tolerance: float) -> tuple[str, Any, Any] | None:
    """Where two tensors differ most, as an index, with both values; None if nowhere by more than the tolerance."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return "", f"{one.dtype} {list(one.shape)}", f"{two.dtype} {list(two.shape)}"
    raw = [np.memmap(each.file, np.uint8, "r", each.offset, each.num_bytes) for each in (one, two) if each.num_bytes]
    if not raw or np.array_equal(raw[0], raw[1]):
        return None
    ours, theirs = (_values(each, one.dtype) for each in raw)
    far = np.where(np.isclose(ours, theirs, tolerance, tolerance, equal_nan=True), 0.0, np.abs(ours - theirs))
    if not far.any():
        return None
    at = int(np.nanargmax(far))
    place = ", ".join(str(int(each)) for each in np.unravel_index(at, one.shape or (1,)))
    return f"[{place}]", float(ours[at]), float(theirs[at])


def _values(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes as float32 or float64; of a type that numpy does not have, the bytes."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(DTYPES[dtype]).astype(np.float64) if dtype in DTYPES else raw.astype(np.float64)


# -- the command --


def diff(words: Sequence[str]) -> int:
    """Print where two runs begin to differ; exit status 1 if they do."""
    args = _parse(words)
    one, two = Side(args.run), Side(args.other)
    keys = [(".".join(map(str, path)), *values) for path, *values in differences(_compared(one), _compared(two))]
    steps = sorted(one.batches.keys() & two.batches.keys())
    if not steps:
        raise ConfigError(f"{one.run.dir} and {two.run.dir} have no step in common: there is nothing to compare")
    found = first_difference(Comparison(one, two, args.tolerance), steps)
    said = {
        "config": [{"key": key, "first": first, "second": second} for key, first, second in keys],
        "steps": [len(one.batches), len(two.batches)],
        "compared": len(steps) if not found else steps.index(found[0].step) + 1,
        "differences": [vars(each) for each in found],
        "unread_groups": len(one.gone | two.gone),
    }
    print(json.dumps(said, default=str) if args.json else harmless(as_text(said, one, two)))
    return int(bool(found) or len(one.batches) != len(two.batches))


def first_difference(comparison: Comparison, steps: Sequence[int]) -> list[Difference]:
    """What differs at the first of these steps at which anything does; the first of it is the cause of the others."""
    return next((found for step in steps if (found := list(comparison.at(step)))), [])


def _compared(side: Side) -> dict[str, Any]:
    return {key: value for key, value in side.run.config.items() if key not in NOT_COMPARED}


def as_text(said: dict[str, Any], one: Side, two: Side) -> str:
    """The comparison for a terminal."""
    lines = [f"{one.run.dir}: {said['steps'][0]} steps", f"{two.run.dir}: {said['steps'][1]} steps", ""]
    for each in said["config"][:MOST_KEYS]:
        lines.append(f"config  {each['key']}: {_brief(each['first'])} and {_brief(each['second'])}")
    if len(said["config"]) > MOST_KEYS:
        lines.append(f"config  and {len(said['config']) - MOST_KEYS} more keys (--json has all)")
    if not said["config"]:
        lines.append("config  the same")
    lines += ["", difference_text(said["differences"], said["compared"], said["unread_groups"])]
    if not said["differences"] and len(set(said["steps"])) > 1:
        lines.append(f"NOT COMPARED: the steps that only one of them has ({' and '.join(map(str, said['steps']))})")
    return "\n".join(lines)


def difference_text(found: Sequence[dict[str, Any]], num_compared: int, num_unread: int = 0, what: str = "") -> str:
    """The fields of the differences of one step, or that there is none in so many steps.

    num_unread: groups whose tokens one of the runs keeps no longer. what: of the steps is compared, such as
    " of training".
    """
    lines = [f"NO DIFFERENCE in {num_compared} step{'s' if num_compared != 1 else ''}{what}"]
    if found:
        first, *others = found
        lines = [f"FIRST DIFFERENCE at step {first['step']}: {_text(first)}"]
        lines += [f"  also at this step: {_text(each)}" for each in others]
    if num_unread:
        groups = "one group" if num_unread == 1 else f"{num_unread} groups"
        values = f"tokens, log-probabilities and rewards of {groups}"
        lines.append(f"NOT COMPARED: {values}, whose tokens are no longer kept")
    return "\n".join(lines)


def _text(each: dict[str, Any]) -> str:
    return f"{each['quantity']}, {each['where']}: {_brief(each['first'])} and {_brief(each['second'])}"


def _brief(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Say at which step two runs first differ, and in what; exit status 1 if they differ."
    parser = PlainParser("diff", about, missing=state.runs_here)
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument("other", help="the run to compare it with")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="T", help="numbers may differ by T, relative or absolute (0)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(list(words))
    if not 0 <= args.tolerance < math.inf:
        raise ConfigError(f"stretto diff: --tolerance {args.tolerance:g}: give 0 or more")
    return args
