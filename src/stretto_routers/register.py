"""Keeps a router's list of engines correct: adds engines that can take requests, and removes those that cannot.

    python -m stretto_routers.register ROUTER ENGINE...

A process beside the engines of a node, for a vllm-router that runs elsewhere (`inference.router.address`). An engine is
on the list while it answers /admitted with 200: it is healthy and, in a run, has the run's weights. So an engine that
is killed is removed within a second, and added again when its launcher has restarted it and it has loaded the current
weights. The list is read from the router each time, so a router that has lost it gets it back. At the end all engines
are removed.
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
ROUTER_TIMEOUT_S = 30.0  # it sends a request to the engine before it answers /add_worker


class Registrar:
    """The engines of one node in one router's list."""

    def __init__(self, router: str, engines: Sequence[str]) -> None:
        self.router, self.engines = router.rstrip("/"), tuple(engines)
        self._pool = ThreadPoolExecutor(len(self.engines))
        self._is_reachable = True

    def run(self, stop: threading.Event) -> None:
        """Correct the list every POLL_S until `stop` is set, then remove all engines."""
        while not stop.wait(POLL_S):
            self.correct(dict(zip(self.engines, self._pool.map(is_admitted, self.engines))))
        self.correct(dict.fromkeys(self.engines, False))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def correct(self, admitted: dict[str, bool]) -> None:
        """Add and remove engines where the list differs; a router that does not answer is tried again later.

        admitted: whether each engine should be on the list.
        """
        try:
            listed = json.loads(self._call("GET", "/list_workers"))["urls"]
            for engine, is_admitted in admitted.items():
                if is_admitted == (engine in listed):
                    continue
                route = "/add_worker" if is_admitted else "/remove_worker"
                self._call("POST", f"{route}?url={quote(engine, safe='')}")
                action = "added to" if is_admitted else "removed from"
                logger.info("%s was %s the list of %s", engine, action, self.router)
        except (OSError, ValueError, KeyError) as error:
            if self._is_reachable:
                logger.warning("the router's list of engines cannot be corrected; trying again: %s", _text(error))
            self._is_reachable = False
            return
        if not self._is_reachable:
            logger.info("the router %s answers again", self.router)
        self._is_reachable = True

    def _call(self, method: str, path: str) -> bytes:
        key = os.environ.get(KEY_VAR)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.router + path, method=method, headers=headers)
        with open_url(request, ROUTER_TIMEOUT_S) as answer:
            return answer.read()


def is_admitted(engine: str) -> bool:
    """Whether this engine can take requests."""
    try:
        with open_url(engine + ADMITTED, ADMITTED_TIMEOUT_S) as answer:
            return answer.status == 200
    except OSError:
        return False


def _text(error: Exception) -> str:
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
