"""`[orchestrator.steering]` against every fixed level: seconds until the policy is as good, on three tasks.

    python benchmarks/steering.py [--quick] [--tasks NAME ...] [--seeds 81 82] [--arms 1 2 4 8 steered] [--steps N]
                                  [--latency 0.4] [--at-once 1] [--rows FILE]

A network of 0.13M parameters is warmed up on solved tasks (`sft`), then trained by `rl` with `max_async_level` 1, 2, 4
and 8, and once with steering that begins at 1. Each reward comes after a log-normal wait (sigma 1, median `--latency`
seconds), the same for a task and a member in every run. Learning is real, seconds are those of a virtual clock
(virtual_run.py), so that neither the machine nor what else it does is in them.

What is compared is the time until the reward of a policy's own rollouts has made 70 % of the way that level 1 makes in
its steps. A curve is the isotonic fit of the versions' rewards: the best one that never falls, so that one lucky
version crosses no target. All runs of a task and a seed share their start. How far luck goes is told in two ways: for
one seed by a bootstrap (`DRAWS` times other residuals around the curves, with targets and crossings anew), for all
of them together by their standard error. A ratio whose interval has 1 in it is marked with `~`.

The best of four levels of one seed is partly the luckiest, and nobody knows it before. So a task is also judged by the
means of its seeds' curves: the level that is best for the task against steering, by other draws of the seeds.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import algorithms

TASKS: dict[str, dict[str, Any]] = {
    "reverse-text": {"example": "reverse_text", "sft_steps": 90, "steps": 60},
    "sort-letters": {"example": "sort_letters", "steps": 80},
    "alphabet-sort": {"example": "alphabet_sort", "steps": 100},
}
LEVELS = (1, 2, 4, 8)
STEERED = "steered"
WAY, END = 0.7, 10
"""Share of level 1's way to make; versions whose mean is its end."""
MORE_STEPS = 1.5
"""Times level 1's steps, that other levels have: older rollouts teach less."""
WIDTH, DRAWS = 3, 400
"""Versions on each side whose mean a residual is taken from; draws of a bootstrap."""
COSTS = {"train_s": 0.25, "play_s": 0.03, "load_s": 0.02, "publish_s": 0.02}
CONSTANT = json.dumps({"type": "constant", "warmup_steps": 10})

GRID_S = 2.0
"""Seconds between two points of a mean curve."""

Row = dict[str, Any]
Curve = tuple[list[float], list[float], list[float]]
"""Seconds, reward and number of rollouts of the versions."""


