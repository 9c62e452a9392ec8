"""The state of all sequences as arrays with a row per slot; a step works on all rows at once.

    FREE -> RESERVED -> RUNNING <-> PREEMPTED -> FREE

A sample is RESERVED while it waits for the prefill of its request. The first sample of a request starts as PREEMPTED:
it has tokens but no blocks. Only scheduler.py changes states.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stretto.inference.embedded.image_prompts import ImagePrompt


class SequenceState(IntEnum):
    FREE = 0
    RESERVED = 1
    RUNNING = 2
    PREEMPTED = 3


_ROW = np.dtype(
    [
        ("state", np.int8),
        ("order", np.int64),  # of arrival; the smallest is served first and preempted last
        ("allocation_id", np.int64),  # a new number whenever the slot is given blocks
        ("num_prompt", np.int64),
        ("num_tokens", np.int64),  # prompt + sampled
        ("num_computed", np.int64),  # tokens whose keys and values are in the cache
        ("num_blocks", np.int64),
        ("end", np.int64),  # num_tokens at which the sequence is cut off
        ("member", np.int64),  # which sample of its request, from 0
        ("key", np.uint64),  # key of its random numbers
        ("inv_temperature", np.float32),
        ("is_greedy", np.bool_),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("is_filtered", np.bool_),  # by top_k, top_p or min_p
        ("is_watched", np.bool_),  # a TokenWatcher reads its tokens: stop strings, streaming
        ("is_adjusted", np.bool_),  # its logits are changed: min_tokens, logit_bias, bad_words
        ("adapter", np.int32),  # id of the adapter; 0 for the engine's own model
        ("shift", np.int64),  # position minus index behind the prompt; 0 without images
    ]
)


class SequenceSlots:
    """Arrays over slots; columns (tokens, blocks) are added when longer sequences arrive.

    Every field of _ROW is an attribute too.
    """

    state: np.ndarray
    order: np.ndarray
    allocation_id: np.ndarray
    num_prompt: np.ndarray
    num_tokens: np.ndarray
    num_computed: np.ndarray
    num_blocks: np.ndarray
    end: np.ndarray
    member: np.ndarray
    key: np.ndarray
    inv_temperature: np.ndarray
    is_greedy: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    is_filtered: np.ndarray
    is_watched: np.ndarray
    is_adjusted: np.ndarray
    adapter: np.ndarray
    shift: np.ndarray

    def __init__(self, capacity: int, max_len: int, block_size: int) -> None:
        self.capacity, self.max_len, self.block_size = capacity, max_len, block_size
        self.rows = np.zeros(capacity, _ROW)
        for name in _ROW.names or ():
            setattr(self, name, self.rows[name])
        self.images: dict[int, ImagePrompt] = {}  # by slot; only prompts with images
        self.stop_ids = np.full((capacity, 1), -1, np.int64)
        self._resize(min(256, max_len))
        self._free = deque(range(capacity))
        self.keeps_ended = (
            False  # slots that ended longest ago are given out first: their tokens can be copied (drafts)
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` slots; the caller has checked that so many are free."""
        return [self._free.popleft() for _ in range(count)]

    def free(self, slots: list[int]) -> None:
        self.state[slots] = SequenceState.FREE
        if self.keeps_ended:
            self._free.extend(slots)
        else:
            self._free.extendleft(reversed(slots))
        if self.images:
            for slot in slots:
                self.images.pop(slot, None)

    def reserve(self, length: int) -> None:
        """Make sure that a sequence of `length` tokens fits in a row."""
        if length > self.tokens.shape[1]:
            self._resize(min(max(length, 2 * self.tokens.shape[1]), self.max_len))

    def set_stop_ids(self, slots: list[int], stop_ids: list[int]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((self.capacity, len(stop_ids)), -1, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        row = np.full(self.stop_ids.shape[1], -1, np.int64)
        row[: len(stop_ids)] = stop_ids
        self.stop_ids[slots] = row

    def _resize(self, columns: int) -> None:
        num_blocks = -(-columns // self.block_size)
        self.tokens = self._widened("tokens", columns, np.int32)
        self.logprobs = self._widened("logprobs", columns, np.float32)
        self.versions = self._widened("versions", columns, np.int32)
        self.blocks = self._widened("blocks", num_blocks, np.int64)

    def _widened(self, name: str, columns: int, dtype: type) -> np.ndarray:
        new: np.ndarray = np.zeros((self.capacity, columns), dtype)
        if (old := getattr(self, name, None)) is not None:
            new[:, : old.shape[1]] = old
        return new
