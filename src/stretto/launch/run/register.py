"""Keeps a router's list of engines true: enters engines that may be given work, and takes out those that may not.

    python -m stretto.launch.run.register ROUTER ENGINE...

A process of its own beside the engines of a node, for a vllm-router that runs elsewhere (`inference.router.address`).
An engine is on the list while it answers /admitted with 200: it is healthy and, in a run, holds the run's weights. So
one that is killed leaves within a second, and enters again when its launcher has started it anew and the run has
given it the current weights. The list itself is read again every time, so a router that lost it gets it back. At
the end all of them leave.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from stretto.base import log
from stretto.base.ports import open_url
from stretto.config.sections.engines import ADMITTED
from stretto.config.sections.inference import KEY_VAR

logger = logging.getLogger(__name__)

POLL_S = 0.5
ADMITTED_TIMEOUT_S = 10.0
ROUTER_TIMEOUT_S = 30.0  # it asks an engine itself before it answers /add_worker


class Registrar:
    """The engines of one node in one router's list."""

    def __init__(self, router: str, engines: Sequence[str]) -> None:
        self.router, self.engines = router.rstrip("/"), tuple(engines)
        self._pool = ThreadPoolExecutor(len(self.engines))
        self._is_reached = True

    def run(self, stop: threading.Event) -> None:
        """Correct the list again and again until `stop` is set, then take all engines out."""
        while not stop.wait(POLL_S):
            self.correct(dict(zip(self.engines, self._pool.map(is_admitted, self.engines))))
        self.correct(dict.fromkeys(self.engines, False))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def correct(self, wanted: dict[str, bool]) -> None:
        """Enter and take out engines, where the list differs; a router that does not answer is asked again later."""
        try:
            listed = json.loads(self._call("GET", "/list_workers"))["urls"]
            for engine, is_wanted in wanted.items():
                if is_wanted == (engine in listed):
                    continue
                route = "/add_worker" if is_wanted else "/remove_worker"
                self._call("POST", f"{route}?url={quote(engine, safe='')}")
                logger.info("%s %s %s", engine, "entered" if is_wanted else "left", self.router)
        except (OSError, ValueError, KeyError) as error:
            if self._is_reached:
                logger.warning(
                    "the router's list of engines cannot be corrected; trying again: %s", _said(error)
                )
            self._is_reached = False
            return
        if not self._is_reached:
            logger.info("the router %s answers again", self.router)
        self._is_reached = True

    def _call(self, method: str, path: str) -> bytes:
        key = os.environ.get(KEY_VAR)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.router + path, method=method, headers=headers)
        with open_url(request, ROUTER_TIMEOUT_S) as answer:
            return answer.read()


def is_admitted(engine: str) -> bool:
    """Whether this engine may be given work."""
    try:
        with open_url(engine + ADMITTED, ADMITTED_TIMEOUT_S) as answer:
            return answer.status == 200
    except OSError:
        return False


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.url}: HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
    return f"{type(error).__name__}: {error}"


def main(words: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT."""
    log.setup("registrar", None)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    Registrar(words[0], words[1:]).run(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
