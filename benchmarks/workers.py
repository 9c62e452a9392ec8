"""What an environment in worker processes costs, next to one in the orchestrator's own, and a verifiers taskset.

    python benchmarks/workers.py [--quick]

Rollouts of bundled environments of one turn and of several are played against an engine that answers at once, in
this process; figures are CPU milliseconds per rollout of this process and of the workers, medians of rounds that
take turns. Then a worker is killed: the time until a rollout that was lost with it has been played again. With the
extra verifiers, a taskset of one turn is played too. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np

from stretto.config.sections.model import RendererSection, ScratchSection
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import Environment, load_environment
from stretto.envs.workers.pool import WorkerEnv, open_workers
from stretto.orchestrator.build import build_scratch_renderer
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, GenerateRequest

SEQ_LEN = 4096
GROUP_SIZE = 8
TASKSET = """
import verifiers.v1 as vf


class WordTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        return [WordTask(vf.TaskData(prompt="abcdef"), self.config.task) for _ in range(1000)]


__all__ = ["WordTaskset"]
"""


class Instant:
    """An engine that answers every request at once with the same six letters."""

    def __init__(self, tokens: list[int]) -> None:
        self.completion = Completion(
            token_ids=np.array(tokens, np.int32), logprobs=np.full(len(tokens), -0.5, np.float32), finish_reason="stop"
        )

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        await asyncio.sleep(0)
        return [self.completion] * request.n


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all threads."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def used(env: Environment) -> tuple[float, float]:
    """CPU seconds of this process and of the environment's workers."""
    workers = env.pool.workers if isinstance(env, WorkerEnv) else []
    return time.process_time(), sum(cpu_s(worker.child.pid) for worker in workers)


async def play(player: Player, env: Environment, first: int, num_groups: int) -> int:
    """Play groups side by side; how many rollouts that were."""
    source = env.tasks("train")
    draws = [Draw(i, source.task(i), GROUP_SIZE, version=0) for i in range(first, first + num_groups)]
    groups = await asyncio.gather(*(player.play(env, draw) for draw in draws))
    errors = [rollout.error for group in groups for rollout in group.rollouts if rollout.error]
    assert not errors, errors[0]
    return num_groups * GROUP_SIZE


async def measure(player: Player, cases: dict[str, Environment], rounds: int, num_groups: int) -> dict[str, Any]:
    """Medians over rounds in which the cases take turns; the first round is warming up."""
    samples: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for round_number in range(rounds + 1):
        for name, env in cases.items():
            before, started = used(env), time.perf_counter()
            count = await play(player, env, round_number * num_groups, num_groups)
            wall_s, after = time.perf_counter() - started, used(env)
            samples[name].append(((after[0] - before[0]) / count, (after[1] - before[1]) / count, count / wall_s))
    figures = {}
    for name, rows in samples.items():
        own, workers, rate = (statistics.median(column) for column in zip(*rows[1:]))
        figures[name] = {
            "own_cpu_ms": round(own * 1e3, 3),
            "workers_cpu_ms": round(workers * 1e3, 3),
            "rollouts_per_s": round(rate, 1),
        }
    return figures


async def time_of_recovery(player: Player, rounds: int) -> float:
    """Seconds from the death of the only worker until a new one has played a group; the median."""
    times = []
    env = open_workers("reverse-text", {}, "recovery", num_workers=1)
    assert isinstance(env, WorkerEnv)
    try:
        for number in range(rounds):
            await play(player, env, number, 1)
            os.kill(env.pool.workers[0].child.pid, signal.SIGKILL)
            started = time.perf_counter()
            await play(player, env, number, 1)
            times.append(time.perf_counter() - started)
    finally:
        await env.close()
    return round(statistics.median(times), 3)


async def run(rounds: int, num_groups: int, directory: str) -> dict[str, Any]:
    renderer = build_scratch_renderer(ScratchSection(), RendererSection())
    tokenizer = renderer.tokenizer
    engine = Instant([*tokenizer.encode("abcdef"), tokenizer.eos_ids[0]])
    player = Player(engine, renderer, SamplingSection(), seq_len=SEQ_LEN, max_retries=8)
    cases: dict[str, Environment] = {}
    for env_id in ("reverse-text", "alphabet-sort"):
        cases[f"{env_id}, own process"] = load_environment(env_id)
        for num_workers in (1, 2):
            cases[f"{env_id}, {num_workers} worker{'s'[: num_workers - 1]}"] = open_workers(
                env_id, {}, env_id, num_workers=num_workers
            )
    if importlib.util.find_spec("verifiers") is not None:
        (Path(directory) / "word_v1.py").write_text(TASKSET)
        sys.path.append(directory)
        cases["verifiers, 1 worker"] = open_workers("word-v1", {}, "word", num_workers=1)
    try:
        figures: dict[str, Any] = await measure(player, cases, rounds, num_groups)
    finally:
        for env in cases.values():
            if isinstance(env, WorkerEnv):
                await env.close()
    figures["recovery_s"] = await time_of_recovery(player, rounds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rounds, num_groups = (2, 8) if args.quick else (7, 64)
    with tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(run(rounds, num_groups, directory))
    for name, figure in figures.items():
        print(f"{name:32} {figure}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
