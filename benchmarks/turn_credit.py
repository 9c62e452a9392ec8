"""Credit per turn against plain grpo: how many steps does it need to the same reward?

    python benchmarks/turn_credit.py [--seeds 101 102 103] [--arms plain returns states] [--rows FILE] [--dir DIR]

The task is `alphabet-sort` with four turns of two letters: the reward is 1 if all four are right. A wrong turn does not
end the episode, unless with `--ends`. A network of 0.13M parameters is warmed up on solved tasks (`sft`). Then it is
trained for STEPS steps with plain grpo, and for SHARE of them with credit per turn; a run's learning rate falls over
its own steps. Both have the settings of examples/alphabet_sort, with 64 rollouts per step. A figure is the mean reward
of 256 held-out tasks, two replies to each, sampled at temperature 1, after a run's last step.

A run is in one process (in_process.py). `--rows` keeps every run that is done, with its curve, and those it has are not
run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from in_process import ROOT, train, warm_up

from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.envs.base import load_environment

EXAMPLE = ROOT / "examples" / "alphabet_sort"

STEPS, SHARE, WARM_UP = 100, 0.7, 150
GAME = {"num_turns": 4, "letters_per_turn": 2}
SETTINGS = "--trainer.optim.lr 3e-4 --orchestrator.batch-size 64 --orchestrator.train.sampling.max-completion-tokens 10"
ARMS: dict[str, tuple[dict[str, bool], str]] = {
    "plain": ({}, ""),
    "states": ({}, "--orchestrator.algo.turns.type states"),
    "values": ({}, "--orchestrator.algo.turns.type values"),
    "returns": ({"scores_turns": True}, "--orchestrator.algo.turns.type returns --orchestrator.algo.turns.gamma 0"),
}


def described(seed: int, arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a row is about."""
    steps = args.steps if arm == "plain" else int(SHARE * args.steps)
    flags = f"{ARMS[arm][1]} {args.flags} {'' if arm == 'plain' else args.credit_flags}".split()
    return {"seed": seed, "arm": arm, "flags": " ".join(flags), "ends": args.ends, "steps": steps}


def run(about: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One run, as a row."""
    game, seed = json.dumps(GAME), str(about["seed"])
    words = ["--model.scratch.seed", seed, "--max-steps", str(WARM_UP), "--data.args", game, "--val.data.args", game]
    weights = warm_up(EXAMPLE / "sft.toml", directory / f"seed-{seed}", words)
    env_args = {**GAME, **ARMS[about["arm"]][0], "goes_on": not about["ends"]}
    given = [
        "--orchestrator.env",
        json.dumps([{"id": "alphabet-sort", "args": env_args}]),
        "--model.name",
        str(weights),
    ]
    more = f"--seed {seed} --max-steps {about['steps']} {SETTINGS} {about['flags']}".split()
    cfg = load(RLConfig, ["@", str(EXAMPLE / "rl.toml"), *given, *more], verb="rl")
    return about | train(cfg, load_environment("alphabet-sort", env_args), num_eval_tasks=256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain", "returns"])
    parser.add_argument("--steps", type=int, default=STEPS, help="of a plain run")
    parser.add_argument("--ends", action="store_true", help="end an episode with its first wrong turn")
    parser.add_argument("--flags", default="", help="more flags of all runs")
    parser.add_argument("--credit-flags", default="", help="more flags of the runs with credit per turn")
    parser.add_argument("--rows", type=Path, help="file of rows that are done")
    parser.add_argument("--dir", type=Path, help="directory of the warm-ups; a temporary one without it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = args.dir or Path(tempfile.mkdtemp(prefix="turn-credit-"))
    rows = [json.loads(line) for line in args.rows.open()] if args.rows and args.rows.exists() else []
    for about in (described(seed, arm, args) for seed in args.seeds for arm in args.arms):
        if any(about.items() <= row.items() for row in rows):
            continue
        rows.append(run(about, directory))
        if args.rows:
            with args.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
    print("| seed | credit | steps | held-out reward | time |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["seed"], -row["steps"], row["arm"])):
        change = f"{row['before']['sampled']:.3f} -> {row['after']['sampled']:.3f}"
        print(f"| {row['seed']} | {row['arm']} | {row['steps']} | {change} | {row['time_s']} s |")


if __name__ == "__main__":
    main()
