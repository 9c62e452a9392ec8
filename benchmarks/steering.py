"""`[orchestrator.steering]` against every fixed level, on three tasks whose rewards take log-normal time.

    python benchmarks/steering.py [--quick] [--tasks NAME ...] [--seeds 31 32] [--steps 60] [--latency 0.1] [--rows F]

A network of 0.13M parameters is warmed up on solved tasks (`sft`), then trained by `rl` with `max_async_level` 1, 2, 4
and 8, and once with steering that begins at 1. Each reward comes after a wait (sigma 1, median `--latency` seconds),
the same for a task and a member in every run. What is compared is the time until the training reward, the mean of ten
steps, has made 70 % of the way that level 1 makes in `--steps` steps; time is counted from the first step. The rate is
constant, so that no run is at another place of a schedule, and each run but that of level 1 ends when its reward is
there, or after one and a half times level 1's seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import algorithms

from stretto.envs.base import RolloutContext, RolloutResult, Split, TaskSource, load_environment
from stretto.records.rollout import Task

TASKS = {name: {"example": name.replace("-", "_")} for name in ("reverse-text", "sort-letters", "alphabet-sort")}
LEVELS = (1, 2, 4, 8)
STEERED = "steered"
PREFIX: list[str] = []
"""What runs of `rl` are started with, such as `nice`."""
WAY, SMOOTH = 0.7, 10
MOST_TIME = 1.5
"""Times the seconds of level 1."""
CONSTANT = json.dumps({"type": "constant", "warmup_steps": 10})


class Slow:
    """An environment whose rewards come later."""

    def __init__(self, of: str, args: dict[str, Any], latency_s: float) -> None:
        self.of = load_environment(of, args)
        self.name, self.latency_s = self.of.name, latency_s

    def tasks(self, split: Split) -> TaskSource:
        return self.of.tasks(split)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        result = await self.of.rollout(task, ctx)
        source = random.Random(f"{task.task_id} {ctx.episode.member}")
        await asyncio.sleep(self.latency_s * source.lognormvariate(0.0, 1.0))
        return result


def train(
    work: Path, task: str, model: Path, arm: str, args: argparse.Namespace, seed: int, first: dict[str, Any] | None
) -> dict[str, Any]:
    """One run: seconds and reward of every step, and how old its rollouts were. first: that of level 1."""
    name = f"{task}-{arm}-{seed}"
    level = "1" if arm == STEERED else arm
    steering = ["--orchestrator.steering.max-level", str(max(LEVELS))] if arm == STEERED else []
    config = algorithms.ROOT / "examples" / TASKS[task]["example"] / "rl.toml"
    [of] = tomllib.loads(config.read_text())["orchestrator"]["env"]
    slow = {"of": of["id"], "args": of.get("args", {}), "latency_s": args.latency}
    steps = args.steps if first is None else 10 * args.steps
    words = [
        "rl", "@", str(config),
        "--output-dir", str(work), "--run.name", name, "--clean", "--seed", str(seed), "--model.name", str(model),
        "--max-steps", str(steps), "--orchestrator.batch-size", "128", "--orchestrator.eval", "null",
        "--trainer.scheduler", CONSTANT, "--ckpt", "null",
        "--orchestrator.max-async-level", level, "--orchestrator.max-off-policy-steps", str(max(LEVELS)),
        "--orchestrator.env", json.dumps([{"id": "steering:Slow", "args": slow}]), *steering,
    ]  # fmt: skip
    run = subprocess.Popen(
        [*PREFIX, sys.executable, "-m", "stretto", *words], env=algorithms.ENV, cwd=algorithms.ROOT,
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    row = {"task": task, "seed": seed, "arm": arm}
    file = work / name / "metrics" / "orchestrator.jsonl"
    while run.poll() is None:
        time.sleep(0.5)
        if first is not None and (is_there(found := row | columns(file), first) or sum(found["seconds"]) > most(first)):
            os.killpg(run.pid, signal.SIGINT)
            break
    if run.wait() and first is None:
        raise SystemExit(f"stretto {' '.join(words)} ended with status {run.returncode}")
    return row | columns(file)


def columns(file: Path) -> dict[str, list[float]]:
    """Seconds, reward and age of each step so far."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    rows = [row for row in rows if "time/step" in row and row["step"] > 0]
    return {
        "seconds": [round(row["time/step"], 4) for row in rows],
        "reward": [round(row["reward/mean"], 4) for row in rows],
        "age": [round(row["off_policy/mean"], 2) for row in rows],
    }


def smoothed(reward: list[float]) -> list[float]:
    return [statistics.fmean(reward[max(0, at - SMOOTH + 1) : at + 1]) for at in range(len(reward))]


def seconds_to(row: dict[str, Any], target: float) -> float:
    """Seconds until the smoothed reward is there for the first time; inf if it never is."""
    took = 0.0
    for at, (reward, seconds) in enumerate(zip(smoothed(row["reward"]), row["seconds"])):
        took += seconds
        if at >= SMOOTH - 1 and reward >= target:
            return took
    return float("inf")


def target_of(first: dict[str, Any]) -> float:
    """The reward to reach, which follows from level 1."""
    start, end = statistics.fmean(first["reward"][:3]), smoothed(first["reward"])[-1]
    return start + WAY * (end - start)


def is_there(row: dict[str, Any], first: dict[str, Any]) -> bool:
    return seconds_to(row, target_of(first)) < float("inf")


def most(first: dict[str, Any]) -> float:
    """Seconds after which a run is given up."""
    return MOST_TIME * sum(first["seconds"])


def compare(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By arm, the seconds to the target."""
    [first] = [row for row in rows if row["arm"] == "1"]
    return {row["arm"]: seconds_to(row, target_of(first)) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[31, 32])
    parser.add_argument("--steps", type=int, default=60, help="of level 1")
    parser.add_argument("--latency", type=float, default=0.1, help="median of the wait, in seconds")
    parser.add_argument("--rows", type=Path, help="a file that keeps the runs that are done")
    parser.add_argument("--quick", action="store_true", help="15 steps of one task at two levels: do they run?")
    args = parser.parse_args()
    arms = [*map(str, LEVELS), STEERED]
    if args.quick:
        args.tasks, args.steps, arms = args.tasks[:1], 15, ["1", STEERED]
    algorithms.ENV["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{algorithms.ENV['PYTHONPATH']}"
    algorithms.TASKS |= TASKS
    known = [json.loads(line) for line in args.rows.open()] if args.rows and args.rows.exists() else []
    found = {}
    with tempfile.TemporaryDirectory(prefix="stretto-steering-") as folder:
        for seed in args.seeds:
            for task in args.tasks:
                model: Path | None = None
                rows = [row for row in known if (row["task"], row["seed"]) == (task, seed)]
                for arm in arms:
                    if any(row["arm"] == arm for row in rows):
                        continue
                    model = model or algorithms.warm_up(Path(folder), task, seed)
                    first = next((row for row in rows if row["arm"] == "1"), None)
                    rows.append(train(Path(folder), task, model, arm, args, seed, first))
                    if args.rows:
                        with args.rows.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
                times = compare(rows)
                fixed = {arm: took for arm, took in times.items() if arm != STEERED}
                best = min(fixed, key=lambda arm: fixed[arm])
                found[f"{task}-{seed}"] = times
                text = "  ".join(f"{arm}: {took:.1f} s" for arm, took in times.items())
                print(f"{task}, seed {seed}   {text}   {times[STEERED] / times[best]:.2f} of level {best}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
