"""Code of somebody else's, an environment's: where in it something was raised, and what arguments it takes."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_type_hints

import msgspec

from stretto.base.errors import ConfigError, StrettoError


@contextmanager
def calling(kind: type[StrettoError], where: str) -> Iterator[None]:
    """Turn whatever somebody else's code raises, a SystemExit too, into `kind` with its place."""
    try:
        yield
    except StrettoError:
        raise
    except (Exception, SystemExit) as cause:
        raise kind(f"{where}: {told(cause, num_ours=2)}") from cause


def told(error: BaseException, num_ours: int = 1) -> str:
    """What was raised, and where, as far inside as code is the environment's own.

    num_ours: outermost frames that are the catcher's, and no place.
    """
    what = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)[num_ours:]
    return f"{nearest(frames)}: {what}" if frames else what


def nearest(frames: list[traceback.FrameSummary]) -> str:
    """`file:line in function` of the innermost frame outside the standard library."""
    stdlib = sysconfig.get_path("stdlib")
    own = [
        f
        for f in frames
        if not f.filename.startswith("<frozen")
        and (not f.filename.startswith(stdlib) or "site-packages" in f.filename)
    ]
    frame = (own or list(frames) or [None])[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}" if frame else "somewhere"


def signature_of(factory: Any, env_id: str) -> inspect.Signature:
    """What a factory of environments is called with.

    Raises: ConfigError for what cannot be called.
    """
    if not callable(factory):
        raise ConfigError(
            f"environment {env_id!r} is a {type(factory).__name__}; name a class, or a function that makes one."
        )
    try:
        return inspect.signature(factory)
    except (TypeError, ValueError) as cause:  # some that are written in C
        raise ConfigError(f"environment {env_id!r} does not say what its arguments are: {cause}") from cause


def check_kinds(cls: type, args: Mapping[str, Any], env_id: str) -> None:
    """Arguments are of the kinds that annotations of `__init__` say.

    Raises: ConfigError with the first that is not.
    """
    kinds = get_type_hints(cls.__init__)
    for key, value in args.items():
        try:
            msgspec.convert(value, kinds.get(key, Any))
        except msgspec.ValidationError as cause:
            rule = str(cause).replace("`", "").removeprefix("Expected ")
            raise ConfigError(
                f"environment {env_id!r}: {key} = {value!r} must be {rule}. Change `args`."
            ) from cause
