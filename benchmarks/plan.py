"""`stretto plan` against real runs: time and staleness of a step, and memory of the trainer, predicted and measured.

    python benchmarks/plan.py [--quick] [--parts memory time] [--runs slow-0 slow-1 slow-4 turns sort] [--measure FILE]

memory: five settings of the trainer, the most that torch's allocator has handed out during a step, and the prediction.
time: three kinds of runs as `rl` starts them (short replies of a warmed-up model; a slow reward at max_async_level 0, 1
and 4; several turns with waits), 40 steps each, 300 of level 4. What pieces of work take on this machine is measured
before, alone and in other programs than the runs: decoding by batch, a row of the trainer by its tokens, a rollout of
the orchestrator, and how much slower two processes are side by side.
The lengths of a workload are given, and for the warmed-up model those of another, shorter run.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import loop  # noqa: E402
import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from stretto.base import process  # noqa: E402
from stretto.base.runtime import keep_freed_memory  # noqa: E402

KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ac": {"ac": {}},
    "ac of the MLP": {"ac": {"mode": "selective", "targets": ["mlp"]}},
    "bfloat16": {"dtype": "bfloat16"},
    "smaller chunk of logits": {"fused_lm_head_token_chunk_size": 256},
}
LATENCY_S = 0.1
GROUP = 8
"""Rollouts of one prompt, which engines and, on a CPU, trainers compute once."""
RUNS = ("slow-0", "slow-1", "slow-4", "turns", "sort")
STEPS, LONGER = 40, {"slow-4": 300}
"""Steps of a run. At level 4 few steps wait, each for one slow rollout, so that a mean over 40 is mostly chance."""


# -- pieces of work on this machine --


def measure(model: Path, reply: int, prompt: int) -> dict[str, Any]:
    """Seconds of pieces of work with this model, as `stretto plan --measured` reads them."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {"decode": _decode(model, reply, prompt), "train": _train(model, prompt, reply)}
    found |= _rollout() | {"cores": _cores(model, prompt, reply)}
    return found | {"prefill_token_s": 0.0, "update_s": 0.002, "publish_s": 0.001, "load_s": 0.005}


def _decode(model: Path, reply: int, prompt: int) -> list[list[float]]:
    """Seconds per token of every sequence, prompts and sampling included, by sequences."""
    from engine import prompts, run_core

    from stretto.inference.embedded.core import CoreSettings, EngineCore
    from stretto.models import hub

    network = hub.load_model(model, dtype=hub.DTYPES["float32"], device="cpu")
    table = []
    for groups in (1, 4, 8, 16, 32):
        core, times = EngineCore(network, CoreSettings()), []
        for i in range(4):
            ids = prompts(groups, network.config.vocab_size, i, prompt)
            start = time.perf_counter()
            run_core(core, str(i), ids, reply, n=GROUP)
            times.append(time.perf_counter() - start)
        table.append([float(GROUP * groups), statistics.median(times[1:]) / reply])
    return table


def _train(model: Path, prompt: int, reply: int) -> list[list[float]]:
    """Seconds of a row, by its tokens; documents are rollouts, in groups of one prompt."""
    table = []
    for num in (8, 64, 128, 256):
        (learner, row), times = _learner_and_row(model, prompt, reply, num), []
        for _ in range(4):
            start = time.perf_counter()
            learner.forward_backward([row])
            learner.optim_step()
            times.append(time.perf_counter() - start)
        table.append([float(num * (prompt + reply)), statistics.median(times[1:])])
    return table


