"""Does a student become its teacher? Distillation of tiny models over several seeds.

A teacher learns sort-letters by supervised fine-tuning; students that have seen less of it, each from a seed of its
own, are then trained with `opd` (their own rollouts, scored by the teacher: the sampled tokens, or its 8 likeliest
besides, by either divergence), `sft` (the teacher's rollouts) and `grpo` (rewards, for comparison), by `stretto rl`,
which starts the teacher's engine. The students of `opsd` (themselves, shown the answer) have learned to copy an answer
that they are shown, and little else. Reported: the teacher's KL and the held-out reward, before and after.

    python benchmarks/distillation.py [--quick] [--algos opd opd-reverse opd-forward]
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
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
LETTERS = 4
TEACHER_STEPS, STUDENT_STEPS = 400, 80  # of fine-tuning
ALGOS = ("opsd", "opd", "opd-reverse", "opd-forward", "sft", "grpo")
TOP_K = 8
SORT = {"id": "sort-letters", "args": {"num_letters": LETTERS}}
SHOWN = {"id": "distillation_env:ShownLetters", "args": {"num_letters": LETTERS, "shown": 9}}
SHOWN_STEPS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, opd alone, few steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--algos", nargs="+", choices=ALGOS, default=ALGOS)
    args = parser.parse_args()
    seeds, steps = (1, 12) if args.quick else (args.seeds, args.steps)
    algos = ("opd",) if args.quick else args.algos
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        teacher = warm_up(directory / "teacher", 150 if args.quick else TEACHER_STEPS, seed=100)
        runs: list[dict[str, Any]] = []
        for seed in range(seeds):
            student = warm_up(directory / f"student_{seed}", 40 if args.quick else STUDENT_STEPS, seed=seed)
            for algo in algos:
                mine = student
                if algo == "opsd":
                    mine = warm_up(directory / f"shown_{seed}", SHOWN_STEPS, seed=seed, env=SHOWN)
                runs.append(distil(directory / f"{algo}_{seed}", algo, mine, teacher, seed, steps))
                print(json.dumps(runs[-1]), flush=True)
    figures = {"steps": steps, "seconds": round(time.perf_counter() - started, 1)}
    for algo in algos:
        mine = [run for run in runs if run["algo"] == algo]
        figures[algo] = {key: [run[key] for run in mine] for key in mine[0] if key not in ("algo", "seed")}
    print(json.dumps(figures))


def warm_up(directory: Path, steps: int, seed: int, env: dict[str, Any] | None = None) -> Path:
    """A model of 0.13M parameters after so many steps of fine-tuning on solved tasks."""
    run(
        directory,
        "sft",
        max_steps=steps,
        seq_len=2048,
        num_threads=1,
        seed=seed,
        model={"scratch": {"hidden_size": 64, "num_layers": 2}},
        data={"type": "environment", "num_rows": 4096} | (env or SORT),
        optim={"lr": 2e-3},
        scheduler={"type": "constant", "warmup_steps": 20},
    )
    return directory / "run" / "weights" / "latest"


def distil(directory: Path, algo: str, student: Path, teacher: Path, seed: int, steps: int) -> dict[str, Any]:
    """One run; where it began and where it ended."""
    kind, _, divergence = algo.partition("-")
    several = {"top_k": TOP_K, "divergence": divergence} if divergence else {}
    orchestrator: dict[str, Any] = {
        "batch_size": 128,
        "group_size": 4,
        "algo": {"type": kind} | several,
        "train": {"sampling": {"max_completion_tokens": LETTERS + 2}},
        "env": [SORT],
        "eval": {"num_examples": 256, "greedy": False},
    }
    if kind in ("opd", "sft"):
        orchestrator["teacher"] = {"model": str(teacher)}
    if algo == "opsd":
        orchestrator["algo"] |= {"template": "{demonstration}"}
    run(
        directory,
        "rl",
        max_steps=steps,
        seq_len=256,
        seed=seed,
        model={"name": str(student)},
        orchestrator=orchestrator,
        trainer={"optim": {"lr": 3e-4 if algo == "opsd" else 1e-3}},
    )
    summary = json.loads((directory / "run" / "summary.json").read_text())
    rows = (directory / "run" / "metrics" / "orchestrator.jsonl").read_text().splitlines()
    metrics = [json.loads(row) for row in rows]
    found = {
        "algo": algo,
        "seed": seed,
        "reward_before": round(summary["reward_before"], 3),
        "reward_after": round(summary["reward_after"], 3),
    }
    for name, key in (("teacher_kl", "teacher_kl/mean"), ("nll", "nll/mean")):
        values = [row[key] for row in metrics if key in row]
        if values:
            tenth = max(len(values) // 10, 1)
            found[f"{name}_first"] = round(sum(values[:tenth]) / tenth, 3)
            found[f"{name}_last"] = round(sum(values[-tenth:]) / tenth, 3)
    return found


def run(directory: Path, verb: str, **settings: Any) -> None:
    """A verb on a config file, to its end."""
    directory.mkdir(parents=True)
    settings |= {"output_dir": str(directory), "run": {"name": "run"}}
    file = directory / "config.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    path = os.pathsep.join(filter(None, [str(SOURCE), str(HERE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "stretto", verb, "@", str(file)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{verb} in {directory} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


if __name__ == "__main__":
    main()
