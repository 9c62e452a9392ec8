"""An episode of repo-repair loses nothing by kill -9 of its worker or of its sandbox."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import psutil
import pytest
from fakes import CharRenderer, FakeEngine
from tiny_package import make_bank

from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.workers.pool import open_workers
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import Group, RolloutStatus
from stretto_sandbox.sandbox import KEEPER

pytestmark = pytest.mark.heavy

NUM_COMMANDS = 6


def reply(prompt: str, rng, version: int) -> str:
    """The next command, which adds a line to a file and prints what is different each time; then the end."""
    number = prompt.count("```sh\necho")
    if number == NUM_COMMANDS:
        return "done"
    return f"```sh\necho {number} >> notes; cat notes | tr '\\n' ' '; date +%N; sleep 0{rng.choice('12')}e-1\n```"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "sandbox"])
def test_kill_9_loses_no_turn_and_runs_no_command_twice(tmp_path, victim):
    bank = make_bank(tmp_path, num_tasks=1)
    engine, requests = FakeEngine(reply), itertools.count()

    async def run() -> Group:
        args = {"tasks": str(bank), "calls": "blocks", "max_turns": 20, "command_timeout_s": 60.0}
        env = open_workers("repo-repair", args, "repair", num_workers=1, directory=str(tmp_path / "episodes"))
        split = "train" if "train" in env._ready.num_tasks else "eval"

        def fail(request) -> None:
            if next(requests) == 4:
                process = psutil.Process(env.pool.workers[0].child.pid)
                if victim == "worker":
                    os.kill(process.pid, signal.SIGKILL)
                else:
                    killing.append(asyncio.get_running_loop().create_task(kill_keeper(process)))

        killing: list[asyncio.Task] = []
        engine.fail = fail
        try:
            player = Player(engine, CharRenderer(), SamplingSection(), seq_len=20_000, max_retries=1)
            group = await player.play(env, Draw(0, env.tasks(split).task(0), 1, version=0))
            await asyncio.gather(*killing)
            assert env.pool.num_lost == (victim == "worker")
            return group
        finally:
            await env.close()

    [rollout] = asyncio.run(run()).rollouts
    assert rollout.status is RolloutStatus.FINISHED and rollout.num_turns == NUM_COMMANDS + 1, rollout.error
    [branch] = rollout.branches
    text = "".join(map(chr, branch.token_ids))
    answers = [line.split()[:-1] for line in text.split("```.U")[1:]]
    assert answers[-1][:NUM_COMMANDS] == [str(number) for number in range(NUM_COMMANDS)]
    assert rollout.metrics["replayed"] == (4 if victim == "worker" else 0)
    assert engine.num_requests <= NUM_COMMANDS + 1 + (victim == "worker")


async def kill_keeper(worker: psutil.Process) -> None:
    """Kill the next sandbox of a worker."""
    async with asyncio.timeout(60):
        while True:
            for child in worker.children():
                if str(KEEPER) in child.cmdline():
                    child.kill()
                    return
            await asyncio.sleep(0.005)
