"""The checksum of published weights notices what goes wrong with bytes on their way."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.transports.weights.checksum import BLOCK, Checksum, checksum_of_bytes

SIZE = 5 * BLOCK + 24


def weights(version: int, size: int = SIZE) -> bytearray:
    return bytearray(np.random.default_rng(version).bytes(size))


def slow_sum(data: bytes) -> list[int]:
    """The sum of each block, word by word."""
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    words = [[int.from_bytes(p[at : at + 8], "little") for at in range(0, len(p), 8)] for p in blocks]
    return [sum(block) % 2**64 for block in words]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3 * BLOCK), max_size=8), st.integers(0, 99))
def test_how_bytes_are_cut_makes_no_difference(sizes, seed):
    data = bytes(weights(seed, sum(sizes)))
    parts, at = Checksum(), 0
    for size in sizes:
        parts.add(memoryview(data)[at : at + size])
        at += size
    assert parts.value == checksum_of_bytes(data)


def test_blocks_are_summed_as_words():
    whole = weights(0, 3 * BLOCK)
    same = whole.copy()
    same[0:8], same[8:16] = whole[8:16], whole[0:8]
    assert slow_sum(same) == slow_sum(whole) and checksum_of_bytes(same) == checksum_of_bytes(whole)
    for seed in range(50):
        other = whole.copy()
        other[random.Random(seed).randrange(len(other))] ^= 1 << seed % 8
        assert slow_sum(other) != slow_sum(whole) and checksum_of_bytes(other) != checksum_of_bytes(whole)


@pytest.mark.parametrize("at", [0, 8, BLOCK - 8, BLOCK, 3 * BLOCK + 4, SIZE - 9])
def test_bytes_of_the_version_before_are_noticed_from_wherever_they_begin(at):
    new, old = weights(1), weights(0)
    for torn in (new[:at] + old[at:], old[:at] + new[at:]):
        assert torn == new or checksum_of_bytes(torn) != checksum_of_bytes(new)


def test_a_stale_block_and_exchanged_blocks_are_noticed():
    new, old = weights(1), weights(0)
    for block in range(SIZE // BLOCK):
        here = slice(block * BLOCK, (block + 1) * BLOCK)
        stale = new.copy()
        stale[here] = old[here]
        assert checksum_of_bytes(stale) != checksum_of_bytes(new)
        for other in range(block):
            there = slice(other * BLOCK, (other + 1) * BLOCK)
            exchanged = new.copy()
            exchanged[here], exchanged[there] = new[there], new[here]
            assert checksum_of_bytes(exchanged) != checksum_of_bytes(new)


@pytest.mark.heavy
def test_missing_and_added_bytes_are_noticed_even_if_they_are_zero():
    data = weights(0) + bytes(64)
    found = {checksum_of_bytes(data + bytes(more)) for more in (0, 1, 8, 64, BLOCK)}
    found |= {checksum_of_bytes(data[:-less]) for less in (1, 8, 64)}
    assert len(found) == 8
    assert checksum_of_bytes(b"") != checksum_of_bytes(bytes(8))
