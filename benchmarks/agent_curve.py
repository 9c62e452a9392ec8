"""Learning through the gateway, beside an environment of stretto that asks for the same.

    python benchmarks/agent_curve.py [--seeds 101 102 103] [--rows FILE] [--dir DIR]

The task is that of examples/agent: products of two numbers, with a tool. With `agent` each rollout is a program that
asks over HTTP; with `calculator` stretto plays. Both have the records of examples/agent in the same order, the same
start (WARM_UP steps of `sft`), seeds and settings: those of examples/calculator with fewer rollouts per step, all of
which are trained, and a smaller rate. The columns are the mean reward of the 128 held-out records, two replies to each
at temperature 1, and the likeliest reply; that of the start is measured once.

A run is in one process (in_process.py), beside the programs. `--rows` keeps every run that is done, with its curve,
and those it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from in_process import ROOT, train, warm_up

from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.envs.base import Split, TaskSource, load_environment
from stretto.envs.bundled.calculator import Calculator
from stretto.records.rollout import Task

EXAMPLES = ROOT / "examples"
STEPS, WARM_UP = 120, 160
SETTINGS = "--orchestrator.batch-size 24 --trainer.optim.lr 2e-4"
PROGRAM = [sys.executable, str(EXAMPLES / "agent" / "program.py"), "{prompt}"]
ARGS = {
    "command": PROGRAM,
    "path": str(EXAMPLES / "agent" / "records.jsonl"),
    "eval_path": str(EXAMPLES / "agent" / "held_out.jsonl"),
    "max_turns": 10,
    "timeout_s": 60.0,
}


class Products(Calculator):
    """calculator, with the records of the example of agents as its tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.records = load_environment("agent", ARGS)

    def tasks(self, split: Split) -> TaskSource:
        source = self.records.tasks(split)

        def make(index: int) -> Task:
            task = source.make(index)
            text = task.data["prompt"][-1]["content"].removesuffix("=")
            return Task(env=self.name, task_id=task.task_id, data={"product": text})

        return TaskSource(make, source.num_tasks)


def run(about: dict[str, Any], directory: Path, before: dict[str, float] | None) -> dict[str, Any]:
    """One run, as a row. before: what the same weights have got already."""
    seed, warm_up_steps = str(about["seed"]), str(about["warm_up"])
    words = ["--model.scratch.seed", seed, "--max-steps", warm_up_steps]
    weights = warm_up(EXAMPLES / "calculator" / "sft.toml", directory / f"seed-{seed}-{warm_up_steps}", words)
    given = ["@", str(EXAMPLES / "calculator" / "rl.toml"), "--model.name", str(weights), "--seed", seed]
    more = f"--max-steps {about['steps']} {SETTINGS} {about['flags']}".split()
    env = Products() if about["arm"] == "calculator" else load_environment("agent", ARGS)
    return about | train(load(RLConfig, [*given, *more], verb="rl"), env, num_eval_tasks=128, before=before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--arms", nargs="+", choices=("calculator", "agent"), default=["calculator", "agent"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps of the warm-up")
    parser.add_argument("--flags", default="", help="more flags of all runs")
    parser.add_argument("--rows", type=Path, help="file of rows that are done")
    parser.add_argument("--dir", type=Path, help="directory of the warm-ups; a temporary one without it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = args.dir or Path(tempfile.mkdtemp(prefix="agent-curve-"))
    rows = [json.loads(line) for line in args.rows.open()] if args.rows and args.rows.exists() else []
    shared = {"flags": args.flags, "warm_up": args.warm_up, "steps": args.steps}
    for about in ({"seed": seed, "arm": arm} | shared for seed in args.seeds for arm in args.arms):
        if any(about.items() <= row.items() for row in rows):
            continue
        start = {key: about[key] for key in ("seed", "warm_up")}
        before = next((row["before"] for row in rows if start.items() <= row.items()), None)
        rows.append(run(about, directory, before))
        if args.rows:
            with args.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
    print("| seed | environment | steps | sampled | greedy | time |\n|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["seed"], row["arm"])):
        change = " | ".join(f"{row['before'][kind]:.3f} -> {row['after'][kind]:.3f}" for kind in ("sampled", "greedy"))
        print(f"| {row['seed']} | `{row['arm']}` | {row['steps']} | {change} | {row['time_s']} s |")


if __name__ == "__main__":
    main()
