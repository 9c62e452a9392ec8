"""Whether and how far to draft: only while it makes sampling faster, as measured.

A pass of the model computes, behind the last token of a sequence, the tokens that drafts.py guesses, and a token is
sampled for each of these positions with the random number of its position. Those up to and with the first that
differs from its guess are what plain decoding samples; the others are dropped (core.py). So drafts change nothing but
time, and time decides about them:

    OFF -> TRYING -> ON -> COMPARING -> ON     COMPARING: a few plain passes, to know their rate
             |  <-----------------------|
             v
            OFF, twice as long as before       if drafts were no faster

Each size of batch (a power of two) has such a state of its own, because a pass of few rows takes as long as one of a
single row, and a pass of many rows does not. A draft is as long as its next token is more likely to be right than the
time of one more row is worth in tokens; how likely is counted by how many tokens before it were equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from stretto.inference.embedded.drafts import NUM_CLASSES, DraftIndex, Method
from stretto.inference.embedded.slots import SequenceSlots

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from stretto.inference.embedded.scheduler import StepPlan

MIN_GAIN = 1.02
"""Drafts must be so many times as fast as plain passes."""
_FIRST_PASSES = 8  # plain passes before the first try
_TRIED_PASSES = 12
_COMPARED_PASSES = 4
_PASSES_ON = 160  # between two comparisons
_FIRST_WAIT, _LAST_WAIT = 256, 16_384  # plain passes between two tries
_MIN_WAIT_RATIO = 64  # a wait is so many times as long as what the last try has cost
_HOPELESS, _HOPELESS_AFTER = 0.7, 3  # a try that is so slow ends early
_DECAY = 0.97  # per pass, of what is measured
_PRIOR_WEIGHT = 2.0
_MAX_LOGIT_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """The keys of [inference.speculation] that the embedded engine has."""

    method: Method = "suffix"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 8
    is_always_on: bool = False  # for tests: drafts whether or not they are faster


class PaceState(StrEnum):
    OFF = "off"
    TRYING = "trying"
    ON = "on"
    COMPARING = "comparing"


@dataclass(slots=True)
class _Rate:
    """Passes of one kind, the older the less."""

    passes: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        if self.passes > 2 and seconds > 8 * self.seconds / self.passes:
            return  # something else had the processor
        self.passes = self.passes * _DECAY + 1
        self.rows = self.rows * _DECAY + rows
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Pace:
    """The state of one size of batch."""

    state: PaceState = PaceState.OFF
    left: int = _FIRST_PASSES  # passes until the state is left
    wait: int = _FIRST_WAIT
    plain: _Rate = field(default_factory=_Rate)
    drafted: _Rate = field(default_factory=_Rate)
    cost_s: float = 0.0  # of the try: what it took longer than plain passes would have
    is_first: bool = True  # the first pass of a try indexes all that was sampled since the last

    @property
    def is_drafting(self) -> bool:
        return self.state is PaceState.TRYING or self.state is PaceState.ON

    def observe(self, *, is_drafted: bool, rows: int, tokens: int, seconds: float) -> None:
        """Count a pass in which every sequence sampled, and move on."""
        if not is_drafted:
            self.plain.add(rows, tokens, seconds)
        elif not self.is_first:
            self.drafted.add(rows, tokens, seconds)
        if self.state is PaceState.TRYING and is_drafted:
            plain_s = tokens / self.plain.per_s if self.plain.per_s else seconds
            self.cost_s += seconds - plain_s
        if is_drafted:
            self.is_first = False
        self.left -= 1
        if self.left <= 0 or self._is_hopeless():
            self._move()

    def _is_hopeless(self) -> bool:
        if self.state is not PaceState.TRYING or self.drafted.passes < _HOPELESS_AFTER:
            return False
        return self.drafted.per_s < _HOPELESS * self.plain.per_s

    def _move(self) -> None:
        is_faster = self.drafted.per_s >= MIN_GAIN * self.plain.per_s
        if self.state is PaceState.OFF:
            self._enter(PaceState.TRYING, _TRIED_PASSES)
            self.drafted, self.cost_s, self.is_first = _Rate(), 0.0, True
        elif self.state is PaceState.ON and is_faster:
            self._enter(PaceState.COMPARING, _COMPARED_PASSES)
        elif is_faster:
            self.wait = _FIRST_WAIT
            self._enter(PaceState.ON, _PASSES_ON)
        else:
            pass_s = self.plain.seconds / self.plain.passes if self.plain.passes else 0.0
            least = _MIN_WAIT_RATIO * self.cost_s / pass_s if pass_s and self.state is PaceState.TRYING else 0.0
            self._enter(PaceState.OFF, max(self.wait, math.ceil(least)))
            self.wait = min(2 * self.wait, _LAST_WAIT)

    def _enter(self, state: PaceState, passes: int) -> None:
        self.state, self.left = state, passes


@dataclass(slots=True)
class SpeculationCounts:
    """Totals since the engine began; arrays have an entry per position in a draft."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafted_at: Int[np.ndarray, " positions"]
    accepted_at: Int[np.ndarray, " positions"]
    on_s: float = 0.0  # in passes with drafts or a search for them
    decode_s: float = 0.0  # in all passes that sample for every sequence


