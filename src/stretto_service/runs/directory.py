"""Runs that are registered by files: each `<runs_dir>/run_*/control/orch.toml` is a run of the service.

    control/orch.toml                    the file of `rl`: written -> the run is registered; deleted -> it is ended
    control/config_validation_error.txt  written by the service: why there is no run; deleted when there is one
    control/evicted.txt                  written -> the run is saved and frees its place; deleted -> it may continue.
                                         The service writes it for a run that its admin has frozen, and deletes it
                                         when the admin has resumed that run
    control/status.json                  written by the service: id, state, reason and step

The name of the directory is the name of the run. The user who wrote the file also starts the run's orchestrator, which
finds the run at the service. The routes call the same functions (register.py, training/training.py).
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
from stretto_service.access import User
from stretto_service.hub import Hub
from stretto_service.runs.client import request_of
from stretto_service.runs.register import GONE, check_run, register
from stretto_service.store import Run
from stretto_service.wires.service import CheckRun, CreateRun

logger = logging.getLogger(__name__)

POLL_S = 1.0
CONFIG, ERROR, EVICTED, STATUS = "orch.toml", "config_validation_error.txt", "evicted.txt", "status.json"
MAX_BYTES = 1 << 20
_BY_ADMIN = "frozen at the service: "
"""Begins an evicted.txt that the service has written: it is no request, and is deleted when the run is resumed."""
Stamp = tuple[int, int]
"""Identifies a state of a file: time of its last change in nanoseconds, and size."""


@dataclass(frozen=True)
class _Files:
    """The contents of one run's directory."""

    path: Path
    stamp: Stamp | None  # of orch.toml; None if there is none
    evicted: str | None  # content of evicted.txt

    @property
    def name(self) -> str:
        return self.path.name


