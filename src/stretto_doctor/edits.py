"""The smallest edits that make a config fit: other values of the keys that its error names, each tried by planning.

An edit is a flag and its value, as the user would type it. With the edits that are offered the config loads, and this
machine could start the run: each has been tried. One edit is preferred to two, and a value near the config's to one
that is far from it.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from stretto.config.section import Section, all_paths

TRY_S = 6.0
MOST_OFFERED = 3
NEAR = 8
_NUMBER = re.compile(r"([a-z_][\w.]*)\]?\s*=\s*(\d+)\b")
_TEXT = re.compile(r"([a-z_][\w.]*)\s*=\s*\"([\w-]+)\"")
TEXTS = {"device": ("auto", "cpu"), "engine": ("embedded",), "attn": ("sdpa",), "impl": ("auto", "hf")}
"""By the last part of a key: values with which a run needs less of a machine."""
GPU_KEYS = (
    ("deployment.num_infer_gpus", ("1", "None")), ("deployment.num_train_gpus", ("1", "None")),
    ("trainer_gpu_ids", ("None",)), ("inference_gpu_ids", ("None",)),
    ("inference.deployment.num_replicas", ("1",)), ("inference.parallel.tp", ("1",)), ("inference.parallel.dp", ("1",)),
    ("deployment.num_replicas", ("1",)), ("parallel.tp", ("1",)), ("parallel.dp", ("1",)),
    ("deployment.gpus_per_node", ("4", "2", "1", "0")), ("inference.device", ("auto", "cpu")),
    ("device", ("auto", "cpu")),
)  # fmt: skip

Edit = tuple[str, str]
"""Flag and value."""


def smallest_edits(
    words: Sequence[str],
    error: str,
    root: type[Section],
    why_not: Callable[[Sequence[str]], str | None],
    gpu_edits: Sequence[Edit] = (),
) -> list[list[Edit]]:
    """Sets of edits with which a config fits, the smallest first; [] if none was found within TRY_S.

    words: the command line that does not fit. error: its message. why_not: returns the error of another command line,
    None if that fits. gpu_edits: the edits of `without_gpus`; as few of them as possible are offered.
    """
    deadline = time.monotonic() + TRY_S
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # warnings about configs that are only tried
    try:
        first = list(_candidates(error, root))
        found: list[list[Edit]] = []
        next_errors: list[tuple[Edit, str]] = []
        for edit in first:
            if time.monotonic() > deadline or len(found) == MOST_OFFERED:
                break
            left = why_not([*words, *edit])
            if left is None:
                found.append([edit])
            elif left != error:
                next_errors.append((edit, left))
        if gpu_edits and not found and why_not([*words, *itertools.chain(*gpu_edits)]) is None:
            found.append(_needed(words, gpu_edits, why_not))
        if found:
            return found
        for edit, left in next_errors:  # the edit removed one error, and another is left
            for other in _candidates(left, root):
                if time.monotonic() > deadline:
                    return []
                if other[0] != edit[0] and why_not([*words, *edit, *other]) is None:
                    return [[edit, other]]
        return []
    finally:
        logging.disable(level)


def _needed(words: Sequence[str], edits: Sequence[Edit], why_not: Callable[[Sequence[str]], str | None]) -> list[Edit]:
    """The edits of a set without those that the config does not need in order to fit."""
    kept = list(edits)
    for edit in edits:
        fewer = [other for other in kept if other != edit]
        if fewer and why_not([*words, *itertools.chain(*fewer)]) is None:
            kept = fewer
    return kept


def without_gpus(cfg: Section) -> list[Edit]:
    """Edits that reset every key with which a config requests GPUs."""
    edits = []
    for key, values in GPU_KEYS:
        value: Any = cfg
        for name in key.split("."):
            value = getattr(value, name, None)
        if value is not None and str(value) != values[-1]:
            edits.append((flag(key), values[-1]))
    return edits


def _candidates(error: str, root: type[Section]) -> Iterator[Edit]:
    """Edits that may help against an error, the smaller changes first."""
    numbers = [
        (abs(math.log(value / max(given, 1))), key, str(value))
        for key, given in _numbers(error, root)
        for value in _values_near(given, key)
    ]
    yield from ((flag(key), value) for _, key, value in sorted(numbers))
    for name, written in _TEXT.findall(error):  # the given value, or what the message advises
        for key in _keys(name, root):
            yield from ((flag(key), value) for value in (written, *TEXTS.get(key.rpartition(".")[2], ())))
    if "GPU" in error:
        yield from ((flag(key), value) for key, values in GPU_KEYS for value in values if key in _paths(root))


def _numbers(error: str, root: type[Section]) -> Iterator[tuple[str, int]]:
    seen = set()
    for name, text in _NUMBER.findall(error):
        for key in _keys(name, root):
            if key not in seen:
                seen.add(key)
                yield key, int(text)


def _keys(name: str, root: type[Section]) -> Iterable[str]:
    """Paths of the root that a message may mean with this name."""
    tables = ("", "deployment", "orchestrator", "trainer", "inference", "model", "inference.parallel", "ckpt")
    paths = (f"{table}.{name}".lstrip(".") for table in tables)
    return dict.fromkeys(path for path in paths if path in _paths(root))


@cache
def _paths(root: type[Section]) -> frozenset[str]:
    return frozenset(path for path, _, _ in all_paths(root))


def _values_near(given: int, key: str) -> Iterable[int]:
    """Other values: halves and doubles, divisors and multiples, neighbours; for a port, the next ones."""
    if key.endswith("port"):
        return range(given + 1, given + 1 + NEAR)
    near = itertools.chain(
        (given + step for step in range(-NEAR, NEAR + 1)),
        (given // by for by in (2, 3, 4, 8, 16) if given % by == 0),
        (given * by for by in (2, 3, 4)),
        (1, 2, 4, 8),
    )
    return sorted({value for value in near if value > 0})  # with `given`, which the message may advise


def flag(key: str) -> str:
    """`--inference.parallel.tp`."""
    return "--" + key.replace("_", "-")


def written(edits: Sequence[Edit]) -> str:
    """A set of edits as the user would type it."""
    return " ".join(itertools.chain.from_iterable(edits))


def as_text(choices: Sequence[Sequence[Edit]]) -> str:
    """The edits to type, one line per choice."""
    return "\n".join(f"    {written(edits)}" for edits in choices)
