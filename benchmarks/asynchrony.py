"""How near the schedule of asynchronous runs comes to the least time of its rules; does it favour short rollouts?

    python benchmarks/asynchrony.py [--quick] [--steps 300] [--levels 1 2 4] [--seeds 1 2 3] [--only SETTING ...]

The orchestrator runs as it is, under a virtual clock, against an engine and a trainer that only take time: each rollout
as long as its reply, log-normal (sigma 1, median 0.1 s), each training step TRAIN_S, batches of 8 groups of 8. What is
left of a step is the schedule. The last line is one JSON object with a row per level and setting.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

TRAIN_S = 0.051
MEDIAN_TOKENS, MEDIAN_S = 20, 0.1
GROUP, GROUPS = 8, 8
SETTINGS = {
    "dispatch": {},
    "finished, at most 8 old": {"batch_order": "finished", "max_off_policy_steps": 8},
    "finished, at most 16 old": {"batch_order": "finished", "max_off_policy_steps": 16},
    "finished, at most 32 old": {"batch_order": "finished", "max_off_policy_steps": 32},
}


def least_times(
    durations: Iterable[float],
    *,
    level: int,
    train_s: float,
    steps: int,
    oldest: int | None = None,
    is_in_order: bool = False,
    groups: int = GROUPS,
) -> list[float]:
    """The earliest end of each step, in seconds, that any schedule can reach with groups of these durations, by draw.

    Four rules, and nothing costs time but groups and training:

    1. (level + 1) * groups groups are between their draw and the load of the weights that they were trained into.
       Group j is therefore drawn no sooner than version v(j) = ceil(j / groups) - level - 1 is loaded (j from 1; 0
       before that).
    2. A batch is `groups` groups that are done, so batch n starts no sooner than n * groups groups are done.
       is_in_order: than its own are, by their draws.
    3. Batches are trained one after the other, train_s each; a version is loaded the moment its step ends.
    4. If `oldest` is given, no group is dropped for its age, so batch n starts no sooner than all groups are done that
       began with version n - 1 - oldest.

    By induction over n every time below is the least, for a schedule that draws as soon as rule 1 allows: draws, ends,
    starts and loads depend on earlier ones alone, and grow with them.
    """
    given, now = iter(durations), 0.0
    running: list[tuple[float, int, int]] = []  # a heap: end, draw, version
    loading: list[tuple[float, int]] = []
    done: set[int] = set()
    times, draws = [0.0], itertools.count()

    def draw(at: float, version: int, num: int) -> None:
        for duration in itertools.islice(given, num):
            heapq.heappush(running, (at + duration, next(draws), version))

    draw(0.0, 0, (level + 1) * groups)
    for step in range(1, steps + 1):
        own = range((step - 1) * groups, step * groups)
        while not (
            all(number in done for number in own)
            if is_in_order
            else len(done) >= step * groups
            and (oldest is None or not any(version < step - oldest for *_, version in running))
        ):
            if not running and not loading:
                return times  # there are no more durations
            if loading and (not running or loading[0][0] <= running[0][0]):
                now, version = heapq.heappop(loading)
                draw(now, version, groups)
            else:
                now, number, _ = heapq.heappop(running)
                done.add(number)
        times.append(max(now, times[-1]) + train_s)
        heapq.heappush(loading, (times[-1], step))
    return times


def mean_step(times: list[float], first: int, last: int) -> float:
    return (times[last] - times[first]) / (last - first)


def farthest(sample: list[int], other: list[int]) -> float:
    """The farthest between two distributions (Kolmogorov and Smirnov), 0 .. 1."""
    import numpy as np

    a, b = np.sort(sample), np.sort(other)
    at = np.concatenate((a, b))
    return float(np.abs(np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)).max())


class Lengths:
    """Replies of log-normal length; a rollout takes as long as its reply says. Remembers what it has played."""

    def __init__(self, seed: int) -> None:
        from stretto.envs.base import SingleTurnEnv, TaskSource
        from stretto.records.rollout import Task

        self.seed = seed
        self.asked: dict[str, int] = {}  # replies so far, by prompt
        self.sampled: list[int] = []  # tokens of every reply
        self.durations: dict[int, float] = {}  # of groups, by draw
        memory = self

        class Env(SingleTurnEnv):
            name = "lengths"

            def tasks(self, split: str) -> TaskSource:
                return TaskSource(lambda i: Task(env=self.name, task_id=str(i), data={"word": str(i)}))

            def prompt(self, task: Task) -> list[dict[str, str]]:
                return [{"role": "user", "content": task.data["word"]}]

            async def score(self, task: Task, text: str) -> float:
                taken = MEDIAN_S * len(text) / MEDIAN_TOKENS
                number = int(task.task_id)
                memory.durations[number] = max(taken, memory.durations.get(number, 0.0))
                memory.sampled.append(len(text) + 1)  # its end is a token too
                await asyncio.sleep(taken)
                return float(len(text) % 7)

        self.env = Env()

    def answer(self, prompt: str, rng: random.Random, version: int) -> str:
        """A reply of the same length for the same member of a draw, whatever the schedule."""
        member = self.asked[prompt] = self.asked.get(prompt, -1) + 1
        length = random.Random(f"{self.seed}/{prompt}/{member}").lognormvariate(0.0, 1.0)
        return "x" * max(1, round(MEDIAN_TOKENS * length))


def play(level: int, given: dict, steps: int, seed: int) -> dict:
    """One run under a virtual clock, and the least times of its rules."""
    from contextlib import AsyncExitStack

    from fakes import CharRenderer, FakeEngine, FakeTrainer, run_virtual
    from orchestrator_runs import config

    from stretto.envs.base import RunInfo
    from stretto.ledger.audit import audit
    from stretto.ledger.reader import LedgerReader
    from stretto.orchestrator.main import UserCode, Wires, build_loop, starting_point

    lengths, ends = Lengths(seed), [0.0]

    class Trainer(FakeTrainer):
        def _emit(self, message) -> None:
            if type(message).__name__ == "StepDone":
                ends.append(asyncio.get_running_loop().time())
            super()._emit(message)

    with tempfile.TemporaryDirectory() as directory:
        shape = {"batch_size": GROUP * GROUPS, "group_size": GROUP, "filter_zero_advantages": False, "seq_len": 4096}
        own = {"env": [{"id": "fakes:EchoEnv", "name": "lengths"}], "max_async_level": level, "max_steps": steps}
        cfg = config(Path(directory), **shape, **own, **given)

        async def run() -> None:
            async with AsyncExitStack() as stack:
                trainer = Trainer(max_steps=steps, step_delay=lambda _: TRAIN_S)
                wires = Wires(FakeEngine(lengths.answer), trainer, trainer)
                code = UserCode(RunInfo(), [lengths.env], None, None, None)
                await build_loop(cfg, wires, CharRenderer(), starting_point(cfg), stack, code).run()

        run_virtual(run())
        assert not audit(cfg.run_dir)
        with LedgerReader(cfg.run_dir) as reader:
            rows = reader.rows("SELECT step, first_version, num_sampled_tokens AS tokens FROM live_rollouts")
            dropped = reader.drops_by_reason()
    trained = [row["tokens"] for row in rows]
    ages = [row["step"] - 1 - row["first_version"] for row in rows]
    durations = [lengths.durations[number] for number in sorted(lengths.durations)]
    is_in_order = given.get("batch_order") != "finished"
    rules = {"level": level, "train_s": TRAIN_S, "steps": steps, "is_in_order": is_in_order}
    first, last = steps // 10, steps - 2 * (level + 1)
    step_s = mean_step(ends, first, last)
    least = least_times(durations, **rules, oldest=cfg.max_off_policy_steps)
    unaged = least_times(durations, **rules)
    return {
        "step_ms": 1e3 * step_s,
        "of_bound": mean_step(least, first, last) / step_s,
        "of_bound_at_any_age": mean_step(unaged, first, last) / step_s,
        "age_mean": statistics.fmean(ages),
        "age_max": max(ages),
        "dropped": sum(dropped.values()),
        "tokens_trained_to_sampled": statistics.fmean(trained) / statistics.fmean(lengths.sampled),
        "distance_of_lengths": farthest(trained, lengths.sampled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 steps of one seed")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 60, args.seeds[:1]
    found = []
    for level, name in itertools.product(args.levels, args.only):
        rows = [play(level, SETTINGS[name], args.steps, seed) for seed in args.seeds]
        row = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        row |= {"age_max": max(row["age_max"] for row in rows)}
        found.append({"level": level, "setting": name} | {key: round(value, 4) for key, value in row.items()})
        print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"benchmark": "asynchrony", "steps": args.steps, "seeds": args.seeds, "rows": found}))


if __name__ == "__main__":
    main()
