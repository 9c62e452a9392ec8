"""`stretto stacks RUN`: what every process of a run is doing now, also when it hangs.

Our own processes answer SIGUSR1 with the stacks of all threads in their log (base/log.py): the handler is in C and
does not need a running interpreter. py-spy reads the stacks of others, such as those of vLLM or of an environment, from
outside if it is installed and allowed to; else the kernel says what they wait for. A process that does not handle
the signal never gets it: it would end.
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
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.files import holder, lock_within, write_atomic
from stretto.base.paths import RunDir

SCRIPTS = ("rl", "vime", "sft", "trainer", "orchestrator", "inference", "eval")
ANSWER_S, QUIET_S, POLL_S, LOCK_S = 3.0, 0.15, 0.05, 60.0
PY_SPY_TIMEOUT_S = 20.0
_STACK_LINE = re.compile(rb"(Current thread|Thread) 0x|  File |  \.\.\.|  Garbage-collecting|  <|$")
_FIRST_LINE = re.compile(rb"^(Current thread|Thread) 0x", re.MULTILINE)


@dataclass(frozen=True)
class Seen:
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
    parser = ArgumentParser(
        "stretto stacks", description="what every process of a run is doing now, also when it hangs"
    )
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args(words)
    run = RunDir(given.run.expanduser())
    top = find_launcher(run)
    seen = processes()
    run.dumps.mkdir(parents=True, exist_ok=True)
    with _alone(run.dumps / ".lock"):
        found = {each.title: stack_of(each) for each in below(top, seen)}
    text = "".join(f"== {title}\n{stack.rstrip()}\n\n" for title, stack in found.items())
    file = run.dumps / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    write_atomic(file, text.encode())
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if given.json else text)
    sys.stderr.write(
        f"{len(found)} process{'es' * (len(found) != 1)} of {socket.gethostname()}; written to {file}\n"
    )
    return 0


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One command at a time: answers of two would stand in each other's."""
    with lock.open("a") as file:
        lock_within(file.fileno(), LOCK_S)  # else the answers are mixed, and still of use
        yield


def find_launcher(run: RunDir) -> int:
    """The process that holds a run.

    Raises: ConfigError if there is no run, or it does not run on this host.
    """
    if not run.launch.exists() and not run.configs.is_dir():
        raise ConfigError(
            f"{run} is no run directory; give <output_dir>/<run.name>, which the command printed."
        )
    pid = holder(run.lock)
    if pid is None:
        raise ConfigError(
            f"{run} is not running; what its processes did when they stalled is in {run.dumps}."
        )
    try:
        host = json.loads(run.launch.read_text()).get("host")
    except (OSError, ValueError, AttributeError):
        host = None
    if host not in (None, socket.gethostname()):
        raise ConfigError(f"{run} runs on {host}; run `stretto stacks {run}` there.")
    if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
        raise ConfigError(f"{run} is held by process {pid}, which is not on this host.")
    return int(pid)


# -- processes --


def processes() -> dict[int, Seen]:
    """All processes of this host, by number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        found[int(entry.name)] = Seen(int(entry.name), parent, tuple(filter(None, words)))
    return found


def below(top: int, seen: Mapping[int, Seen]) -> Iterator[Seen]:
    """A process and its descendants, parents first."""
    if top in seen:
        yield seen[top]
    for child in sorted(pid for pid, each in seen.items() if each.parent == top):
        yield from below(child, seen)


# -- stacks --


def stack_of(process: Seen) -> str:
    """The stacks of a process, by the first way that works."""
    if log := _own_log(process.pid):
        try:
            before = log.stat().st_size
            os.kill(process.pid, signal.SIGUSR1)
            if answer := _answer(log, before):
                return answer
        except OSError:
            pass  # it has ended meanwhile, or its log was deleted
    return _py_spy(process.pid) or _from_kernel(process.pid)


def _own_log(pid: int) -> Path | None:
    """The file to which a process writes its stacks at SIGUSR1; None if it does not handle the signal so.

    Its standard error, where that is a file; else a log of its own that it has open.
    """
    try:
        status = (Path("/proc") / str(pid) / "status").read_text()
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
        opened = [
            Path(os.readlink(fd)) for fd in sorted((Path("/proc") / str(pid) / "fd").iterdir(), key=_number)
        ]
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, StopIteration, ValueError):
        return None
    if not caught >> (signal.SIGUSR1 - 1) & 1 or not _is_ours(words):
        return None
    logs = [
        path for path in opened if path.suffix == ".log" and path.parent.name == "logs" and path.is_file()
    ]
    return logs[0] if logs else None


def _is_ours(words: Sequence[str]) -> bool:
    """Does the command line run stretto, as a module or as one of its scripts?"""
    names = [Path(word).name for word in words[:8]]
    return any(name.partition(".")[0] == "stretto" for name in names) or any(n in SCRIPTS for n in names[:2])


def _number(fd: Path) -> int:
    return int(fd.name)


def _answer(log: Path, start: int) -> str:
    """The stacks that were appended to a log; "" if none came in time. Lines that others logged are left out."""
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
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _from_kernel(pid: int) -> str:
    """What the kernel tells about a process whose stack nobody can read."""
    found = {}
    for name in ("wchan", "syscall"):
        try:
            found[name] = (Path("/proc") / str(pid) / name).read_text().split()[:1]
        except OSError:
            continue
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "it has ended meanwhile"
    waits = " ".join(found.get("wchan") or ["?"])
    hint = "" if shutil.which("py-spy") else "; pip install py-spy shows stacks of Python"
    return f"state {fields[0]}, waits in {waits}{hint}"
