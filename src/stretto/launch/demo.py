"""`stretto demo`: warms a tiny model up and trains it by reinforcement learning, with one of the bundled examples.

The examples are part of the installed package; `make demo` is the same command in a clone. Each verb runs in a process
of its own; the runs are in the current directory's `outputs`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from stretto.base.errors import ConfigError
from stretto.base.process import exit_status

DEFAULT = "sort_letters"
USAGE = """\
usage: stretto demo [EXAMPLE] [--KEY VALUE ...]

Warm a tiny model up and train it by reinforcement learning, in a few minutes on two cores: `sft` and then `rl`,
each with --clean. Runs are in ./outputs. Keys are given to both, for instance --output-dir DIR or --seed 2.
The examples:"""


def examples() -> dict[str, Path]:
    """The directory of every example that has both stages, by name."""
    root = (Path(__file__).parents[1] / "examples").resolve()
    return {path.parent.name: path.parent for path in sorted(root.glob("*/rl.toml"))}


def demo(words: Sequence[str]) -> int:
    """Run both stages of an example; the exit status of the first that fails.

    Raises: ConfigError for an unknown example.
    """
    if {"-h", "--help"} & set(words):
        sys.stdout.write("\n".join([USAGE, *(f"  {name}" for name in examples())]) + "\n")
        return 0
    name, flags = DEFAULT, list(words)
    if flags and not flags[0].startswith("-"):
        name = flags.pop(0).replace("-", "_")
    if name not in examples():
        raise ConfigError(f"stretto demo: there is no example {name!r}; choose {', '.join(examples())}.")
    for verb in ("sft", "rl"):
        file = examples()[name] / f"{verb}.toml"
        shown = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
        if status := _run([sys.executable, "-m", "stretto", verb, "@", shown, "--clean", *flags]):
            return status
    return 0


def _run(words: list[str]) -> int:
    """Run a command to its end; its exit status. Ctrl-C reaches it from the terminal, SIGTERM is passed on."""
    with subprocess.Popen(words) as child:

        def pass_on(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGTERM:
                child.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return exit_status(code)
