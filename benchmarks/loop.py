"""The whole system: completion tokens per second against TRL's GRPOTrainer, and what asynchrony buys.

    python benchmarks/loop.py [--quick] [--shapes 16x16 64x32 256x64] [--rounds N] [--trl-python PATH]

1. Side by side: a random Qwen3 (2 layers, hidden 64, 64 tokens), so many completions of exactly so many tokens per step
   (16 x 16, 64 x 32, 256 x 64) in groups of 8, AdamW, float32 on the CPU, one thread per process. Ours is inference
   server, orchestrator and trainer as `rl` starts them; TRL is its GRPOTrainer in a virtual environment of its own
   (`--trl-python`, else build/trl, which is made when it is missing). They run in turns, and the ratio is taken round
   by round.
2. Asynchrony (alone: `--levels 0 1 2 4`): the same work with an environment whose latency is log-normal (sigma 1),
   synchronous (max_async_level = 0) and in batches of whoever is done, and how near that is to the least time.

The last line is one JSON object. `ratio_tokens_per_s` and what stands beside it are of 64 x 32; `ratios` has the median
of every shape, `shapes` everything that was measured of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import loop_env
from asynchrony import least_times, mean_step

from stretto.base.paths import RunDir
from stretto.ledger.reader import LedgerReader

HERE = Path(__file__).resolve().parent
CHARACTERS = loop_env.LETTERS + loop_env.LETTERS[:12].upper() + "0123456789\n"
GROUP, WARMUP = 8, 5
OLDEST = 32
"""max_off_policy_steps of asynchronous runs."""


@dataclass(frozen=True)
class Shape:
    """Completions per step, tokens of each, steps of a turn, and the ratio that is aimed at."""

    completions: int
    new_tokens: int
    steps: int
    goal: float

    @property
    def name(self) -> str:
        return f"{self.completions}x{self.new_tokens}"


SHAPES = {s.name: s for s in (Shape(16, 16, 300, 2.0), Shape(64, 32, 150, 3.0), Shape(256, 64, 40, 3.0))}
MAIN = SHAPES["64x32"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def build_model(directory: Path) -> None:
    """A random model in Hugging Face form with a tokenizer of exactly 64 tokens."""
    from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
    from stretto.config.sections.model import ScratchSection
    from stretto.models.hub import random_model, save_hf

    build_letters_tokenizer(directory, CHARACTERS)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == 64, tokenizer.vocab_size
    shape = ScratchSection(hidden_size=64, intermediate_size=192, num_layers=2, max_position_embeddings=4096)
    model = random_model(shape, 64, eos_token_id=tokenizer.eos_token_id)
    save_hf(model, directory, directory)


def trl_python(work: Path) -> Path:
    """The interpreter of TRL's own virtual environment, made on first use."""
    python = work / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", work], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.13.0"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "trl==1.16.0", "transformers>=5.16,<5.20"], check=True)
    return python


def run_trl(python: Path, model: Path, work: Path, shape: Shape, steps: int) -> list[dict]:
    """TRL's step times; one dict per step with wall_s and cpu_s."""
    sizes = [str(shape.completions), str(GROUP), str(shape.new_tokens)]
    command = [python, HERE / "loop_trl.py", model, str(steps), work, *sizes]
    out = subprocess.run(command, check=True, env=ENV, capture_output=True, text=True).stdout
    times = json.loads(out.splitlines()[-1])
    wall, cpu = times["wall"], times["cpu"]
    return [{"wall_s": wall[i] - wall[i - 1], "cpu_s": cpu[i] - cpu[i - 1]} for i in range(max(WARMUP, 1), len(wall))]


