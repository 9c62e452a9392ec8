"""Child processes that cannot outlive their parent, and the cores and GPUs that this machine has for them.

A child runs in a process group of its own (Ctrl-C in the terminal does not reach it) and writes to a log file. The
kernel kills it when its parent dies, even by SIGKILL; its own children are then killed by a keeper (keeper.py).
States of a child: RUNNING -> EXITED. `stop` ends several at once: SIGTERM, SIGKILL after a grace time, then all
remaining descendants, in any process group. Linux only (pidfd, prctl).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.base import keeper
from stretto.base.errors import EngineError

logger = logging.getLogger(__name__)

# Runs in the child's process before its program: it asks the kernel to send SIGKILL when the parent's thread ends
# (1 is PR_SET_PDEATHSIG, which survives exec). A separate program, because preexec_fn is unsafe with threads.
# The child ignores what schedulers send to all processes of a job: the launcher gets it too, and stops its children.
_DIE_WITH_PARENT = """
import ctypes, os, sys
from _signal import SIGHUP, SIGUSR2, SIG_IGN, signal
signal(SIGHUP, SIG_IGN)
signal(SIGUSR2, SIG_IGN)
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LEFTOVER_GRACE_S = 1.0
OUTPUT_S = 8.0
TRAIN_NODES_VAR = "STRETTO_TRAIN_NODES"
"""Environment variable of the first rank: the addresses of the trainer's nodes, for messages."""
LOST_AFTER_VAR = "STRETTO_LOST_AFTER_S"
"""Environment variable of the ranks: seconds of silence after which a node of the trainer is lost."""
RESTART_EARNED_S = 3600.0
"""A process that ran for this long may be started again once more."""
EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
EXIT_LOST = 75
"""Exit code of a process that ends because another node is lost; another machine may take its place."""


# -- resources of this machine --


def num_cores() -> int:
    """CPU cores that this process may use: its affinity, limited by a container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that this process may use, found without loading CUDA."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA stops at the first invalid entry, too; "-1" and "NoDevFiles" are the usual values for no GPU.
        return list(itertools.takewhile(lambda name: name and name[0] != "-" and name != "NoDevFiles", names))
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return [str(index) for index in range(len(list(driver.iterdir())))]
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        num_gpus = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
        return [str(index) for index in range(num_gpus)]
    return []


def thread_env(num_threads: int) -> dict[str, str]:
    """Environment variables that limit a process to `num_threads` CPU threads.

    Waiting OpenMP threads sleep: with spinning ones, two processes on two cores were measured 30 times slower.
    """
    counts = {f"{name}_NUM_THREADS": str(num_threads) for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
    sleep = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    return counts | sleep | {"TOKENIZERS_PARALLELISM": "false"}


def device_env(gpus: Sequence[str]) -> dict[str, str]:
    """Environment variables that show a process only these GPUs; an empty list hides all."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


# -- children --


class Restarts:
    """How often a process may still be restarted: `most` times, and once more per hour that it has run since.

    So a process that ends at each start is soon given up, and one that is killed now and then is always restarted.
    """

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0

    def left(self, ran_s: float) -> int:
        """Restarts that are left; ran_s: seconds that the process has run since its last start."""
        return self._most - self._counted(ran_s)

    def use(self, ran_s: float) -> None:
        """Count one restart of a process that has run for ran_s seconds."""
        self._used = self._counted(ran_s) + 1

    def _counted(self, ran_s: float) -> int:
        return max(0, self._used - int(ran_s / RESTART_EARNED_S))


