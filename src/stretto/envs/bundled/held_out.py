"""Random strings by index, split into training and held-out strings that never overlap.

The hash of a string decides whether it is held out (1 in 16 of all strings), not when it was drawn. So no held-out
string is ever trained on, however many tasks are drawn, in any process and run.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

EVAL_SHARE = 16
"""One string in this many is held out."""


def draw_held_out(stream: str, index: int, *, is_eval: bool, make: Callable[[int], str]) -> str:
    """String number `index` of `stream`, held out or not; `make` turns a random integer into a string."""
    attempt = 0
    while True:
        entropy = _digest(f"{stream}/{index}/{attempt}")
        text = make(entropy)
        if is_held_out(text) == is_eval:
            return text
        attempt += 1


def is_held_out(text: str) -> bool:
    """Is this string held out?"""
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
