"""`stretto.rl(...)`, `sft` and `evaluate` from a script or notebook: the verbs, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.run import Run
from stretto.base.errors import ConfigError, EngineError
from stretto.base.status import harmless

if TYPE_CHECKING:
    from stretto.config.section import Section

    Config = Mapping[str, Any] | Section | Path | str

_NUM_SAID = 20  # lines of an error that an exception has


def rl(config: Config, *flags: str) -> Run:
    """Train by reinforcement learning until the run has ended; what `rl @ config flags` does.

    config: a dict of the configuration's sections, a config object, or the path of a TOML file. Lines of the
    run are printed as they come.

    Raises: ConfigError when the configuration is wrong, EngineError when the run fails; the output says why.
    """
    return _run("rl", config, flags)


def sft(config: Config, *flags: str) -> Run:
    """Supervised fine-tuning; as `rl`."""
    return _run("sft", config, flags)


def evaluate(config: Config, *flags: str) -> None:
    """Evaluate a model on environments; what `stretto eval @ config flags` does and prints."""
    _check_flags("evaluate", flags)
    with _as_file(config) as file:
        _start("eval", file, flags)


def _run(verb: str, config: Config, flags: tuple[str, ...]) -> Run:
    from stretto.config.load import load
    from stretto.config.root import RLConfig, SFTConfig

    _check_flags(verb, flags)
    with _as_file(config) as file:
        arguments = ["@", file, *flags]
        root: RLConfig | SFTConfig
        root = load(RLConfig, arguments, verb=verb) if verb == "rl" else load(SFTConfig, arguments, verb=verb)
        _start(verb, file, flags)
    return Run(root.run_dir.path)


@contextmanager
def _as_file(config: Config) -> Iterator[str]:
    """The configuration as a file that a verb reads."""
    if isinstance(config, str | Path):
        yield str(config)
        return
    values = config if isinstance(config, Mapping) else config.model_dump(mode="json", exclude_unset=True)
    _check_values(values, "")
    with tempfile.TemporaryDirectory(prefix="stretto-script-") as directory:
        file = Path(directory, "config.json")
        file.write_text(json.dumps(values, default=str))
        yield str(file)


def _check_values(value: Any, place: str) -> None:
    """Raises: ConfigError for a value that a file of the configuration cannot hold, such as a class of a notebook."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _check_values(each, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _check_values(each, f"{place}.{index}")
    elif isinstance(value, type) or callable(value):
        name = f"{value.__module__}:{value.__qualname__}" if hasattr(value, "__qualname__") else "module:name"
        raise ConfigError(
            f"{place} is {value!r}: the processes of a run cannot get it from here; put it into a file, such as "
            f"envs.py, and give its name: 'envs:{name.partition(':')[2]}'"
        )
    elif not isinstance(value, str | int | float | Path | None):
        raise ConfigError(
            f"{place} is a {type(value).__name__}, which a configuration cannot hold; give text, a number, a list or a "
            "dict, or write it into a file and name that"
        )


def _check_flags(verb: str, flags: tuple[Any, ...]) -> None:
    """Raises: ConfigError for what follows the configuration and is no flag."""
    for flag in flags:
        if not isinstance(flag, str):
            raise ConfigError(
                f"stretto.{verb}: {flag!r:.60} follows the configuration; there go flags as texts: '--max-steps', '3'"
            )


def _start(verb: str, file: str, flags: tuple[str, ...]) -> None:
    """Run a verb to its end; its lines are printed here, where a notebook shows them."""
    words = [sys.executable, "-m", "stretto", verb, "@", file, *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said: list[str] = []  # the error, for the exception
        try:
            for line in process.stdout:
                print(harmless(line), end="", flush=True)
                said = [*said[-_NUM_SAID:], line] if said or line.startswith("error: ") else said
        except KeyboardInterrupt:  # the verb received Ctrl-C too, and shuts down
            for line in process.stdout:
                print(harmless(line), end="", flush=True)
        code = process.wait()
    if code == 2:
        reason = "".join(said).strip().removeprefix("error: ").replace(file, "config")
        raise ConfigError(f"{verb}: {harmless(reason) or 'the configuration is wrong; see the message above'}")
    if code:
        raise EngineError(f"{verb} ended with status {code}; the message above names the reason and the log.")
