"""Python programs of tests, forked from a process that has imported torch and stretto.

The four processes of a run of three steps take 9 s of CPU time, and 3.5 s when they are forked. `forked.Popen` is
`subprocess.Popen` for `python -m MODULE`, `python FILE` and `python -c CODE`. The program has the arguments,
environment, directory and files that it would have, is seen with them in /proc, and ends as Python ends. The processes
that it starts by base/process.py are its children as ever, and forked too.

What differs: modules are imported, all have the same hash seed, and the launcher's words for Python
(`-I -S -c ... PID`) are not run. So tests of starting use `subprocess`: unit/launch, e2e/endings/test_kill.py,
e2e/endings/test_interrupts.py and the verbs by hand in e2e/test_loop.py. vLLM is started as ever.

This file is run as a program too: the process that imports and forks. Linux only.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = (
    "stretto.launch.run.rl",
    "stretto.launch.run.serve",
    "stretto.launch.run.ranks",
    "stretto.inference.server",
    "stretto.orchestrator.main",
    "stretto.trainer.rl",
    "stretto.trainer.sft",
)
"""Modules that start no threads when they are imported."""
NUM_SPARES = 6  # processes that a program can start by fork; more are started as ever
ROOM = 32_768  # bytes of a program's arguments and environment in /proc
PR_SET_PDEATHSIG = 1


# -- in the process that runs tests --


class Popen(subprocess.Popen):
    """`subprocess.Popen`, whose program is forked by the process that has imported everything."""

    def _execute_child(self, args: Sequence[Any], *how: Any) -> None:
        fds, request = described([os.fspath(word) for word in args], *how)
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            send(parent(), request, [*fds, theirs.fileno()])
        words = self._status.recv(64)
        assert words, "the process that forks has ended; its output is above"
        self.pid, self._child_created = int(words), True
        self._close_pipe_fds(*how[9:15])

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self.returncode if self._has_ended(0.0) else None

    def _wait(self, timeout: float | None) -> int | None:
        if not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            words = self._status.recv(64)
            self._status.close()
            self.returncode = os.waitstatus_to_exitcode(int(words)) if words else -signal.SIGKILL
        return self.returncode is not None


_parent: tuple[int, socket.socket] | None = None


def parent() -> socket.socket:
    """The way to the process that forks; the first call starts it."""
    global _parent
    if _parent is None or _parent[0] != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words, room = [sys.executable, __file__, str(theirs.fileno())], " " * ROOM
        popen = subprocess.Popen(
            [*words, room],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"ROOM": room},
            pass_fds=[theirs.fileno()],
        )
        popen.returncode = 0  # it ends at the session's end and is never waited for
        theirs.close()
        _parent = os.getpid(), ours
        multiprocessing.util.Finalize(None, ours.close, exitpriority=10)  # leftovers.py runs it
    return _parent[1]


# -- on both sides --


def described(
    args: Sequence[str],
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: Any,
    env: Mapping[str, str] | None,
    startupinfo: Any,
    creationflags: int,
    shell: bool,
    *rest: Any,
) -> tuple[list[int], dict[str, Any]]:
    """What `Popen._execute_child` is given: the file descriptors to send, and all else as a message."""
    stdin, _, _, stdout, _, stderr, *_, new_session, group = rest
    assert preexec_fn is None and close_fds and not shell, "not by fork"
    standard = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
    message = {
        "words": list(args),
        "env": dict(os.environ if env is None else env),
        "cwd": os.fspath(cwd or os.getcwd()),
        "fds": [0, 1, 2, *pass_fds],
        "group": group,
        "is_session": new_session,
    }
    return [*standard, *pass_fds], message


def send(to: socket.socket, request: Mapping[str, Any], fds: Sequence[int]) -> None:
    socket.send_fds(to, [json.dumps(request).encode()], list(fds))


def receive(at: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A request and its file descriptors, high numbers all; None at the end."""
    data, received, _, _ = socket.recv_fds(at, 1 << 20, 64)
    if not data:
        return None
    fds = [_moved(fd) for fd in received]
    return json.loads(data), fds


