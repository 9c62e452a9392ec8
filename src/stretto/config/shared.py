"""Root keys of `rl` that mean the same in several sections: filled in, refused where they disagree.

Works on raw data, before validation, because only raw data knows what was given and what is a default. In:
the nested dicts of a root. Out: the same with every shared key in all its places, and the problems found on
the way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stretto.config.section import Section


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at dotted paths; the loader adds file and line."""

    paths: tuple[str, ...]
    message: str


class ConfigProblems(ValueError):
    """Carries problems through pydantic's validation to the loader."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(problem.message for problem in problems))
        self.problems = problems


@dataclass(frozen=True)
class Shared:
    """A root key and its places in the sections.

    With `must_agree`, sections may not differ even when the root says nothing, and a value given in one of
    them counts for all. Without, the root's value fills the sections, which may otherwise differ.
    """

    root: str
    places: tuple[str, ...]
    must_agree: bool = field(default=False, kw_only=True)


SHARED = (
    Shared(
        "model.name", ("trainer.model.name", "orchestrator.model.name", "inference.model"), must_agree=True
    ),
    Shared("model.scratch", ("trainer.model.scratch", "orchestrator.model.scratch"), must_agree=True),
    Shared("model.dtype", ("trainer.model.dtype", "orchestrator.model.dtype", "inference.dtype")),
    Shared("model", ("trainer.model", "orchestrator.model")),
    Shared("tokenizer", ("trainer.tokenizer", "orchestrator.tokenizer"), must_agree=True),
    Shared("max_steps", ("trainer.max_steps", "orchestrator.max_steps"), must_agree=True),
    Shared("seq_len", ("trainer.seq_len", "orchestrator.seq_len"), must_agree=True),
    Shared("seed", ("trainer.seed", "orchestrator.seed", "inference.seed")),
    Shared("ckpt", ("trainer.ckpt",), must_agree=True),
    Shared(
        "weight_broadcast", ("trainer.weight_broadcast", "orchestrator.weight_broadcast"), must_agree=True
    ),
    Shared(
        "rollout_transport", ("trainer.rollout_transport", "orchestrator.rollout_transport"), must_agree=True
    ),
    Shared("control", ("trainer.control", "orchestrator.control"), must_agree=True),
    Shared("monitors", ("trainer.monitors", "orchestrator.monitors")),
    Shared("log", ("trainer.log", "orchestrator.log", "inference.log")),
)


def same_as(path: str) -> list[str]:
    """The other paths of `rl` that a value at this one fills or is filled from."""
    found = []
    for shared in SHARED:
        for place in (shared.root, *shared.places):
            if path == place or path.startswith(f"{place}."):
                found += [other + path.removeprefix(place) for other in (shared.root, *shared.places)]
    return [other for other in dict.fromkeys(found) if other != path]


def propagate(data: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Fill every shared key into its places; conflicts come back as problems, all at once."""
    data = copy.deepcopy(data)
    problems: list[Problem] = []
    done: set[str] = set()
    for shared in SHARED:
        for leaf in sorted(set(_given_leaves(data, shared))):
            path = shared.root + leaf
            if path not in done:
                done.add(path)
                problems += _settle(data, path, [place + leaf for place in shared.places], shared.must_agree)
    return data, problems


def _given_leaves(data: dict[str, Any], shared: Shared) -> Iterator[str]:
    """Suffixes (`` or `.a.b`) below a shared key that are given in any of its places."""
    for place in (shared.root, *shared.places):
        yield from _leaves(get(data, place))


def _leaves(value: Any, prefix: str = "") -> Iterator[str]:
    if value is MISSING:
        return
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}")
    else:
        yield prefix


def _settle(data: dict[str, Any], root: str, places: list[str], must_agree: bool) -> list[Problem]:
    places = [place for place in places if _is_open(data, place)]
    given = [(path, value) for path in (root, *places) if (value := get(data, path)) is not MISSING]
    is_table = isinstance(given[0][1], dict)
    differing = [
        (p, value)
        for p, value in given[1:]
        if value != given[0][1] and not (is_table and isinstance(value, dict))
    ]
    is_at_root = given[0][0] == root
    if differing and (is_at_root or must_agree):
        told = " but ".join(f"{path} = {show(value)}" for path, value in [given[0], *differing])
        message = f"{told}; say it once, at the root as {root}, or make them equal"
        return [Problem(tuple(path for path, _ in [given[0], *differing]), message)]
    if is_at_root or must_agree:
        for path in (root, *places):
            if get(data, path) is MISSING:
                put(data, path, copy.deepcopy(given[0][1]))
    return []


def _is_open(data: dict[str, Any], path: str) -> bool:
    """Whether a value can be given at a path: no section above it is None or something else than a table."""
    for key in path.split(".")[:-1]:
        data = data.get(key, {})
        if not isinstance(data, dict):
            return False
    return True


MISSING: Any = object()


def get(data: Any, path: str) -> Any:
    """The raw value at a dotted path, or MISSING."""
    for key in path.split("."):
        if not isinstance(data, dict) or key not in data:
            return MISSING
        data = data[key]
    return None if data == "None" else data


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the raw value at a dotted path whose parents are tables or absent."""
    *parents, last = path.split(".")
    for key in parents:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            return
    data[last] = value


def show(value: Any) -> str:
    """A value as TOML would write it, near enough for a message."""
    if value is None:
        return "None"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {show(item)}" for key, item in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value)


def as_raw(value: Any) -> Any:
    """Raw data of sections given as objects: only what was set on them, and always a union's tag."""
    if isinstance(value, Section):
        raw = {key: as_raw(getattr(value, key)) for key in value.model_fields_set}
        return raw | ({"type": value.type} if hasattr(value, "type") else {})
    if isinstance(value, dict):
        return {key: as_raw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_raw(item) for item in value]
    return value


def without_differing(data: dict[str, Any]) -> dict[str, Any]:
    """Dumped data of an RLConfig less the root leaves that are defaults there and differ in a section.

    What remains loads again to the same config: a root value that was given equals all its places.
    """
    data = copy.deepcopy(data)
    for shared in SHARED:
        value = get(data, shared.root)
        for leaf in list(_leaves(value)):
            places = [place + leaf for place in shared.places if _is_open(data, place + leaf)]
            if any(get(data, place) != get(data, shared.root + leaf) for place in places):
                _remove(data, shared.root + leaf)
    return data


def _remove(data: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        if not isinstance(data := data.get(key, {}), dict):
            return
    data.pop(last, None)