def train(work: Path, task: str, model: Path, arm: str, args: argparse.Namespace, seed: int) -> Row:
    """One run: the reward of each version, and when it was there."""
    steps = args.steps or TASKS[task]["steps"]
    steps = steps if arm == "1" else int(MORE_STEPS * steps)
    steering = ["--orchestrator.steering.max-level", str(max(LEVELS))] if arm == STEERED else []
    words = [
        "--output-dir", str(work), "--run.name", f"{task}-{arm}-{seed}", "--clean", "--seed", str(seed),
        "--model.name", str(model), "--max-steps", str(steps), "--orchestrator.batch-size", "128",
        "--orchestrator.eval", "null", "--trainer.scheduler", CONSTANT, "--ckpt", "null", "--trainer.optim.lr", args.lr,
        "--orchestrator.max-async-level", "1" if arm == STEERED else arm,
        "--orchestrator.max-off-policy-steps", str(max(LEVELS)), *steering,
    ]  # fmt: skip
    config = str(algorithms.ROOT / "examples" / TASKS[task]["example"] / "rl.toml")
    spec = {"config": config, "words": words, "latency_s": args.latency, "seed": seed, **COSTS}
    file = Path(__file__).with_name("virtual_run.py")
    done = subprocess.run(
        [sys.executable, str(file), json.dumps(spec)], env=algorithms.ENV, cwd=algorithms.ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{task}, {arm}, seed {seed}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return {"task": task, "seed": seed, "arm": arm} | json.loads(done.stdout.splitlines()[-1])


# -- curves --


def points(row: Row) -> Curve:
    """The curve of the versions that have rollouts."""
    rows = [each for each in zip(row["at"], row["reward"], row["rollouts"], strict=True) if each[2] > 0]
    at, reward, num = map(list, zip(*rows))
    return at, reward, num


def isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The nearest values that never fall, by least squares: neighbours that fall are pooled."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (a, of_a, num_a), (b, of_b, num_b) = blocks[-2:]
            blocks[-2:] = [((a * of_a + b * of_b) / (of_a + of_b), of_a + of_b, num_a + num_b)]
    return [mean for mean, _, num in blocks for _ in range(num)]


def smooth(values: list[float]) -> list[float]:
    return [statistics.fmean(values[max(0, at - WIDTH) : at + WIDTH + 1]) for at in range(len(values))]


def seconds_to(at: list[float], rewards: list[float], num: list[float], target: float) -> float:
    """Seconds until the fit of some versions' rewards is there; inf if it never is."""
    fit = isotonic(rewards, num)
    return next((seconds for seconds, value in zip(at, fit) if value >= target), math.inf)


def ends_of(curves: dict[str, Curve]) -> tuple[float, float]:
    """The reward at the start of all arms, and at the end of level 1."""
    start = sum(rewards[0] * num[0] for _, rewards, num in curves.values()) / sum(num[0] for *_, num in curves.values())
    return start, statistics.fmean(curves["1"][1][-END:])


def on_grid(curve: Curve, last: float) -> list[float]:
    """The fit of a curve every GRID_S seconds, up to a second."""
    at, fit = curve[0], isotonic(curve[1], curve[2])
    return [fit[max(bisect.bisect_right(at, GRID_S * i) - 1, 0)] for i in range(int(last / GRID_S) + 1)]


def times_of(curves: dict[str, Curve]) -> dict[str, float]:
    """By arm, the seconds to the target, which follows from level 1 and the start of all."""
    start, end = ends_of(curves)
    return {arm: seconds_to(*curve, start + WAY * (end - start)) for arm, curve in curves.items()}


def compare(rows: list[Row], seed: int = 0) -> tuple[dict[str, float], list[dict[str, float]]]:
    """By arm, the seconds to the target; and the same for each draw of the bootstrap."""
    curves = {row["arm"]: points(row) for row in rows}
    rng, draws = random.Random(seed), []
    means = {arm: smooth(rewards) for arm, (_, rewards, _) in curves.items()}
    left = {arm: [a - b for a, b in zip(curves[arm][1], mean)] for arm, mean in means.items()}
    widen = math.sqrt((2 * WIDTH + 1) / (2 * WIDTH))  # a residual is nearer to a mean that it is part of
    for _ in range(DRAWS):
        other = {
            arm: (at, [mean + widen * rng.choice(left[arm]) for mean in means[arm]], num)
            for arm, (at, _, num) in curves.items()
        }
        draws.append(times_of(other))
    return times_of(curves), draws


def ratio(times: dict[str, float], of: str) -> float:
    """Steered over a level; over the best one if `of` is `best`."""
    fixed = {arm: took for arm, took in times.items() if arm != STEERED}
    below = min(fixed.values()) if of == "best" else fixed[of]
    if times[STEERED] == below:  # both at once, or never
        return 1.0
    return times[STEERED] / below if below > 0 else math.inf


def interval(values: list[float]) -> tuple[float, float]:
    """The middle 90 %."""
    ordered = sorted(values)
    return ordered[int(0.05 * len(ordered))], ordered[int(0.95 * len(ordered)) - 1]


def shown(value: float, low: float, high: float) -> str:
    """A ratio and its interval, marked if 1 is in it."""
    return f"{'~' if low <= 1 <= high else ''}{value:.2f} ({low:.2f} to {high:.2f})"


def times_together(curves: dict[str, list[list[float]]], starts: list[float], ends: list[float]) -> dict[str, float]:
    """By arm, the seconds until the mean of the seeds' curves is there; curves: of each arm the seeds', on the grid."""
    target = (1 - WAY) * statistics.fmean(starts) + WAY * statistics.fmean(ends)
    means = {arm: map(statistics.fmean, zip(*own)) for arm, own in curves.items()}
    return {
        arm: next((GRID_S * i for i, mean in enumerate(mean_of) if mean >= target), math.inf)
        for arm, mean_of in means.items()
    }


def report_together(rows: list[Row], seed: int = 0) -> None:
    """Print of each task the times of the means of its seeds' curves, steered over the best level and over level 1."""
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        arms = list(dict.fromkeys(row["arm"] for row in own))
        by_seed = {
            number: {row["arm"]: points(row) for row in own if row["seed"] == number}
            for number in {row["seed"] for row in own}
        }
        by_seed = {number: curves for number, curves in by_seed.items() if set(curves) == set(arms)}
        if len(by_seed) < 2 or not {"1", STEERED} <= set(arms):
            continue
        last = max(at[-1] for curves in by_seed.values() for at, *_ in curves.values())
        found = [
            ({arm: on_grid(curve, last) for arm, curve in curves.items()}, *ends_of(curves))
            for curves in by_seed.values()
        ]

        def times(of: list[Any], arms: list[str] = arms) -> dict[str, float]:
            curves = {arm: [each[0][arm] for each in of] for arm in arms}
            return times_together(curves, [each[1] for each in of], [each[2] for each in of])

        took, rng = times(found), random.Random(seed)
        best = min((arm for arm in arms if arm != STEERED), key=lambda arm: took[arm])
        draws = [times(rng.choices(found, k=len(found))) for _ in range(DRAWS)]
        texts = [
            f"{shown(ratio(took, of), *interval([ratio(draw, of) for draw in draws]))} of level {of}"
            for of in (best, "1")
        ]
        print(
            f"{task}, {len(found)} seeds   {'  '.join(f'{arm}: {took[arm]:.1f}' for arm in arms)}   {', '.join(texts)}"
        )


def report(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Print the times of each task and seed, and the mean ratios of all; by task and seed, the times."""
    found: dict[str, dict[str, float]] = {}
    logs: dict[str, list[float]] = {"best": [], "1": []}
    for task, seed in dict.fromkeys((row["task"], row["seed"]) for row in rows):
        own = [row for row in rows if (row["task"], row["seed"]) == (task, seed)]
        if not {"1", STEERED} <= {row["arm"] for row in own}:
            continue
        times, draws = compare(own)
        found[f"{task}-{seed}"] = times
        # The best level of a draw is the luckiest one, so what is compared with is the best of the measured curves.
        best = min((arm for arm in times if arm != STEERED), key=lambda arm: times[arm])
        texts = []
        for name, of in (("best", best), ("level 1", "1")):
            texts.append(f"{shown(ratio(times, of), *interval([ratio(draw, of) for draw in draws]))} of {name}")
        for key, of in (("best", best), ("1", "1")):
            logs[key].append(math.log(max(ratio(times, of), 1e-9)))
        took = "  ".join(f"{arm}: {seconds:.1f}" for arm, seconds in times.items())
        print(f"{task}, seed {seed}   {took}   {', '.join(texts)} (level {best})", flush=True)
    for key, values in logs.items():
        if len(values) > 1 and all(map(math.isfinite, values)):
            mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
            text = shown(math.exp(mean), math.exp(mean - 2 * error), math.exp(mean + 2 * error))
            print(f"all {len(values)}: {text} of {'the best level' if key == 'best' else 'level 1'}")
    report_together(rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[81, 82])
    parser.add_argument("--arms", nargs="+", default=[*map(str, LEVELS), STEERED])
    parser.add_argument("--steps", type=int, help="of level 1, for all tasks")
    parser.add_argument("--latency", type=float, default=0.4, help="median of the wait, in seconds")
    parser.add_argument("--lr", default="1e-3")
    parser.add_argument("--at-once", type=int, default=1, help="runs that compute at one time")
    parser.add_argument("--models", type=Path, help="a folder that keeps the networks that are warmed up")
    parser.add_argument("--rows", type=Path, help="a file that keeps the runs that are done")
    parser.add_argument("--quick", action="store_true", help="8 steps of one task at two levels: do they run?")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.seeds, args.steps, args.arms = ["sort-letters"], args.seeds[:1], 8, ["1", STEERED]
    algorithms.TASKS |= TASKS
    rows: list[Row] = [json.loads(line) for line in args.rows.open()] if args.rows and args.rows.exists() else []
    done = {(row["task"], row["seed"], row["arm"]) for row in rows}
    wanted = [(task, seed) for seed in args.seeds for task in args.tasks]
    with tempfile.TemporaryDirectory(prefix="stretto-steering-") as folder, ThreadPoolExecutor(args.at_once) as pool:
        work = Path(folder)

        def warm(task: str, seed: int) -> Path:
            kept = (args.models or work) / f"{task}-sft-{seed}" / "weights" / "latest"
            more = {"steps": TASKS[task]["sft_steps"]} if "sft_steps" in TASKS[task] else {}
            return kept if kept.exists() else algorithms.warm_up(args.models or work, task, seed, **more)

        def once(task: str, seed: int, arm: str, model: Path) -> Row:
            row = train(work, task, model, arm, args, seed)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            return row

        missing = [(*each, arm) for each in wanted for arm in args.arms if (*each, arm) not in done]
        models = dict(zip(wanted, pool.map(lambda each: warm(*each), wanted))) if missing else {}
        rows += pool.map(lambda each: once(*each, models[each[:2]]), missing)
    print(json.dumps(report([row for row in rows if (row["task"], row["seed"]) in wanted])))


if __name__ == "__main__":
    main()