class RunsDirectory:
    """Registers, evicts and ends the runs of one directory by its files; the runs belong to `user`."""

    def __init__(self, hub: Hub, path: Path, user: User) -> None:
        self.hub, self.path, self.user = hub, path, user
        self._refused: dict[str, Stamp] = {}
        """By name: files that cannot be runs of this service."""
        self._requests: dict[str, tuple[Stamp, CheckRun]] = {}
        """By name: the request in a file, which is read again when the file has changed."""

    async def watch(self) -> None:
        """Look at the files every POLL_S seconds, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Bring all runs into the state that the files describe."""
        try:
            directories, unread = await asyncio.to_thread(self._scan)
        except OSError as error:  # it may be unreachable for a while, which ends no run
            if self._requests:
                logger.warning("service.runs_dir = %s cannot be read: %s", self.path, error.strerror or error)
            return
        for files in directories:
            try:
                await self._follow(files)
            except OSError as error:  # the errors of one run do not affect the others
                logger.warning("%s: %s", files.path, error.strerror or error)
            except Exception:  # nor do mistakes of ours
                logger.exception("%s", files.path)
        names = {files.name for files in directories}
        for by_name in (self._refused, self._requests):
            for name in by_name.keys() - names:
                del by_name[name]
        present = {str(files.path) for files in directories if files.stamp is not None} | unread
        for run in self.hub.store.all(Run):
            is_ours = run.directory is not None and Path(run.directory).parent == self.path
            if is_ours and run.directory not in present and run.state not in GONE:
                self._audit("end", run, f"{run.directory}/control/{CONFIG} is gone")
                self.hub.training.end(run)

    def _scan(self) -> tuple[list[_Files], set[str]]:
        """The runs' files, and the directories that cannot be read now. Raises: OSError if none can."""
        found: list[_Files] = []
        unread: set[str] = set()
        for path in sorted(self.path.iterdir()):
            # Through a link the hub would read and write elsewhere, with rights that its owner may not have.
            if not (path.name.startswith("run_") and path.name.isprintable()) or not _is_own_directory(path):
                continue
            try:
                found.append(_read_files(path))
            except OSError as error:
                logger.warning("%s: %s", path, error.strerror or error)
                unread.add(str(path))
        return found, unread

    async def _follow(self, files: _Files) -> None:
        """Bring one run into the state that its files describe."""
        run = self.hub.store.get(Run, f"{self.user.name}:{files.name}")
        own = run if run is not None and run.directory == str(files.path) else None
        if files.evicted is not None and files.evicted.startswith(_BY_ADMIN):
            if own is None or not own.is_held:
                (files.path / "control" / EVICTED).unlink(missing_ok=True)
        elif files.evicted is not None:
            self._evict(own, files.evicted)
        elif own is not None and own.is_held_by_file:
            self._audit("resume", own, f"control/{EVICTED} is gone")
            self.hub.training.resume(own, by_admin=True)
        elif files.stamp is not None and self._is_new(own, files.stamp):
            own = await self._register(files, files.stamp)
        if own is not None and files.stamp is not None:
            self._report(own, files)

    def _is_new(self, own: Run | None, stamp: Stamp) -> bool:
        """Whether a file registers a run: there is none, or it ended before the file was written."""
        if own is None:
            return True
        return own.state in GONE and stamp[0] > max(own.created_at, own.last_request_at) * 1e9

    async def _register(self, files: _Files, stamp: Stamp) -> Run | None:
        """Register a run; None if that is not possible (yet): its error file says why."""
        if self._refused.get(files.name) == stamp:
            return None
        error = files.path / "control" / ERROR
        try:
            request = await self._read(files, stamp)
        except StrettoError as problem:
            self._refused[files.name] = stamp
            _write(error, f"{problem}\n")
            return None
        try:
            check_run(self.hub, self.user, request)
            body = CreateRun(spec=request.spec, base_model=request.base_model)
            run = register(self.hub, self.user, body, directory=str(files.path))
        except StrettoError as problem:  # it is tried again, because a place may become free
            _write(error, f"{files.path}/control/{CONFIG}: {problem}\n")
            return None
        error.unlink(missing_ok=True)
        self._audit("register", run, str(files.path))
        return run

    async def _read(self, files: _Files, stamp: Stamp) -> CheckRun:
        """The request in a run's file. Raises: ConfigError."""
        cached = self._requests.get(files.name)
        if cached is None or cached[0] != stamp:
            url = f"http://127.0.0.1:{self.hub.cfg.service.port}"
            file = files.path / "control" / CONFIG
            cached = stamp, await asyncio.to_thread(read_request, file, files.name, url)
            self._requests[files.name] = cached
        return cached[1]

    def _evict(self, run: Run | None, content: str) -> None:
        if run is None or run.state in GONE or run.is_held:
            return
        reason = f"control/{EVICTED}: " + (" ".join(content.split())[:300] or "no reason given")
        self._audit("evict", run, reason)
        # Frozen first, so that its requests get the reason and do not bring it back.
        self.hub.training.freeze(run, reason, by_file=True)
        if run.is_placed:
            self.hub.training.evict(run, reason)

    def _report(self, run: Run, files: _Files) -> None:
        """Write the state of a run into its directory."""
        control = files.path / "control"
        if run.state == "failed":
            _write(control / ERROR, f"{control / CONFIG}: {run.reason}\n")
        if run.is_held and not run.is_held_by_file and files.evicted is None:
            _write(control / EVICTED, f"{_BY_ADMIN}{run.reason}\n")
        state = {"id": run.id, "state": run.state, "reason": run.reason, "step": run.step}
        _write(control / STATUS, json.dumps(state, indent=2) + "\n")

    def _audit(self, action: str, run: Run, reason: str) -> None:
        self.hub.audit.write(self.user.name, action, run.id, reason=reason)


def read_request(file: Path, name: str, url: str) -> CheckRun:
    """The request in the file of a run for the service at `url`; `name`: of the run.

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
    return request_of(named.trainer_config())


def _read_files(path: Path) -> _Files:
    """The contents of a run's directory. Raises: OSError if they cannot be read now."""
    control = path / "control"
    if not _is_own_directory(control):
        return _Files(path, None, None)
    config, evicted = _file(control / CONFIG), None
    if _file(control / EVICTED) is not None:
        with (control / EVICTED).open(errors="replace") as file:
            evicted = file.read(4096)
    return _Files(path, None if config is None else (config.st_mtime_ns, config.st_size), evicted)


def _file(path: Path) -> os.stat_result | None:
    """The state of a plain file; None for others: a pipe would never end, a link leads elsewhere."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _is_own_directory(path: Path) -> bool:
    """Whether it is a directory rather than a link to one, which is not followed: its end may be unreachable."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _write(path: Path, text: str) -> None:
    """Write a file, unless it has this content."""
    try:
        if path.read_text() == text:
            return
    except (OSError, ValueError):
        pass
    write_atomic(path, text.encode())
