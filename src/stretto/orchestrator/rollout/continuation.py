"""Partial rollouts: interrupts running requests and continues them after a resume.

A stop aborts all requests on the engines, which return the tokens sampled so far. Every turn (`build_turn`) is
written to the ledger (`Interruption.save_turns`), and the episodes wait to be cancelled. A killed run keeps its
completed turns. When the run is resumed, the episodes are played again. Their requests are answered from the saved
turns as long as both are equal token for token (`match_saved_turn`). The interrupted reply is continued from its last
token (`continuation_request`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from stretto.base.errors import EngineError
from stretto.ledger.writer import Ledger
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.records.generate import Completion, GenerateRequest, member_seed
from stretto.records.images import Image
from stretto.records.partial import Turn, continued_request, needs_whole_reply

if TYPE_CHECKING:
    from jaxtyping import Int32

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0
"""Time for the engines to return what they have sampled."""
ABORT_RETRY_S = 0.5
"""Interval after which open requests are aborted again."""


class Interruption:
    """Tracks the open requests of a run's rollouts, saves their turns, and interrupts them."""

    def __init__(self, ledger: Ledger) -> None:
        self.has_begun = False
        self._ledger = ledger
        self._open_requests: dict[str, None] = {}
        self._all_answered = asyncio.Event()

    async def begin_request(self, request_id: str) -> None:
        """A request is sent now; `end_request` must follow. Once rollouts are interrupted, wait to be cancelled."""
        if self.has_begun:
            await self.wait_for_cancellation()
        self._open_requests[request_id] = None

    def end_request(self, request_id: str) -> None:
        """A request was answered, or has failed."""
        self._open_requests.pop(request_id, None)
        if not self._open_requests:
            self._all_answered.set()

    async def save_turns(self, group_id: int, turns: Mapping[int, Turn]) -> None:
        """Write the turns of members to the ledger; if one was interrupted, wait to be cancelled."""
        for member, turn in turns.items():
            if len(turn.completion.token_ids):
                self._ledger.turn_played(group_id, member, turn)
        if self.has_begun and not all(turn.is_done for turn in turns.values()):
            await self.wait_for_cancellation()

    async def interrupt(self, abort: Callable[[list[str]], Awaitable[Any]]) -> None:
        """Start no more requests, abort the open ones, and wait for them up to ABORT_TIMEOUT_S."""
        self.has_begun = True
        self._all_answered.clear()
        if not self._open_requests:
            return
        num_requests = len(self._open_requests)
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while self._open_requests:
                    await abort(list(self._open_requests))
                    with suppress(TimeoutError):  # an abort may reach the engine before its request
                        async with asyncio.timeout(ABORT_RETRY_S):
                            await self._all_answered.wait()
        except (EngineError, TimeoutError) as error:
            logger.warning("%d of %d replies are lost: %r", len(self._open_requests), num_requests, error)
        await asyncio.sleep(0)  # let answered requests save their turns

    async def wait_for_cancellation(self) -> NoReturn:
        """Wait to be cancelled."""
        while True:
            await asyncio.Event().wait()


def build_turn(
    request: GenerateRequest,
    completion: Completion,
    *,
    agent: str,
    index: int,
    attempt: int,
    temperature: float,
    branch: OpenBranch | None = None,
    number: int = 0,
) -> Turn:
    """Build the turn that is saved for a reply.

    branch: the tokens that the prompt extends. number: of the reply among those of its request.
    """
    num_shared = 0 if branch is None else len(branch.token_ids)
    images = request.images if branch is None else request.images[len(branch.images) :]
    assert request.sampling.seed is not None
    return Turn(
        agent=agent,
        index=index,
        attempt=attempt,
        seed=member_seed(request.sampling.seed, number),
        temperature=temperature,
        num_shared=num_shared,
        prompt_ids=request.prompt_ids[num_shared:],
        completion=completion,
        images=tuple(image.without_patches() for image in images),
    )


# -- after a resume --


def match_saved_turn(
    turns: deque[Turn],
    request: GenerateRequest,
    temperature: float,
    known: Int32[np.ndarray, " tokens"],
    known_images: tuple[Image, ...],
    rollout_id: str,
) -> Turn | None:
    """An agent's next saved turn if its prompt equals the request's; None otherwise.

    known, known_images: the agent's tokens so far and their images. If the environment sends another prompt than
    before, the remaining saved turns are discarded.
    """
    if not turns:
        return None
    turn = turns.popleft()
    prompt_ids = np.concatenate((known[: turn.num_shared], turn.prompt_ids), dtype=np.int32)
    images = (*(known_images if turn.num_shared else ()), *turn.images)
    is_same = temperature == turn.temperature and np.array_equal(prompt_ids, request.prompt_ids)
    is_same = is_same and images == request.images  # equal tokens may show other pictures
    needs_whole = needs_whole_reply(request.sampling)
    if is_same and (turn.is_done or not needs_whole):
        return turn
    num_lost = sum(len(each.completion.token_ids) for each in (turn, *turns))
    turns.clear()
    logger.warning(
        "rollout %s, turn %d of %s: %s; %d saved tokens are discarded and the rest is sampled again",
        rollout_id,
        turn.index,
        turn.agent,
        "its stop texts or bad words need a whole reply" if is_same else "the environment sends another prompt now",
        num_lost,
    )
    return None


def continuation_request(request: GenerateRequest, begun: Turn) -> GenerateRequest:
    """The request for the rest of an interrupted reply, with the seed of its first part."""
    return continued_request(request, begun.completion, begun.seed)
