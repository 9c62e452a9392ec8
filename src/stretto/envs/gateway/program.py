"""One run of a user's program: started with a rollout's address and key, limited in time, ended with all it started."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.base import process
from stretto.base.secret import without_secret
from stretto.config.sections.distill import MODEL_KEY_VAR, TEACHER_KEY_VAR
from stretto.config.sections.inference import KEY_VAR

GRACE_S = 2.0
MAX_OUTPUT_BYTES = 4 * 2**20
_HIDDEN = (KEY_VAR, TEACHER_KEY_VAR, MODEL_KEY_VAR)
_NUM_LINES = 12


@dataclass(frozen=True)
class Ended:
    """How a program has ended."""

    returncode: int | None
    """None: it was ended at its limit of time."""
    output: str
    """All that it printed, standard error included; of more than MAX_OUTPUT_BYTES the end."""

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-_NUM_LINES:]) or "(it printed nothing)"


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with `{name}` replaced by values; braces around anything else stay."""
    pattern = re.compile("|".join(re.escape("{" + name + "}") for name in values))
    return [pattern.sub(lambda match: values[match[0][1:-1]], word) for word in command]


async def run_program(
    name: str, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float | None, cwd: Path | None = None
) -> Ended:
    """Run a program to its end, or to its limit of time, in `cwd` or an empty directory of its own.

    What it has started ends with it, also if this is cancelled.
    """
    hidden = without_secret() | dict.fromkeys(_HIDDEN, "")
    with tempfile.TemporaryDirectory(prefix="stretto-agent-", ignore_cleanup_errors=True) as folder:
        place, log = cwd or Path(folder, "work"), Path(folder, "output")
        place.mkdir(exist_ok=True)
        child = process.start(name, argv, env=hidden | dict(env), log=log, cwd=place, level=logging.DEBUG)
        returncode: int | None = None
        try:
            async with asyncio.timeout(timeout_s):
                returncode = await child.wait()
        except TimeoutError:
            pass
        finally:
            await asyncio.shield(process.stop([child], grace_s=GRACE_S))
        return Ended(returncode, _end_of(log))


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - MAX_OUTPUT_BYTES, 0))
        return file.read().decode(errors="replace")
