"""A node of the plan on a machine of a Ray cluster: an actor that starts the command there and returns its output.

States: placed -> started -> ended. The command ends with the actor, in whatever way that ends: the kernel kills the
command's launcher, whose keeper ends the rest (base/keeper.py). The actor itself has no keeper, because Ray kills all
children of a worker that ends. This file does not import Ray: cluster.py makes the actor.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.base.process import bound, device_env
from stretto.base.rundir import JOB_VAR
from stretto.base.secret import SECRET_VAR

NOT_PASSED = ("SLURM_", "RAY_JOB_CONFIG_JSON", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", SECRET_VAR)
"""Beginnings of the names of variables that are about Ray itself, or about what started it."""
END_S = 12.0  # the launcher needs some seconds to end its processes


@dataclass(frozen=True)
class MachineInfo:
    """A machine as the actor sees it."""

    host: str
    user: str
    """Who runs Ray there."""
    gpus: tuple[str, ...]
    """CUDA's names of the GPUs that the actor has."""


class Node:
    """The command of one node."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self._read = 0

    def describe(self) -> MachineInfo:
        """The machine on which the actor runs."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = str(os.getuid())
        return MachineInfo(socket.gethostname(), user, tuple(_sorted_gpus()))

    def start(self, argv: list[str], env: dict[str, str], log: str, cwd: str) -> str:
        """Start the command; why it cannot start, "" if it has started.

        env: an argument of the call, because it may hold keys and Ray does not store calls.
        """
        config, python = argv[argv.index("@") + 1], argv[0]
        if not os.access(python, os.X_OK):
            return f"has no {python}: stretto must be installed at the same path on all machines"
        if not os.access(config, os.R_OK):
            return (
                f"cannot read {config} as user {self.describe().user}: output_dir must be on a file system that all "
                "machines share"
            )
        self._log = Path(log)
        try:
            self._log.open("ab").close()
        except OSError as cause:
            user = self.describe().user
            return f"cannot write {log} as user {user}: {cause.strerror}; make output_dir writable there"
        for name in [name for name in os.environ if name.startswith(NOT_PASSED)]:
            del os.environ[name]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **env, **device_env(_sorted_gpus()), JOB_VAR: "ray"}
        self._read = self._log.stat().st_size
        with self._log.open("ab") as output, _ctrl_c_unblocked():
            self._child = subprocess.Popen(
                bound(argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                cwd=cwd if Path(cwd).is_dir() else None,
            )
        return ""

    def poll(self) -> tuple[str, int | None]:
        """What the command has written since the last call, and its exit code (None while it runs)."""
        assert self._child is not None, "not started"
        code = self._child.poll()  # before reading, so that everything it wrote is read
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data if code is not None else data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace"), code

    def signal(self, number: int) -> None:
        """Send the command a signal."""
        if self._child is not None:
            self._child.send_signal(number)

    def end(self) -> None:
        """End the command at once: its launcher ends its processes."""
        if self._child is None:
            return
        for number in (signal.SIGINT, signal.SIGTERM):  # at the second one it does not finish the step
            self._child.send_signal(number)
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()


@contextmanager
def _ctrl_c_unblocked() -> Iterator[None]:
    """Unblock SIGINT: a worker of Ray blocks it, and its children would inherit that."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _sorted_gpus() -> list[str]:
    """The GPUs that Ray assigned to this actor, in the order of their numbers."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return sorted(names, key=lambda name: (int(name) if name.isdigit() else 0, name))
