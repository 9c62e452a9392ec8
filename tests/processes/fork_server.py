"""The process that imports, and forks the programs of tests (forked.py); run as a program. Linux only."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import io
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from forked import NUM_SPARES_VAR, described, move, receive, send, uses_vllm

PRELOADED = (
    "stretto.launch.run.rl",
    "stretto.launch.run.serve",
    "stretto_sft.ranks",
    "stretto.inference.server",
    "stretto.orchestrator.main",
    "stretto.trainer.rl",
    "stretto_sft.training",
    "stretto.trainer.state.slice_files",
    "stretto.cli",
    "stretto.verbs",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "renderers",
    "renderers.gpt_oss",
    "torch._dynamo",
)
"""Modules that start no threads when they are imported, and what these import when they need it first."""
PRELOADED_FOR = dict.fromkeys(("mesh_runs.py", "hf_runs.py"), ("transformers.models.auto.modeling_auto",))
"""What some scripts of tests/dist import on every rank, imported when the first rank is asked for."""
PRELOADED_VLLM = (
    "stretto_vllm.launch",
    "stretto_vllm.plugin",
    "stretto_vllm.routes",
    "stretto_vllm.weights",
    "stretto_vllm.worker",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What programs with vLLM import besides."""
NUM_SPARES = 6  # forked children of a verb whose environment does not say how many; others start as ever
NUM_ENGINE_PROCESSES = 2  # of an engine that a program has started
PR_SET_PDEATHSIG = 1


def serve(listener: socket.socket, modules: Sequence[str]) -> dict[str, Any]:
    """Fork a process per request until nobody is connected any more; in that process, its request is returned."""
    load(modules)
    # torch._dynamo does it at exit, after which Python has forgotten that Ctrl-C ended the program.
    with suppress(ImportError):
        importlib.import_module("tabulate")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    ended.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    controls: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listener, ended, *controls], [], [])
        if ended in ready:
            ended.recv(4096)
            _reap(running)
        if listener in ready:
            controls.append(listener.accept()[0])
            with suppress(OSError):  # it may have gone again
                controls[-1].send(b" ")
            continue
        control = next((each for each in controls if each in ready), None)
        if control is None:
            continue
        if (received := receive(control)) is None:
            control.close()
            controls.remove(control)
            if not controls:
                os._exit(0)
            continue
        request, (*fds, status) = received
        for word in request["words"][1:3]:
            load(PRELOADED_FOR.get(Path(word).name, ()))
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (listener, ended, wake, *controls, *running.values()):
                each.close()
            os.close(status)
            become(request, fds)
            return request
        if request["group"] == 0:  # here and in the child: whoever comes first
            with suppress(OSError):
                os.setpgid(pid, 0)
        running[pid] = socket.socket(fileno=status)
        running[pid].send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def load(modules: Sequence[str]) -> None:
    """Import these, in all processes that are forked from now on."""
    if all(module in sys.modules for module in modules):
        return
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # an add-on may be taken away
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a module has started threads when it was imported"
    gc.collect()
    gc.freeze()


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
    tempfile.tempdir = None
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


_spawn = multiprocessing.util.spawnv_passfds


class Spares:
    """Children of this process that wait to become a program that it starts; they do not need these open files."""

    def __init__(self, count: int, not_theirs: Sequence[int] = ()) -> None:
        self._ways: list[tuple[int, socket.socket]] = []
        self.request: dict[str, Any] | None = None
        mother = os.getpid()
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if (pid := os.fork()) == 0:
                ours.close()
                for _, way in self._ways:
                    way.close()
                for fd in not_theirs:
                    os.close(fd)
                self.request = _wait_as_spare(theirs, mother)
                return
            theirs.close()
            self._ways.append((pid, ours))

    def _begin(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        pid, way = self._ways.pop()
        with way:
            send(way, request, fds)
            way.recv(1)  # it is in its group and to be seen with its words
        return pid

    def popen(self) -> type[subprocess.Popen]:
        """`subprocess.Popen` for base/process.py."""
        spares = self

        class SparePopen(subprocess.Popen):
            def _execute_child(self, args: Sequence[str], *how: Any) -> None:
                words = list(args[args.index("-c") + 3 :]) if "-c" in args else []
                is_ours = words[:3] == [sys.executable, "-m", "stretto"]
                if not is_ours or not spares._ways or (uses_vllm(words) and "vllm" not in sys.modules):
                    return super()._execute_child(args, *how)
                fds, request = described(words, *how)
                self.pid, self._child_created = spares._begin(request, fds), True
                self._close_pipe_fds(*how[9:15])

        return SparePopen

    def spawn(self, path: Any, args: Sequence[str | bytes], passed: Sequence[int]) -> int:
        """`spawnv_passfds` of multiprocessing: its children, but not its helper, are spares while there are some."""
        if "--multiprocessing-fork" not in args or not self._ways:
            return _spawn(path, args, passed)
        request = {
            "words": [os.fsdecode(word) for word in args],
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "fds": [0, 1, 2, *passed],
            "group": None,
            "is_session": False,
        }
        return self._begin(request, [0, 1, 2, *passed])


def _wait_as_spare(way: socket.socket, mother: int) -> dict[str, Any]:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    moved = socket.socket(fileno=move(way.detach()))
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
    if "--multiprocessing-fork" in words:
        words = words[words.index("-c") :]  # after flags of Python
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *SITE]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *words[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")  # its children would run this file as theirs
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    has_vllm = sys.argv[2] == "vllm"
    request = serve(socket.socket(fileno=int(sys.argv[1])), PRELOADED + PRELOADED_VLLM * has_vllm)
    from stretto.base import process

    if request["words"][1:3] == ["-m", "stretto"] or NUM_SPARES_VAR in os.environ:
        spares = Spares(int(os.environ.pop(NUM_SPARES_VAR, NUM_SPARES)))
        if spares.request is None:
            process.subprocess = _like(subprocess, Popen=spares.popen())  # type: ignore[assignment]
            multiprocessing.util.spawnv_passfds = spares.spawn
        elif has_vllm and spares.request["words"][3:4] == ["inference"]:
            engines = Spares(NUM_ENGINE_PROCESSES, spares.request["fds"][3:])
            multiprocessing.util.spawnv_passfds = engines.spawn
            spares.request = engines.request or spares.request
        request = spares.request or request
    try:
        run(request)
    except SystemExit as ended:
        _end(ended.code)
    _end(None)


def _end(code: object) -> NoReturn:
    """As Python ends, but that it does not take apart all that has been imported: that would copy every page of it.

    An error that the program does not catch takes Python's own way.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads that are no daemons
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if file is not None and not file.closed:
            file.flush()
    os._exit((code or 0) & 0xFF)


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
