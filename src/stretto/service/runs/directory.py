"""A directory as a second way in: `<runs_dir>/run_*/control/orch.toml` is a run of the service.

    control/orch.toml                    the file of `rl`: written -> the run is registered; deleted -> it is ended
    control/config_validation_error.txt  written here: why there is no run; gone as soon as there is one
    control/evicted.txt                  written -> the run is saved and gives its place back; deleted -> it may go on.
                                         The service writes it for a run that its admin has frozen, and deletes it
                                         once the admin has resumed that run
    control/status.json                  written here: id, state, reason and step

The name of the directory is the name of the run. Its orchestrator is started by who wrote the file, and finds the run
there. Everything goes through the functions that the routes call (register.py, training/training.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.files import write_atomic
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.service.access import User
from stretto.service.hub import Hub
from stretto.service.runs.client import CheckRun, spec_of, tokenizer_digest
from stretto.service.runs.register import GONE, check_run, register
from stretto.service.store import Run
from stretto.transports.service import CreateRun

logger = logging.getLogger(__name__)

POLL_S = 1.0
CONFIG, ERROR, EVICTED, STATUS = "orch.toml", "config_validation_error.txt", "evicted.txt", "status.json"
MAX_BYTES = 1 << 20
_BY_ADMIN = "frozen at the service: "
"""Begins what the service writes into evicted.txt: it asks for nothing, and is deleted when the run is resumed."""
_HELD = f"control/{EVICTED}: "
"""Begins the reason of a run that the file has evicted: removing it lets that run go on, and no other."""


@dataclass(frozen=True)
class _Place:
    """One run's directory, as it is found."""

    path: Path
    stamp: (
        tuple[int, int] | None
    )  # of orch.toml: time of its last change, nanoseconds; size. None: there is none
    evicted: str | None  # content of evicted.txt

    @property
    def name(self) -> str:
        return self.path.name


