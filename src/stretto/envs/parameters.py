"""Which arguments an environment takes, and whether the given ones fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from stretto.base.errors import ConfigError
from stretto.base.foreign import definition_of

_BASES = ("stretto.envs.base", "stretto.envs.multi_turn")
"""Modules of the classes from which environments are derived."""


def signature_of(factory: Any, env_id: str) -> inspect.Signature:
    """The signature of a class or function that builds an environment.

    Raises: ConfigError if it cannot be called.
    """
    if not callable(factory):
        raise ConfigError(
            f"environment {env_id!r} is an object of type {type(factory).__name__}; name a class, or a function that "
            "makes one."
        )
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError) as cause:  # some callables written in C
        raise ConfigError(f"environment {env_id!r} has no readable signature: {cause}") from cause


def check_argument_types(cls: type, args: Mapping[str, Any], env_id: str) -> None:
    """Check arguments against the annotations of the class's `__init__`.

    Raises: ConfigError for the first argument of another type.
    """
    types = get_type_hints(cls.__init__)  # type: ignore[misc]  # mypy takes a class for an instance of one
    for key, value in args.items():
        try:
            msgspec.convert(value, types.get(key, Any))
        except msgspec.ValidationError as cause:
            rule = str(cause).replace("`", "").removeprefix("Expected ")
            raise ConfigError(f"environment {env_id!r}: {key} = {value!r} must be {rule}. Change `args`.") from cause


def check_methods(kind: type, env_id: str) -> None:
    """Check that a class of the user has the methods of the class from which it is derived, with their arguments.

    Raises: ConfigError for one that is missing, or takes other arguments than it is called with.
    """
    where = f"environment {env_id!r}: {kind.__name__}"
    for name in sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(f"{where} has no `{name}`; write `{_header(name, getattr(kind, name))}`")
    for name, wanted in _wanted_methods(kind).items():
        own = getattr(kind, name)
        if own is wanted or not inspect.isfunction(own):
            continue
        if isinstance(inspect.getattr_static(kind, name), staticmethod):
            continue
        parameters = inspect.signature(wanted).parameters.values()
        needed = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        try:
            inspect.signature(own).bind(*[None] * len(needed))
        except TypeError as cause:
            raise ConfigError(
                f"{where}.{name} ({definition_of(own)}): {cause}; write `{_header(name, wanted)}`"
            ) from None


def _wanted_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods of the classes of stretto from which a class is derived."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(kind.__mro__):
        if base.__module__ in _BASES:
            found |= {n: each for n, each in vars(base).items() if inspect.isfunction(each) and n[0] != "_"}
    return found


def _header(name: str, function: Callable[..., Any]) -> str:
    """The first line of a method, as one writes it."""
    names = [each for each, p in inspect.signature(function).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return f"def {name}({', '.join(names)})"
