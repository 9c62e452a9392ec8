"""Every algorithm learns: each credit with each loss on two tasks, then losses on stale rollouts.

    python benchmarks/algorithms.py [--quick] [--pairs WHICH] [--credit NAME ...] [--lr RATE] [--task TASK]
                                    [--only PART] [--seed N] [--rows FILE] [--picture FILE]

A network of 0.13M parameters is warmed up on solved tasks (`sft`), then trained by `rl` with the embedded engine, once
for every row of the table: the credits of `CREDITS` with the losses of `LOSSES` (as far as the configuration allows the
pair), the methods that need more than a credit and a loss (`METHODS`), and the control `zero`, which must not learn.
Figures are the mean reward of held-out tasks, sampled at temperature 1, before and after; a row learns when it ends at
least its task's margin above its start. Second part: rollouts up to 8 steps old, with and without correction.

The table goes to the standard output, a heat map and dots to `--picture` (algorithm_pictures.py); the last line is one
JSON object. `--rows` keeps every run that is done, and those it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import algorithm_pictures

ROOT = Path(__file__).resolve().parents[1]
STALE = 8
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}

TASKS = {
    "reverse-text": {"example": "reverse_text", "steps": 50, "margin": 0.1},
    "arithmetic": {"example": "arithmetic", "steps": 300, "margin": 0.03},
}
CREDITS = {
    "grpo": "--orchestrator.algo.type grpo",
    "grpo/std": "--orchestrator.algo.type grpo --orchestrator.algo.normalize-std",
    "dr_grpo": "--orchestrator.algo.type dr_grpo --trainer.loss.reduction constant --trainer.loss.reduction-tokens 8",
    "rloo": "--orchestrator.algo.type rloo",
    "max_rl": "--orchestrator.algo.type max_rl",
    "rae": "--orchestrator.algo.type rae",
    "r++": "--orchestrator.algo.type reinforce_plus_plus",
    "r++baseline": "--orchestrator.algo.type reinforce_plus_plus_baseline",
}
LOSSES = {
    "default": "--trainer.loss.type default",
    "ipo": "--trainer.loss.type ipo",
    "ppo": "--trainer.loss.type ppo --trainer.loss.clip-high 0.28 --trainer.loss.clip-dual 3.0",
    "gspo": "--trainer.loss.type gspo --trainer.loss.clip-low 0.1 --trainer.loss.clip-high 0.1",
    "cispo": "--trainer.loss.type cispo",
    "reinforce": "--trainer.loss.type reinforce",
    "reinforce+tis": "--trainer.loss.type reinforce --trainer.loss.correction.weights.high 2.0",
}
CRITIC = (
    "--orchestrator.algo.type ppo --trainer.loss.type ppo --trainer.advantages.type gae"
    " --trainer.critic.lr 1e-3 --trainer.critic.num-critic-only-steps 10"
)
RETURNS = "--orchestrator.algo.type reinforce_plus_plus --trainer.advantages.type returns --trainer.loss.type ppo"
METHODS = {
    "ppo+critic": CRITIC,
    "ppo+critic, lambda 0.95, KL price": f"{CRITIC} --trainer.advantages.lambd 0.95 --trainer.advantages.kl-coef 0.01",
    "r++ returns, KL price": f"{RETURNS} --trainer.advantages.gamma 0.99 --trainer.advantages.kl-coef 0.01",
    "grpo, 4 updates, old policy": "--trainer.loss.type ppo --no-trainer.loss.use-rollout-logprobs"
    " --trainer.updates-per-step 4",
    "grpo, 2 epochs": "--trainer.loss.type ppo --trainer.epochs-per-step 2 --trainer.optim.lr 5e-4",
    "grpo, reference KL": "--trainer.loss.type ppo --trainer.loss.reference-kl.coef 0.01",
    "grpo, entropy bonus": "--trainer.loss.type ppo --trainer.loss.entropy-coef 0.001",
    "zero (control)": "--orchestrator.algo.type zero --trainer.loss.kl-tau 0",
}
OFF_POLICY = {
    "reinforce": LOSSES["reinforce"],
    "reinforce+tis": LOSSES["reinforce+tis"],
    "reinforce+icepop": "--trainer.loss.type reinforce --trainer.loss.correction.weights.mode mask"
    " --trainer.loss.correction.weights.low 0.5 --trainer.loss.correction.weights.high 2.0",
    "gspo": LOSSES["gspo"],
    "ppo": LOSSES["ppo"],
    "default": LOSSES["default"],
}


def stretto(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "stretto", *words], env=ENV, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"stretto {' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def warm_up(work: Path, task: str, seed: int, *, steps: int | None = None) -> Path:
    """A network that solves some of the tasks; its directory. steps: None for those of the example."""
    name, settings = f"{task}-sft-{seed}", TASKS[task]
    more = () if steps is None else ("--max-steps", str(steps))
    stretto(
        "sft", "@", str(ROOT / "examples" / settings["example"] / "sft.toml"), "--output-dir", str(work),
        "--run.name", name, "--clean", "--seed", str(seed), "--model.scratch.seed", str(seed), *more,
    )  # fmt: skip
    return work / name / "weights" / "latest"


def train(work: Path, task: str, model: Path, name: str, flags: str, *, steps: int, seed: int) -> dict:
    """One run: reward before and after, and the reward of every step."""
    run = "".join(c if c.isalnum() else "-" for c in f"{task}-{name}")
    start = time.perf_counter()
    stretto(
        "rl", "@", str(ROOT / "examples" / TASKS[task]["example"] / "rl.toml"), "--output-dir", str(work),
        "--run.name", run, "--clean", "--seed", str(seed), "--model.name", str(model), "--max-steps", str(steps),
        "--trainer.scheduler.warmup-steps", "10", "--trainer.scheduler.decay-steps", str(steps - 10),
        "--orchestrator.eval.interval", str(steps), "--orchestrator.batch-size", "128", *flags.split(),
    )  # fmt: skip
    summary = json.loads((work / run / "summary.json").read_text())
    lines = (work / run / "metrics" / "orchestrator.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward/mean" in row]
    return {
        "task": task,
        "name": name,
        "before": round(summary["reward_before"], 4),
        "after": round(summary["reward_after"], 4),
        "gain": round(summary["reward_after"] - summary["reward_before"], 4),
        "off_policy_mean": round(statistics.fmean(row["off_policy/mean"] for row in rows), 2),
        "wall_s": round(time.perf_counter() - start, 1),
        "curve": [round(row["reward/mean"], 4) for row in rows],
    }


class Done:
    """The runs that a file has, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.rows = {(row["task"], row["seed"], row["flags"]): row for row in map(json.loads, lines)}

    def once(self, work: Path, task: str, model: Path, *, steps: int, seed: int) -> Callable[[str, str], dict]:
        """A function that trains with some flags, unless that has been done."""

        def run(name: str, flags: str) -> dict:
            flags = " ".join(flags.split())
            if (task, seed, flags) in self.rows:
                return self.rows[task, seed, flags]
            row = train(work, task, model, name, flags, steps=steps, seed=seed)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps(row | {"seed": seed, "flags": flags}) + "\n")
            return row

        return run


