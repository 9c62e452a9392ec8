"""Garbage in cycles, searched for when there may be much of it."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LOOK_EVERY_S = 1.0
GROWTH_BYTES = 1 << 30
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def collect_less() -> None:
    """For the start of a process: imports make a million objects that stay, and are searched again and again."""
    gc.set_threshold(10_000, 20, 50)


def settle() -> None:
    """For a process that has been built: what is there now is never searched again."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def collecting_seldom() -> AsyncIterator[None]:
    """Search all objects whenever the process has grown by GROWTH_BYTES, and never otherwise.

    With ten thousand rollouts in flight a full search takes a second, and the collector's own partial ones, which
    it does when containers made exceed those freed by some number, up to 250 ms; what they found was nothing.
    """
    settle()
    gc.disable()
    looking = asyncio.create_task(_look(_peak_bytes()))
    try:
        yield
    finally:
        looking.cancel()
        gc.freeze()
        gc.enable()


async def _look(searched_at: int) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if _peak_bytes() > searched_at + GROWTH_BYTES:
            gc.collect()
            searched_at = _peak_bytes()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
