"""The state of all sequences as arrays with a row per slot; a step works on all rows at once.

    FREE -> RESERVED -> RUNNING <-> PREEMPTED -> FREE

RESERVED is a sample that waits for the prefill of its request. The first sample of a request starts as PREEMPTED: it
has tokens but no blocks. Only scheduler.py changes states.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stretto.inference.embedded.vision.prompt import ImagePrompt


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
        ("adapter", np.int32),  # id of the adapter; 0 for the engine's own model
        ("shift", np.int64),  # position minus index behind the prompt; 0 without images
    ]
)


class SequenceSlots:
    """Arrays over slots; columns (tokens, blocks) are added when longer sequences arrive."""

    def __init__(self, capacity: int, max_len: int, block_size: int) -> None:
        self.capacity, self.max_len, self.block_size = capacity, max_len, block_size
        rows = np.zeros(capacity, _ROW)
        self.rows = rows
        self.state = rows["state"]
        self.order = rows["order"]
        self.allocation_id = rows["allocation_id"]
        self.num_prompt = rows["num_prompt"]
        self.num_tokens = rows["num_tokens"]
        self.num_computed = rows["num_computed"]
        self.num_blocks = rows["num_blocks"]
        self.end = rows["end"]
        self.member = rows["member"]
        self.key = rows["key"]
        self.inv_temperature = rows["inv_temperature"]
        self.is_greedy = rows["is_greedy"]
        self.top_k = rows["top_k"]
        self.top_p = rows["top_p"]
        self.min_p = rows["min_p"]
        self.is_filtered = rows["is_filtered"]
        self.is_watched = rows["is_watched"]
        self.adapter = rows["adapter"]
        self.shift = rows["shift"]
        self.images: dict[int, ImagePrompt] = {}  # by slot, of those whose prompts have some
        self.stop_ids = np.full((capacity, 1), -1, np.int64)
        self._resize(min(256, max_len))
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free slots; the caller has checked that there are so many."""
        allocated = self._free[-count:][::-1]
        del self._free[-count:]
        return allocated

    def free(self, slots: list[int]) -> None:
        self.state[slots] = SequenceState.FREE
        self._free.extend(slots)
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
        old = getattr(self, "tokens", None)
        tokens = np.zeros((self.capacity, columns), np.int32)
        logprobs = np.zeros((self.capacity, columns), np.float32)
        versions = np.zeros((self.capacity, columns), np.int32)
        blocks = np.zeros((self.capacity, num_blocks), np.int64)
        if old is not None:
            tokens[:, : old.shape[1]] = old
            logprobs[:, : old.shape[1]] = self.logprobs
            versions[:, : old.shape[1]] = self.versions
            blocks[:, : self.blocks.shape[1]] = self.blocks
        self.tokens, self.logprobs, self.versions, self.blocks = tokens, logprobs, versions, blocks
