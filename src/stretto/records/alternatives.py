"""Alternatives: at a sampled token, what teachers hold for likeliest there, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int


class Alternatives(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of alternatives, each of one token; tokens without a row have none.

    Rows of several samples may differ in the numbers of teachers and alternatives: the smaller ones are filled up with
    teachers of weight 0 and alternatives of id -1.
    """

    positions: np.ndarray  # int32 [rows], the token of each row, increasing
    ids: np.ndarray  # int32 [rows, teachers, alternatives]; -1: none
    logprobs: np.ndarray  # float32 [rows, teachers, alternatives], nats, those of the teacher; 0 where the id is -1
    weights: np.ndarray  # float32 [rows, teachers], with the sum 1 in each row
    is_forward: np.ndarray  # bool [rows]: what is small is KL(teacher || policy), not KL(policy || teacher)

    def part(self, start: int, stop: int) -> Alternatives:
        """Those of tokens start <= t < stop, counted from start."""
        low, high = np.searchsorted(self.positions, (start, stop))
        rows = slice(int(low), int(high))
        return Alternatives(
            positions=(self.positions[rows] - start).astype(np.int32),
            ids=self.ids[rows],
            logprobs=self.logprobs[rows],
            weights=self.weights[rows],
            is_forward=self.is_forward[rows],
        )

    def at(self, tokens: Int[np.ndarray, " tokens"]) -> Alternatives:
        """A row for each of these tokens, of weights 0 for those that have none."""
        rows = np.searchsorted(self.positions, tokens).clip(max=max(len(self.positions) - 1, 0))
        has_row = self.positions[rows] == tokens if len(self.positions) else np.zeros(len(tokens), bool)
        empty = _filled_up(self.part(0, 0), len(tokens), self.ids.shape[1:])
        if not has_row.any():
            return empty
        rows = rows[has_row]
        for name in ("ids", "logprobs", "weights", "is_forward"):
            getattr(empty, name)[has_row] = getattr(self, name)[rows]
        return empty


def concat_alternatives(parts: Sequence[Alternatives | None], lengths: Sequence[int]) -> Alternatives | None:
    """Those of several samples of `lengths` tokens, one after another; None if no sample has any."""
    starts = np.cumsum([0, *lengths[:-1]])
    known = [(part, int(start)) for part, start in zip(parts, starts, strict=True) if part is not None]
    if not known:
        return None
    shape = tuple(np.max([part.ids.shape[1:] for part, _ in known], axis=0).tolist())
    whole = [_filled_up(part, len(part.positions), shape) for part, _ in known]
    return Alternatives(
        positions=np.concatenate([part.positions + start for part, start in known]).astype(np.int32),
        ids=np.concatenate([part.ids for part in whole]),
        logprobs=np.concatenate([part.logprobs for part in whole]),
        weights=np.concatenate([part.weights for part in whole]),
        is_forward=np.concatenate([part.is_forward for part in whole]),
    )


def _filled_up(part: Alternatives, num_rows: int, shape: tuple[int, ...]) -> Alternatives:
    """Copies of the arrays with this many rows, and with teachers and alternatives that are none to this shape."""
    teachers, most = shape
    known, has, had = len(part.positions), *part.ids.shape[1:]
    ids = np.full((num_rows, teachers, most), -1, np.int32)
    logprobs = np.zeros((num_rows, teachers, most), np.float32)
    weights, is_forward = np.zeros((num_rows, teachers), np.float32), np.zeros(num_rows, bool)
    ids[:known, :has, :had], logprobs[:known, :has, :had] = part.ids, part.logprobs
    weights[:known, :has], is_forward[:known] = part.weights, part.is_forward
    return Alternatives(
        positions=np.arange(num_rows, dtype=np.int32),
        ids=ids,
        logprobs=logprobs,
        weights=weights,
        is_forward=is_forward,
    )
