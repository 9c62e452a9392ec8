"""Objects that a setting names by import path, and calls into them whose failures say where they happened."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from stretto.base.errors import ConfigError, StrettoError


@cache
def load_object(path: str, where: str) -> Any:
    """What `module:attr` (or `module.attr`) names; `where` is the setting that says so.

    Modules are looked for on the Python path, then in the working directory.

    Raises: ConfigError for a path that is none, a module or attribute that is not there, a module that fails.
    """
    module_name, _, attr = path.rpartition(":" if ":" in path else ".")
    if not module_name or not attr:
        raise ConfigError(f"{where} = {path!r}: name a module and what is in it, as `module:attr`")
    module = load_module(module_name, f"{where} = {path!r}")
    if not hasattr(module, attr):
        names = [name for name in vars(module) if not name.startswith("_")]
        nearest = difflib.get_close_matches(attr, names, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(names) or 'nothing'}."
        raise ConfigError(f"{where} = {path!r}: {module.__file__} has no {attr!r}; {hint}")
    return getattr(module, attr)


def load_module(name: str, what: str) -> ModuleType:
    """A module on the Python path or in the working directory; `what` names who asks in messages.

    Raises: ConfigError when it is not there, or fails.
    """
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            if "" in sys.path:
                raise
            # Console scripts do not look into the working directory, where a user's own code usually lies.
            sys.path.append("")
            return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name is not None and f"{name}.".startswith(f"{cause.name}."):
            message = f"{what}: no module {cause.name!r} on the Python path or in this directory"
            raise ConfigError(message) from cause
        raise ConfigError(f"{what}: {place_of(cause)}: {cause}") from cause
    except Exception as cause:
        raise ConfigError(f"{what}: {place_of(cause)}: {type(cause).__name__}: {cause}") from cause


def load_function(path: str, kwargs: dict[str, Any], where: str) -> Callable[..., Any]:
    """The function a path names, which must take one argument and these keyword arguments.

    Raises: ConfigError, also for arguments that do not fit.
    """
    function = load_object(path, where)
    if not callable(function):
        raise ConfigError(f"{where} = {path!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, **kwargs)
    except TypeError as cause:
        arguments = inspect.signature(function)
        raise ConfigError(
            f"{where} = {path!r}: {cause}; it is defined as {function.__name__}{arguments}"
        ) from cause
    return function


def call(function: Callable[..., Any], inputs: Any, kwargs: dict[str, Any], where: str) -> Any:
    """function(inputs, **kwargs).

    Raises: ConfigError with file and line when it raises.
    """
    try:
        return function(inputs, **kwargs)
    except StrettoError:
        raise
    except Exception as cause:
        raise ConfigError(f"{where}: {place_of(cause)}: {type(cause).__name__}: {cause}") from cause


def place_of(error: BaseException) -> str:
    """Where it was raised, outside of importing itself."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    return f"{frames[-1].filename}:{frames[-1].lineno}"
