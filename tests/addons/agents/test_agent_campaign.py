"""512 rollouts of programs that die, compact, ask twice, leave before a reply: what is trained was sampled, once."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter

import numpy as np
import pytest
from fakes import FakeEngine
from programs import CLIENT, player_of, write_records

from stretto.envs.base import load_environment
from stretto.orchestrator.batch import samples_of
from stretto.orchestrator.rollout.play import Draw
from stretto.records.outcomes import Reason

pytestmark = [pytest.mark.heavy, pytest.mark.slow]
NUM_GROUPS, GROUP_SIZE = 64, 8
PROGRAM = """
import signal, threading, time
from concurrent.futures import ThreadPoolExecutor
def first_free(folder):
    for number in range(10_000):
        try:
            os.mkdir(f"{folder}/{number}")
            return number
        except FileExistsError:
            pass
def turns(count, *history):
    history = list(history)
    for number in range(count):
        history.append(ask(history))
        history.append(user(f"more {number}"))
    return history
def is_refused(history):
    try:
        ask(history)
    except urllib.error.HTTPError as error:
        return error.code == 403
number = first_free(sys.argv[2])
kind, start = number % 10, user(f"task {number}")
history = turns(2, start)
if kind == 0:
    os.kill(os.getpid(), signal.SIGKILL)
elif kind in (1, 2):
    turns(2, user(f"summary of {number}: {history[-2]['content']}"))
elif kind == 3:
    assert ask(history) == ask(history)
elif kind == 4:
    assert len({str(reply) for reply in ThreadPoolExecutor(4).map(ask, [history] * 4)}) == 1
elif kind == 5:
    turns(1, user(f"a title for {number}"))
    turns(1, *history)
elif kind == 6:
    try:
        ask(history, timeout=0.01)
    except TimeoutError:
        pass
    turns(1, *history)
elif kind == 7:
    turns(4, *history)
    assert is_refused(history + [user("beyond")])
elif kind == 8:
    list(ThreadPoolExecutor(3).map(lambda n: turns(1, user(f"sub-agent {n} of {number}")), range(3)))
"""
"""Kind 0 is killed, 7 goes beyond its turns; the others end by themselves."""


class Recording(FakeEngine):
    """Its replies differ from each other, and it remembers each with its prompt."""

    def __init__(self) -> None:
        numbers = itertools.count()
        super().__init__(lambda prompt, rng, version: f"reply {next(numbers)}", delay=lambda request: 0.05)
        self.record: dict[bytes, np.ndarray] = {}

    async def generate(self, request):
        completions = await super().generate(request)
        for completion in completions:
            whole = np.concatenate((request.prompt_ids, completion.token_ids)).astype(np.int32)
            assert self.record.setdefault(whole.tobytes(), completion.logprobs) is completion.logprobs
        return completions


async def play_all(engine, records, claims):
    env = load_environment(
        "agent", {"command": [sys.executable, "-c", CLIENT + PROGRAM, "{prompt}", claims], **records}
    )
    player, some = player_of(engine), asyncio.Semaphore(4)

    async def one(number):
        async with some:
            return await player.play(env, Draw(number, env.tasks("train").task(0), GROUP_SIZE, version=0))

    try:
        return await asyncio.gather(*map(one, range(NUM_GROUPS)))
    finally:
        await env.close()


def spans_of(mask):
    """Begin and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(int), [0]))))
    return edges.reshape(-1, 2).tolist()


def test_nothing_is_trained_twice_and_nothing_that_was_not_sampled(tmp_path):
    (claims := tmp_path / "claims").mkdir()
    engine = Recording()
    groups = asyncio.run(play_all(engine, {"path": write_records(tmp_path), "max_turns": 6}, str(claims)))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    kinds = Counter(number % 10 for number in range(NUM_GROUPS * GROUP_SIZE))
    rest = len(rollouts) - kinds[0] - kinds[7]
    expected = {None: rest, Reason.ENV_ERROR: kinds[0], Reason.TURN_LIMIT: kinds[7]}
    assert Counter(rollout.reason for rollout in rollouts) == expected, [r.error for r in rollouts if r.error][:3]
    assert all("SIGKILL" in rollout.error for rollout in rollouts if rollout.reason is Reason.ENV_ERROR)

    trained: Counter[bytes] = Counter()
    for sample in (each for rollout in rollouts if rollout.is_counted for each in samples_of(rollout, 1.0)):
        for begin, end in spans_of(sample.loss_mask):
            whole = sample.token_ids[:end].tobytes()
            assert np.array_equal(engine.record[whole], sample.logprobs[begin:end])
            trained[whole] += 1
    assert set(trained.values()) == {1}
    num_turns = sum(rollout.num_turns for rollout in rollouts if rollout.reason is not Reason.ENV_ERROR)
    assert len(trained) == num_turns == len(engine.record) - 2 * kinds[0]