def _moved(fd: int) -> int:
    """Away from the numbers that programs use."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500)
    os.close(fd)
    return moved


# -- in the process that forks, and in its children --


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork a process for every request until the tests end; in that process, its request is returned."""
    for module in PRELOADED:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a module has started threads when it was imported"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    ended.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            ended.recv(4096)
            _reap(running)
        if control not in ready:
            continue
        if (received := receive(control)) is None:
            os._exit(0)
        request, (*fds, status) = received
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (control, ended, wake, *running.values()):
                each.close()
            os.close(status)
            become(request, fds)
            return request
        running[pid] = socket.socket(fileno=status)
        running[pid].send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as to, suppress(OSError):  # it may not be waited for any more
            to.send(str(status).encode())


def become(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Take over the files, environment, directory and words of a request."""
    for number, fd in zip(request["fds"], fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    if request["is_session"]:
        os.setsid()
    elif request["group"] == 0:
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["env"])
    _show(request["words"])
    _open_standard_files()
    if "torch" in sys.modules and (count := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(count))


def _open_standard_files() -> None:
    is_raw = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw = open(number, f"{mode}b", buffering=0 if is_raw and mode == "w" else -1, closefd=False)  # noqa: SIM115
        text: dict[str, Any] = {"encoding": "utf-8", "write_through": is_raw and mode == "w"}
        if name == "stderr":
            text |= {"errors": "backslashreplace", "line_buffering": True}
        file = io.TextIOWrapper(raw, **text)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _show(words: Sequence[str]) -> None:
    """Let /proc/PID have these arguments and this environment, in the place of those of the process that forks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]  # where arguments begin and end, and the environment
    env = [f"{name}={value}" for name, value in os.environ.items()]
    for begin, end, texts in ((*places[:2], words), (*places[2:], env)):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        assert len(data) < end - begin, f"{len(data)} bytes of arguments or environment: enlarge ROOM"
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


class Spares:
    """Children of this process that wait to become a program that it starts."""

    def __init__(self) -> None:
        self._ways: list[tuple[int, socket.socket]] = []
        self.request: dict[str, Any] | None = None
        mother = os.getpid()
        for _ in range(NUM_SPARES):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if (pid := os.fork()) == 0:
                ours.close()
                for _, way in self._ways:
                    way.close()
                self.request = _wait_as_spare(theirs, mother)
                return
            theirs.close()
            self._ways.append((pid, ours))

    def popen(self) -> type[subprocess.Popen]:
        """`subprocess.Popen` for base/process.py."""
        ways = self._ways

        class SparePopen(subprocess.Popen):
            def _execute_child(self, args: Sequence[str], *how: Any) -> None:
                words = list(args[args.index("-c") + 3 :]) if "-c" in args else []
                if not ways or words[:3] != [sys.executable, "-m", "stretto"] or is_of_vllm(words):
                    return super()._execute_child(args, *how)
                fds, request = described(words, *how)
                self.pid, way = ways.pop()
                with way:
                    send(way, request, fds)
                    way.recv(1)  # it is in its group and to be seen with its words
                self._child_created = True
                self._close_pipe_fds(*how[9:15])

        return SparePopen


def is_of_vllm(words: Sequence[str]) -> bool:
    """Is it an engine with this library, which minds what was imported before it?"""
    files = [word for word in words if word.endswith(".json")]
    return words[3] == "inference" and any('"vllm"' in Path(file).read_text() for file in files)


def _wait_as_spare(way: socket.socket, mother: int) -> dict[str, Any]:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    moved = socket.socket(fileno=_moved(way.detach()))
    _show(["spare"])
    received = receive(moved) if os.getppid() == mother else None
    if received is None:
        os._exit(0)
    become(*received)
    moved.send(b" ")
    moved.close()
    return received[0]


def run(request: Mapping[str, Any]) -> None:
    """The program, as Python begins it; its end is this process's own."""
    _, *words = request["words"]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *SITE]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    from stretto.base import process

    if request["words"][1:3] == ["-m", "stretto"]:
        spares = Spares()
        if spares.request is None:
            process.subprocess = _like(subprocess, Popen=spares.popen())  # type: ignore[assignment]
        request = spares.request or request
    run(request)


class _like:
    """A module with other attributes."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update(vars(module) | others)


if __name__ == "__main__":
    # This process's own: those of PYTHONPATH and of this file are not for its programs.
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    SITE = [path for path in sys.path if path not in own]
    assert threading.active_count() == 1
    main()
