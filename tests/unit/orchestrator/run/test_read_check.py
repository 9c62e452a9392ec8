"""A finished rollout is read again by an engine, and compared with what it was sampled by."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from stretto.base.errors import EngineError
from stretto.orchestrator.versions.read_check import MAX_TOKENS, ReadCheck
from stretto.records.generate import Completion, VersionSpan
from stretto.records.images import image_of
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task
from stretto.records.support import Support

TASK = Task(env="e", task_id="0", data={})


@dataclass
class Versions:
    loaded: int = 3
    num_checked: int = 1
    wants_reading: bool = True
    rollout_error: float | None = None


@dataclass
class Engine:
    """Scores token t with -t / 10, and has a version."""

    version: int = 3
    fails: bool = False
    asked: list[np.ndarray] = field(default_factory=list)

    async def read(self, token_ids: np.ndarray, name: str) -> Completion:
        self.asked.append(token_ids)
        if self.fails:
            raise EngineError("it is down")
        scores = np.where(np.arange(len(token_ids)) == 0, 0, -token_ids / 10).astype(np.float32)
        return Completion(
            token_ids=np.array([1], np.int32),
            logprobs=np.zeros(1, np.float32),
            finish_reason="length",
            versions=(VersionSpan(self.version, 0, 1),),
            prompt_logprobs=scores,
        )


def branch(gap: float = 0.0, *, prompt: int = 4, replies: int = 16, **changes: Any) -> Branch:
    """A branch that version 3 has sampled, with log-probabilities that are `gap` away from the engine's."""
    total = prompt + replies
    ids, is_sampled = np.arange(total, dtype=np.int32) % 50, np.arange(total) >= prompt
    logprobs = np.where(is_sampled, -ids / 10 + gap, 0).astype(np.float32)
    known: dict[str, Any] = {
        "token_ids": ids, "is_sampled": is_sampled, "logprobs": logprobs, "temperature": 1.0,
        "versions": (VersionSpan(3, prompt, total),),
    }  # fmt: skip
    return Branch(**(known | changes))


def group(*branches: Branch, status: RolloutStatus = RolloutStatus.FINISHED) -> Group:
    rollouts = [
        Rollout(rollout_id=f"g0.{i}", group_id=0, member=i, task=TASK, status=status, branches=(each,))
        for i, each in enumerate(branches)
    ]
    return Group(group_id=0, task=TASK, rollouts=tuple(rollouts))


async def offer(check: ReadCheck, offered: Group, version: int = 3) -> None:
    async with asyncio.TaskGroup() as tasks:
        check.offer(offered, version, tasks)


def offered(
    *groups: Group,
    versions: Versions | None = None,
    engine: Engine | None = None,
    version: int = 3,
    seq_len: int = 4096,
) -> Any:
    """What a check knows, and the engine, after these groups."""
    versions, engine = versions or Versions(), engine or Engine()
    check = ReadCheck(versions, engine, seq_len)
    for each in groups:
        asyncio.run(offer(check, each, version))
    return versions, engine


def test_the_mean_difference_of_the_sampled_tokens_is_measured() -> None:
    versions, engine = offered(group(branch(0.25)))
    assert versions.rollout_error == pytest.approx(0.25, abs=1e-6)
    assert [len(ids) for ids in engine.asked] == [20]
    versions, _ = offered(group(branch()))
    assert versions.rollout_error < 1e-6


def test_one_rollout_is_read_after_each_check_by_a_canary() -> None:
    versions, engine = offered(group(branch()), group(branch(1.0)))
    assert len(engine.asked) == 1 and versions.rollout_error < 1e-6 and not versions.wants_reading
    versions.num_checked, versions.wants_reading = 2, True
    offered(group(branch(1.0)), versions=versions, engine=engine)
    assert len(engine.asked) == 2 and versions.rollout_error == pytest.approx(1.0)
    versions, engine = offered(group(branch()), versions=Versions(wants_reading=False))
    assert not engine.asked and versions.rollout_error is None


