"""Seconds of training until held-out tasks are solved: stretto beside TRL's GRPOTrainer.

    python benchmarks/time_to_reward.py [--quick] [--trl-python PATH] [--seed N ...] [--rows FILE]
                                        [--steps N] [--rate linear|constant]

The task is the demo's, sort-letters with an exact-match reward. For every seed a network of 0.13M parameters is warmed
up (`sft`), and both train that one checkpoint, one after the other, each first in turn: 256 completions of at most 8
tokens per step in groups of 8, AdamW with the same clipping and rates (20 steps up, then linearly to 0), no KL to a
reference model, rewards less their group's mean, float32, one thread per process. With `--rate constant` the rate stays
where it is after 20 steps. TRL runs in a virtual environment of its own (`--trl-python`, else build/trl, see loop.py);
ours is `rl` with examples/sort_letters/rl.toml. What differs is left as each has it: ours samples for the next step
while it trains, draws other tasks for groups without signal, and is three processes.

Both export their weights every EXPORT_EVERY steps. Afterwards transformers' `generate` samples 4 replies to each of 256
held-out tasks from every export, and a system has arrived with the first export whose mean reward is TARGET; `levels`
says the same of rewards on the way. `train_s`
counts from the first draw (TRL: the beginning of `train`), `wall_s` from the start of the command. Ours contains the
exports, TRL's does not. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import loop

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "sort_letters"
TARGET, EXPORT_EVERY, STEPS = 0.9, 20, 360
LEVELS = (0.5, 0.6, 0.75)  # on the way
HELD_OUT, REPLIES, MAX_TOKENS = 256, 4, 8
ENV = {**loop.ENV, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}


def run(command: list, cwd: Path = ROOT) -> str:
    done = subprocess.run(list(map(str, command)), env=ENV, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def warm_up(work: Path, seed: int) -> Path:
    """A network that solves some of the tasks when sampled; its directory."""
    run(
        [sys.executable, "-m", "stretto", "sft", "@", EXAMPLE / "sft.toml", "--output-dir", work,
         "--run.name", f"sft-{seed}", "--clean", "--seed", seed, "--model.scratch.seed", seed]
    )  # fmt: skip
    return (work / f"sft-{seed}" / "weights" / "latest").resolve()


def tasks(split: str, count: int) -> list[dict[str, str]]:
    """Prompts and answers of sort-letters."""
    from stretto.envs.bundled.sort_letters import SortLetters

    env = SortLetters()
    source = env.tasks(split)
    letters = [source.task(index).data["letters"] for index in range(count)]
    return [{"prompt": text, "answer": "".join(sorted(text))} for text in letters]


# -- one run of each --


def run_ours(model: Path, work: Path, seed: int, steps: int, rate: str) -> dict:
    """Exports and their times of one `rl` run."""
    name, started = f"ours-{seed}", time.time()
    decay_steps = steps - 20 if rate == "linear" else 0
    run(
        [sys.executable, "-m", "stretto", "rl", "@", EXAMPLE / "rl.toml", "--output-dir", work, "--run.name", name,
         "--clean", "--seed", seed, "--model.name", model, "--max-steps", steps,
         "--trainer.scheduler.warmup-steps", 20,
         "--trainer.scheduler.decay-steps", decay_steps, "--ckpt.weights.interval", EXPORT_EVERY,
         "--no-orchestrator.eval"]
    )  # fmt: skip
    lines = (work / name / "metrics" / "orchestrator.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row]
    exports, train_s = [], 0.0
    for step, row in enumerate(rows, start=1):
        train_s += row["time/step"]
        directory = work / name / "weights" / f"step_{step}"
        if step % EXPORT_EVERY == 0:
            wall_s = (directory / "model.safetensors").stat().st_mtime - started
            exports.append({"step": step, "train_s": train_s, "wall_s": wall_s, "directory": str(directory)})
    return {"exports": exports, "curve": [round(row["reward/mean"], 4) for row in rows]}


def run_trl(python: Path, model: Path, work: Path, seed: int, steps: int, rate: str) -> dict:
    """The same of TRL."""
    directory, started = work / f"trl-{seed}", time.time()
    directory.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("time_to_reward_trl.py")
    out = run([python, script, model, steps, directory, seed, EXPORT_EVERY, work / "tasks.json", rate])
    found = json.loads(out.splitlines()[-1])
    for export in found["exports"]:
        export["wall_s"] = export.pop("at") - started
    return found


# -- held-out reward of an export --


def held_out_reward(directory: str) -> float:
    """Mean reward of replies sampled at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM

    from stretto.chat.render import build_renderer
    from stretto.chat.tokenizer import load_tokenizer

    torch.manual_seed(0)
    renderer = build_renderer(directory, model_type="qwen3")
    tokenizer = load_tokenizer(directory)
    held_out = tasks("eval", HELD_OUT)
    prompts = [renderer.render_prompt([{"role": "user", "content": task["prompt"]}]) for task in held_out]
    assert len({len(ids) for ids in prompts}) == 1, "prompts of several lengths need padding"
    ids = torch.tensor([ids.tolist() for ids in prompts]).repeat_interleave(REPLIES, 0)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=list(renderer.stop_ids),
        pad_token_id=renderer.stop_ids[-1],
    )
    answers = [task["answer"] for task in held_out for _ in range(REPLIES)]
    correct = 0
    for reply, answer in zip(out[:, ids.shape[1] :].tolist(), answers):
        end = next((at for at, token in enumerate(reply) if token in renderer.stop_ids), None)
        correct += tokenizer.decode(reply[:end]).strip() == answer
    return correct / len(answers)


