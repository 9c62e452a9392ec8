"""orchestrator/versions/shared_devices.py: the order of uses, and what engines are told."""

from __future__ import annotations

import pytest

from stretto.config.sections.run import ColocateSection
from stretto.orchestrator.versions.shared_devices import SharedDevices, Use


class Engines:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    async def wake_up(self, tag: str) -> None:
        self.told.append(f"wake {tag}")


async def two_steps(devices: SharedDevices) -> None:
    await devices.begin()
    for _ in range(2):
        await devices.begin_loading()
        await devices.begin_rollouts()
        await devices.end_rollouts()


@pytest.mark.asyncio
async def test_weights_are_woken_first_and_the_cache_when_they_are_loaded():
    devices = SharedDevices(engines := Engines(), ColocateSection())
    await two_steps(devices)
    assert engines.told == ["sleep 2", *["wake weights", "wake kv_cache", "sleep 2"] * 2]
    assert devices.use is Use.TRAINING


@pytest.mark.asyncio
async def test_engines_that_keep_their_memory_are_told_nothing():
    await two_steps(SharedDevices(engines := Engines(), ColocateSection(offload_rollout=False)))
    assert engines.told == []


@pytest.mark.asyncio
async def test_a_use_out_of_order_is_a_fault():
    devices = SharedDevices(Engines(), ColocateSection())
    with pytest.raises(AssertionError, match="cannot go from starting to rollouts"):
        await devices.begin_rollouts()
