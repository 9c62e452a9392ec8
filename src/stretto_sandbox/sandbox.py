"""Runs untrusted code in isolation: `await Sandbox().run(code)`; `run_in(folder, program)` in a directory that stays.

There are two back ends with the same behaviour. `bubblewrap` (Debian package of that name): no network, its own
processes and IPC, read-only access to the system's libraries and the interpreter only, a work directory in memory.
`subprocess`, if bubblewrap is missing or may not make namespaces: resource limits, an empty environment, and the
namespaces and Landlock rules that the kernel grants. The log says once which back end is used and what stays open.

A seccomp filter refuses sockets of every family in both back ends. Where the machine has none (other processors than
x86-64 and arm64) and no namespaces either, as in many containers, only Landlock stands between a program and the
network: it refuses TCP from Linux 6.7 on, and never UDP or sockets by file name.

As root, `subprocess` can count processes only from outside (unless every user may read the interpreter, and there are
other users: a container without root may have none): a fork bomb is ended within moments, but slows the machine down.
Prefer bubblewrap there.

Both limit time, memory (of all processes together), number of processes, file size, the work directory and output,
and nothing that the program started survives it. There is no cgroup for memory, and the filter is a list of refused
calls: code that is written to break out of a kernel needs a virtual machine.
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
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from stretto.base.errors import ConfigError, EnvError
from stretto.base.process import num_cores
from stretto.records.outcomes import Reason
from stretto_sandbox.sandbox_keeper import remove

logger = logging.getLogger(__name__)
Backend = Literal["bubblewrap", "subprocess"]

KEEPER = Path(__file__).with_name("sandbox_keeper.py")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
WORK, KEEPER_INSIDE = "/sandbox", "/sandbox_keeper.py"  # paths inside bubblewrap
GRACE_S = 10.0  # what the keeper may take beyond the program's own time
PROBE_TIMEOUT_S = 10.0
USERS = range(20_000, 60_000)
_run_numbers = count()
_removers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="sandbox-remove")  # only removes directories


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run."""

    wall_s: float = 5.0
    memory_bytes: int = 512 << 20  # private memory of all processes together, and the address space of each
    max_processes: int = 16  # threads count
    file_bytes: int = 16 << 20  # the largest file
    work_bytes: int = 64 << 20  # the work directory; without bubblewrap checked 20 times per second
    output_bytes: int = 256 << 10  # standard output and standard error, each
    max_depth: int | None = None  # directories in each other; checked where work_bytes is


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended, and what it printed."""

    exit_code: int | None  # 128 + number if a signal ended it; None if a limit did
    killed_for: Literal["time", "memory", "processes", "output", "files"] | None
    stdout: str
    stderr: str
    wall_s: float
    peak_bytes: int = 0  # private memory, the largest that was measured

    @property
    def is_ok(self) -> bool:
        return self.exit_code == 0


@dataclass
class Sandbox:
    """Runs programs, at most max_concurrent at a time (None for one per core)."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    backend: Literal["auto", "bubblewrap", "subprocess"] = "auto"
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        self._is_bubblewrapped = choose_backend(self.backend) == "bubblewrap"
        self._free: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, code: str, *, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        """Run `code` as main.py beside `files` (relative names) in an empty directory.

        Raises: EnvError if the sandbox cannot be built, or a file name leads out of the directory.
        """
        files = {**(files or {}), "main.py": code}
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise EnvError(f"sandbox: the file name {name!r} leaves the work directory")
        if "\0" in code:  # up to 3.11.3, Python runs what is before it and says nothing
            return SandboxResult(1, None, "", "SyntaxError: source code cannot contain null bytes\n", wall_s=0.0)
        async with self._temporary() as folder:
            program = [interpreter()[0], "-s", "-S", "-B", "main.py"]
            return await self._keep(self._request(program, stdin, folder) | {"files": files})

    async def run_in(
        self,
        folder: Path,
        program: list[str],
        *,
        stdin: str = "",
        env: dict[str, str] | None = None,
        readable: Sequence[str] = (),
        owner: int | None = None,
    ) -> SandboxResult:
        """Run a program in a directory that stays, and nothing else of the run does.

        The program sees the directory as `self.path_of(folder)`, and has another one for temporary files. env: further
        variables. readable: further paths that it may read. owner: `owner_of(folder)`, to whom all files there belong.

        Raises: EnvError as `run`.
        """
        async with self._temporary() as temporary:
            inside = {"TMPDIR": "/tmp" if self._is_bubblewrapped else temporary}
            request = self._request(program, stdin, str(folder), readable=readable, temporary=temporary)
            request |= {"env": request["env"] | inside | (env or {}), "uid": owner}
            if owner is not None:
                os.chown(temporary, owner, owner)
            return await self._keep(request)

    def path_of(self, folder: Path) -> str:
        """A directory as programs see it that `run_in` runs there."""
        return WORK if self._is_bubblewrapped else str(folder)

    def owner_of(self, folder: Path) -> int | None:
        """The user as which programs run in this directory, if they do not run as that of this process."""
        return next_uid() if os.geteuid() == 0 and self._changes_user(str(folder)) else None

    def _changes_user(self, folder: str) -> bool:
        return (self._is_bubblewrapped or is_public(interpreter()[0], folder)) and has_users()

    @contextlib.asynccontextmanager
    async def _temporary(self) -> AsyncIterator[str]:
        """One of the max_concurrent runs, with a directory that ends with it."""
        async with self._free_runs():
            folder = tempfile.mkdtemp(prefix="stretto-sandbox-")
            try:
                yield folder
            finally:
                loop = asyncio.get_running_loop()
                await asyncio.shield(loop.run_in_executor(_removers, remove, folder))

    def _free_runs(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._free = loop, asyncio.Semaphore(self.max_concurrent or num_cores())
        assert self._free is not None
        return self._free

    def _request(
        self, program: list[str], stdin: str, folder: str, *, readable: Sequence[str] = (), temporary: str | None = None
    ) -> dict[str, Any]:
        """What the keeper is asked; `temporary` is a second directory, and then `folder` is one that stays."""
        python, prefix = interpreter()
        work = WORK if self._is_bubblewrapped else folder
        enter = [python, "-I", "-S", "-B", KEEPER_INSIDE if self._is_bubblewrapped else str(KEEPER), "enter"]
        kept = None if temporary is None else folder
        watched = [folder] if temporary is None else [folder, temporary]
        if self._is_bubblewrapped:  # what is in memory there has a size
            watched = [] if kept is None else [kept]
        return {
            "argv": [*bwrap_argv(self.limits, kept, readable), *enter] if self._is_bubblewrapped else enter,
            "cwd": folder,
            "watched": watched,
            "removed": temporary or folder,
            "is_kept": kept is not None,
            "program": program,
            "env": {"HOME": work, "TMPDIR": work, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            "files": {},
            "stdin": stdin,
            "limits": asdict(self.limits),
            "uid": next_uid() if self._changes_user(folder) else None,
            "is_bubblewrapped": self._is_bubblewrapped,
            "readable": [*SYSTEM, prefix, *readable],
            "writable": [] if temporary is None else [temporary],
        }

    async def _keep(self, request: dict[str, Any]) -> SandboxResult:
        keeper = await self._started()
        try:
            async with asyncio.timeout(self.limits.wall_s + GRACE_S):
                answer, errors = await keeper.communicate(json.dumps(request).encode())
        except TimeoutError as cause:
            text = f"sandbox: no answer {GRACE_S:g} s after the program's time limit"
            raise EnvError(text, reason=Reason.SANDBOX_LOST) from cause
        finally:
            await asyncio.shield(_end(keeper))
        if keeper.returncode != 0 or not answer:
            text = f"the sandbox cannot be built: {errors.decode(errors='replace')[-500:]}"
            raise EnvError(text, reason=Reason.SANDBOX_LOST)
        fields = json.loads(answer)
        if trouble := fields.pop("trouble"):
            raise EnvError(f"the sandbox cannot be built: {trouble.strip()}", reason=Reason.SANDBOX_LOST)
        return SandboxResult(**fields)

    @staticmethod
    async def _started() -> asyncio.subprocess.Process:
        """A keeper. One whose start is cancelled is waited for and ended: asyncio may wait for it for ever (3.11)."""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                interpreter()[0],
                *("-I", "-S", "-B", str(KEEPER), "keep"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={},
                process_group=0,
            )
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _end(await starting)
            raise


async def _end(keeper: asyncio.subprocess.Process) -> None:
    """End a keeper; if it still runs, it kills its program first."""
    with contextlib.suppress(ProcessLookupError):
        keeper.terminate()
    try:
        async with asyncio.timeout(GRACE_S):
            await keeper.wait()
    except TimeoutError:
        keeper.kill()
        await keeper.wait()


# -- choice of the back end --


@functools.cache
def choose_backend(requested: str) -> Backend:
    """The back end to use; logs the choice once.

    Raises: ConfigError if bubblewrap is required and does not work here.
    """
    if requested not in ("auto", "bubblewrap", "subprocess"):
        raise ConfigError(f"sandbox: backend = {requested!r}; use auto, bubblewrap or subprocess.")
    trouble = "not requested" if requested == "subprocess" else bubblewrap_trouble()
    if trouble is None:
        logger.info("untrusted code runs in bubblewrap")
        return "bubblewrap"
    if requested == "bubblewrap":
        raise ConfigError(
            f"sandbox: bubblewrap does not work here: {trouble}. Install the package `bubblewrap` and allow user "
            "namespaces, or use `subprocess`."
        )
    logger.warning(
        "untrusted code runs in a subprocess with resource limits, not in bubblewrap (%s); "
        "it can query the processor%s",
        trouble,
        "".join(f"; {gap}" for gap in subprocess_gaps()),
    )
    return "subprocess"


def subprocess_gaps() -> list[str]:
    """What a program in a subprocess may do here, because this kernel lacks the means to prevent it."""
    probe = [interpreter()[0], "-I", "-S", "-B", str(KEEPER), "probe"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=PROBE_TIMEOUT_S, env={}, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        return [f"what else it may do is unknown: {cause}"]
    found = json.loads(done.stdout)
    abi, gaps = found["landlock_abi"], []
    if abi < 1:
        gaps.append("no Landlock: it reads the files of this user")
    if not found["has_filter"]:
        gaps.append("no seccomp filter: sockets by file name, such as Docker's, are open to it")
    if not found["has_namespaces"] and not found["has_filter"]:
        gaps.append(f"no network namespace: {'UDP is' if abi >= 4 else 'UDP and TCP are'} open to it")
    return gaps


@functools.cache
def bubblewrap_trouble() -> str | None:
    """Why bubblewrap does not work here; None if it does."""
    if shutil.which("bwrap") is None:
        return "no program `bwrap`"
    probe = [*bwrap_argv(SandboxLimits()), interpreter()[0], "-I", "-S", "-c", ""]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env={})
    except (OSError, subprocess.TimeoutExpired) as cause:
        return str(cause)
    return None if done.returncode == 0 else done.stderr.strip()[-200:] or f"exit code {done.returncode}"


def bwrap_argv(limits: SandboxLimits, kept: str | None = None, readable: Sequence[str] = ()) -> list[str]:
    """The bwrap command, to which the program to run inside is appended.

    kept: the work directory, if it is to stay; else it is in memory. readable: further paths to be read.
    """
    argv = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # `enter` changes to another user inside
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_CHOWN"]
    else:
        argv += ["--unshare-user"]
    visible = [*SYSTEM, interpreter()[1], *readable]
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
    if kept is None:
        argv += ["--size", size, "--perms", "1777", "--tmpfs", WORK, "--symlink", WORK, "/tmp"]
    else:
        argv += ["--bind", kept, WORK, "--size", size, "--perms", "1777", "--tmpfs", "/tmp"]
    return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]


def next_uid() -> int:
    """A user for a run or a directory: each has its own, since the kernel counts processes per user."""
    return USERS[(os.getpid() * 64 + next(_run_numbers)) % len(USERS)]


@functools.cache
def interpreter() -> tuple[str, str]:
    """This Python without its virtual environment: the program, and its prefix directory."""
    return os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)


@functools.cache
def has_users() -> bool:
    """May root here become one of USERS? In a user namespace, as in containers without root, they may not exist."""
    try:
        if Path("/proc/self/setgroups").read_text().strip() == "deny":
            return False
        maps = [Path(f"/proc/self/{name}").read_text().splitlines() for name in ("uid_map", "gid_map")]
    except OSError:  # no such files: no user namespaces
        return True
    ranges = [[(int(line.split()[0]), int(line.split()[2])) for line in lines] for lines in maps]
    return all(any(first <= USERS[0] and USERS[-1] < first + count for first, count in each) for each in ranges)


def is_public(*paths: str) -> bool:
    """May every user enter all directories above these paths?"""
    parents = {parent for path in paths for parent in Path(path).parents}
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in parents)