def _learner_and_row(model: Path, prompt: int, reply: int, num: int) -> tuple[Any, Any]:
    """A learner of this model as `rl` has it, and a row of so many rollouts."""
    from trainer import _micro_batch

    from stretto.config.sections.model import ModelSection
    from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, TrainerKeys
    from stretto.models import hub
    from stretto.trainer.learner import Learner

    policy = hub.load_model(model, dtype=hub.DTYPES["float32"], device="cpu")
    optim = AdamWOptim(lr=1e-6)
    learner = Learner(
        policy, model=ModelSection(), optim=optim, scheduler=ConstantScheduler(), max_steps=None,
        loss=TrainerKeys().loss,
    )  # fmt: skip
    rng, vocab = np.random.default_rng(0), policy.config.vocab_size
    prompts = rng.integers(0, vocab, (num // GROUP, prompt), np.int32).repeat(GROUP, 0)
    docs = list(np.concatenate([prompts, rng.integers(0, vocab, (num, reply), np.int32)], 1))
    is_reply = np.tile(np.arange(prompt + reply) >= prompt, num)
    row = msgspec.structs.replace(
        _micro_batch(docs), ce_weights=None, loss_mask=is_reply, rollout_tokens=(reply,) * num,
        logprobs=np.full(len(is_reply), -math.log(vocab), np.float32),
        advantages=rng.standard_normal(len(is_reply)).astype(np.float32),
    )  # fmt: skip
    return learner, row


def _cores(model: Path, prompt: int, reply: int) -> float:
    """How many times faster all cores are than one: the same passes in one process and in one per core."""
    num = process.num_cores()
    alone, together = (_pass_s(model, prompt, reply, count) for count in (1, num))
    return num * min(alone / together, 1.0)


def _pass_s(model: Path, prompt: int, reply: int, num: int) -> float:
    """Seconds of a training pass while so many processes do the same."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(num), context.Queue()
    workers = [context.Process(target=_passes, args=(model, prompt, reply, barrier, times)) for _ in range(num)]
    for worker in workers:
        worker.start()
    found = [times.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    return statistics.mean(found)


def _passes(model: Path, prompt: int, reply: int, barrier: Any, times: Any) -> None:
    """Median seconds of passes over a row of 64 documents, begun when all others are ready."""
    import torch

    keep_freed_memory()
    torch.set_num_threads(1)
    learner, row = _learner_and_row(model, prompt, reply, 64)
    learner.forward_backward([row])
    barrier.wait(120)
    found = []
    for _ in range(8):
        start = time.perf_counter()
        learner.forward_backward([row])
        found.append(time.perf_counter() - start)
    barrier.wait(120)
    times.put(statistics.median(found))


def _rollout() -> dict[str, float]:
    """Seconds of the orchestrator per rollout, real HTTP, wires and ledger included."""
    out = subprocess.run(
        [sys.executable, HERE / "rollout_cost.py", "--quick"], check=True, capture_output=True, text=True
    ).stdout
    found = json.loads(out.splitlines()[-1])
    seconds = 1e-6 * found["cpu_us_per_rollout"]
    # A turn of its own is a request of its own; a group of one turn shares one.
    return {"rollout_s": seconds, "turn_s": 3 * seconds, "step_s": 0.004, "request_s": seconds / 2}


# -- time --


def predicted(config: Path, measured: Path, steps: int, *flags: str) -> dict[str, Any]:
    """What `stretto plan --json` says of a run's config."""
    command = [
        sys.executable, "-m", "stretto", "plan", str(config), "--json", "--no-propose", "--gpu", "CPU", "--measured",
        str(measured), "--simulated-steps", str(steps), *flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)["time"]


def compared(name: str, run: Path, measured: Path, *flags: str) -> dict[str, Any]:
    """One run: step time and staleness, predicted and measured."""
    from stretto.base.paths import RunDir
    from stretto_plan.compare import measured_rows
    from stretto_plan.simulation.run import read_ledger

    rows = measured_rows(run)[loop.WARMUP :]
    real = read_ledger(RunDir(run), int(rows[0]["step"]), int(rows[-1]["step"]))
    plan = predicted(run / "configs" / "run.json", measured, len(rows), *flags)
    times = [row["time/step"] for row in rows]
    step = statistics.mean(times)
    chance = statistics.stdev(times) / math.sqrt(len(times)) / step
    found = {
        "run": name,
        "step_ms": [round(1e3 * plan["step_s"], 1), round(1e3 * step, 1)],
        "step_error": round(plan["step_s"] / step - 1, 3),
        "by_chance": [round(plan["spread"], 3), round(chance, 3)],  # standard errors, as shares
        "staleness_mean": [round(plan["staleness_mean"], 2), round(real.staleness_mean, 2)],
        "staleness_p95": [plan["staleness_p95"], real.staleness_p95],
        "train_ms": [
            round(1e3 * plan["train_s"], 1),
            round(1e3 * statistics.mean(row["trainer/step_s"] - row["trainer/wait_s"] for row in rows), 1),
        ],
    }
    print(json.dumps(found), flush=True)
    return found


def time_part(work: Path, names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    model, found = work / "model", []
    model.mkdir(parents=True, exist_ok=True)
    loop.build_model(model)
    measured = work / "measured.json"
    if set(names) != {"sort"}:
        measured.write_text(json.dumps(measure(model, 32, 29)))
        print(measured.read_text(), flush=True)
    given = ("--prompt-tokens", "29", "--reply-tokens", "32", "--score-s", f"{LATENCY_S}:1")
    slow = json.dumps([{"id": "loop_env:SlowLetters", "args": {"latency_s": LATENCY_S}}])
    for level in (0, 1, 4):
        if f"slow-{level}" in names:
            overrides = ("--orchestrator.env", slow, "--orchestrator.max-async-level", str(level))
            num = LONGER.get(f"slow-{level}", steps) if steps == STEPS else steps
            loop.run_ours(model, work, loop.MAIN, num, f"slow-{level}", *overrides)
            found.append(compared(f"slow reward, level {level}", work / f"slow-{level}", measured, *given))
    if "turns" in names:
        talk = json.dumps([{"id": "loop_env:TalkingLetters", "args": {"num_turns": 3, "latency_s": LATENCY_S}}])
        loop.run_ours(model, work, loop.MAIN, steps, "turns", "--orchestrator.env", talk)
        turns = ("--turns", "3", "--observation-tokens", "29", "--turn-wait-s", f"{LATENCY_S}:1")
        found.append(compared("three turns, level 1", work / "turns", measured, *given, *turns))
    if "sort" in names:
        found.append(sort_letters(work, steps))
    return found


def sort_letters(work: Path, steps: int) -> dict[str, Any]:
    """The example; lengths and the share of groups with signal are those of an earlier run with another seed."""
    examples, env = HERE.parent / "examples" / "sort_letters", {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(verb: str, name: str, *flags: str) -> None:
        words = [verb, "@", str(examples / f"{verb}.toml"), "--output-dir", str(work), "--clean", *flags]
        subprocess.run([sys.executable, "-m", "stretto", *words], check=True, env=env, capture_output=True)

    run("sft", "sort-letters-sft")
    common = ("--no-orchestrator.eval", "--trainer.scheduler.type", "constant", "--no-view")
    for name, num, seed in (("earlier", steps // 2, "7"), ("sort", steps, "8")):
        run("rl", name, "--run.name", name, "--max-steps", str(num), "--seed", seed, *common)
    measured = work / "measured-sort.json"
    measured.write_text(json.dumps(measure(work / "sort-letters-sft" / "weights" / "latest", 7, 18)))
    return compared("sort-letters, level 1", work / "sort", measured, "--from", str(work / "earlier"))


# -- memory --


def memory_part() -> list[dict[str, Any]]:
    """Five settings of the dense model of trainer.py: weights, optimizer and the most that a step adds."""
    return [_one_setting(name, settings) for name, settings in KNOBS.items()]


def _one_setting(name: str, settings: dict[str, Any], tokens: int = 2048) -> dict[str, Any]:
    import torch
    from trainer import _micro_batch, shape_of

    from stretto.config.load import build
    from stretto.config.root import RLConfig
    from stretto.config.sections.model import ModelSection
    from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
    from stretto.models import hub
    from stretto.trainer.learner import Learner
    from stretto_plan.memory import trainer_memory
    from stretto_plan.setup import build_setup

    scratch, vocab = shape_of("dense")
    policy = hub.random_model(scratch, vocab)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(policy.config.hf))
        values = {"model": {"name": directory, **settings}, "seq_len": tokens}
        setup = build_setup(build(RLConfig, values | {"orchestrator": {"env": [{"id": "sort-letters"}]}}))
    plan = trainer_memory(setup, tokens, num_rows=1)
    predicted_bytes = plan.peak.total - setup.hardware.reserved_bytes
    section = ModelSection(**settings)
    policy = policy.to(hub.dtype_of(section.dtype, "cpu"))
    learner = Learner(policy, model=section, optim=AdamWOptim(lr=1e-4), scheduler=ConstantScheduler(), max_steps=None)
    rng = np.random.default_rng(0)
    rows = [_micro_batch([rng.integers(0, vocab, 512).astype(np.int32) for _ in range(tokens // 512)])]
    learner.forward_backward(rows)
    learner.optim_step()
    own = [*policy.parameters(), *learner.network.weights.parameters]
    state = [v for s in learner.network.optimizer.state.values() for v in s.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*own, *state)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        learner.forward_backward(rows)
        learner.optim_step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = max(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]))
    real = sum(storages.values()) + float(peak)
    found = {
        "setting": name,
        "MiB": [round(predicted_bytes / 2**20, 1), round(real / 2**20, 1)],
        "error": round(predicted_bytes / real - 1, 3),
    }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="15 steps, and no warm-up of sort-letters")
    parser.add_argument("--parts", nargs="+", choices=("memory", "time"), default=["memory", "time"])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="of the part `time`")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure pieces of work only, into FILE")
    parser.add_argument("--model", type=Path, help="with --measure: the model's directory")
    args = parser.parse_args()
    keep_freed_memory()  # as engines and trainers do: without it every pass pays for fresh pages
    if args.measure is not None:
        args.measure.write_text(json.dumps(measure(args.model, 32, 32)))
        return
    work = HERE.parent / "build" / "bench-plan"
    result: dict[str, Any] = {"benchmark": "plan", "quick": args.quick}
    if "memory" in args.parts:
        result["memory"] = memory_part()
    if "time" in args.parts:
        names = [name for name in args.runs if name != "sort" or not args.quick]
        result["time"] = time_part(work, names, 15 if args.quick else STEPS)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
