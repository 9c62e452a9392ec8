"""Alternatives: rows of some tokens survive packing, cutting, and the wire."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.records.alternatives import Alternatives, alternatives_of, concat_alternatives, join_teachers
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


def test_the_token_itself_is_one_of_them_and_there_once() -> None:
    tokens = np.array([5, 6, 7], np.int32)
    top_ids = np.array([[0, 0], [6, 9], [8, 9]], np.int32)
    top = np.array([[0, 0], [-0.1, -3], [-1, -2]], np.float32)
    logprobs = np.array([0, -0.1, -4], np.float32)
    one = alternatives_of(tokens, np.array([1, 2]), logprobs, (top_ids, top), is_forward=True)
    as_float = lambda pairs: {token: pytest.approx(value) for token, value in pairs.items()}
    assert by_token(one, 3) == [
        None, (True, [(1.0, as_float({6: -0.1, 9: -3}))]), (True, [(1.0, as_float({7: -4, 8: -1, 9: -2}))])
    ]  # fmt: skip
    both = join_teachers([one, one], np.array([0.25, 0.75]))
    assert [weight for weight, _ in by_token(both, 3)[1][1]] == [0.25, 0.75]
