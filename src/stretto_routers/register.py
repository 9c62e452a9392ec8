"""Keeps a router's list of engines correct: adds engines that can take requests, and removes those that cannot.

    python -m stretto_routers.register ROUTER ENGINE...

A process beside the engines of a node, for a vllm-router that runs elsewhere (`inference.router.address`). An engine is
on the list while it answers /admitted with 200: it is healthy and, in a run, has the run's weights. So an engine that
is killed is removed within a second, and added again when its launcher has restarted it and it has loaded the current
weights. The list is read from the router each time, so a router that has lost it gets it back. At the end all engines
are removed.

`RouterList` is the list itself. A run's orchestrator has one, too: for engines that join and leave while the run goes
on (transports/engine/routed.py).
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

from stretto.base import log
from stretto.base.errors import EngineError
from stretto.base.ports import is_same_server, open_url
from stretto.config.sections.engines import ADMITTED
from stretto.config.sections.inference import KEY_VAR

logger = logging.getLogger(__name__)

POLL_S = 0.5
ADMITTED_TIMEOUT_S = 10.0
SIDES = b"PD router"
"""In vllm-router's answer to /add_worker, if it is between prefill and decode engines."""
ROUTER_TIMEOUT_S = 30.0  # it sends a request to the engine before it answers /add_worker


class RouterList:
    """The list of engines of one vllm-router."""

    def __init__(self, router: str, key: str | None) -> None:
        self.router, self._key = router.rstrip("/"), key
        self._has_sides: bool | None = None  # between prefill and decode engines

    def engines(self) -> list[str]:
        """The addresses on the list.

        Raises: OSError if the router does not answer now; EngineError if engines cannot enter its list and leave it.
        """
        self._check_sides(listed := self._listed())
        return listed

    def _listed(self) -> list[str]:
        try:
            return [str(url) for url in json.loads(self._call("GET", "/list_workers"))["urls"]]
        except urllib.error.HTTPError as error:
            if error.code in (401, 403) or error.code >= 500:
                raise
            why = f"HTTP {error.code}"
        except (ValueError, KeyError, TypeError):
            why = "no list"
        raise EngineError(
            f"the router {self.router} has no list that engines enter and leave (GET /list_workers: {why}), as a "
            "vllm-router has"
        )

    def correct(self, wanted: Mapping[str, bool]) -> None:
        """Enter engines that are wanted and take out those that are not, where the list differs.

        Raises: OSError if the router does not answer now; EngineError if it has no list, or refuses an engine.
        """
        listed, refused = self._listed(), []
        for engine, is_wanted in sorted(wanted.items(), key=lambda item: item[1]):  # one that starts may take long
            names = [url for url in listed if is_same_server(url, engine)]
            if is_wanted == bool(names):
                continue
            try:
                for name in names or [engine]:
                    self._change(name, "/add_worker" if is_wanted else "/remove_worker")
            except EngineError as error:
                refused.append(str(error))
                continue
            action = "added to" if is_wanted else "removed from"
            logger.info("%s was %s the list of %s", engine, action, self.router)
        if refused:
            raise EngineError("; ".join(refused))

    def _check_sides(self, listed: Sequence[str]) -> None:
        """Raises: EngineError for a router between prefill and decode engines."""
        if self._has_sides is None and listed:
            try:  # changes nothing: it is on the list
                self._call("POST", f"/add_worker?url={quote(listed[0], safe='')}")
                self._has_sides = False
            except urllib.error.HTTPError as error:
                self._has_sides = SIDES in error.read()
        if self._has_sides:
            raise EngineError(
                f"the router {self.router} is between prefill and decode engines, and keeps those that it was started "
                "with"
            )

    def _change(self, engine: str, route: str) -> None:
        try:
            self._call("POST", f"{route}?url={quote(engine, safe='')}")
        except urllib.error.HTTPError as error:
            raise EngineError(f"{self.router}{route} of {engine}: {_text(error)}") from error

    def _call(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(self.router + path, method=method, headers=headers)
        with open_url(request, ROUTER_TIMEOUT_S) as answer:
            return answer.read()


class Registrar:
    """The engines of one node in one router's list."""

    def __init__(self, router: str, engines: Sequence[str]) -> None:
        self.router, self.engines = router.rstrip("/"), tuple(engines)
        self._list = RouterList(router, os.environ.get(KEY_VAR))
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
            self._list.correct(admitted)
        except (OSError, EngineError) as error:
            if self._is_reachable:
                logger.warning("the router's list of engines cannot be corrected; trying again: %s", _text(error))
            self._is_reachable = False
            return
        if not self._is_reachable:
            logger.info("the router %s answers again", self.router)
        self._is_reachable = True


def is_admitted(engine: str) -> bool:
    """Whether this engine can take requests."""
    try:
        with open_url(engine + ADMITTED, ADMITTED_TIMEOUT_S) as answer:
            return answer.status == 200
    except OSError:
        return False


def _text(error: Exception) -> str:
    if isinstance(error, EngineError):
        return str(error)
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
