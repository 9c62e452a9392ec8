"""Servers of hubs: one that is started here as a process, and requests to any."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from stretto.base import process
from stretto.base.errors import ConfigError, EnvError, reason_of
from stretto.base.ports import unused_port
from stretto.base.secret import without_secret

START_S = 120.0
_POLL_S = 0.1
_GRACE_S = 2.0
_CHECK_S = 5.0
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_FIND_S = 30.0


class LocalServer:
    """A server that `argv` and a port as its last word start on 127.0.0.1, often in a Python of its own."""

    def __init__(self, what: str, argv: Sequence[str], directory: Path | None = None) -> None:
        self._what, self.argv, self._directory = what, argv, directory
        self._log: Path | None = None
        self._child: process.Child | None = None
        self._url = ""
        self._starting = asyncio.Lock()

    async def url(self) -> str:
        """Its address; the first call starts it, and the first after its end starts it again.

        Raises: EnvError with its last lines if it does not start.
        """
        async with self._starting:
            if self._child is None or self._child.returncode is not None:
                await self._start()
        return self._url

    async def close(self) -> None:
        if self._child is not None:
            await process.stop([self._child], grace_s=_GRACE_S)
        if self._log is not None:
            shutil.rmtree(self._log.parent, ignore_errors=True)

    async def _start(self) -> None:
        if self._log is None:
            self._log = Path(tempfile.mkdtemp(prefix="stretto-hub-"), "server.log")
        if self._child is not None:
            self._child.close()
        port = unused_port()
        argv = [*self.argv, str(port)]
        self._child = child = process.start(
            self._what, argv, env=env_for(argv[0]), log=self._log, cwd=self._directory, level=logging.INFO
        )
        self._url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(START_S):
                while not await _accepts(port):
                    if child.returncode is not None:
                        how = process.describe_exit(child.returncode)
                        raise EnvError(f"{self._what}: its server ended with {how}:\n" + "\n".join(child.tail()))
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            child.kill()
            raise EnvError(
                f"{self._what}: its server did not answer in {START_S:g} s:\n" + "\n".join(child.tail())
            ) from None


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def find_python(python: str | None) -> str:
    """The path of a Python; None is this one. A program that is not there stays as it is: `missing_package` says so."""
    if python is None:
        return sys.executable
    return python if (found := shutil.which(python)) is None else str(Path(found).absolute())


def missing_package(python: str, package: str, rule: str = "") -> str | None:
    """A sentence for a Python that is not there, or does not have a package; None if all is well."""
    if shutil.which(python) is None:
        return f"python = {python!r} is no program; give the path of a Python, such as venv/bin/python"
    argv = [python, "-c", _FIND, package.replace("-", "_")]
    if process.output_of(argv, timeout_s=_FIND_S, env=os.environ | env_for(python)) is not None:
        return None
    return f"{python} has no package {package}: {python} -m pip install {package}{rule}"


def env_for(python: str) -> dict[str, str]:
    """Environment variables for a program of a Python: another one must not find the packages of this one."""
    return without_secret() | ({} if python == sys.executable else {"PYTHONPATH": ""})


def split_of(what: str, count: int, num_eval: int, noun: str) -> tuple[range, range]:
    """The numbers that are trained on, and the held-out ones: the last, or all if none is held out.

    Raises: ConfigError if too many are held out.
    """
    if not 0 <= num_eval < count:
        raise ConfigError(f"{what}: num_eval = {num_eval} must be 0 or more and less than its {count} {noun}")
    first = count - num_eval
    return range(first), range(first if num_eval else 0, count)


def fetch_json(url: str) -> Any:
    """The JSON at an address; a sentence if it cannot be fetched."""
    try:
        with urllib.request.urlopen(url, timeout=_CHECK_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code} at {url}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return reason_of(reason) if isinstance(reason, OSError) else str(reason)


async def answer_of(http: aiohttp.ClientSession, method: str, url: str, what: str, **request: Any) -> Any:
    """The JSON that a server answers.

    Raises: EnvError if it does not answer, or refuses.
    """
    try:
        async with http.request(method, url, **request) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise EnvError(f"{what}: {method} {url}: HTTP {answer.status}: {text[:500]}")
            return json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as cause:
        raise EnvError(f"{what}: {method} {url}: {type(cause).__name__}: {cause}") from cause
