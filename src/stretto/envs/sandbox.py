"""Untrusted Python code, run where it can do no harm: `await Sandbox().run(code)`.

Two back ends, one behaviour. `bubblewrap` (Debian package of that name): no network, processes and IPC of its
own, only the system's libraries and the interpreter to be seen, read-only, a work directory in memory.
`subprocess`, where bubblewrap is missing or may not make namespaces: resource limits, an empty environment,
and whatever of namespaces and Landlock the kernel grants. Which one it is is logged once, and what stays open.

Where the kernel grants no namespaces, as in many containers, only Landlock stands between a program and the
network: it refuses TCP from Linux 6.7 on, UDP never.

As root, `subprocess` can count processes only from outside (unless every user may read the interpreter): a fork
bomb is ended within moments, but the machine feels it. Prefer bubblewrap there.

In both, time, memory (of all its processes together), number of processes, file size and output are limited,
and nothing it started survives it. What a machine-wide administrator would add, cgroups and seccomp, is not
here: code written to break out of a kernel needs a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Literal

from stretto.base.errors import ConfigError, EnvError
from stretto.base.process import num_cores

logger = logging.getLogger(__name__)
Backend = Literal["bubblewrap", "subprocess"]

KEEPER = Path(__file__).with_name("sandbox_keeper.py")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
WORK, KEEPER_INSIDE = "/sandbox", "/sandbox_keeper.py"  # names inside bubblewrap
GRACE_S = 10.0  # for the keeper, beyond the program's own time
PROBE_TIMEOUT_S = 10.0
_runs = count()
_removers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="sandbox-remove")  # used by nobody who hangs


@dataclass(frozen=True)
class Limits:
    """What one run may use."""

    wall_s: float = 5.0
    memory_bytes: int = 512 << 20  # of all processes together, and address space of each
    max_processes: int = 16  # threads count
    file_bytes: int = 16 << 20  # the largest file
    work_bytes: int = 64 << 20  # the work directory (bubblewrap only)
    output_bytes: int = 256 << 10  # of standard output and of standard error, each


@dataclass(frozen=True)
class SandboxResult:
    """What became of a program."""

    exit_code: int | None  # 128 + number where a signal ended it; None where a limit did
    killed_for: Literal["time", "memory", "processes", "output"] | None
    stdout: str
    stderr: str
    wall_s: float
    peak_bytes: int = 0  # private memory, as far as it was looked at

    @property
    def is_ok(self) -> bool:
        return self.exit_code == 0


@dataclass
class Sandbox:
    """Runs programs, at most max_concurrent at a time (None: one a core)."""

    limits: Limits = field(default_factory=Limits)
    backend: Literal["auto", "bubblewrap", "subprocess"] = "auto"
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        self._is_bubblewrapped = choose_backend(self.backend) == "bubblewrap"
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, code: str, *, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        """Run `code` as main.py beside `files` (relative names) in an empty directory.

        Raises: EnvError when the sandbox itself cannot be built, or a file name leaves the directory.
        """
        files = {**(files or {}), "main.py": code}
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise EnvError(f"sandbox: the file name {name!r} leaves the work directory")
        async with self._free_slot():
            folder = tempfile.mkdtemp(prefix="stretto-sandbox-")
            try:
                return await self._keep(self._request(files, stdin, folder), folder)
            finally:
                loop = asyncio.get_running_loop()
                await asyncio.shield(loop.run_in_executor(_removers, _remove, folder))

    def _free_slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._slots = loop, asyncio.Semaphore(self.max_concurrent or num_cores())
        assert self._slots is not None
        return self._slots

    def _request(self, files: dict[str, str], stdin: str, folder: str) -> dict:
        python, prefix = interpreter()
        work = WORK if self._is_bubblewrapped else folder
        enter = [python, "-I", "-S", "-B", KEEPER_INSIDE if self._is_bubblewrapped else str(KEEPER), "enter"]
        # A user of its own for every run: what it may start is counted by user.
        uid = 20_000 + (os.getpid() * 64 + next(_runs)) % 40_000
        return {
            "argv": [*bwrap_argv(self.limits), *enter] if self._is_bubblewrapped else enter,
            "cwd": folder,
            "program": [python, "-s", "-S", "-B", "main.py"],
            "env": {"HOME": work, "TMPDIR": work, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            "files": files,
            "stdin": stdin,
            "limits": asdict(self.limits),
            "uid": uid if self._is_bubblewrapped or is_public(python, folder) else None,
            "is_bubblewrapped": self._is_bubblewrapped,
            "readable": [*SYSTEM, prefix],
        }

    async def _keep(self, request: dict, folder: str) -> SandboxResult:
        keeper = await asyncio.create_subprocess_exec(
            interpreter()[0],
            *("-I", "-S", "-B", str(KEEPER), "keep"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            process_group=0,
        )
        try:
            async with asyncio.timeout(self.limits.wall_s + GRACE_S):
                answer, complaint = await keeper.communicate(json.dumps(request).encode())
        except TimeoutError as cause:
            raise EnvError(f"sandbox: no answer {GRACE_S:g} s after the program's time was up") from cause
        finally:
            await asyncio.shield(_end(keeper))
        if keeper.returncode != 0 or not answer:
            raise EnvError(f"sandbox: it cannot be built: {complaint.decode(errors='replace')[-500:]}")
        fields = json.loads(answer)
        if trouble := fields.pop("trouble"):
            raise EnvError(f"sandbox: it cannot be built: {trouble.strip()}")
        return SandboxResult(**fields)


async def _end(keeper: asyncio.subprocess.Process) -> None:
    """A keeper that still runs ends what it keeps, then itself."""
    with contextlib.suppress(ProcessLookupError):
        keeper.terminate()
    try:
        async with asyncio.timeout(GRACE_S):
            await keeper.wait()
    except TimeoutError:
        keeper.kill()
        await keeper.wait()


def _remove(folder: str) -> None:
    """A work directory, however deep its program made it and whatever of it was closed. Nobody is in it any more."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.islink(folder):
        os.unlink(folder)
    elif os.path.exists(folder):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, folder], stderr=subprocess.DEVNULL, check=False)


