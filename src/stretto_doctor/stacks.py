"""`stretto stacks RUN`: what every process of a run is doing now, also when it hangs.

Our own processes write the stacks of all threads to their log at SIGUSR1 (base/log.py): the handler is in C and does
not need a running interpreter. The signal is not sent to a process that does not handle it, since it would end. The
stacks of such processes, of vLLM or of an environment for example, are read by py-spy, if it is installed and may do
so; otherwise the kernel says what they wait for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.files import lock_within, write_atomic
from stretto.config.reading.plain import PlainParser
from stretto.launch.control import find_run, launcher_pid
from stretto.state import runs_here

SCRIPTS = ("rl", "vime", "sft", "trainer", "orchestrator", "inference", "eval")
ANSWER_S, QUIET_S, POLL_S, LOCK_S = 3.0, 0.15, 0.05, 60.0
PY_SPY_TIMEOUT_S = 20.0
_STACK_LINE = re.compile(rb"(Current thread|Thread) 0x|  File |  \.\.\.|  Garbage-collecting|  <|$")
_FIRST_LINE = re.compile(rb"^(Current thread|Thread) 0x", re.MULTILINE)


@dataclass(frozen=True)
class Process:
    """A process of a run, as /proc shows it."""

    pid: int
    parent: int
    words: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its role or program, and its number."""
        names = [Path(word).name for word in self.words]
        names = names[1:] if names[1:] and names[0].startswith("python") else names
        ours = names[names.index("stretto") :][:2] if "stretto" in names else []
        name = " ".join(ours or names)
        return f"{name[:60] or '?'} (process {self.pid})"


def stacks(words: list[str]) -> int:
    """Print the stacks of all processes of a run on this host, and write them to RUN/dumps."""
    parser = PlainParser("stacks", "what every process of a run is doing now, also when it hangs", missing=runs_here)
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(words)
    run = find_run(options.run)
    if (launcher := launcher_pid(run, "stacks")) is None:
        raise ConfigError(f"{run} is not running; the stacks of its stalled processes are in {run.dumps}.")
    run.dumps.mkdir(parents=True, exist_ok=True)
    with _locked(run.dumps / ".lock"):
        by_title = {each.title: stack_of(each) for each in below(launcher, processes())}
    text = "".join(f"== {title}\n{stack.rstrip()}\n\n" for title, stack in by_title.items())
    file = run.dumps / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    write_atomic(file, text.encode())
    sys.stdout.write(json.dumps(by_title, indent=2) + "\n" if options.json else text)
    count = f"{len(by_title)} process{'es' * (len(by_title) != 1)}"
    sys.stderr.write(f"{count} of {socket.gethostname()}; written to {file}\n")
    return 0


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock file, so that the stacks that two commands ask for are not mixed in the logs."""
    with lock.open("a") as file:
        lock_within(file.fileno(), LOCK_S)  # mixed stacks are still of use
        yield


# -- processes --


def processes() -> dict[int, Process]:
    """All processes of this host, by number."""
    by_pid = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        by_pid[int(entry.name)] = Process(int(entry.name), parent, tuple(filter(None, words)))
    return by_pid


def below(top: int, by_pid: Mapping[int, Process]) -> Iterator[Process]:
    """A process and its descendants, parents first."""
    if top in by_pid:
        yield by_pid[top]
    for child in sorted(pid for pid, each in by_pid.items() if each.parent == top):
        yield from below(child, by_pid)


# -- stacks --


def stack_of(process: Process) -> str:
    """The stacks of a process, by the first way that works."""
    if log := _stack_log(process.pid):
        try:
            before = log.stat().st_size
            os.kill(process.pid, signal.SIGUSR1)
            if stacks := _read_stacks(log, before):
                return stacks
        except OSError:
            pass  # it has ended meanwhile, or its log was deleted
    return _py_spy(process.pid) or _from_kernel(process.pid)


def _stack_log(pid: int) -> Path | None:
    """The log to which a process writes its stacks at SIGUSR1; None if it does not handle the signal that way.

    Of the logs that it has open, the one with the lowest file descriptor: standard error, if that is a log.
    """
    proc = Path("/proc") / str(pid)
    try:
        status = (proc / "status").read_text()
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
        fds = sorted((proc / "fd").iterdir(), key=lambda fd: int(fd.name))
        opened = [Path(os.readlink(fd)) for fd in fds]
        words = (proc / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, StopIteration, ValueError):
        return None
    if not caught >> (signal.SIGUSR1 - 1) & 1 or not _is_ours(words):
        return None
    logs = (path for path in opened if path.suffix == ".log" and path.parent.name == "logs")
    return next((path for path in logs if path.is_file()), None)


def _is_ours(words: Sequence[str]) -> bool:
    """Whether the command line runs stretto, as a module or as one of its scripts."""
    names = [Path(word).name for word in words[:8]]
    return any(name.partition(".")[0] == "stretto" for name in names) or any(n in SCRIPTS for n in names[:2])


def _read_stacks(log: Path, start: int) -> str:
    """The stacks written to a log after `start` bytes, without other lines; "" if none came within ANSWER_S."""
    deadline, size, changed_at = time.monotonic() + ANSWER_S, start, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (grown := log.stat().st_size) != size:
            size, changed_at = grown, now
        elif size > start and now - changed_at > QUIET_S:
            break
        time.sleep(POLL_S)
    with log.open("rb") as file:
        file.seek(start)
        text = file.read()
    first = _FIRST_LINE.search(text)
    if first is None:
        return ""
    lines = text[first.start() :].splitlines()
    return b"\n".join(line for line in lines if _STACK_LINE.match(line)).decode(errors="replace")


def _py_spy(pid: int) -> str:
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    try:
        return subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""


def _from_kernel(pid: int) -> str:
    """The state of a process, and where in the kernel it waits; for one whose stacks cannot be read."""
    proc, waits = Path("/proc") / str(pid), "?"
    with suppress(OSError):
        waits = " ".join((proc / "wchan").read_text().split()[:1]) or "?"
    try:
        state = (proc / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "it has ended meanwhile"
    hint = "" if shutil.which("py-spy") else "; pip install py-spy shows stacks of Python"
    return f"state {state}, waits in {waits}{hint}"
