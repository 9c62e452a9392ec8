"""The runs that a page shows: each keeps its id while the page is served, and its metrics in memory."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stretto import state
from stretto.base.errors import StrettoError
from stretto.base.files import holder
from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto.chat.tokenizer import Tokenizer, load_tokenizer
from stretto.config.sections.inference import KEY_VAR
from stretto.monitors.file import MetricsTail
from stretto_python.run import Run
from stretto_view.page import logs

logger = logging.getLogger(__name__)

_RESCAN_S = 5.0
ROLES = ("orchestrator", "trainer", "sft", "evals", "eval")
"""The metrics files of a run; if two have the same metric, the first of them in this list is used."""

MOST_ROWS = 4000
"""Rows of each of these files that are in memory: four times the points of a curve, and about 35 MB."""


class OpenRun(Run):
    """A run with its metrics in memory; new rows are added as its files grow."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.made_of = made_of(self.dir)
        self.lock = threading.Lock()  # requests are answered by several threads
        self.sampled: dict[str, tuple[float, float]] = {}
        """By engine: tokens sampled so far, and when that was asked."""
        self._loading = _Loading(lambda: self._found(load_tokenizer))
        self.tails = {role: MetricsTail(self.dir.metrics(role), max_rows=MOST_ROWS) for role in ROLES}

    def tokenizer_within(self, seconds: float) -> Tokenizer | None:
        """The tokenizer, if it is loaded by then: a large one takes longer than a list may (`is_loading`)."""
        self._loading.start()
        self._loading.done.wait(seconds)
        return self._loading.result

    @property
    def is_loading(self) -> bool:
        """Whether the tokenizer is not loaded yet."""
        return not self._loading.done.is_set()

    @property
    def no_text(self) -> str | None:
        """Why the tokens of this run cannot be shown as text; None if they can, or while the tokenizer is loaded."""
        if self.is_loading or self._loading.result is not None:
            return None
        why = self._loading.error or "it is neither where the config says nor in the run"
        return f"tokens are shown as numbers, because the tokenizer cannot be loaded: {why.rstrip('.')}"

    def engines(self) -> tuple[list[str], str | None]:
        """Addresses of the engines that the run's config names, and their key: its own, the environment's, or derived.

        The first address answers chats; with a router the others are the engines behind it. None for a run of another
        user: its config could send our key to any address.
        """
        file = self.dir.config("run")
        try:
            if file.stat().st_uid != os.geteuid():
                return [], None
            settings = json.loads(file.read_text())  # `config` masks keys
        except (OSError, ValueError):  # the views say what is wrong with it
            return [], None
        client = (settings.get("orchestrator") or {}).get("client") or {}
        named = client.get("base_url") or []
        key = (settings.get("inference") or {}).get("api_key") or os.environ.get(client.get("api_key_var") or KEY_VAR)
        if not key and self.dir.secret.exists():
            key = load_secret(self.dir).text_key("inference.api_key")
        own = [named] if isinstance(named, str) else list(named)
        return [*own, *(client.get("admin_base_url") or [])], key

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of each metrics file, by role; a role without rows is left out."""
        with self.lock:
            for tail in self.tails.values():
                tail.refresh()
            return {role: rows for role, tail in self.tails.items() if (rows := tail.rows())}

    def stamp(self) -> dict[str, str]:
        """Per subject, a text that changes when its files do."""
        metrics = [self.dir.metrics(role) for role in ROLES]
        ledger = [self.dir.ledger, self.dir.ledger.with_name(self.dir.ledger.name + "-wal")]
        return {
            "metrics": _sizes(metrics),
            "ledger": _sizes(ledger),
            "logs": _sizes(list(logs.files(self.dir).values())),
            "evals": _sizes([self.dir.evals, *sorted(self.dir.evals.glob("version_*"))]),
            "scores": _sizes([*sorted((self.path / "scores").glob("*.json"))]),
            "state": f"{_sizes([self.dir.summary])} {holder(self.dir.lock)}",  # a killed run changes no file
        }


class _Loading:
    """A load in a thread of its own: `result`, or why there is none. What is not there yet is looked for again."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._next_at = float("-inf")  # time.monotonic()
        self.done = threading.Event()
        self.result: Any = None
        self.error: str | None = None

    def start(self) -> None:
        with self._lock:
            if self.result is None and time.monotonic() >= self._next_at:
                self._next_at = float("inf")
                threading.Thread(target=self._run, name="load", daemon=True).start()

    def _run(self) -> None:
        error: str | None = None
        try:
            self.result = self._load()
        except Exception as cause:  # the files are a stranger's: the page shows the rest of the run
            error = f"{cause}" if isinstance(cause, StrettoError) else f"{type(cause).__name__}: {cause}"
            if error != self.error:
                logger.warning("the tokenizer cannot be loaded: %s", error)
        finally:
            self.error = error
            self._next_at = time.monotonic() + _RESCAN_S
            self.done.set()


class Library:
    """The runs among some directories and below them."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = list(places)
        self._runs: dict[str, OpenRun] = {}
        self._ids: dict[Path, str] = {}
        self._scanned_at = float("-inf")
        self._lock = threading.Lock()

    def runs(self) -> dict[str, OpenRun]:
        """The runs by id; directories are searched again every few seconds."""
        with self._lock:
            if time.monotonic() - self._scanned_at > _RESCAN_S:
                self._scan()
            return dict(self._runs)

    def get(self, name: str) -> OpenRun | None:
        """The run of this id."""
        return self.runs().get(name)

    def _scan(self) -> None:
        found = {
            run.path.resolve(): run for run in state.find([place for place in self._places if os.path.isdir(place)])
        }
        self._runs = {name: run for name, run in self._runs.items() if run.path.resolve() in found}
        for path, run in found.items():
            name = self._ids.setdefault(path, self._new_id(run))
            if name not in self._runs or self._runs[name].made_of != made_of(run):
                self._runs[name] = OpenRun(run.path)
        self._scanned_at = time.monotonic()

    def _new_id(self, run: RunDir) -> str:
        """The run's name, with a number if another run has the same name."""
        name = run.path.resolve().name
        taken = set(self._ids.values())
        return next(
            each for number in range(1, 10**6) if (each := f"{name}~{number}" if number > 1 else name) not in taken
        )


def made_of(run: RunDir) -> str:
    """A text that changes when the directory gets another run, or the run is resumed with other settings."""
    return _sizes([run.config("run")])


def _sizes(files: Sequence[Path]) -> str:
    found = []
    for file in files:
        try:
            about = file.stat()
            found.append(f"{about.st_size}.{about.st_mtime_ns}")
        except OSError:
            found.append("-")
    return " ".join(found)