@dataclass
class Child:
    """One child process and its log file."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Size of the log file when this process was started, in bytes."""
    pidfd: int
    mark: str
    """Identifies its descendants (keeper.py)."""
    started_at: float = field(default_factory=time.monotonic)
    has_leftovers: bool = False
    """It has ended, and other processes of its group still run."""
    _shared: set[str] = field(default_factory=set)
    """Names of the shared memory that it and its descendants used when they were asked to end."""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def age_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started_at

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal's number; None while it runs."""
        if self.popen.returncode is None and self.popen.poll() is not None:
            self.has_leftovers = self._signal_group(0)
        return self.popen.returncode

    async def wait(self) -> int:
        """Wait for the exit and return the exit code; any number of tasks may wait."""
        if (returncode := self.returncode) is not None:
            return returncode
        loop = asyncio.get_running_loop()
        # An event loop allows one reader per file descriptor, so every waiter watches its own duplicate.
        fd = os.dup(self.pidfd)
        exited = asyncio.Event()
        loop.add_reader(fd, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        returncode = self.returncode
        assert returncode is not None, f"{self.name} (pid {self.pid}) ended but cannot be waited for"
        return returncode

    def signal(self, number: int) -> None:
        """Send a signal to the child alone."""
        if self.returncode is None:
            self.popen.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the child's process group."""
        if number in (signal.SIGTERM, signal.SIGKILL):
            self._shared |= keeper.removable_shared_memory(keeper.marked_processes(self.mark))
        if self.returncode is None or self.has_leftovers:
            self.has_leftovers = self._signal_group(number) and self.returncode is not None

    def _signal_group(self, number: int) -> bool:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    async def end_leftovers(self, deadline: float) -> None:
        """Wait for the rest of the group to end, then kill all descendants.

        deadline: monotonic time until which to wait.
        """
        while self.has_leftovers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            self.has_leftovers = self._signal_group(0)
        await asyncio.to_thread(self._sweep)

    def kill(self) -> None:
        """Kill the child and all its descendants at once; for code that cannot await."""
        self.signal_group(signal.SIGKILL)
        self.popen.wait()
        self._sweep()
        self.close()

    def _sweep(self) -> None:
        """Kill all descendants, in any process group, and remove their shared memory."""
        if alive := keeper.kill_marked(self.mark, self._shared):
            logger.error("%s: processes %s survive SIGKILL: they hang in the kernel", self.name, alive)
        self.has_leftovers = False

    def tail(self, num_lines: int = 15) -> list[str]:
        """The last lines that this process wrote to its log."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_start, size - 64_000))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return lines[-num_lines:]

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def bound(argv: Sequence[str]) -> list[str]:
    """The command in a form that the kernel kills when the thread that started it ends."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]


def start(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str | None],
    log: Path,
    pass_fds: Iterable[int] = (),
    cwd: Path | None = None,
    is_shown: bool = False,
    level: int = logging.INFO,
) -> Child:
    """Start a child; `log` gets its output, `level` is of the line about it.

    env: extends this process's environment; a variable that is None is removed from it.
    is_shown: its output goes to this process's output instead, and the child writes `log` itself.
    Call it from the main thread: the kernel kills the child when the thread that started it ends.
    """
    if sys.platform != "linux":
        raise EngineError(f"stretto starts processes on Linux only, not on {sys.platform}")
    log.parent.mkdir(parents=True, exist_ok=True)
    parent_keeper = keeper.start()
    mark = parent_keeper.mark()
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **env, **parent_keeper.env(mark)}
    with log.open("ab") as output:
        log_start = output.seek(0, os.SEEK_END)
        popen = subprocess.Popen(
            bound(argv),
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=None if is_shown else output,
            stderr=None if is_shown else subprocess.STDOUT,
            process_group=0,
            pass_fds=tuple(pass_fds),
            cwd=cwd,
        )
    logger.log(level, "started %s pid=%d threads=%s", name, popen.pid, env.get("OMP_NUM_THREADS", "-"))
    return Child(name, popen, log, log_start, os.pidfd_open(popen.pid), mark)


async def stop(children: Iterable[Child], *, grace_s: float) -> None:
    """Stop children together: SIGTERM, SIGKILL after grace_s, then their descendants.

    Takes at most grace_s + 3 s.
    """
    children = list(children)
    running = [child for child in children if child.returncode is None]
    for child in running:
        child.signal_group(signal.SIGTERM)
    for child in await _still_running(running, grace_s):
        logger.warning("%s did not end within %.0fs of SIGTERM: killed", child.name, grace_s)
        child.signal_group(signal.SIGKILL)
    for child in await _still_running(running, 2.0):
        logger.error("%s (pid %d) survives SIGKILL: it hangs in the kernel", child.name, child.pid)
    deadline = time.monotonic() + _LEFTOVER_GRACE_S
    for child in children:
        await child.end_leftovers(deadline)
        child.close()


async def _still_running(children: Iterable[Child], timeout_s: float) -> list[Child]:
    """Wait for all children, up to timeout_s; returns those that still run."""
    waits = {asyncio.create_task(child.wait()): child for child in children if child.returncode is None}
    if not waits:
        return []
    _, late = await asyncio.wait(waits, timeout=timeout_s)
    for task in late:
        task.cancel()
    return [waits[task] for task in late]


def exit_status(returncode: int) -> int:
    """The status with which a command ends like its child: that of the child, or 128 + the number of its signal."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_exit(returncode: int) -> str:
    """An exit code as text: `exit code 3` or `killed by SIGKILL (9)`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name} ({-returncode})"
    except ValueError:
        return f"killed by signal {-returncode}"


def output_of(argv: list[str], timeout_s: float = OUTPUT_S, env: Mapping[str, str] | None = None) -> str | None:
    """The output of a program; None if it is missing, fails or does not end within timeout_s."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=True, env=env).stdout
    except (OSError, subprocess.SubprocessError):
        return None
