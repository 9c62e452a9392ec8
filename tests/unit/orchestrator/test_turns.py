"""orchestrator/versions/turns.py: the order of turns, and what engines are told."""

from __future__ import annotations

import pytest

from stretto.config.sections.run import ColocateSection
from stretto.orchestrator.versions.turns import Turn, Turns


class Engines:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    async def wake_up(self, tag: str) -> None:
        self.told.append(f"wake {tag}")


async def two_steps(turns: Turns) -> None:
    await turns.begin()
    for _ in range(2):
        await turns.begin_loading()
        await turns.begin_rollouts()
        await turns.end_rollouts()


@pytest.mark.asyncio
async def test_weights_are_woken_first_and_the_cache_when_they_are_loaded():
    turns = Turns(engines := Engines(), ColocateSection())
    await two_steps(turns)
    assert engines.told == ["sleep 2", *["wake weights", "wake kv_cache", "sleep 2"] * 2]
    assert turns.turn is Turn.TRAINER


@pytest.mark.asyncio
@pytest.mark.parametrize("section", [None, ColocateSection(offload_rollout=False)])
async def test_engines_that_keep_their_memory_are_told_nothing(section):
    await two_steps(Turns(engines := Engines(), section))
    assert engines.told == []


@pytest.mark.asyncio
async def test_a_turn_out_of_order_is_a_fault():
    turns = Turns(Engines(), ColocateSection())
    with pytest.raises(AssertionError, match="cannot go from starting to rollouts"):
        await turns.begin_rollouts()