def test_a_check_that_passes_meanwhile_wants_another_one() -> None:
    versions = Versions()

    class Late(Engine):
        async def read(self, token_ids: np.ndarray, name: str) -> Completion:
            versions.num_checked += 1
            return await super().read(token_ids, name)

    offered(group(branch()), versions=versions, engine=Late())
    assert versions.wants_reading


async def test_one_is_read_at_a_time() -> None:
    class Slow(Engine):
        async def read(self, token_ids: np.ndarray, name: str) -> Completion:
            await asyncio.sleep(0.01)
            return await super().read(token_ids, name)

    engine = Slow()
    check = ReadCheck(Versions(), engine, 4096)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            check.offer(group(branch()), 3, tasks)
            await asyncio.sleep(0)
    assert len(engine.asked) == 1


def test_the_beginning_of_a_long_rollout_is_read() -> None:
    late = branch(prompt=MAX_TOKENS - 20, replies=30)
    worse = late.logprobs.copy()
    worse[MAX_TOKENS:] += 5  # behind what is read
    versions, engine = offered(group(msgspec.structs.replace(late, logprobs=worse)))
    assert [len(ids) for ids in engine.asked] == [MAX_TOKENS] and versions.rollout_error < 1e-5
    _, engine = offered(group(branch(prompt=MAX_TOKENS, replies=3)))
    assert not engine.asked, "no sampled token is among those"


NOT_READ = {
    "two versions": branch(versions=(VersionSpan(2, 4, 6), VersionSpan(3, 6, 20))),
    "an older version": branch(versions=(VersionSpan(2, 4, 20),)),
    "temperature": branch(temperature=0.7),
    "support": branch(support=Support.unrestricted(20)),
    "greedy": branch(is_greedy=np.ones(20, bool)),
    "another model's": branch(is_trained=False),
    "a teacher's": branch(is_frozen=True, versions=()),
    "images": branch(images=(image_of(np.zeros((4, 12), np.float32), (1, 2, 2)),)),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_cannot_be_computed_again_is_passed_over(name: str) -> None:
    _, engine = offered(group(NOT_READ[name]))
    assert not engine.asked
    versions, engine = offered(group(NOT_READ[name], branch(0.5)))
    assert len(engine.asked) == 1 and versions.rollout_error == pytest.approx(0.5)


def test_short_replies_are_read_one_after_another_until_there_are_enough_tokens() -> None:
    """The mean of one or two tokens has no bound: rounding moves a single one further."""
    few, others = group(branch(0.9, replies=6)), group(branch(0.0, replies=5))
    versions, engine = offered(few, others)
    assert versions.rollout_error is None and versions.wants_reading and len(engine.asked) == 2
    versions, engine = offered(few, others, others, others)
    assert len(engine.asked) == 3 and versions.rollout_error == pytest.approx(0.9 * 6 / 16, abs=1e-6)
    assert not versions.wants_reading


def test_an_engine_has_room_for_one_token_more() -> None:
    _, engine = offered(group(branch(prompt=4, replies=60)), seq_len=64)
    assert [len(ids) for ids in engine.asked] == [63]


def test_groups_of_another_version_and_failed_rollouts_are_passed_over() -> None:
    for kept in (
        offered(group(branch()), version=2),
        offered(group(branch()), versions=Versions(loaded=4)),
        offered(group(branch(), status=RolloutStatus.FAILED)),
    ):
        assert not kept[1].asked


def test_an_engine_that_has_loaded_another_version_meanwhile_says_nothing() -> None:
    engine = Engine(version=4)
    versions, _ = offered(group(branch(1.0)), engine=engine)
    assert versions.rollout_error is None and len(engine.asked) == 1
    engine.version = 3
    offered(group(branch(1.0)), versions=versions, engine=engine)
    assert versions.rollout_error == pytest.approx(1.0), "the next one is read in its place"


def test_an_engine_that_is_down_harms_nothing() -> None:
    engine = Engine(fails=True)
    versions, _ = offered(group(branch()), group(branch()), engine=engine)
    assert versions.rollout_error is None and len(engine.asked) == 1
