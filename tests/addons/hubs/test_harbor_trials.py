"""Trials of Harbor with its own package, in directories instead of containers: rewards, faults, what is left."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from fakes import CharRenderer, FakeEngine
from processes.hubs import python_of

from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import load_environment
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[3] / "examples" / "harbor"


def sorts(prompt, rng, version):
    return "".join(sorted(prompt.partition("U")[2].partition(".")[0]))


@asynccontextmanager
async def suite(tmp_path, monkeypatch, answer=sorts, **args):
    """The environment of the example's suite, and how a group of it is played."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    settings = {"python": python_of("harbor"), "agent": "one_reply:OneReply", "environment": "local"} | args
    env = load_environment("harbor:suite", settings, in_worker=True)
    player = Player(FakeEngine(answer), CharRenderer(), SamplingSection(), seq_len=2000, seed=1, max_retries=0)
    try:
        yield env, lambda index, members=1: player.play(env, Draw(index, env.tasks("train").task(index), members, 0))
    finally:
        await env.close()
        assert not trial_processes()


def trial_processes():
    words = ("first_process.py", "play_trials.py")
    own = psutil.Process().children(recursive=True)
    return [each for each in own if any(word in " ".join(each.cmdline()) for word in words)]


def test_a_trial_is_rewarded_by_the_tests_of_its_task(tmp_path, monkeypatch):
    async def run():
        (tmp_path / "own").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
        async with suite(tmp_path, monkeypatch) as (env, play):
            assert env.tasks("train").num_tasks == 3 and env.check() == []
            right = [(await play(index)).rollouts[0] for index in range(3)]
        async with suite(tmp_path, monkeypatch, lambda prompt, rng, version: "abc") as (_, play):
            return right, (await play(0, 2)).rollouts

    right, wrong = asyncio.run(run())
    assert [rollout.reward for rollout in right] == [1.0] * 3, [rollout.error for rollout in right]
    assert [rollout.reward for rollout in wrong] == [0.0] * 2 and wrong[0].metrics["turns"] == 1.0
    assert not list((tmp_path / "own").glob("stretto-harbor-*"))


def test_an_agent_that_asks_nothing_fails_with_the_words_of_harbor(tmp_path, monkeypatch):
    async def run():
        async with suite(tmp_path, monkeypatch, agent="oracle") as (_, play):
            return (await play(0)).rollouts[0]

    rollout = asyncio.run(run())
    assert rollout.status is RolloutStatus.FAILED and "without one reply of the policy" in rollout.error


def test_a_player_that_is_killed_fails_its_trials_and_the_next_are_played(tmp_path, monkeypatch):
    async def run():
        waiting = asyncio.Event()

        class Slow(FakeEngine):
            async def generate(self, request):
                if not waiting.is_set():
                    waiting.set()
                    await asyncio.sleep(3600)
                return await super().generate(request)

        async with suite(tmp_path, monkeypatch) as (env, play):
            settings = {"seq_len": 2000, "seed": 1, "max_retries": 0}
            slow = Player(Slow(sorts), CharRenderer(), SamplingSection(), **settings)
            first = asyncio.create_task(slow.play(env, Draw(0, env.tasks("train").task(0), 1, 0)))
            await waiting.wait()
            for each in trial_processes():
                if "play_trials.py" in " ".join(each.cmdline()):
                    each.kill()
            return (await first).rollouts[0], (await play(1)).rollouts[0]

    failed, played = asyncio.run(run())
    assert failed.status is RolloutStatus.FAILED and "the process of Harbor has ended" in failed.error
    assert played.reward == 1.0, played.error


def test_a_rollout_that_is_cancelled_ends_its_trial(tmp_path, monkeypatch):
    async def run():
        asked = asyncio.Event()

        def answer(prompt, rng, version):
            asked.set()
            return sorts(prompt, rng, version)

        class Never(FakeEngine):
            async def generate(self, request):
                asked.set()
                await asyncio.sleep(3600)

        async with suite(tmp_path, monkeypatch, answer, output_dir="kept") as (env, play):
            never = Player(Never(answer), CharRenderer(), SamplingSection(), seq_len=2000, seed=1, max_retries=0)
            first = asyncio.create_task(never.play(env, Draw(0, env.tasks("train").task(0), 1, 0)))
            await asked.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            async with asyncio.timeout(60):
                while any("first_process.py" in " ".join(each.cmdline()) for each in trial_processes()):
                    await asyncio.sleep(0.1)
            return (await play(1)).rollouts[0]

    assert asyncio.run(run()).reward == 1.0
    assert not list((tmp_path / "kept").glob("*/root"))
