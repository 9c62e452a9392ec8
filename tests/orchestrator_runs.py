"""Complete orchestrator runs in this process, with a fake at the other end of every wire."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from fakes import CharRenderer, run_virtual

from stretto.config.load import build
from stretto.config.root import OrchestratorConfig
from stretto.orchestrator.main import Wires, build_loop, starting_point

ECHO = "fakes:EchoEnv"


def config(path, **settings):
    base = {
        "env": [{"id": ECHO, "name": "echo"}],
        "batch_size": 8,
        "group_size": 4,
        "seq_len": 64,
        "max_steps": 5,
        "max_rollout_retries": 1,
        "output_dir": path,
        "run": {"name": "test"},
    }
    return build(OrchestratorConfig, base | settings)


def train(cfg, engine, trainer, *, meanwhile=None, hold=None):
    """Run one incarnation and return its loop. `hold` receives the loop as soon as it is built."""

    async def run():
        async with AsyncExitStack() as stack:
            progress = starting_point(cfg)
            wires = Wires(engine, trainer, trainer)
            loop = build_loop(cfg, wires, CharRenderer(), progress, stack)
            if hold is not None:
                hold.append(loop)
            task = None
            if meanwhile is not None:
                task = asyncio.create_task(meanwhile(loop))
            await loop.run()
            if task is not None:
                await task
            return loop

    return run_virtual(run())


def run_once(cfg, engine, trainer, renderer, *, stop_at=None, kill_at=None):
    """Run one incarnation, stopped in order or killed at a time in s."""

    async def run():
        async with AsyncExitStack() as stack:
            loop = build_loop(cfg, Wires(engine, trainer, trainer), renderer, starting_point(cfg), stack)
            task = asyncio.create_task(loop.run())
            if stop_at is not None:
                asyncio.get_running_loop().call_later(stop_at, loop.stop)
            if kill_at is None:
                await task
            else:
                await asyncio.sleep(kill_at)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    run_virtual(run())


def sampled(trainer):
    """All trained samples, step by step: sample ids, tokens and advantages."""
    return [
        [
            (micro.sample_ids, micro.token_ids.tolist(), micro.advantages.tolist())
            for batch in step
            for micro in batch.micro_batches
        ]
        for step in trainer.batches
    ]


def by_number(prompt, rng, version):
    """Tasks differ in how often they are solved: the n-th of 12 with probability n / 12."""
    word = prompt.rsplit("U", 1)[-1].removesuffix(".A")
    return word if rng.random() < int(word.removeprefix("train")) / 12 else "no"
