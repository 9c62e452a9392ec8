"""Guesses what running sequences sample next, from what they and other sequences already have.

The text to copy from is the token array of slots.py itself, rows of ended sequences included until another sequence
gets their slot. A table holds, for hashes of `n` tokens, where the latest occurrence of such tokens was followed by
which position. Entries may be out of date or of other tokens with the same hash: the tokens themselves are compared
before anything is copied, and a wrong guess costs time, never correctness. So nothing is cleared when
the weights change: what the version before has written is still likely text.

Two lengths are looked up. Long runs of tokens (`most`) are found in all sequences of the same adapter: siblings,
earlier turns, other tasks. Short ones (`least`) are found only among those of the same prompt too, and in the prompt.
Adapters are users of a service: how fast a reply comes must not tell one what another was answered.
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
_COMPARED = 16
"""Tokens that are compared before the place to copy from: how many are equal says how good a guess is."""
NUM_CLASSES = _COMPARED.bit_length() + 1
"""Guesses are classed by the binary length of the number of equal tokens; 0: a copy that goes on after a change."""
_RESUMED = 24
"""Tokens behind a place that was found for which a copy may go on."""
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
        self.slots, self._is_own = slots, method == "ngram"
        self._sizes = np.array(sorted({most, least}, reverse=True))
        self._levels = np.arange(len(self._sizes))
        self._back = np.arange(1, most + 1)
        self._factors = np.where(self._back[:, None] <= self._sizes, _FACTORS[:most, None], np.uint64(0))
        self._table = np.empty((0, 0), np.int64)
        self._order = np.full(slots.capacity, -1, np.int64)  # of the sequence that is indexed
        self._num_indexed = np.zeros(slots.capacity, np.int64)
        self._salts = np.zeros((slots.capacity, len(self._sizes)), np.uint64)
        # By slot: the row of the last place that was found, the place minus the length then, and that length.
        self._last = np.zeros((slots.capacity, 3), np.int64)
        self._prompts: dict[bytes, int] = {}  # a slot whose tokens begin with this prompt and are indexed

    def update(self, running: Int[np.ndarray, " rows"]) -> None:
        """Index what these sequences have, except runs that end with their last token."""
        slots = self.slots
        if not self._table.size:  # memory only for engines that draft
            self._table = np.zeros((len(self._sizes), 1 << _TABLE_BITS), np.int64)  # 0: none
        is_new = self._order[running] != slots.order[running]
        if is_new.any():
            for slot in running[is_new].tolist():
                self._begin(slot)
        known, length = self._num_indexed[running], slots.num_tokens[running] - 1
        count = length - known
        total = int(count.sum())
        if not total:
            return
        owners, ends = running, length
        if total != len(running) or count.max() > 1:
            owners = np.repeat(running, count)
            ends = np.arange(total) - np.repeat(np.cumsum(count) - count - known, count) + 1
        hashes, places = self._hashes(owners, ends), (owners << _POSITION_BITS) | ends
        if ends.min() >= self._sizes[0]:
            self._table[self._levels, hashes] = places[:, None]
        else:
            for level, size in enumerate(self._sizes):
                is_long = ends >= size
                self._table[level, hashes[is_long, level]] = places[is_long]
        self._num_indexed[running] = length

    def find(self, running: Int[np.ndarray, " rows"]) -> Guesses:
        """Where these sequences, all of them indexed, can copy from: behind the longest run that is known, or where
        they copied from before."""
        length = self.slots.num_tokens[running]
        places = self._table[self._levels, self._hashes(running, length)]
        equal = self._num_equal(running, places) if places.any() else np.zeros_like(places)
        equal[equal < self._sizes] = 0
        best = equal.argmax(axis=1)
        nth = np.arange(len(running))
        equal, places = equal[nth, best], places[nth, best]
        is_found = equal > 0
        rows, starts = places >> _POSITION_BITS, places & _POSITION_MASK
        if is_found.all():
            self._last[running] = np.stack((rows, starts - length, length), axis=1)
            return Guesses(running, rows, starts, np.frexp(equal)[1])
        found = running[is_found]
        self._last[found] = np.stack((rows, starts - length, length), axis=1)[is_found]
        # A copy in which one token differs goes on behind it.
        last_row, shift, found_at = self._last[running].T
        is_resumed = ~is_found & (length - found_at <= _RESUMED)
        rows, starts = np.where(is_resumed, last_row, rows), np.where(is_resumed, length + shift, starts)
        kept = is_found | is_resumed
        return Guesses(running[kept], rows[kept], starts[kept], np.frexp(equal[kept])[1])

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
        self._last[slot] = (0, 0, -_RESUMED - 1)
        if self._is_own:
            self._salts[slot] = order + 1
            self._num_indexed[slot] = 0
            return
        adapter = int(slots.adapter[slot])
        key = blake2b(slots.tokens[slot, :num_prompt].tobytes(), digest_size=8, key=b"%d" % adapter).digest()
        self._salts[slot] = adapter
        self._salts[slot, -1] = int.from_bytes(key)
        # The prompt of a group is indexed once, as long as the first slot has it.
        first = self._prompts.get(key)
        is_indexed = first is not None and first != slot and self._salts[first, -1] == self._salts[slot, -1]
        self._num_indexed[slot] = max(num_prompt - 1, 0) if is_indexed else 0
        if not is_indexed:
            if len(self._prompts) > 4 * slots.capacity:
                self._prompts.clear()
            self._prompts[key] = slot

    def _hashes(self, rows: Int[np.ndarray, " runs"], ends: Int[np.ndarray, " runs"]) -> Int[np.ndarray, "runs levels"]:
        """Indices in the table of the runs before position `ends` of these slots."""
        runs = self.slots.tokens[rows[:, None], (ends[:, None] - self._back).clip(-1)]
        mixed: UInt64[np.ndarray, "runs levels"] = runs.astype(np.uint64) @ self._factors
        mixed += self._salts[rows]
        mixed ^= mixed >> np.uint64(32)
        mixed *= _FACTORS[-1]
        return (mixed >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)

    def _num_equal(
        self, running: Int[np.ndarray, " rows"], places: Int[np.ndarray, "rows levels"]
    ) -> Int[np.ndarray, "rows levels"]:
        """How many tokens before each place equal the last ones of each sequence; at most _COMPARED."""
        tokens, back = self.slots.tokens, np.arange(1, _COMPARED + 1)
        ours = (self.slots.num_tokens[running][:, None] - back).clip(-1)
        theirs = ((places & _POSITION_MASK)[:, :, None] - back).clip(-1)
        is_equal = tokens[running[:, None], ours][:, None] == tokens[(places >> _POSITION_BITS)[:, :, None], theirs]
        is_equal &= (theirs >= 0) & (ours >= 0)[:, None]
        return np.where(is_equal.all(axis=2), _COMPARED, is_equal.argmin(axis=2))
