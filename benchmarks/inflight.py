"""Ten thousand rollouts in flight: how late the orchestrator's event loop runs, and what a rollout weighs.

    python benchmarks/inflight.py [--quick] [--rollouts 10000] [--steps 4] [--delay 4 12] [--profile]

The orchestrator runs as it is, over real HTTP and real wires, against a second process that plays the engine
(it answers every request after a random delay) and the trainer. Every rollout has two turns and so a request
of its own at any time. A probe sleeps 5 ms again and again; what it oversleeps is the lag, and what of it the
orchestrator itself spent in CPU time is its own. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import rollout_cost

from stretto.config.root import OrchestratorConfig
from stretto.envs.base import RolloutResult, TaskSource
from stretto.records.rollout import Task

TURNS = 2
PROBE_S = 0.005
DELAY_S = (4.0, 12.0)


class TwoTurns:
    """Sort some letters, twice; half of the replies are right."""

    name = "two-turns"

    def tasks(self, split: str) -> TaskSource:
        def make(index: int) -> Task:
            rng = random.Random(index)
            letters = "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 6))
            return Task(env=self.name, task_id=str(index), data={"letters": letters})

        return TaskSource(make)

    async def rollout(self, task: Task, ctx) -> RolloutResult:
        messages, right = [], 0
        for _ in range(TURNS):
            messages.append({"role": "user", "content": task.data["letters"]})
            reply = await ctx.chat(messages)
            right += reply.text == "".join(sorted(task.data["letters"]))
            messages.append(reply.message)
        return RolloutResult(reward=right / TURNS)


def config(directory: str, ports: dict[str, int], args: argparse.Namespace) -> OrchestratorConfig:
    base = rollout_cost.config(directory, ports, args)
    env = [{"id": "inflight:TwoTurns", "name": "two-turns"}]
    own = {"env": env, "seq_len": 256, "run": {"name": "inflight"}, "filter_zero_advantages": False}
    return OrchestratorConfig.model_validate(base.model_dump() | own)


def play_others(args: argparse.Namespace) -> None:
    ports = json.loads(args.others)
    cfg = config(args.directory, ports, args)
    gc.disable()  # or it would fall silent for a second and then answer many at once
    threading.Thread(target=rollout_cost.play_trainer, args=(cfg,), daemon=True).start()
    asyncio.run(rollout_cost.play_engine(ports["engine"], lambda rng: rng.uniform(*args.delay)))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def probe(lags: list[tuple[float, float, float]]) -> None:
    """(when, how late, CPU time this process spent meanwhile) in seconds, for ever.

    On a machine that others use, lag without CPU time is their doing.
    """
    while True:
        before, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(PROBE_S)
        now = time.perf_counter()
        lags.append((now, now - before - PROBE_S, time.process_time() - cpu))


async def measure(cfg: OrchestratorConfig) -> dict:
    from stretto.base.runtime import collect_on_growth
    from stretto.orchestrator.build import build_scratch_renderer
    from stretto.orchestrator.main import build_loop, open_wires
    from stretto.orchestrator.state.run_checkpoint import Progress

    renderer = build_scratch_renderer(cfg.model.scratch, cfg.renderer)
    lags: list[tuple[float, float, float]] = []
    peak, spent = {"rollouts": 0, "rss": 0, "tasks": 0}, {"looking": 0.0}
    async with AsyncExitStack() as stack:
        loop = build_loop(cfg, await open_wires(cfg, 0, stack), renderer, Progress(), stack)
        await stack.enter_async_context(collect_on_growth())
        before = rss_bytes()

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.25)
                running = loop.buffer.gauges().get("running", 0) * cfg.group_size
                if running >= peak["rollouts"]:
                    began = time.process_time()  # to go through all tasks takes as long as ten rollouts
                    peak.update(rollouts=running, rss=rss_bytes(), tasks=len(asyncio.all_tasks()))
                    spent["looking"] += time.process_time() - began

        beside = [asyncio.create_task(probe(lags)), asyncio.create_task(watch())]
        started, cpu = time.perf_counter(), rollout_cost.cpu_s()
        await loop.run()
        wall, cpu = time.perf_counter() - started, rollout_cost.cpu_s() - cpu - spent["looking"]
        num_replies = loop.parts.engines.num_replies
        for each in beside:
            each.cancel()
    late = sorted(lag for _, lag, _ in lags)
    busy = sorted(min(lag, cpu) for _, lag, cpu in lags)
    at = lambda share: round(1e3 * late[min(int(share * len(late)), len(late) - 1)], 2)
    num = cfg.batch_size * cfg.max_steps
    worst = sorted(lags, key=lambda each: -min(each[1:]))[:8]
    return {
        "rollouts_in_flight": peak["rollouts"],
        "tasks": peak["tasks"],
        "lag_ms_p50": at(0.5),
        "lag_ms_p99": at(0.99),
        "lag_ms_max": at(1.0),
        "own_lag_ms_p99": round(1e3 * busy[int(0.99 * len(busy))], 2),
        "own_lag_ms_max": round(1e3 * busy[-1], 2),
        "own_lag_ms_worst": [round(1e3 * min(lag, cpu), 1) for _, lag, cpu in worst],
        "worst_at_s": [round(when - started, 1) for when, _, _ in worst],
        "own_lag_share_over_50_ms": round(sum(lag > 0.05 for lag in busy) / len(busy), 5),
        "kib_per_rollout_in_flight": round((peak["rss"] - before) / max(peak["rollouts"], 1) / 1024, 2),
        "cpu_ms_per_rollout": round(1e3 * cpu / num, 3),  # those in flight at the end are not among them
        "cpu_ms_per_reply": round(1e3 * cpu / num_replies, 3),
        "looking_s": round(spent["looking"], 2),
        "wall_s": round(wall, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rollouts", type=int, default=10_000, help="in flight")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--delay", type=float, nargs=2, default=DELAY_S, help="seconds until an answer, from and to")
    parser.add_argument("--profile", action="store_true", help="print where the orchestrator's time goes")
    parser.add_argument("--batch-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--others", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rollouts, args.steps = min(args.rollouts, 2000), 2
    args.batch_size = args.rollouts // 2 // args.group_size * args.group_size
    if args.others:
        return play_others(args)
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = dict(zip(("engine", "control", "rollouts"), (each.getsockname()[1] for each in sockets)))
    for each in sockets:
        each.close()
    with tempfile.TemporaryDirectory() as directory:
        cfg = config(directory, ports, args)
        sizes = [f"--rollouts={args.rollouts}", f"--group-size={args.group_size}", f"--steps={args.steps}"]
        sizes += ["--delay", *map(str, args.delay)]
        command = [sys.executable, __file__, "--others", json.dumps(ports), "--directory", directory, *sizes]
        others = subprocess.Popen(command)
        try:
            figures = profiled(cfg) if args.profile else asyncio.run(measure(cfg))
        finally:
            others.kill()
            others.wait()
    print(json.dumps(figures))


def profiled(cfg: OrchestratorConfig) -> dict:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    figures = profile.runcall(asyncio.run, measure(cfg))
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return figures


if __name__ == "__main__":
    main()
