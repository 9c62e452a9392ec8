"""Calls of hooks: they are loaded by import path at the start, and errors name file and line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError, EnvError
from stretto.base.foreign import definition_of, error_location, error_text, guarded, import_place, load_object

REWARD_FORM = "; write `def reward(args, sample)` and return a number: sample.response is the reply"
"""How a reward is written, for `Hook.load`."""
_METADATA = "; name the columns that `metadata` shall have: args.metadata_key = [...]"
"""For a key that the metadata of a sample lacks."""


@dataclass(frozen=True)
class Hook:
    """A user's function, and the setting that names it."""

    function: Callable[..., Any]
    where: str

    @classmethod
    def load(
        cls,
        path: str,
        setting: str,
        num_arguments: int,
        *,
        named: Sequence[str] = (),
        is_awaited: bool = True,
        form: str = "",
    ) -> Hook:
        """Load the function at `module:function` or `module.function`; it is called with num_arguments.

        named: further arguments that it gets by name. is_awaited: it may be a coroutine function. form: how it is
        written, the end of a message about one that takes other arguments.

        Raises: ConfigError if it does not exist, does not take so many arguments, or is a coroutine function where a
        plain one is needed.
        """
        function = load_object(path, setting)
        where = f"{setting} = {path!r}"
        if not callable(function):
            raise ConfigError(f"{where} is a {type(function).__name__}, not a function")
        if not is_awaited and inspect.iscoroutinefunction(function):
            raise ConfigError(f"{where} is `async def`, and nothing awaits it; write `def`")
        try:
            inspect.signature(function).bind(*[None] * num_arguments, **dict.fromkeys(named))
        except TypeError as cause:
            shape = f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}"
            raise ConfigError(
                f"{where}: {cause}; it is defined as {shape} and called with {num_arguments}{form}"
            ) from None
        return cls(function, where)

    @property
    def place(self) -> str:
        """For messages about what it has returned: the setting, and file and line of the function."""
        return f"{self.where} ({definition_of(self.function)})"

    def takes(self, name: str) -> bool:
        """Does the function have a parameter of this name, or `**kwargs`?"""
        parameters = inspect.signature(self.function).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and await the result if it is awaitable.

        Raises: EnvError with file and line for whatever the function raises.
        """
        with guarded(EnvError, self.where, describe=self._describe):
            returned = self.function(*args, **kwargs)
            return await returned if inspect.isawaitable(returned) else returned

    def call_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Like `call`, for a function that is not asynchronous.

        Raises: EnvError as `call`.
        """
        with guarded(EnvError, self.where, describe=self._describe):
            return self.function(*args, **kwargs)

    def _describe(self, cause: BaseException) -> str:
        frames = traceback.extract_tb(cause.__traceback__)
        hint = _METADATA if isinstance(cause, KeyError) and ".metadata" in (frames[-1].line or "") else ""
        return f"{self._location(cause)}: {error_text(cause)}{hint}"

    def _location(self, cause: BaseException) -> str:
        """The line in the user's file, and the line outside of it that raised, if that is another."""
        function = inspect.unwrap(self.function)
        last, code = error_location(cause), getattr(function, "__code__", None)
        if str(getattr(function, "__module__", "")).startswith("stretto_"):  # an add-on's, around that of the user
            own = import_place(cause)
            return last if own == last else f"{own} (in {last})"
        frames = traceback.extract_tb(cause.__traceback__)
        in_user_file = [
            f"{f.filename}:{f.lineno}" for f in frames if code is not None and f.filename == code.co_filename
        ]
        return last if not in_user_file or in_user_file[-1] == last else f"{in_user_file[-1]} (in {last})"
