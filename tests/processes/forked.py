"""Python programs of tests, forked from a process that has imported torch and stretto (fork_server.py).

All workers of xdist have one such process, which the first that needs it starts.

The four processes of a run of six steps take 9.6 s of CPU time (by `os.wait4` of the launcher), and 2.4 s when they are
forked. Programs with vLLM are forked from another process, which has imported vLLM too: that takes each of an engine's
processes 7 s of CPU time.

`forked.Popen` is `subprocess.Popen` for `python -m MODULE`, `python FILE` and `python -c CODE`. The program has the
arguments, environment, directory and files that it would have, is seen with them in /proc, and ends as Python ends. The
processes that a verb starts by base/process.py, and those of vLLM, are its children as ever, and forked too: the first
six, or as many as `NUM_SPARES_VAR` says.

What differs: modules are imported, all have the same hash seed, and the launcher's words for Python
(`-I -S -c ... PID`) are not run. A program that ends waits for its threads, runs what is registered for its end, and is
gone: taking apart all modules, as Python does, copies each of their pages, which was half of the CPU time of a run of
one step. So tests of starting use `subprocess`: most of unit/launch, the kills and interrupts at the start in
e2e/endings, the verbs by hand in e2e/test_loop.py, and for vLLM contract/test_leftovers.py.

`fork_children_of(monkeypatch, module)` lets a module in the process of the tests do the same with the Python programs
that it starts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from stretto.base.process import visible_gpus

if TYPE_CHECKING:
    import pytest

SERVER = Path(__file__).with_name("fork_server.py")
ENVIRONMENT = dict(os.environ)
"""The session's, as it was before a test: the process that forks outlives the test that starts it."""
ROOM = 32_768  # bytes of a program's arguments and environment in /proc
IS_VLLM = re.compile(r'\bengine"? ?[:=] ?"vllm"')  # in JSON and TOML; there is a router of that name too
NUM_SPARES_VAR = "NUM_FORKED_CHILDREN"
"""Environment variable of a program that is no verb, or of which not all processes are forked: how many of them are."""
VLLM_ENV = {"VLLM_PLUGINS": "stretto", "TORCH_COMPILE_DISABLE": "1"}
"""What vLLM reads while it is imported, of the variables with which an engine on a CPU is started."""


# -- in the process that runs tests --


class Popen(subprocess.Popen):
    """`subprocess.Popen`, whose program is forked by the process that has imported everything."""

    def _execute_child(self, args: Sequence[Any], *how: Any) -> None:
        fds, request = described([os.fspath(word) for word in args], *how)
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            send(parent(uses_vllm(request["words"])), request, [*fds, theirs.fileno()])
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
        if timeout == 0.0 and self.returncode is None and _is_gone(self.pid):
            timeout = None  # its status is on its way
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            words = self._status.recv(64)
            self._status.close()
            self.returncode = os.waitstatus_to_exitcode(int(words)) if words else -signal.SIGKILL
        return self.returncode is not None


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it goes between opening and reading
        return True


def run(args: Sequence[str], *, timeout: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with its output captured as text."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as popen:
        try:
            output, errors = popen.communicate(timeout=timeout)
        except BaseException:
            popen.kill()
            raise
    return subprocess.CompletedProcess(args, popen.returncode, output, errors)


def fork_children_of(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let a module that begins with `import subprocess` fork the Python programs that it starts."""
    own = dict(vars(subprocess))
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(**own | {"Popen": _Unbound, "run": _run}))


class _Unbound(Popen):
    """Without the words that base/process.py has a child begin with."""

    def __init__(self, args: Sequence[str], **how: Any) -> None:
        is_bound = list(args[1:4]) == ["-I", "-S", "-c"]
        super().__init__(args[6:] if is_bound else args, **how)


def _run(args: Sequence[str], *, capture_output: bool, text: bool, check: bool, **how: Any) -> Any:
    assert capture_output and text
    done = run(args, **how)
    if check:
        done.check_returncode()
    return done


_parents: dict[tuple[int, bool], socket.socket] = {}


def parent(has_vllm: bool) -> socket.socket:
    """The way to the session's process that forks, with or without vLLM; it is started if it does not run."""
    if (key := (os.getpid(), has_vllm)) not in _parents:
        directory = ENVIRONMENT.get("TMPDIR", tempfile.gettempdir())  # the session's own: leftovers.py
        name = hashlib.sha256(f"{directory} {SERVER} {has_vllm}".encode()).hexdigest()  # an address is short
        address = f"\0forks-{name[:32]}"
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (way := _connected(address)) is None:
                _start(address, has_vllm)
                way = _connected(address)
        finally:
            os.close(lock)
        assert way is not None, "the process that forks has ended; its output is above"
        _parents[key] = way
        multiprocessing.util.Finalize(None, way.close, exitpriority=10)  # leftovers.py runs it
    return _parents[key]


def _start(address: str, has_vllm: bool) -> None:
    words, room = [sys.executable, str(SERVER)], " " * ROOM
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        popen = subprocess.Popen(
            [*words, str(listener.fileno()), "vllm" if has_vllm else "", room],
            stdin=subprocess.DEVNULL,
            env=ENVIRONMENT | {"ROOM": room} | (VLLM_ENV if has_vllm else {}),
            pass_fds=[listener.fileno()],
        )
    popen.returncode = 0  # it ends with the last that is connected to it, and is never waited for


def _connected(address: str) -> socket.socket | None:
    """A way to the process that forks, once it has imported everything; None if there is none."""
    way = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):
        way.connect(address)
        if way.recv(1):
            return way
    way.close()
    return None


# -- also in fork_server.py --


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
    fds = [move(fd) for fd in received]
    return json.loads(data), fds


def move(fd: int) -> int:
    """Away from the numbers that programs use."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500)
    os.close(fd)
    return moved


def uses_vllm(words: Sequence[str]) -> bool:
    """Is it a verb with an engine of vLLM on CPUs, by its words or by its configs?"""
    if list(words[1:3]) != ["-m", "stretto"] or find_spec("vllm") is None:
        return False
    files = [Path(word) for word in words if word.endswith((".json", ".toml"))]
    texts = [path.read_text() for path in files if path.is_file()]
    return ("vllm" in words or any(IS_VLLM.search(text) for text in texts)) and not visible_gpus()
