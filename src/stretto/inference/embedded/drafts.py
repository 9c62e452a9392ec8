"""Guesses what running sequences sample next, from what they and other sequences already have.

The text to copy from is the token array of slots.py itself, rows of ended sequences included until another sequence
gets their slot. A table holds, for hashes of `n` tokens, where the latest occurrence of such tokens was followed by
which position. Entries may be out of date or of other tokens with the same hash: the tokens themselves are compared
before anything is copied, and a wrong guess costs time, never correctness (speculation.py). So nothing is cleared when
the weights change: what the version before has written is still likely text.

Two lengths are looked up. Long runs of tokens (`most`) are found in all sequences: siblings, earlier turns, other
tasks. Short ones (`least`) are found only among sequences of the same prompt, and in the prompt.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import numpy as np

from stretto.inference.embedded.slots import SequenceSlots

if TYPE_CHECKING:
    from jaxtyping import Int, UInt64

Method = Literal["ngram", "suffix"]
_TABLE_BITS = 19
_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_COMPARED = 32
"""Tokens that are compared before the place to copy from: how many are equal says how good a guess is."""
NUM_CLASSES = _COMPARED.bit_length() + 1
"""Guesses are classed by the binary length of the number of equal tokens."""
_FACTORS = np.random.default_rng(20).integers(1, 2**63, _COMPARED, dtype=np.uint64) | np.uint64(1)


class Guesses:
    """Where some sequences can copy from; arrays with an entry per sequence that has such a place."""

    def __init__(
        self, slots: Int[np.ndarray, " found"], rows: Int[np.ndarray, " found"], starts: Int[np.ndarray, " found"],
        classes: Int[np.ndarray, " found"],
    ) -> None:  # fmt: skip
        self.slots, self.rows, self.starts, self.classes = slots, rows, starts, classes


class DraftIndex:
    """Where in the slots' tokens runs of tokens were seen last."""

    def __init__(self, slots: SequenceSlots, method: Method, *, least: int, most: int) -> None:
        """least, most: numbers of equal tokens that are looked up; method "ngram": in the own sequence only."""
        assert 1 <= least <= most <= _COMPARED, (least, most)
        self.slots, self.sizes, self._is_own = slots, tuple(sorted({least, most})), method == "ngram"
        self._tables: dict[int, Int[np.ndarray, " hashes"]] = {}
        self._order = np.full(slots.capacity, -1, np.int64)  # of the sequence that is indexed
        self._num_indexed = np.zeros(slots.capacity, np.int64)
        self._salts = np.zeros((len(self.sizes), slots.capacity), np.uint64)
        self._prompts: dict[bytes, int] = {}  # prompts with indexed tokens, and how many of them are

    def update(self, running: Int[np.ndarray, " rows"]) -> None:
        """Index what these sequences have, except runs that end with their last token."""
        slots = self.slots
        if not self._tables:
            self._tables = {size: np.full(1 << _TABLE_BITS, -1, np.int64) for size in self.sizes}
        is_new = self._order[running] != slots.order[running]
        for slot in running[is_new].tolist():
            self._begin(slot)
        known, length = self._num_indexed[running], slots.num_tokens[running] - 1
        count = length - known
        total = int(count.sum())
        if not total:
            return
        if total == len(running) and count.min() == 1:
            owners, ends = running, length
        else:
            owners = np.repeat(running, count)
            ends = np.arange(total) - np.repeat(np.cumsum(count) - count - known, count) + 1
        for level, size in enumerate(self.sizes):
            rows, upto = owners, ends
            if ends.min() < size:
                is_long = ends >= size
                rows, upto = owners[is_long], ends[is_long]
            self._tables[size][self._hashes(level, rows, upto)] = (rows << _POSITION_BITS) | upto
        self._num_indexed[running] = length

    def find(self, running: Int[np.ndarray, " rows"]) -> Guesses:
        """Where these sequences, all of them indexed, can copy from: the longest run that is known."""
        slots = self.slots
        length = slots.num_tokens[running]
        found = np.full(len(running), -1, np.int64)
        for level, size in reversed(list(enumerate(self.sizes))):
            missing = np.flatnonzero((found < 0) & (length >= size))
            if not len(missing):
                continue
            rows, upto = running[missing], length[missing]
            places = self._tables[size][self._hashes(level, rows, upto)]
            is_known = places >= 0
            missing, places = missing[is_known], places[is_known]
            found[missing] = np.where(self._num_equal(running[missing], places) >= size, places, -1)
        is_found = found >= 0
        chosen, places = running[is_found], found[is_found]
        equal = self._num_equal(chosen, places)
        rows, starts = places >> _POSITION_BITS, places & _POSITION_MASK
        return Guesses(chosen, rows, starts, np.frexp(equal)[1])

    def write(self, guesses: Guesses, most: Int[np.ndarray, " found"]) -> Int[np.ndarray, " found"]:
        """Copy at most so many tokens behind each sequence; returns how many were."""
        slots, length = self.slots, self.slots.num_tokens
        left = length[guesses.rows] - guesses.starts
        is_own = (guesses.rows == guesses.slots) & (left > 0)
        # A sequence that repeats itself is repeated for as long as it takes.
        count = np.where(is_own, most, np.minimum(most, left)).clip(0)
        total = int(count.sum())
        if total:
            nth = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
            repeat = lambda x: np.repeat(x, count)
            source = repeat(guesses.starts) + np.where(repeat(is_own), nth % repeat(left.clip(1)), nth)
            tokens = slots.tokens[repeat(guesses.rows), source]
            slots.tokens[repeat(guesses.slots), repeat(length[guesses.slots]) + nth] = tokens
        return count

    def _begin(self, slot: int) -> None:
        """Prepare the index for the sequence that has this slot now."""
        slots = self.slots
        self._order[slot] = order = int(slots.order[slot])
        num_prompt = int(slots.num_prompt[slot])
        if self._is_own:
            self._salts[:, slot] = order + 1
            self._num_indexed[slot] = 0
            return
        key = blake2b(slots.tokens[slot, :num_prompt].tobytes(), digest_size=8).digest()
        self._salts[0, slot] = int.from_bytes(key)
        if len(self.sizes) > 1:
            self._salts[1:, slot] = 0
        # The prompt of a group is indexed once. Its first row may be another sequence's by now: then once again.
        first = self._prompts.get(key)
        is_indexed = first is not None and self._order[first] >= 0 and self._salts[0, first] == self._salts[0, slot]
        self._num_indexed[slot] = max(num_prompt - 1, 0) if is_indexed and first != slot else 0
        if not is_indexed:
            self._prompts[key] = slot
            if len(self._prompts) > 4 * slots.capacity:
                self._prompts.clear()

    def _hashes(
        self, level: int, rows: Int[np.ndarray, " runs"], ends: Int[np.ndarray, " runs"]
    ) -> Int[np.ndarray, " runs"]:
        """Indices in the table of the runs before position `ends` of these slots."""
        tokens, size = self.slots.tokens, self.sizes[level]
        mixed: UInt64[np.ndarray, " runs"] = self._salts[level, rows]
        for i in range(size):
            mixed = mixed + tokens[rows, ends - size + i].astype(np.uint64) * _FACTORS[i]
        mixed ^= mixed >> np.uint64(32)
        mixed *= _FACTORS[-1]
        return (mixed >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)

    def _num_equal(
        self, running: Int[np.ndarray, " rows"], places: Int[np.ndarray, " rows"]
    ) -> Int[np.ndarray, " rows"]:
        """How many tokens before each place equal the last ones of each sequence; at most _COMPARED."""
        slots = self.slots
        back = np.arange(1, _COMPARED + 1)
        ours = slots.num_tokens[running][:, None] - back
        theirs = (places & _POSITION_MASK)[:, None] - back
        is_equal = (ours >= 0) & (theirs >= 0)
        tokens, rows = slots.tokens, (places >> _POSITION_BITS)[:, None]
        is_equal &= tokens[running[:, None], ours] == tokens[rows, theirs]
        return np.where(is_equal.all(axis=1), _COMPARED, is_equal.argmin(axis=1))
