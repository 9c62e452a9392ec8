"""Alternatives: rows of some tokens survive packing, cutting, and the wire."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.records.alternatives import Alternatives, concat_alternatives
from stretto.records.codec import decode, encode


def some(seed: int, tokens: int, teachers: int, most: int) -> Alternatives:
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(tokens) < 0.5).astype(np.int32)
    shape = (len(positions), teachers, most)
    return Alternatives(
        positions=positions,
        ids=rng.integers(0, 50, shape).astype(np.int32),
        logprobs=-rng.random(shape).astype(np.float32),
        weights=np.full(shape[:2], 1 / teachers, np.float32),
        is_forward=rng.random(len(positions)) < 0.5,
    )


def by_token(rows: Alternatives, num_tokens: int) -> list[tuple[bool, list[tuple[float, dict[int, float]]]] | None]:
    """Per token, the direction, and each teacher's weight and alternatives; None without a row."""
    found: list[tuple[bool, list[tuple[float, dict[int, float]]]] | None] = [None] * num_tokens
    for row, position in enumerate(rows.positions.tolist()):
        teachers = [
            (float(weight), {int(i): float(x) for i, x in zip(ids, logprobs) if i >= 0})
            for weight, ids, logprobs in zip(rows.weights[row], rows.ids[row], rows.logprobs[row])
            if weight
        ]
        found[position] = bool(rows.is_forward[row]), teachers
    return found


@pytest.mark.parametrize("seed", range(10))
def test_what_is_joined_and_cut_again_is_what_it_was(seed: int) -> None:
    lengths = [9, 5, 12, 3]
    parts = [some(seed, 9, 1, 4), None, some(seed + 1, 12, 3, 2), some(seed + 2, 3, 2, 6)]
    whole = concat_alternatives(parts, lengths)
    assert whole is not None
    whole = decode(encode(whole), Alternatives)
    ends = np.cumsum(lengths).tolist()
    for part, length, end in zip(parts, lengths, ends):
        expected = [None] * length if part is None else by_token(part, length)
        assert by_token(whole.part(end - length, end), length) == expected
    tokens = np.random.default_rng(seed).permutation(ends[-1])[:15]
    chosen = by_token(whole.at(tokens), len(tokens))
    for token, found in zip(tokens, chosen):
        expected = by_token(whole, ends[-1])[token]
        assert found == (expected or (False, []))


def test_samples_without_alternatives_have_none_together() -> None:
    assert concat_alternatives([None, None], [3, 4]) is None
