"""Random strings by index whose train and eval sides can never meet.

A string belongs to the eval side if its own hash says so (1 in 16 of all strings), never because of when it
was drawn: however many tasks are drawn on either side, in any process and run, no eval string is ever
trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

EVAL_SHARE = 16


def draw_held_out(stream: str, index: int, *, is_eval: bool, make: Callable[[int], str]) -> str:
    """String number `index` of `stream` on one side of the split.

    `make` turns a random integer into a string.
    """
    attempt = 0
    while True:
        entropy = _digest(f"{stream}/{index}/{attempt}")
        text = make(entropy)
        if is_held_out(text) == is_eval:
            return text
        attempt += 1


def is_held_out(text: str) -> bool:
    """Does this string belong to the eval side?"""
    return _digest("side/" + text) % EVAL_SHARE == 0


def letters_of(entropy: int, alphabet: str, length: int) -> str:
    """`length` letters, each drawn with replacement, from the digits of `entropy` in base len(alphabet)."""
    base = len(alphabet)
    letters = []
    for _ in range(length):
        entropy, digit = divmod(entropy, base)
        letters.append(alphabet[digit])
    return "".join(letters)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=64).digest(), "little")
