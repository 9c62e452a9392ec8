"""Turns, tokens and seconds that an episode may have, and has used."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from stretto.envs.base import EpisodeLimits, LimitReached


@dataclass
class Budget:
    """Turns and tokens that an episode has used, all agents together.

    Open turns reserve the tokens granted to them, so that agents with open turns share what is left.
    """

    limits: EpisodeLimits
    started_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    num_turns: int = 0  # completed
    num_tokens: int = 0
    engine_s: float = 0.0  # waited for replies
    _num_open_turns: int = 0
    _num_reserved_tokens: int = 0  # of open turns
    _queue: asyncio.Lock = field(default_factory=asyncio.Lock)  # first come, first served
    _turn_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self.started_at

    async def begin_turn(self, num_requested: int) -> int:
        """Open a turn and return how many tokens it may have; `end_turn` must follow.

        If open turns may leave enough tokens, it waits for them, so that the grant does not depend on which agent is
        faster.

        Raises: LimitReached if the episode has no turn or token left.
        """
        granted = num_requested
        if self.limits.max_tokens is None:
            self._check_limits()
        else:
            async with self._queue:
                granted = await self._grant(num_requested, self.limits.max_tokens)
        self._num_open_turns += 1
        self._num_reserved_tokens += granted
        return granted

    def end_turn(self, granted: int, num_tokens: int | None) -> None:
        """Close a turn that used num_tokens; None if it failed."""
        self._num_open_turns -= 1
        self._num_reserved_tokens -= granted
        if num_tokens is not None:
            self.num_turns += 1
            self.num_tokens += num_tokens
        self._turn_ended.set()

    async def _grant(self, num_requested: int, max_tokens: int) -> int:
        while True:
            self._check_limits()
            left = max_tokens - self.num_tokens
            if left < 1:
                raise LimitReached(f"the episode has had its {max_tokens} tokens (max_tokens)")
            if num_requested <= left - self._num_reserved_tokens or not self._num_open_turns:
                return min(num_requested, left)
            self._turn_ended.clear()
            await self._turn_ended.wait()

    def _check_limits(self) -> None:
        limits = self.limits
        if limits.max_turns is not None and self.num_turns + self._num_open_turns >= limits.max_turns:
            raise LimitReached(f"the episode has had its {limits.max_turns} turns (max_turns)")
        if limits.timeout_s is not None and self.age_s >= limits.timeout_s:
            raise LimitReached(f"the episode has had its {limits.timeout_s:g} s (timeout_s)")