def run_ours(model: Path, work: Path, shape: Shape, steps: int, name: str, *overrides: str) -> dict:
    """One `rl` run. Step rows after the warm-up, and the CPU seconds of all its processes per step."""
    command = [
        sys.executable, "-m", "stretto", "rl",
        "--output-dir", str(work), "--run.name", name, "--clean",
        "--model.name", str(model), "--max-steps", str(steps), "--seq-len", "4096",
        "--orchestrator.env", '[{"id": "loop_env:DistinctLetters"}]',
        "--orchestrator.batch-size", str(shape.completions), "--orchestrator.group-size", str(GROUP),
        "--orchestrator.train.sampling.max-completion-tokens", str(shape.new_tokens),
        "--orchestrator.train.sampling.ignore-eos", "--no-orchestrator.filter-zero-advantages",
        "--trainer.optim.lr", "1e-4",
        *overrides,
    ]  # fmt: skip
    before = os.times()
    started = time.perf_counter()
    done = subprocess.run(
        command, env={**ENV, "PYTHONPATH": f"{HERE}:{ENV.get('PYTHONPATH', '')}"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    after = os.times()
    rows = [json.loads(line) for line in (work / name / "metrics" / "orchestrator.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step" in row]
    return {
        "rows": rows[WARMUP:],
        "cpu_s": after.children_user - before.children_user + after.children_system - before.children_system,
        "wall_s": time.perf_counter() - started,
        "steps": steps,
    }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def tokens_per_s(walls: list[float], shape: Shape) -> float:
    return len(walls) * shape.completions * shape.new_tokens / sum(walls)


def side_by_side(python: Path, model: Path, work: Path, shape: Shape, steps: int, rounds: int) -> dict:
    """Completion tokens per second of both, in turns."""
    ratios, ours, theirs = [], [], []
    cpu: list[float] = []
    for i in range(rounds):
        trl = run_trl(python, model, work, shape, steps)
        run = run_ours(model, work, shape, steps, f"side-{shape.name}-{i}")
        walls = [row["time/step"] for row in run["rows"]]
        ratios.append(tokens_per_s(walls, shape) / tokens_per_s([step["wall_s"] for step in trl], shape))
        ours += run["rows"]
        theirs += trl
        # Start-up is paid once: CPU time per step is the difference between a long and a short run.
        short = run_ours(model, work, shape, steps // 2, f"side-{shape.name}-short")
        cpu.append((run["cpu_s"] - short["cpu_s"]) / (steps - steps // 2))
    walls = [row["time/step"] for row in ours]
    trl_walls = [step["wall_s"] for step in theirs]
    return {
        "ratio_tokens_per_s": statistics.median(ratios),
        "ratio_tokens_per_s_rounds": [round(r, 3) for r in ratios],
        "goal": shape.goal,
        "steps": steps,
        "tokens_per_s": tokens_per_s(walls, shape),
        "step_wall_ms_p50": 1e3 * percentile(walls, 0.5),
        "step_wall_ms_p10": 1e3 * percentile(walls, 0.1),
        "step_cpu_ms": 1e3 * statistics.median(cpu),
        "trl_tokens_per_s": tokens_per_s(trl_walls, shape),
        "trl_step_wall_ms_p50": 1e3 * percentile(trl_walls, 0.5),
        "trl_step_wall_ms_p10": 1e3 * percentile(trl_walls, 0.1),
        "trl_step_cpu_ms_p50": 1e3 * percentile([step["cpu_s"] for step in theirs], 0.5),
        "trl_step_cpu_ms_p10": 1e3 * percentile([step["cpu_s"] for step in theirs], 0.1),
        "wait_share_trainer": sum(row["time/wait_for_rollouts"] for row in ours) / sum(walls),
        "wait_share_engine": sum(row["time/wait_for_trainer"] for row in ours) / sum(walls),
    }


def asynchrony(model: Path, work: Path, steps: int, latency_s: float, levels: list[int]) -> dict:
    """Wall time of the same steps under a slow environment, synchronous and asynchronous, beside the least possible.

    The least is computed from what this run's own groups and training steps took, by asynchrony.least_times.
    """
    env = ("--orchestrator.env", json.dumps([{"id": "loop_env:SlowLetters", "args": {"latency_s": latency_s}}]))
    result: dict[str, float] = {"latency_median_s": latency_s}
    for level in levels:
        words = [*env, "--orchestrator.max-async-level", str(level)]
        if level:
            words += ["--orchestrator.batch-order", "finished", "--orchestrator.max-off-policy-steps", str(OLDEST)]
        rows = run_ours(model, work, MAIN, steps, f"async-{level}", *words)["rows"]
        train_s = statistics.mean(r["trainer/step_s"] - r["trainer/wait_s"] for r in rows)
        durations, ends = read_times(RunDir(work / f"async-{level}"))
        rules = {"level": level, "train_s": train_s, "steps": steps, "groups": MAIN.completions // GROUP}
        least = mean_step(least_times(durations, **rules, oldest=OLDEST), WARMUP, steps)
        step_s = mean_step([0.0, *ends], WARMUP, steps)
        result |= {
            f"async_{level}_step_ms": 1e3 * step_s,
            f"async_{level}_training_ms": 1e3 * train_s,
            f"async_{level}_group_ms": 1e3 * statistics.mean(durations),
            f"async_{level}_of_bound": least / step_s,
            f"async_{level}_age": statistics.mean(r["off_policy/mean"] for r in rows),
            f"async_{level}_dropped": sum(r["off_policy/dropped"] for r in rows),
        }
        print(json.dumps(result), flush=True)
    return result


def read_times(run_dir: RunDir) -> tuple[list[float], list[float]]:
    """Seconds of each group, by draw, and when each step ended."""
    with LedgerReader(run_dir) as reader:
        drawn = reader.rows("SELECT drawn_at, finished_at FROM draws WHERE finished_at IS NOT NULL ORDER BY group_id")
        trained = reader.rows("SELECT trained_at FROM batches WHERE state = 'trained' ORDER BY step")
    return [row["finished_at"] - row["drawn_at"] for row in drawn], [row["trained_at"] for row in trained]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds; under a minute")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="completions x tokens")
    parser.add_argument("--rounds", type=int, help="turns of each system; 3, with --quick 1")
    parser.add_argument("--levels", type=int, nargs="+", help="only asynchrony, at these levels")
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL 1.16")
    args = parser.parse_args()
    work = HERE.parent / "build" / "bench-loop"
    model = work / "model"
    model.mkdir(parents=True, exist_ok=True)
    build_model(model)
    if args.levels:
        print(json.dumps(asynchrony(model, work, 40, 0.1, args.levels)))
        return
    (work / "prompts.json").write_text(json.dumps([loop_env.prompt_text(i) for i in range(4096)]))
    python = args.trl_python or trl_python(HERE.parent / "build" / "trl")
    rounds = args.rounds or (1 if args.quick else 3)
    shapes = {}
    for name in [MAIN.name] if args.quick else args.shapes:
        shape = SHAPES[name]
        steps = 25 if args.quick else shape.steps
        shapes[name] = side_by_side(python, model, work, shape, steps, rounds)
        print(name, json.dumps(shapes[name]), flush=True)
    result = {"benchmark": "loop", "quick": args.quick} | shapes.get(MAIN.name, {})
    result["ratios"] = {name: figures["ratio_tokens_per_s"] for name, figures in shapes.items()}
    result["goals"] = {name: SHAPES[name].goal for name in shapes}
    result["shapes"] = shapes
    if not args.quick and MAIN.name in shapes:
        result["asynchrony"] = asynchrony(model, work, 40, 0.1, [0, 1, 2, 4])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