class Speculator:
    """Writes drafts behind the tokens of running sequences, and counts what became of them."""

    def __init__(self, slots: SequenceSlots, settings: SpeculationSettings, vocab_size: int) -> None:
        self.slots, self.settings = slots, settings
        least = settings.prompt_lookup_min
        self.index = DraftIndex(slots, settings.method, least=least, most=max(settings.prompt_lookup_max, least))
        most = settings.num_speculative_tokens
        self.counts = SpeculationCounts(0, 0, 0, np.zeros(most, np.int64), np.zeros(most, np.int64))
        self.paces: dict[int, Pace] = {}
        self._pace = Pace()
        self._max_rows = max(_MAX_LOGIT_BYTES // (4 * vocab_size), 1)
        self._right = np.zeros(NUM_CLASSES)  # drafted tokens that were right, by class of their guess, decaying
        self._wrong = np.zeros(NUM_CLASSES)
        self._classes = np.zeros(slots.capacity, np.int64)  # of each slot's guess
        self._num_drafts = np.zeros(slots.capacity, np.int64)
        self._is_searched = False

    def propose(self, running: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " slots"] | None:
        """Write drafts behind the tokens of these slots; returns their lengths by slot, None without any."""
        self._is_searched = False
        size = len(running)
        if not size:
            return None
        pace = self._pace = self.paces.get(size.bit_length()) or self.paces.setdefault(size.bit_length(), Pace())
        if not (pace.is_drafting or self.settings.is_always_on):
            return None
        slots = self.slots
        # Sequences whose prompt is computed, and which have room for more than the token that is sampled anyway.
        missing = slots.num_tokens[running] - slots.num_computed[running]
        room = slots.end[running] - slots.num_tokens[running] - 1
        is_ready = (missing == 1) & (slots.num_tokens[running] > slots.num_prompt[running]) & (room > 0)
        ready = running if is_ready.all() else running[is_ready]
        if not len(ready):
            return None
        self._is_searched = True
        self.index.update(ready)
        guesses = self.index.find(ready)
        if not len(guesses.slots):
            return None
        room = slots.end[guesses.slots] - slots.num_tokens[guesses.slots] - 1
        count = self.index.write(guesses, np.minimum(self._lengths(pace)[guesses.classes], room))
        total = int(count.sum())
        if not total or total + size > self._max_rows:
            return None
        self._classes[guesses.slots] = guesses.classes
        self._num_drafts[:] = 0
        self._num_drafts[guesses.slots] = count
        return self._num_drafts

    def observe_pass(self, plan: StepPlan | None, *, tokens: int, seconds: float) -> None:
        """Count a pass in which every sequence sampled; others tell nothing about drafts."""
        if plan is None or not (plan.is_decode or plan.is_checking):
            return
        rows = len(plan.slots) if plan.is_decode else int(plan.count.sum())
        self.counts.decode_s += seconds
        if self._is_searched:
            self.counts.on_s += seconds
        self._pace.observe(is_drafted=self._is_searched, rows=rows, tokens=tokens, seconds=seconds)

    def observe_drafts(
        self, slots: Int[np.ndarray, " rows"], drafted: Int[np.ndarray, " rows"],
        accepted: Int[np.ndarray, " rows"], is_rejected: Bool[np.ndarray, " rows"],
    ) -> None:  # fmt: skip
        """Count drafts of these slots: how many tokens they had, how many were right, and did one differ?"""
        counts, classes = self.counts, self._classes[slots]
        counts.num_drafts += int((drafted > 0).sum())
        counts.num_draft_tokens += int(drafted.sum())
        counts.num_accepted_tokens += int(accepted.sum())
        positions = len(counts.drafted_at)
        at_least = lambda x: np.cumsum(np.bincount(x, minlength=positions + 1)[:0:-1])[::-1]
        counts.drafted_at += at_least(drafted)
        counts.accepted_at += at_least(accepted)
        self._right = self._right * _DECAY + np.bincount(classes, accepted, NUM_CLASSES)
        self._wrong = self._wrong * _DECAY + np.bincount(classes, is_rejected, NUM_CLASSES)

    def _lengths(self, pace: Pace) -> Int[np.ndarray, " classes"]:
        """How many tokens to draft, by class of the guess.

        The nth token of a draft is right with probability p^n. It is worth its row while that is more than the tokens
        that are sampled in the time of a row.
        """
        most = self.settings.num_speculative_tokens
        prior = np.arange(NUM_CLASSES) / NUM_CLASSES  # the more tokens were equal, the likelier is the next
        p = (self._right + _PRIOR_WEIGHT * prior) / (self._right + self._wrong + _PRIOR_WEIGHT)
        price = np.log(self._price_of_row(pace))
        return np.minimum(price / np.log(p.clip(0.01, 0.995)), most).astype(np.int64)

    def _price_of_row(self, pace: Pace) -> float:
        """The tokens that are sampled in the time that one more row of a pass takes."""
        plain, drafted = pace.plain, pace.drafted
        if not plain.passes or drafted.passes < _HOPELESS_AFTER:
            return 0.3
        more_rows = drafted.rows / drafted.passes - plain.rows / plain.passes
        more_s = drafted.seconds / drafted.passes - plain.seconds / plain.passes
        if more_rows < 1:
            return 0.3
        rate = max(plain.per_s, drafted.per_s)
        return min(max(more_s / more_rows * rate, 0.05), 0.95)


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
