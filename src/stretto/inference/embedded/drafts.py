"""Drafts: tokens that are guessed behind those of running sequences, and checked in the same pass of the model.

An add-on guesses (stretto.inference, "drafts"): it writes tokens behind the last one of a sequence and says how
many. The pass computes them too, and a token is sampled at each of these positions with the random number of its
position. Those up to and with the first that differs from its guess are what plain decoding samples; the others are
dropped (core.py). So drafts change nothing but time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stretto.inference.embedded.scheduler import EngineRequest, StepPlan
from stretto.inference.embedded.slots import SequenceSlots

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(slots=True)
class DraftCounts:
    """Totals since the engine began; arrays have an entry per position in a draft."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafted_at: Int[np.ndarray, " positions"]
    accepted_at: Int[np.ndarray, " positions"]
    num_passes_on: int = 0  # with drafts, or a search for them
    num_passes: int = 0  # all


class Drafter(Protocol):
    """Who guesses. Before a pass it is asked whether to `rest`, and if not to `propose`; after it, it is told."""

    counts: DraftCounts

    def rest(self, num_sequences: int) -> bool:
        """Whether the next pass is a plain one of which nothing is measured; counts it."""

    def propose(self, running: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " slots"] | None:
        """Write drafts behind the tokens of these slots; returns their lengths by slot, None without any."""

    def observe_pass(self, plan: StepPlan | None, *, tokens: int, seconds: float) -> None:
        """Told after a pass that was no rest: what it computed, and how many tokens it sampled."""

    def observe_drafts(
        self, slots: Int[np.ndarray, " rows"], drafted: Int[np.ndarray, " rows"],
        accepted: Int[np.ndarray, " rows"], is_rejected: Bool[np.ndarray, " rows"],
    ) -> None:  # fmt: skip
        """Told in a pass with drafts: how many tokens these slots' had, how many were right, and did one differ?"""


BuildDrafter = Callable[[SequenceSlots, int], Drafter]
"""(slots of an engine, size of its vocabulary) -> what drafts for it."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of logits of sequences with drafts: one for each token of a draft, and one more."""

    owner: Int[np.ndarray, " rows"]  # the sequence of each row
    nth: Int[np.ndarray, " rows"]  # its place behind the sequence's last token
    starts: Int[np.ndarray, " sequences"]  # the first row of each sequence

    @classmethod
    def of(cls, num_drafts: Int[np.ndarray, " sequences"]) -> DraftRows:
        count = num_drafts + 1
        starts = np.cumsum(count) - count
        owner = np.repeat(np.arange(len(num_drafts)), count)
        return cls(owner, np.arange(len(owner)) - starts[owner], starts)

    def first(self, flags: Bool[np.ndarray, " rows"]) -> Int[np.ndarray, " sequences"]:
        """The place in each sequence of its first row with a flag; a large number without one."""
        return np.minimum.reduceat(np.where(flags, self.nth, 1 << 40), self.starts)


def watch_drafts(
    slots: SequenceSlots, request_of: Sequence[EngineRequest | None], chosen: Int[np.ndarray, " sequences"],
    starts: Int[np.ndarray, " sequences"], count: Int[np.ndarray, " sequences"],
    sampled: tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"]],
) -> dict[int, str | None]:  # fmt: skip
    """Show watchers the tokens that are kept, and lower `count` where a stop text ends before.

    sampled: tokens and logprobs. Returns the stop text by place in `chosen`; None for a request whose watcher raised.
    """
    found: dict[int, str | None] = {}
    for i in np.flatnonzero(slots.is_watched[chosen]).tolist():
        slot = int(chosen[i])
        request = request_of[slot]
        assert request is not None and request.watcher is not None, f"slot {slot} is watched"
        if request.failure is not None:
            continue
        for nth, row in enumerate(range(int(starts[i]), int(starts[i] + count[i]))):
            try:
                match = request.watcher.observe(int(slots.member[slot]), int(sampled[0][row]), float(sampled[1][row]))
            except Exception as error:  # fails this request only: the engine's state is not changed
                request.failure, found[i] = error, None
                break
            if match is not None:
                found[i], count[i] = match, nth + 1
                break
    return found
