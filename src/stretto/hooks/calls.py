"""Calls into hooks: found by import path at the start, and what they raise is told with file and line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError, EnvError, StrettoError
from stretto.base.imports import load_object, place_of


@dataclass(frozen=True)
class Hook:
    """A user's function, and the setting that names it."""

    function: Callable[..., Any]
    where: str

    @classmethod
    def load(cls, path: str, setting: str, num_arguments: int) -> Hook:
        """The function at `module:function` or `module.function`, called with so many arguments.

        Raises: ConfigError for a path that leads nowhere, or a function that does not take them.
        """
        function = load_object(path, setting)
        where = f"{setting} = {path!r}"
        if not callable(function):
            raise ConfigError(f"{where} is a {type(function).__name__}, not a function")
        try:
            inspect.signature(function).bind(*[None] * num_arguments)
        except TypeError as cause:
            shape = f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}"
            raise ConfigError(
                f"{where}: {cause}; it is defined as {shape} and called with {num_arguments}"
            ) from None
        return cls(function, where)

    def takes(self, name: str) -> bool:
        """Does the function have a parameter of this name, or take any?"""
        parameters = inspect.signature(self.function).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, awaited where it is asynchronous.

        Raises: EnvError with file and line where it raises.
        """
        try:
            returned = self.function(*args, **kwargs)
            return await returned if inspect.isawaitable(returned) else returned
        except StrettoError:
            raise
        except Exception as cause:
            raise EnvError(self._told(cause)) from cause

    def call_now(self, *args: Any, **kwargs: Any) -> Any:
        """As `call`, of a function that is not asynchronous."""
        try:
            return self.function(*args, **kwargs)
        except StrettoError:
            raise
        except Exception as cause:
            raise EnvError(self._told(cause)) from cause

    def _told(self, cause: Exception) -> str:
        return f"{self.where}: {self._place(cause)}: {type(cause).__name__}: {cause}"

    def _place(self, cause: Exception) -> str:
        """The line of the user's file, and where it led to outside of that."""
        last, code = place_of(cause), getattr(inspect.unwrap(self.function), "__code__", None)
        frames = traceback.extract_tb(cause.__traceback__)
        own = [
            f"{f.filename}:{f.lineno}" for f in frames if code is not None and f.filename == code.co_filename
        ]
        return last if not own or own[-1] == last else f"{own[-1]} (in {last})"