class RunsDirectory:
    """Keeps the runs of one directory as its files say; they belong to `user`."""

    def __init__(self, hub: Hub, path: Path, user: User) -> None:
        self.hub, self.path, self.user = hub, path, user
        self._refused: dict[str, tuple[int, int]] = {}
        """By name: the file that is no run of this service."""
        self._requests: dict[str, tuple[tuple[int, int], CheckRun]] = {}
        """By name: what a file asks for; read again when the file has changed."""

    async def watch(self) -> None:
        """Look for changes until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Do what the files say now."""
        try:
            places, unread = await asyncio.to_thread(self._scan)
        except OSError as error:  # it may be away for a while: nobody's run is ended for that
            if self._requests:
                logger.warning("service.runs_dir = %s cannot be read: %s", self.path, error.strerror or error)
            return
        for place in places:
            try:
                await self._follow(place)
            except OSError as error:  # of one run: the others never notice
                logger.warning("%s: %s", place.path, error.strerror or error)
            except Exception:
                logger.exception("%s", place.path)
        names = {place.name for place in places}
        for known in (self._refused, self._requests):
            for name in known.keys() - names:
                del known[name]
        here = {str(place.path) for place in places if place.stamp is not None} | unread
        for run in self.hub.store.all(Run):
            is_ours = run.directory is not None and Path(run.directory).parent == self.path
            if is_ours and run.directory not in here and run.state not in GONE:
                self._audit("end", run, f"{run.directory}/control/{CONFIG} is gone")
                self.hub.training.end(run)

    def _scan(self) -> tuple[list[_Place], set[str]]:
        """What is there, and the directories that cannot be read now. Raises: OSError if none can."""
        found: list[_Place] = []
        unread: set[str] = set()
        for path in sorted(self.path.iterdir()):
            # A link would have the hub read and write elsewhere, with rights that who made it may not have.
            if not (path.name.startswith("run_") and path.name.isprintable()) or not _is_own_directory(path):
                continue
            try:
                found.append(_look_at(path))
            except OSError as error:
                logger.warning("%s: %s", path, error.strerror or error)
                unread.add(str(path))
        return found, unread

    async def _follow(self, place: _Place) -> None:
        """Bring one run to where its files want it."""
        run = self.hub.store.get(Run, f"{self.user.name}:{place.name}")
        own = run if run is not None and run.directory == str(place.path) else None
        if place.evicted is not None and place.evicted.startswith(_BY_ADMIN):
            if own is None or not own.is_held:
                (place.path / "control" / EVICTED).unlink(missing_ok=True)
        elif place.evicted is not None:
            self._evict(own, place.evicted)
        elif own is not None and own.is_held and own.reason.startswith(_HELD):
            self._audit("resume", own, f"control/{EVICTED} is gone")
            self.hub.training.resume(own, by_admin=True)
        elif place.stamp is not None and self._is_wanted(own, place.stamp):
            own = await self._register(place, place.stamp)
        if own is not None and place.stamp is not None:
            self._tell(own, place)

    def _is_wanted(self, own: Run | None, stamp: tuple[int, int]) -> bool:
        """Whether a file asks for a run that is not there: one that has ended is made anew by a new file."""
        if own is None:
            return True
        return own.state in GONE and stamp[0] > max(own.created_at, own.last_request_at) * 1e9

    async def _register(self, place: _Place, stamp: tuple[int, int]) -> Run | None:
        """Register a run; None if it cannot be one, or not yet: its error file says why."""
        if self._refused.get(place.name) == stamp:
            return None
        error = place.path / "control" / ERROR
        try:
            request = await self._read(place, stamp)
        except StrettoError as problem:
            self._refused[place.name] = stamp
            _write(error, f"{problem}\n")
            return None
        try:
            check_run(self.hub, self.user, request)
            body = CreateRun(spec=request.spec, base_model=request.base_model)
            run = register(self.hub, self.user, body, directory=str(place.path))
        except StrettoError as problem:  # places become free: it is tried again
            _write(error, f"{place.path}/control/{CONFIG}: {problem}\n")
            return None
        error.unlink(missing_ok=True)
        self._audit("register", run, str(place.path))
        return run

    async def _read(self, place: _Place, stamp: tuple[int, int]) -> CheckRun:
        """What the file asks for. Raises: ConfigError."""
        known = self._requests.get(place.name)
        if known is None or known[0] != stamp:
            url = f"http://127.0.0.1:{self.hub.cfg.service.port}"
            file = place.path / "control" / CONFIG
            known = stamp, await asyncio.to_thread(read_request, file, place.name, url)
            self._requests[place.name] = known
        return known[1]

    def _evict(self, run: Run | None, content: str) -> None:
        if run is None or run.state in GONE or run.is_held:
            return
        reason = _HELD + (" ".join(content.split())[:300] or "no reason given")
        self._audit("evict", run, reason)
        # What is held stays away: its requests get the reason.
        self.hub.training.freeze(run, reason, by_admin=True)
        if run.is_placed:
            self.hub.training.evict(run, reason)

    def _tell(self, run: Run, place: _Place) -> None:
        """Write what became of a run."""
        control = place.path / "control"
        if run.state == "failed":
            _write(control / ERROR, f"{control / CONFIG}: {run.reason}\n")
        if run.is_held and not run.reason.startswith(_HELD) and place.evicted is None:
            _write(control / EVICTED, f"{_BY_ADMIN}{run.reason}\n")
        state = {"id": run.id, "state": run.state, "reason": run.reason, "step": run.step}
        _write(control / STATUS, json.dumps(state, indent=2) + "\n")

    def _audit(self, action: str, run: Run, reason: str) -> None:
        self.hub.audit.write(self.user.name, action, run.id, reason=reason)


def read_request(file: Path, name: str, url: str) -> CheckRun:
    """What the file of a run asks of the service at `url`; `name`: of the run.

    Raises: ConfigError that names the file and what is wrong in it.
    """
    if file.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{file} has more than {MAX_BYTES >> 20} MiB: it is no config")
    cfg = load(RLConfig, ["@", str(file), "--service.url", url])
    if cfg.run.name not in (None, name):
        raise ConfigError(
            f'{file}: run.name = "{cfg.run.name}" is not the name of the directory; write name = "{name}", or leave '
            "it out"
        )
    named = cfg.model_copy(update={"run": cfg.run.model_copy(update={"name": name})})
    return CheckRun(
        spec=spec_of(named.trainer_config()),
        base_model=cfg.model.name,
        seq_len=cfg.seq_len,
        tokenizer=tokenizer_digest(cfg.tokenizer.name or cfg.model.name),
    )


def _look_at(path: Path) -> _Place:
    """Raises: OSError if its files cannot be read now."""
    control = path / "control"
    if not _is_own_directory(control):
        return _Place(path, None, None)
    config, evicted = _file(control / CONFIG), None
    if _file(control / EVICTED) is not None:
        with (control / EVICTED).open(errors="replace") as file:
            evicted = file.read(4096)
    return _Place(path, None if config is None else (config.st_mtime_ns, config.st_size), evicted)


def _file(path: Path) -> os.stat_result | None:
    """None if it is not there, or no plain file: a pipe would never end, a link leads elsewhere."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _is_own_directory(path: Path) -> bool:
    """Whether it is a directory, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _write(path: Path, text: str) -> None:
    """Write a file, unless it says so already."""
    try:
        if path.read_text() == text:
            return
    except (OSError, ValueError):
        pass
    write_atomic(path, text.encode())
