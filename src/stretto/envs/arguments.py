"""Which arguments an environment takes, and whether the given ones fit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from stretto.base.errors import ConfigError


def signature_of(factory: Any, env_id: str) -> inspect.Signature:
    """The signature of a class or function that builds an environment.

    Raises: ConfigError if it cannot be called.
    """
    if not callable(factory):
        raise ConfigError(
            f"environment {env_id!r} is a {type(factory).__name__}; name a class, or a function that makes one."
        )
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError) as cause:  # some callables written in C
        raise ConfigError(f"environment {env_id!r} has no readable signature: {cause}") from cause


def check_argument_types(cls: type, args: Mapping[str, Any], env_id: str) -> None:
    """Check arguments against the annotations of the class's `__init__`.

    Raises: ConfigError for the first argument of another type.
    """
    types = get_type_hints(cls.__init__)
    for key, value in args.items():
        try:
            msgspec.convert(value, types.get(key, Any))
        except msgspec.ValidationError as cause:
            rule = str(cause).replace("`", "").removeprefix("Expected ")
            raise ConfigError(
                f"environment {env_id!r}: {key} = {value!r} must be {rule}. Change `args`."
            ) from cause
