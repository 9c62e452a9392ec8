"""Whether and how far to draft: only while it makes sampling faster, as measured.

Drafts change nothing but time (inference/embedded/drafts.py), and time decides about them:

    RESTING -> TIMING -> TRYING -> ON <-> COMPARING
       ^                   |                  |
       |-------------------|------------------|     if drafts were no faster, each time for twice as long

RESTING: plain passes, of which nothing is measured. TIMING, COMPARING: a few plain passes, to know their rate.

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

from stretto.config.sections.inference import SpeculationSection
from stretto.inference.embedded.drafts import BuildDrafter, DraftCounts
from stretto.inference.embedded.slots import SequenceSlots
from stretto_speculation.copies import NUM_CLASSES, DraftIndex, Method

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from stretto.inference.embedded.scheduler import StepPlan

MIN_GAIN = 1.06
"""Drafts must be so many times as fast as plain passes."""
_TIMED_PASSES = 8
_TRIED_PASSES = 24
_COMPARED_PASSES = 4
_PASSES_ON, _PASSES_CHECKED = 160, 16  # between two comparisons; an earlier one if drafts have become slower
_FIRST_WAIT, _LAST_WAIT = 256, 16_384  # plain passes between two tries
_MIN_WAIT_RATIO = 100  # a wait is so many times as long as what the last try has cost
_HOPELESS, _HOPELESS_AFTER = 0.7, 10  # a try that is so slow ends early
_LEAST_MEASURED = 3.0  # passes of each kind
_FRUITLESS_AFTER = 8  # a try in which no draft was right ends early
_DECAY = 0.97  # per pass, of what is measured
_PASSES_PER_LENGTHS = 4  # passes until lengths are chosen again
_PRIOR = 1 - 0.5 ** np.arange(1, NUM_CLASSES + 1)  # the more tokens were equal, the likelier is the next
_PRIOR_WEIGHT = 2.0
_MAX_LOGIT_BYTES = 1 << 28  # of a pass with drafts


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """The keys of [inference.speculation] that the embedded engine has."""

    method: Method = "suffix"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 8
    is_always_on: bool = False  # for tests: drafts whether or not they are faster

    def build(self, slots: SequenceSlots, vocab_size: int) -> Speculator:
        return Speculator(slots, self, vocab_size)


def drafter_of(section: SpeculationSection) -> BuildDrafter:
    """What builds the drafter of an engine with this section."""
    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    given = {name: value for name, value in section.given.items() if name in names}
    if "prompt_lookup_max" in given and "prompt_lookup_min" not in given:
        given["prompt_lookup_min"] = min(given["prompt_lookup_max"], SpeculationSettings.prompt_lookup_min)
    assert section.method in ("suffix", "ngram"), "the rules refuse other methods"
    return SpeculationSettings(method=section.method, **given).build


class PaceState(StrEnum):
    RESTING = "resting"
    TIMING = "timing"
    TRYING = "trying"
    ON = "on"
    COMPARING = "comparing"


@dataclass(slots=True)
class _Rate:
    """Passes of one kind, the older the less."""

    passes: float = 0.0
    sequences: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        if self.passes > 2 and seconds > 8 * self.seconds / self.passes:
            return  # something else had the processor
        self.passes = self.passes * _DECAY + 1
        self.sequences = self.sequences * _DECAY + sequences
        self.rows = self.rows * _DECAY + rows
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Pace:
    """The state of one size of batch."""

    state: PaceState = PaceState.TIMING
    left: int = _TIMED_PASSES  # passes until the state is left
    wait: int = _FIRST_WAIT
    plain: _Rate = field(default_factory=_Rate)
    drafted: _Rate = field(default_factory=_Rate)
    cost_s: float = 0.0  # of a try: what it took longer than plain passes would have
    num_right: int = 0  # drafted tokens in a try that were right
    is_first: bool = True  # the first pass of a try indexes all that was sampled since the last

    @property
    def is_drafting(self) -> bool:
        return self.state is PaceState.TRYING or self.state is PaceState.ON

    def rest(self) -> bool:
        """Whether the next pass is plain and not to be observed; counts it, if so."""
        if self.state is not PaceState.RESTING:
            return False
        self.left -= 1
        if self.left <= 0:
            self._move()
        return True

    def observe(self, *, is_drafted: bool, num_sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Count a pass in which every sequence sampled, and move on."""
        if not is_drafted:
            self.plain.add(num_sequences, rows, tokens, seconds)
        elif not self.is_first:
            self.drafted.add(num_sequences, rows, tokens, seconds)
        if self.state is PaceState.TRYING and is_drafted:
            self.cost_s += seconds - (tokens / self.plain.per_s if self.plain.per_s else seconds)
            self.num_right += tokens - num_sequences
            self.is_first = False
        self.left -= 1
        is_lost = self.state is PaceState.TRYING and self._is_hopeless()
        is_lost |= self.state is PaceState.ON and self.left % _PASSES_CHECKED == 0 and not self.is_faster
        if self.left <= 0 or is_lost:
            self._move()

    @property
    def is_faster(self) -> bool:
        """Whether drafts are, as measured last; they cannot be where hardly any token was right."""
        plain, drafted = self.plain, self.drafted
        is_known = min(plain.passes, drafted.passes) >= _LEAST_MEASURED
        return is_known and drafted.tokens >= MIN_GAIN * drafted.sequences and drafted.per_s >= MIN_GAIN * plain.per_s

    def skip(self) -> None:
        """Count a pass that tells nothing, so that a try ends in time where most passes compute prompts too."""
        self.left -= 1
        if self.left <= 0:
            self._move()

    def _is_hopeless(self) -> bool:
        passes = self.drafted.passes
        if passes >= _HOPELESS_AFTER and self.drafted.per_s < _HOPELESS * self.plain.per_s:
            return True
        return not self.num_right and _TRIED_PASSES - self.left >= _FRUITLESS_AFTER

    def _move(self) -> None:
        is_faster = self.is_faster
        if self.state is PaceState.RESTING:
            self._enter(PaceState.TIMING, _TIMED_PASSES)
            self.plain = _Rate()
        elif self.state is PaceState.TIMING:
            self._enter(PaceState.TRYING, _TRIED_PASSES)
            self.drafted, self.cost_s, self.num_right, self.is_first = _Rate(), 0.0, 0, True
        elif self.state is PaceState.ON:
            self._enter(PaceState.COMPARING, _COMPARED_PASSES)
        elif is_faster:
            self.wait = _FIRST_WAIT
            self._enter(PaceState.ON, _PASSES_ON)
        else:
            pass_s = self.plain.seconds / self.plain.passes if self.plain.passes else 0.0
            least = _MIN_WAIT_RATIO * self.cost_s / pass_s if pass_s and self.state is PaceState.TRYING else 0.0
            self._enter(PaceState.RESTING, max(self.wait, math.ceil(least)))
            self.wait = min(2 * self.wait, _LAST_WAIT)

    def _enter(self, state: PaceState, passes: int) -> None:
        self.state, self.left = state, passes