def arrival(exports: list[dict], start: float, target: float) -> dict:
    """Held-out reward of every export, and when the first came that has the target."""
    for export in exports:
        export["reward"] = round(held_out_reward(export.pop("directory")), 4)
        export["train_s"], export["wall_s"] = round(export["train_s"], 2), round(export["wall_s"], 2)

    def first(level: float) -> dict | None:
        return next((export for export in exports if export["reward"] >= level), None)

    return {
        "reached": first(target),
        "levels": {str(level): first(level) for level in LEVELS if level > start},
        "held_out": exports,
    }


def one_seed(args: argparse.Namespace, python: Path, work: Path, seed: int, *, is_ours_first: bool) -> dict:
    model = warm_up(work, seed)
    start = held_out_reward(str(model))
    row: dict = {"seed": seed, "steps": args.steps, "rate": args.rate, "reward_start": round(start, 4)}
    for system in ("stretto", "trl") if is_ours_first else ("trl", "stretto"):
        given = (model, work, seed, args.steps, args.rate)
        found = run_ours(*given) if system == "stretto" else run_trl(python, *given)
        row[system] = arrival(found["exports"], start, args.target)
        print(f"seed {seed}, {system}: {row[system]['reached']}, end {found['exports'][-1]}", flush=True)
    ours, theirs = row["stretto"], row["trl"]
    row["ratio_train_s"] = ratio(ours["reached"], theirs["reached"])
    row["ratio_levels"] = {level: ratio(ours["levels"][level], theirs["levels"][level]) for level in ours["levels"]}
    return row


def ratio(ours: dict | None, theirs: dict | None) -> float | None:
    """How many times sooner ours came; None where one did not."""
    return round(theirs["train_s"] / ours["train_s"], 2) if ours and theirs else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, a target that they reach")
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL 1.16")
    parser.add_argument("--seed", type=int, action="append", help="of warm-up, tasks and sampling; 71, 72, 73")
    parser.add_argument("--rows", type=Path, help="a file of JSON lines, one per seed that is done")
    parser.add_argument("--steps", type=int, help=f"{STEPS}")
    parser.add_argument("--rate", choices=["linear", "constant"], default="linear")
    args = parser.parse_args()
    args.steps = args.steps or (40 if args.quick else STEPS)
    args.target = 0.3 if args.quick else TARGET
    work = ROOT / "build" / "bench-time-to-reward"
    work.mkdir(parents=True, exist_ok=True)
    (work / "tasks.json").write_text(json.dumps(tasks("train", 32 * args.steps)))
    python = args.trl_python or loop.trl_python(ROOT / "build" / "trl")
    seeds = args.seed or ([71] if args.quick else [71, 72, 73])
    lines = args.rows.read_text().splitlines() if args.rows and args.rows.exists() else []
    done = {(row["seed"], row["steps"], row["rate"]): row for row in map(json.loads, lines)}
    rows = []
    for turn, seed in enumerate(seeds):
        row = done.get((seed, args.steps, args.rate))
        if row is None:
            row = one_seed(args, python, work, seed, is_ours_first=turn % 2 == 0)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(row)
    ratios = [row["ratio_train_s"] for row in rows if row["ratio_train_s"] is not None]
    result = {
        "benchmark": "time_to_reward",
        "quick": args.quick,
        "target": args.target,
        "ratio_train_s": statistics.median(ratios) if ratios else None,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