# -- which one --


@functools.cache
def choose_backend(wanted: str) -> Backend:
    """The back end to use, said once in the log.

    Raises: ConfigError when bubblewrap is asked for and does not work here.
    """
    if wanted not in ("auto", "bubblewrap", "subprocess"):
        raise ConfigError(f"sandbox: {wanted!r} is none of auto, bubblewrap, subprocess.")
    trouble = "not asked for" if wanted == "subprocess" else bubblewrap_trouble()
    if trouble is None:
        logger.info("untrusted code runs in bubblewrap")
        return "bubblewrap"
    if wanted == "bubblewrap":
        raise ConfigError(
            f"sandbox: bubblewrap does not work here: {trouble}. Install the package `bubblewrap` and allow user "
            "namespaces, or use `subprocess`."
        )
    logger.warning(
        "untrusted code runs in a subprocess with resource limits, not in bubblewrap (%s); it sees the processor%s",
        trouble,
        "".join(f"; {gap}" for gap in subprocess_gaps()),
    )
    return "subprocess"


def subprocess_gaps() -> list[str]:
    """What a program in a subprocess may do here because the kernel does not grant what would keep it from it."""
    probe = [interpreter()[0], "-I", "-S", "-B", str(KEEPER), "probe"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=PROBE_TIMEOUT_S, env={}, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        return [f"what else it may do cannot be said: {cause}"]
    found = json.loads(done.stdout)
    abi, gaps = found["landlock_abi"], []
    if abi < 1:
        gaps.append("no Landlock: it reads the files of this user")
    if not found["has_namespaces"]:
        gaps.append(f"no network namespace: {'UDP is' if abi >= 4 else 'UDP and TCP are'} open to it")
    return gaps


@functools.cache
def bubblewrap_trouble() -> str | None:
    """Why bubblewrap cannot be used here; None when it can."""
    if shutil.which("bwrap") is None:
        return "no program `bwrap`"
    probe = [*bwrap_argv(Limits()), interpreter()[0], "-I", "-S", "-c", ""]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env={})
    except (OSError, subprocess.TimeoutExpired) as cause:
        return str(cause)
    return None if done.returncode == 0 else done.stderr.strip()[-200:] or f"exit code {done.returncode}"


def bwrap_argv(limits: Limits) -> list[str]:
    """The command that everything inside is appended to."""
    argv = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # becomes a user of its own inside, see `enter`
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_CHOWN"]
    else:
        argv += ["--unshare-user"]
    visible = [*SYSTEM, interpreter()[1]]
    for folder in sorted({str(parent) for path in visible for parent in Path(path).parents} - {"/"}):
        if not any(Path(folder).is_relative_to(path) for path in visible):
            argv += ["--perms", "0755", "--dir", folder]
    for path in visible:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            argv += ["--ro-bind", path, path]
    argv += ["--ro-bind", str(KEEPER), KEEPER_INSIDE]
    size = str(limits.work_bytes)
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--perms", "1777", "--tmpfs", "/dev/shm"]
    argv += ["--size", size, "--perms", "1777", "--tmpfs", WORK, "--symlink", WORK, "/tmp"]
    return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]


@functools.cache
def interpreter() -> tuple[str, str]:
    """This Python without its virtual environment: the program, and the directory it lives in."""
    return os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)


def is_public(*paths: str) -> bool:
    """May every user reach these paths?"""
    parents = {parent for path in paths for parent in Path(path).parents}
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in parents)
