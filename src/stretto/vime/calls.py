"""Calls of hooks: they are loaded by import path at the start, and errors name file and line."""

from __future__ import annotations

import inspect
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError, EnvError
from stretto.base.foreign import definition_of, error_location, error_text, guarded, load_object

ARGUMENTS = {
    "reward": "; write `def reward(args, sample)` and return a number: sample.response is the reply",
    "model": "; write `def provider(args, build)` and return what build() gives, with parts changed",
    "generate": "; write `async def generate(args, sample, sampling_params)` and return the sample",
}
"""The end of a message about a function with wrong arguments, by the last word of its setting."""

TRAINER_HOOKS = {
    "model": 2,
    "init": 1,
    "before_log_prob": 3,
    "before_train_step": 6,
    "advantages": 2,
    "data_postprocess": 3,
    "tis": 1,
    "loss": 4,
    "pg_loss_reducer": 4,
    "post_write": 3,
}
"""Number of arguments of each function in [trainer.hooks]."""
_NOT_LOADED = "not loaded: "
"""Begins the message of `python -m stretto.vime.calls` for a function that cannot be loaded."""
NOT_AWAITED = {*TRAINER_HOOKS, "dynamic_sampling_filter"}
"""Functions that must not be `async`, by the last word of their setting."""
KEYWORDS: dict[str, tuple[str, ...]] = {
    "tis": (
        "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths",
    ),
    "sample_hooks": ("rollout_id", "evaluation"),
}  # fmt: skip
"""Arguments that a function gets by name, by the last word of its setting."""


@dataclass(frozen=True)
class Hook:
    """A user's function, and the setting that names it."""

    function: Callable[..., Any]
    where: str

    @classmethod
    def load(cls, path: str, setting: str, num_arguments: int) -> Hook:
        """Load the function at `module:function` or `module.function`; it is called with num_arguments.

        Raises: ConfigError if it does not exist, does not take so many arguments, or is a coroutine function where a
        plain one is needed.
        """
        function = load_object(path, setting)
        where = f"{setting} = {path!r}"
        if not callable(function):
            raise ConfigError(f"{where} is a {type(function).__name__}, not a function")
        name = setting.rpartition(" ")[2].rpartition(".")[2].removeprefix("--")
        if name in NOT_AWAITED and inspect.iscoroutinefunction(function):
            raise ConfigError(f"{where} is `async def`, and nothing awaits it; write `def`")
        try:
            named = KEYWORDS.get(name, ())
            inspect.signature(function).bind(*[None] * num_arguments, **dict.fromkeys(named))
        except TypeError as cause:
            shape = f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}"
            raise ConfigError(
                f"{where}: {cause}; it is defined as {shape} and called with {num_arguments}{ARGUMENTS.get(name, '')}"
            ) from None
        if name == "model" and "pre_process" in inspect.signature(function).parameters:
            raise ConfigError(f"{where} builds a module of Megatron-LM's, which is not used{ARGUMENTS[name]}")
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
        return f"{self._location(cause)}: {error_text(cause)}"

    def _location(self, cause: BaseException) -> str:
        """The line in the user's file, and the line outside of it that raised, if that is another."""
        last, code = error_location(cause), getattr(inspect.unwrap(self.function), "__code__", None)
        frames = traceback.extract_tb(cause.__traceback__)
        in_user_file = [
            f"{f.filename}:{f.lineno}" for f in frames if code is not None and f.filename == code.co_filename
        ]
        return last if not in_user_file or in_user_file[-1] == last else f"{in_user_file[-1]} (in {last})"


def load_trainer_hooks(paths: Mapping[str, str]) -> dict[str, Hook]:
    """The functions of [trainer.hooks], by their keys.

    Raises: ConfigError as Hook.load.
    """
    return {key: Hook.load(path, f"trainer.hooks.{key}", TRAINER_HOOKS[key]) for key, path in paths.items()}


def check_in_process(paths: Mapping[str, str], env: Mapping[str, str]) -> None:
    """Load functions of [trainer.hooks] in another process, because they may import torch.

    env: the environment variables of that process.

    Raises: ConfigError as Hook.load, also if the import ends the process.
    """
    words = [sys.executable, "-m", "stretto.vime.calls", *(f"{key}={path}" for key, path in paths.items())]
    done = subprocess.run(words, env=dict(env), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return
    *before, last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if last.startswith(_NOT_LOADED):
        raise ConfigError(last.removeprefix(_NOT_LOADED))
    text = "\n".join([*before, last])
    raise ConfigError(f"trainer.hooks: importing {', '.join(paths.values())} ended its process: {text}")


if __name__ == "__main__":  # python -m stretto.vime.calls KEY=PATH ...
    try:
        load_trainer_hooks(dict(word.split("=", 1) for word in sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"{_NOT_LOADED}{error}")
