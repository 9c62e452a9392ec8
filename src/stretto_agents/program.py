"""One run of a user's program: started with a rollout's address and key, limited in time, ended with all it started."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stretto.base import keeper, process
from stretto.base.secret import SECRET_VAR
from stretto.config.sections.distill import MODEL_KEY_VAR, TEACHER_KEY_VAR
from stretto.config.sections.inference import KEY_VAR

GRACE_S = 2.0
MAX_OUTPUT_BYTES = 4 * 2**20
MAX_PRINTED_BYTES = 2**30
_POLL_S = 1.0
_OF_THE_RUN = (SECRET_VAR, KEY_VAR, TEACHER_KEY_VAR, MODEL_KEY_VAR)
_SECRET = re.compile(r"(^|_)(KEYS?|TOKENS?|AUTH|PASS)(_|$)|APIKEY|SECRET|PASSW(OR)?D|CREDENTIAL")
_ELSEWHERE = (
    "OPENAI_API_BASE",
    "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID",
    "ANTHROPIC_API_BASE",
    "ANTHROPIC_CUSTOM_HEADERS",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
)
"""Variables that send a client to another address, or as somebody else."""
_NUM_LINES = 12


class Cut(Enum):
    """Why a program was ended."""

    TIME = "time"
    OUTPUT = "output"
    """It printed more than MAX_PRINTED_BYTES."""
    LIMIT = "limit"
    """It went on asking beyond a limit."""


@dataclass(frozen=True)
class Ended:
    """How a program has ended."""

    end: int | Cut
    """Its exit code, or why it was ended."""
    output: str
    """All that it printed, standard error included; of more than MAX_OUTPUT_BYTES the end."""

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-_NUM_LINES:]) or "(it printed nothing)"


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with `{name}` replaced by values; braces around anything else stay."""
    pattern = re.compile("|".join(re.escape("{" + name + "}") for name in values))
    return [pattern.sub(lambda match: values[match[0][1:-1]], word) for word in command]


def variables(given: Mapping[str, str], passed: Sequence[str] = ()) -> dict[str, str | None]:
    """What changes in this process's environment for a program: None removes a variable.

    given: address and key of the rollout. passed: names of variables that it gets although they look like secrets.
    """
    secret = {name for name in os.environ if _SECRET.search(name.upper())} - {*passed}
    direct = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in ("no_proxy", "NO_PROXY")}
    return {**dict.fromkeys((*secret, *_ELSEWHERE, *_OF_THE_RUN)), **direct, **given}


async def run_program(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str | None],
    timeout_s: float | None,
    cwd: Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a program to its end, or to one of its limits, in `cwd` or an empty directory of its own.

    What it has started ends with it, also if this is cancelled. is_over: asked once per second whether to end it.
    """
    parent = keeper.start().directory  # which goes even if this process is killed
    with tempfile.TemporaryDirectory(prefix="stretto-agent-", dir=parent, ignore_cleanup_errors=True) as folder:
        place, log = cwd or Path(folder, "work"), Path(folder, "output")
        place.mkdir(exist_ok=True)
        child = process.start(name, argv, env=env, log=log, cwd=place, level=logging.DEBUG)
        try:
            end = await _until_end(child, timeout_s, is_over)
        finally:
            await asyncio.shield(process.stop([child], grace_s=GRACE_S))
        return Ended(end, _end_of(log))


async def _until_end(child: process.Child, timeout_s: float | None, is_over: Callable[[], bool]) -> int | Cut:
    """The exit code of a program, or why it is to be ended."""
    exited = asyncio.create_task(child.wait())
    try:
        async with asyncio.timeout(timeout_s):
            while not (await asyncio.wait({exited}, timeout=_POLL_S))[0]:
                if child.log.stat().st_size > MAX_PRINTED_BYTES:
                    return Cut.OUTPUT
                if is_over():
                    return Cut.LIMIT
        return exited.result()
    except TimeoutError:
        return Cut.TIME
    finally:
        exited.cancel()


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - MAX_OUTPUT_BYTES, 0))
        return file.read().decode(errors="replace")
