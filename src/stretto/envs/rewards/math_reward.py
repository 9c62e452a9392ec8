"""Checks boxed answers: plain numbers are compared here, all other mathematics by math-verify in worker processes.

math-verify (the extra `math`) refuses threads, needs SIGALRM and can block for seconds, so it runs in worker
processes. A worker that exceeds its deadline is killed and replaced, and its answer counts as wrong. Plain numbers are
compared as exact fractions, in microseconds. Without the extra, everything else is compared as text; the log says so
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from stretto.base.errors import EnvError

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?\Z")
_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}\Z")
_MAX_ANSWER_CHARS = 4096
_MAX_NUMBER_CHARS = 64
_START_TIMEOUT_S = 60.0  # importing math-verify and sympy on a busy machine
_BOX = "\\boxed{"


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces balanced; None if there is none."""
    end = len(text)
    while (start := text.rfind(_BOX, 0, end)) >= 0:
        depth = 1
        for position in range(start + len(_BOX), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(_BOX) : position]
        end = start
    return None


def number(text: str) -> Fraction | None:
    """A plain number as an exact fraction: 1,200 | -3.5 | 1/2 | \\frac{1}{2} | 50\\%; None for any other text."""
    text = text.strip().strip("$").replace(" ", "")
    percent = text.endswith("%")
    text = text.removesuffix("%").removesuffix("\\")
    if not 0 < len(text) <= _MAX_NUMBER_CHARS:
        return None
    if found := _FRACTION.match(text):
        text = "{}{}/{}".format(*found.groups())
    if not _NUMBER.match(text) or not text[-1].isdecimal():
        return None
    above, _, below = text.replace(",", "").partition("/")
    try:
        value = Fraction(above) / Fraction(below or "1")
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent else value


def quick_verdict(answer: str, gold: str) -> bool | None:
    """The verdict on equal texts or two plain numbers; None if math-verify has to decide."""
    if answer.strip() == gold.strip():
        return True
    left, right = number(answer), number(gold)
    return left == right if left is not None and right is not None else None


class MathVerifier:
    """Compares answers in up to num_workers processes, each started when it is first needed.

    `close()` ends the workers; they also end with this process.
    """

    def __init__(self, *, num_workers: int = 2, timeout_s: float = 3.0) -> None:
        self.timeout_s = timeout_s
        self.num_replaced = 0  # workers that were killed after their deadline, or had died
        self._num_workers = num_workers
        self._idle: list[asyncio.subprocess.Process] = []
        self._free: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_library = importlib.util.find_spec("math_verify") is not None
        self._has_warned = False

    async def verify(self, reply: str, gold: str) -> bool:
        r"""Is the boxed answer of this reply equal to gold (an expression, without \boxed)?

        A reply without a complete box is wrong.

        Raises: EnvError if a worker cannot be started.
        """
        answer = boxed(reply)
        if answer is None or not answer.strip() or len(answer) > _MAX_ANSWER_CHARS:
            return False
        verdict = quick_verdict(answer, gold)
        if verdict is not None:
            return verdict
        if not self._has_library:
            self._warn()
            return False
        return await self._verify_in_worker(answer, gold)

    async def close(self) -> None:
        """End the workers."""
        while self._idle:
            await _end(self._idle.pop())

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "math-verify is not installed: answers other than plain numbers are compared as text; "
                "pip install 'stretto[math]'"
            )

    async def _verify_in_worker(self, answer: str, gold: str) -> bool:
        async with self._free_workers():
            worker = self._idle.pop() if self._idle else await self._start()
            is_sound = False
            assert worker.stdin is not None and worker.stdout is not None
            try:
                async with asyncio.timeout(self.timeout_s):
                    line = json.dumps({"answer": answer, "gold": gold}).encode() + b"\n"
                    worker.stdin.write(line)
                    await worker.stdin.drain()
                    verdict = await worker.stdout.readline()
                is_sound = verdict in (b"1\n", b"0\n")
                if not is_sound and self.num_replaced == 0:
                    logger.warning("math-verify ended at %.60r against %.60r, which counts as wrong", answer, gold)
                return verdict == b"1\n"
            except (TimeoutError, ConnectionError):
                logger.debug("no verdict on %.60r against %.60r within %gs", answer, gold, self.timeout_s)
                return False
            finally:  # also if the rollout is cancelled: the next one would read its verdict
                if is_sound:
                    self._idle.append(worker)
                else:
                    self.num_replaced += 1
                    await _end(worker)

    def _free_workers(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # pipes belong to the event loop that opened them
            self._loop, self._free, self._idle = loop, asyncio.Semaphore(self._num_workers), []
        assert self._free is not None
        return self._free

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from stretto.envs.rewards.math_reward import work; work()",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        )
        assert worker.stdout is not None
        said = b""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                said = await worker.stdout.readline()
                if said == b"ready\n":
                    return worker
        except TimeoutError:
            pass
        except BaseException:
            await _end(worker)
            raise
        await _end(worker)
        why = said.decode(errors="replace").strip() or "try `python -c 'import math_verify'`"
        raise EnvError(f"a math-verify worker did not start: {why}")


async def _end(worker: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    await worker.wait()


def fault_of(parse: Callable[[str], Any], verify: Callable[[Any, Any], bool]) -> str:
    """Why these functions of math-verify compare nothing, so that all answers would be wrong; "" if they do."""
    try:
        if verify(parse(r"\boxed{\frac{x}{2}}"), parse(r"\boxed{0.5x}")):
            return ""
        why = "it does not find x/2 equal to 0.5x"
    except Exception as error:  # of a foreign parser
        why = f"{type(error).__name__}: {error}".replace("\n", " ")
    return f"math-verify is damaged ({why}); install it anew: pip install --force-reinstall 'stretto[math]'"


def work() -> None:
    """Main loop of a worker: reads one JSON object per line, writes 1 or 0; ends with its standard input."""
    from math_verify import parse, verify

    print(fault_of(parse, verify) or "ready", flush=True)
    for line in sys.stdin:
        pair = json.loads(line)
        texts = [f"\\boxed{{{pair[key]}}}" for key in ("gold", "answer")]
        try:
            gold, answer = map(parse, texts)
            is_right = bool(gold) and verify(gold, answer)
        except Exception:  # the boundary of a foreign parser: an answer it cannot read is wrong
            is_right = False
        print(int(is_right), flush=True)
