"""The sequences' state as arrays, one row a slot, so that a step works on all of them at once.

A slot is FREE -> RESERVED (a sample that waits for its group's prefill) -> RUNNING <-> PREEMPTED -> FREE; a
group's first sample starts as PREEMPTED, i.e. it has tokens but no blocks. Only scheduler.py moves slots.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class SlotState(IntEnum):
    FREE = 0
    RESERVED = 1
    RUNNING = 2
    PREEMPTED = 3


_ROW = np.dtype(
    [
        ("state", np.int8),
        ("order", np.int64),  # arrival; smaller is served first and preempted last
        ("num_prompt", np.int64),
        ("num_tokens", np.int64),  # prompt + sampled
        ("num_computed", np.int64),  # tokens whose keys and values are in the cache
        ("num_blocks", np.int64),
        ("end", np.int64),  # num_tokens at which the sequence has its full length
        ("member", np.int64),
        ("key", np.uint64),  # of the random numbers
        ("inv_temperature", np.float32),
        ("is_greedy", np.bool_),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("is_filtered", np.bool_),  # top_k, top_p or min_p is in force
        ("is_watched", np.bool_),  # somebody reads tokens one by one: stop strings, streaming
        ("adapter", np.int32),  # id of the adapter; 0: the engine's own model
    ]
)


class Slots:
    """Arrays over slots; columns (tokens, blocks) grow as longer sequences come."""

    def __init__(self, capacity: int, max_len: int, block_size: int) -> None:
        self.capacity, self.max_len, self.block_size = capacity, max_len, block_size
        rows = np.zeros(capacity, _ROW)
        self.rows = rows
        self.state = rows["state"]
        self.order = rows["order"]
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
        self.stop_ids = np.full((capacity, 1), -1, np.int64)
        self._resize(min(256, max_len))
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def free(self, slots: list[int]) -> None:
        self.state[slots] = SlotState.FREE
        self._free.extend(slots)

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