def combinations(which: str) -> dict[str, str]:
    """Names and flags of what is tried on both tasks: all, the cross (credits with the default loss, losses with
    grpo, and the methods), the rest of the pairs, or what is quick."""
    if which == "quick":
        return {"grpo x default": "", "zero (control)": METHODS["zero (control)"]}
    pairs = {
        (c, name): (f"{c} x {name}", f"{credit} {loss}")
        for c, credit in CREDITS.items()
        for name, loss in LOSSES.items()
    }
    is_crossed = {pair: pair[0] == "grpo" or pair[1] == "default" for pair in pairs}
    chosen = dict(each for pair, each in pairs.items() if which == "all" or is_crossed[pair] == (which == "cross"))
    return chosen if which == "rest" else chosen | METHODS


def show(results: list[dict], title: str) -> None:
    print(f"\n{title}\n{'':40}{'before':>8}{'after':>8}{'gain':>8}{'steps old':>11}{'seconds':>9}")
    for row in results:
        figures = f"{row['before']:8.3f}{row['after']:8.3f}{row['gain']:+8.3f}{row['off_policy_mean']:11.2f}"
        print(f"{row['task'] + ': ' + row['name']:40}{figures}{row['wall_s']:9.1f}", flush=True)


def draw(results: list[dict], stale: list[dict], path: Path) -> None:
    """The pairs of a credit and a loss, and the losses on stale rollouts as a credit of their own."""
    old = [row | {"name": f"grpo, up to {STALE} steps old x {row['name']}"} for row in stale]
    if cells := algorithm_pictures.cells_of_rows([*results, *old]):
        algorithm_pictures.draw(cells, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one combination and the control on one task")
    parser.add_argument(
        "--pairs",
        choices=["all", "cross", "rest"],
        default="all",
        help="cross: each credit with the default loss, each loss with grpo; rest: all others",
    )
    parser.add_argument("--task", choices=list(TASKS), help="one task")
    parser.add_argument("--only", choices=["combinations", "stale"], help="one part")
    parser.add_argument("--seed", type=int, default=11, help="of the warm-up's network, of tasks and of sampling")
    parser.add_argument("--credit", action="append", choices=list(CREDITS), help="of the pairs, only this one's")
    parser.add_argument("--lr", help="instead of the example's 1e-3")
    parser.add_argument("--rows", type=Path, help="a file of JSON lines, one per run that is done")
    parser.add_argument("--picture", type=Path, help="where to write the picture")
    args = parser.parse_args()
    done = Done(args.rows)
    rate = f"--trainer.optim.lr {args.lr}" if args.lr else ""
    results: list[dict] = []
    stale: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for task in [args.task] if args.task else ["reverse-text"] if args.quick else TASKS:
            steps = 40 if args.quick else TASKS[task]["steps"]
            run = done.once(work, task, warm_up(work, task, args.seed), steps=steps, seed=args.seed)
            if args.only != "stale":
                for name, flags in combinations("quick" if args.quick else args.pairs).items():
                    if args.credit and name.partition(" x ")[0] not in args.credit:
                        continue
                    results.append(run(name, f"{flags} {rate}"))
                    show(results[-1:], "")
                    if args.picture is not None:
                        draw(results, stale, args.picture)
            if args.only == "combinations" or args.quick:
                continue
            old = f"--orchestrator.max-async-level {STALE} --orchestrator.max-off-policy-steps {STALE}"
            for name, flags in OFF_POLICY.items():
                stale.append(run(name, f"{flags} {old} {rate}"))
                show(stale[-1:], f"up to {STALE} steps old")
    show(results, f"all, seed {args.seed}")
    show(stale, f"up to {STALE} steps old, seed {args.seed}")
    if args.picture is not None:
        draw(results, stale, args.picture)
    tried = [row for row in results if "control" not in row["name"]]
    failed = [row for row in tried if row["gain"] < TASKS[row["task"]]["margin"]]
    figures = {
        "seed": args.seed,
        "margin": {task: settings["margin"] for task, settings in TASKS.items()},
        "tried": len(tried),
        "learned": len(tried) - len(failed),
        "did_not_learn": [f"{row['task']}: {row['name']}" for row in failed],
        "control_gain": {row["task"]: row["gain"] for row in results if "control" in row["name"]},
        "rows": [{k: v for k, v in row.items() if k != "curve"} for row in results],
        "stale": [{k: v for k, v in row.items() if k != "curve"} for row in stale],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