class Speculator:
    """A `Drafter` that copies what sequences already have, and counts what became of its drafts."""

    def __init__(self, slots: SequenceSlots, settings: SpeculationSettings, vocab_size: int) -> None:
        self.slots, self.settings = slots, settings
        least = settings.prompt_lookup_min
        self.index = DraftIndex(slots, settings.method, least=least, most=max(settings.prompt_lookup_max, least))
        most = settings.num_speculative_tokens
        self.counts = DraftCounts(0, 0, 0, np.zeros(most, np.int64), np.zeros(most, np.int64))
        self.paces: dict[int, Pace] = {}  # by the binary length of the number of sequences
        self._pace = Pace()
        self._max_rows = max(_MAX_LOGIT_BYTES // (4 * vocab_size), 1)
        self._right = np.zeros(NUM_CLASSES)  # drafted tokens that were right, by class of their guess, decaying
        self._wrong = np.zeros(NUM_CLASSES)
        self._num_found = 0  # searches that found something
        self._lengths = np.zeros(NUM_CLASSES, np.int64)
        self._classes = np.zeros(slots.capacity, np.int64)  # of each slot's guess
        self._num_drafts = np.zeros(slots.capacity, np.int64)
        self._is_searched = False

    def rest(self, num_sequences: int) -> bool:
        """Whether the next pass is a plain one of which nothing is measured; counts it."""
        self.counts.num_passes += 1
        size = num_sequences.bit_length()
        pace = self.paces.get(size)
        if pace is None:
            pace = self.paces[size] = Pace()
        self._pace = pace
        return not num_sequences or (pace.rest() and not self.settings.is_always_on)

    def propose(self, running: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " slots"] | None:
        """Write drafts behind the tokens of these slots; returns their lengths by slot, None without any."""
        self._is_searched = False
        pace = self._pace
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
        self.counts.num_passes_on += 1
        self.index.update(ready)
        guesses = self.index.find(ready)
        if not len(guesses.slots):
            return None
        if self._num_found % _PASSES_PER_LENGTHS == 0:
            self._lengths = self._choose_lengths(pace)
        self._num_found += 1
        room = slots.end[guesses.slots] - slots.num_tokens[guesses.slots] - 1
        count = self.index.write(guesses, np.minimum(self._lengths[guesses.classes], room))
        # No more rows than there is memory for; the first sequences draft then.
        count = np.diff(np.minimum(np.cumsum(count), max(self._max_rows - len(running), 0)), prepend=0)
        if not count.any():
            return None
        self._classes[guesses.slots] = guesses.classes
        self._num_drafts[:] = 0
        self._num_drafts[guesses.slots] = count
        return self._num_drafts

    def observe_pass(self, plan: StepPlan | None, *, tokens: int, seconds: float) -> None:
        """Count a pass in which every sequence sampled; others tell nothing about drafts."""
        if plan is None or not (plan.is_decode or plan.is_checking):
            self._pace.skip()
            return
        rows = len(plan.slots) if plan.is_decode else int(plan.count.sum())
        self._pace.observe(
            is_drafted=self._is_searched, num_sequences=len(plan.slots), rows=rows, tokens=tokens, seconds=seconds
        )

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

    def _choose_lengths(self, pace: Pace) -> Int[np.ndarray, " classes"]:
        """How many tokens to draft, by class of the guess.

        The nth token of a draft is right with probability p^n. It is worth its row while that is more than the tokens
        that are sampled in the time of a row.
        """
        most = self.settings.num_speculative_tokens
        p = (self._right + _PRIOR_WEIGHT * _PRIOR) / (self._right + self._wrong + _PRIOR_WEIGHT)
        price = np.log(self._price_of_row(pace))
        return np.minimum(price / np.log(p.clip(0.01, 0.995)), most).astype(np.int64)

    def _price_of_row(self, pace: Pace) -> float:
        """The tokens that are sampled in the time that one more row of a pass takes."""
        plain, drafted = pace.plain, pace.drafted
        if not plain.passes or drafted.passes < _TIMED_PASSES:
            return 0.3
        more_rows = drafted.rows / drafted.passes - plain.rows / plain.passes
        more_s = drafted.seconds / drafted.passes - plain.seconds / plain.passes
        if more_rows < 1:
            return 0.3
        rate = max(plain.per_s, drafted.per_s)
        return min(max(more_s / more_rows * rate, 0.05), 0.95)
