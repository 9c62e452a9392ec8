"""Credit per turn against plain grpo: how many steps does it need to the same reward?

    python benchmarks/turn_credit.py [--seeds 101 102 103] [--arms plain returns states] [--rows FILE] [--dir DIR]

The task is `alphabet-sort` with four turns of two letters: the reward is 1 if all four are right. A network of 0.13M
parameters is warmed up on solved tasks (`sft`), then trained by `rl` with the embedded engine, for STEPS steps with
plain grpo and for SHARE of them with credit per turn. A run's learning rate falls over its own steps. Its figure is
the mean reward of held-out tasks, sampled at temperature 1, after its last step.

`--rows` keeps every run that is done, and those it has are not run again. The table goes to the standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "alphabet_sort"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}

STEPS, SHARE = 100, 0.7
GAME = {"num_turns": 4, "letters_per_turn": 2}
ARMS = {
    "plain": ({}, ""),
    "states": ({}, "--orchestrator.algo.turns.type states"),
    "values": ({}, "--orchestrator.algo.turns.type values"),
    "returns": ({"scores_turns": True}, "--orchestrator.algo.turns.type returns"),
}
SETTINGS = (
    "--orchestrator.batch-size 64 --orchestrator.train.sampling.max-completion-tokens 10 "
    "--orchestrator.eval.num-examples 512 --orchestrator.eval.group-size 2"
)


def stretto(verb: str, *words: str) -> None:
    """Run a verb; its output is shown if it fails."""
    done = subprocess.run([sys.executable, "-m", "stretto", verb, *words], env=ENV, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{verb} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def warm_up(seed: int, directory: Path) -> None:
    """The network of a seed, that has seen solved tasks; nothing if it is there."""
    if (directory / "alphabet-sort-sft" / "weights" / "latest").exists():
        return
    game = json.dumps(GAME)
    words = f"--output-dir {directory} --model.scratch.seed {seed} --max-steps 200".split()
    stretto("sft", "@", str(EXAMPLE / "sft.toml"), *words, "--data.args", game, "--val.data.args", game)


def train(seed: int, arm: str, directory: Path, steps: int, more: str = "") -> dict:
    """One run, as a row."""
    warm_up(seed, directory)
    args, flags = ARMS[arm]
    name = f"{arm}-{steps}"
    envs = json.dumps([{"id": "alphabet-sort", "args": {**GAME, **args}}])
    words = f"--output-dir {directory} --run.name {name} --clean --seed {seed} --max-steps {steps} {SETTINGS}"
    began = time.monotonic()
    stretto("rl", "@", str(EXAMPLE / "rl.toml"), "--orchestrator.eval.interval", str(steps), "--orchestrator.env", envs,
            *f"{words} {flags} {more}".split())  # fmt: skip
    evals = [row for row in rows_of(directory / name) if "eval/alphabet-sort/sampled/mean" in row]
    rewards = [row["eval/alphabet-sort/sampled/mean"] for row in evals]
    return {
        "seed": seed, "arm": arm, "flags": f"{flags} {more}".strip(), "steps": steps, "before": rewards[0],
        "after": rewards[-1], "time_s": round(time.monotonic() - began),
    }  # fmt: skip


def rows_of(run: Path) -> list[dict]:
    """The orchestrator's metrics of a run."""
    return [json.loads(line) for line in (run / "metrics" / "orchestrator.jsonl").open()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain", "returns"])
    parser.add_argument("--steps", type=int, default=STEPS, help="of a plain run")
    parser.add_argument("--flags", default="", help="more flags of all runs but plain ones")
    parser.add_argument("--rows", type=Path, help="file of rows that are done")
    parser.add_argument("--dir", type=Path, help="directory of the runs; a temporary one without it")
    args = parser.parse_args()
    directory = args.dir or Path(tempfile.mkdtemp(prefix="turn-credit-"))
    rows = [json.loads(line) for line in args.rows.open()] if args.rows and args.rows.exists() else []
    for seed in args.seeds:
        for arm in args.arms:
            steps, more = (args.steps, "") if arm == "plain" else (int(SHARE * args.steps), args.flags)
            wanted = (seed, arm, f"{ARMS[arm][1]} {more}".strip(), steps)
            if any((row["seed"], row["arm"], row["flags"], row["steps"]) == wanted for row in rows):
                continue
            rows.append(train(seed, arm, directory / f"seed-{seed}", steps, more))
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    print("| seed | credit | steps | held-out reward | time |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["seed"], row["steps"], row["arm"]), reverse=False):
        change = f"{row['before']:.3f} -> {row['after']:.3f}"
        print(f"| {row['seed']} | {row['arm']} | {row['steps']} | {change} | {row['time_s']} s |")


if __name__ == "__main__":
    main()
