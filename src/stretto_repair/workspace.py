"""A directory in which a policy works turn by turn, and a journal from which it is made again after a kill.

    async with Workspace(home, files, sandbox) as work:
        answer = await work.step(key, act)

`act` runs programs by `work.run`; between steps nothing runs, and nothing is in memory. The journal gets one row per
step: its key, its answer, and what it has changed in the directory. If the episode is played again, by a run that is
resumed or after a worker has died, the same steps in the same order are answered from the journal without running
anything: the same answers, so that the turns that are saved fit (orchestrator/rollout/continuation.py). The first step
that differs makes the directory as it was before it, and continues from there.

A journal is locked while it is in use. `remove_leftovers` removes directories whose owner was killed, which journals
can make again, and the oldest journals.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import struct
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self, TypeVar

import msgspec

from stretto.base.errors import EnvError
from stretto.records.outcomes import Reason
from stretto_sandbox.sandbox import Sandbox, SandboxResult
from stretto_sandbox.sandbox_keeper import remove

T = TypeVar("T")
Files = Mapping[str, bytes]

JOURNAL, FILES = "journal", "files"
KEPT_JOURNALS = 4096
LOCK_TIMEOUT_S = 5.0
MAX_LOST = 2  # sandboxes that a step may lose before its rollout fails
UNDONE = "[the files of this directory exceeded their limit: what this command did to them was undone]"
_HEAD = struct.Struct("<II")  # length and checksum of a row
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="workspace")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A file, directory or link in a work directory."""

    kind: str  # "f", "d", "l"
    mode: int
    content: bytes = b""  # of a file; where a link leads


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One step."""

    key: bytes
    answer: str
    changed: dict[str, Entry] = {}
    removed: list[str] = []


class TooLarge(Exception):
    """The directory is over its limit."""


class Workspace:
    """The directory of one episode; everything about it is below `home`."""

    def __init__(
        self, home: Path, files: Files, sandbox: Sandbox, *, origin: bytes, readable: Sequence[str] = ()
    ) -> None:
        """files: those that the directory begins with, by path. readable: further paths that programs may read.

        origin: a digest of the files and of all else that answers depend on: a journal of another origin is not used.
        """
        self.home, self.folder = home, home / FILES
        self._files, self._sandbox, self._readable = files, sandbox, readable
        self._origin = origin
        self._journal: IO[bytes] | None = None
        self._end = 0  # of the rows that this episode has repeated or made
        self._seen: dict[str, tuple[int, ...]] | None = None  # what is in the directory; None: it must be made
        self._owner: int | None = None
        self._one_step = asyncio.Lock()  # the calls of one reply come at once
        self._guard = threading.Lock()  # a step that is cancelled may leave its thread running
        self.num_replayed = 0

    # -- what an environment uses --

    async def __aenter__(self) -> Self:
        await self._in_thread(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self._in_thread(self._close))

    async def step(self, key: bytes, act: Callable[[], Awaitable[str]]) -> str:
        """The answer to a step, from the journal if it was made before. Steps are made one after the other.

        Raises: EnvError if sandboxes are lost again and again, or what `act` raises.
        """
        async with self._one_step:
            return await self._step(key, act)

    async def _step(self, key: bytes, act: Callable[[], Awaitable[str]]) -> str:
        if (row := await self._in_thread(lambda: self._repeated(key))) is not None:
            self.num_replayed += 1
            return row.answer
        for attempt in range(MAX_LOST + 1):
            await self._in_thread(self._make)
            try:
                answer = await act()
                break
            except BaseException as error:
                self._seen = None  # it may have changed something
                is_lost = isinstance(error, EnvError) and error.reason == Reason.SANDBOX_LOST
                if not is_lost or attempt == MAX_LOST:
                    raise
        try:
            await self._in_thread(lambda: self._append(key, answer))
        except TooLarge:
            self._seen, answer = None, f"{answer}\n{UNDONE}".lstrip()
            await self._in_thread(lambda: self._append(key, answer))
        return answer

    async def run(self, program: list[str], *, stdin: str = "", env: dict[str, str] | None = None) -> SandboxResult:
        """Run a program in the directory, within a step. In its output the directory is /sandbox."""
        result = await self._sandbox.run_in(
            self.folder, program, stdin=stdin, env=env, readable=self._readable, owner=self._owner
        )
        here = self._sandbox.path_of(self.folder)
        texts = {name: getattr(result, name).replace(here, "/sandbox") for name in ("stdout", "stderr")}
        return SandboxResult(**(vars(result) | texts))

    @property
    def path(self) -> str:
        """The directory as programs in it see it."""
        return self._sandbox.path_of(self.folder)

    async def changes(self) -> dict[str, Entry | None]:
        """What the steps so far have changed: by path, None for what they have removed."""
        return await self._in_thread(self._changes)

    # -- files: these run in threads, one at a time --

    async def _in_thread(self, function: Callable[[], T]) -> T:
        def guarded() -> T:
            with self._guard:
                return function()

        return await asyncio.get_running_loop().run_in_executor(_threads, guarded)

    def _open(self) -> None:
        journal = self._journal = self._locked()
        remove(str(self.folder))
        journal.seek(0)
        if (origin := _next_row(journal)) is None or origin.key != self._origin:
            self._end = 0
            journal.truncate(0)
            self._write(Row(self._origin, ""))
        else:
            self._end = journal.tell()

    def _locked(self) -> IO[bytes]:
        """The journal, locked; a worker that was killed may hold it for moments.

        Raises: EnvError if another episode has it.
        """
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < deadline:
            self.home.mkdir(parents=True, exist_ok=True)
            journal = open(self.home / JOURNAL, "a+b", buffering=0)  # noqa: SIM115  # until _close
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(journal.fileno()).st_nlink:  # else it was removed before it was locked
                    return journal
            journal.close()
            time.sleep(0.05)
        raise EnvError(f"{self.home} is in use by another rollout of this name")

    def _close(self) -> None:
        if self._journal is not None:
            remove(str(self.folder))
            self._journal.close()
            self._journal = None

    def _repeated(self, key: bytes) -> Row | None:
        """The next row of the journal if it is of this step. Else the journal ends here."""
        journal = self._open_journal()
        journal.seek(self._end)
        row = _next_row(journal)
        if row is not None and row.key == key:
            self._end, self._seen = journal.tell(), None
            return row
        journal.truncate(self._end)
        return None

    def _open_journal(self) -> IO[bytes]:
        assert self._journal is not None, "a workspace is used within `async with`"
        return self._journal

    def _rows(self) -> Iterator[Row]:
        """The rows of the steps so far."""
        journal = self._open_journal()
        journal.seek(0)
        _next_row(journal)
        while journal.tell() < self._end and (row := _next_row(journal)) is not None:
            yield row

    def _write(self, row: Row) -> None:
        data = msgspec.msgpack.encode(row)
        self._open_journal().write(_HEAD.pack(len(data), zlib.crc32(data)) + data)
        self._end += _HEAD.size + len(data)

    def _changes(self) -> dict[str, Entry | None]:
        changes: dict[str, Entry | None] = {}
        for row in self._rows():
            changes |= dict.fromkeys(row.removed)
            changes |= row.changed
        return changes

    def _make(self) -> None:
        """Make the directory as the steps so far have left it, if it is not."""
        if self._seen is not None:
            return
        entries: dict[str, Entry] = {}
        for name, content in self._files.items():
            for parent in list(Path(name).parents)[-2::-1]:
                entries[str(parent)] = Entry("d", 0o755)
            entries[name] = Entry("f", 0o644, content)
        for row in self._rows():
            for name in row.removed:
                entries.pop(name, None)
            entries |= row.changed
        remove(str(self.folder))
        self.folder.mkdir(mode=0o755)
        self._owner = self._sandbox.owner_of(self.folder)
        for name in sorted(entries):
            _put(self.folder / name, entries[name], self._owner)
        for name in sorted(entries, reverse=True):  # a directory that cannot be written to is closed last
            if entries[name].kind == "d":
                os.chmod(self.folder / name, entries[name].mode)
        if self._owner is not None:
            os.chown(self.folder, self._owner, self._owner)
        self._seen = dict(self._scan())

    def _append(self, key: bytes, answer: str) -> None:
        """Write the row of a step that was made, with what it has changed.

        Raises: TooLarge if the directory is over its limits.
        """
        if self._seen is None:  # what it did to the files is undone
            self._write(Row(key, answer))
            return
        now = dict(self._scan())
        changed = {name: _entry(self.folder / name) for name, seen in now.items() if self._seen.get(name) != seen}
        self._write(Row(key, answer, changed, [name for name in self._seen if name not in now]))
        self._seen = now

    def _scan(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every entry of the directory with what tells whether it has changed; nothing runs there now.

        Raises: TooLarge. What is neither file, directory nor link is removed.
        """
        limits, total, folders = self._sandbox.limits, 0, [("", 0)]
        while folders:
            folder, depth = folders.pop()
            if limits.max_depth is not None and depth > limits.max_depth:
                raise TooLarge
            try:
                with os.scandir(self.folder / folder) as found:
                    entries = list(found)
            except OSError as cause:  # its path is too long
                raise TooLarge from cause
            for entry in entries:
                name = os.path.join(folder, entry.name)
                if not _is_text(name):
                    raise TooLarge  # it has no place in a journal
                if (seen := _seen(entry)) is None:
                    continue
                total += max(os.lstat(entry.path).st_size, 4096)
                if total > limits.work_bytes:
                    raise TooLarge
                if entry.is_dir(follow_symlinks=False):
                    folders.append((name, depth + 1))
                yield name, seen


def remove_leftovers(root: Path, kept: int = KEPT_JOURNALS) -> None:
    """Remove work directories below `root` whose owners are dead, and all but the newest journals."""
    homes = []
    for home in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):
            homes.append(((home / JOURNAL).stat().st_mtime, home))
    for age, (_, home) in enumerate(sorted(homes, reverse=True)):
        if age < kept and not (home / FILES).exists():
            continue
        with contextlib.suppress(OSError), open(home / JOURNAL, "rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(str(home / FILES))
            if age >= kept:
                shutil.rmtree(home)


def _next_row(journal: IO[bytes]) -> Row | None:
    """The row at the journal's position; None at its end, or where a kill has cut it off."""
    head = journal.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    data = journal.read(length)
    if len(data) < length or zlib.crc32(data) != checksum:
        return None
    return msgspec.msgpack.decode(data, type=Row)


def _seen(entry: os.DirEntry[str]) -> tuple[int, ...] | None:
    """What tells whether an entry has changed; None for what is removed, as neither file, directory nor link.

    What its owner may not read is opened to them, since a journal has all contents.
    """
    status = entry.stat(follow_symlinks=False)
    is_folder = stat.S_ISDIR(status.st_mode)
    if not (is_folder or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        os.unlink(entry.path)
        return None
    needed = 0o700 if is_folder else 0o400
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & needed != needed:
        os.chmod(entry.path, stat.S_IMODE(status.st_mode) | needed)
        status = os.lstat(entry.path)
    if is_folder:
        return status.st_mode, status.st_ino
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entry(path: Path) -> Entry:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return Entry("l", 0, os.fsencode(os.readlink(path)))
    if stat.S_ISDIR(status.st_mode):
        return Entry("d", stat.S_IMODE(status.st_mode))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return Entry("f", stat.S_IMODE(status.st_mode), file.read())


def _put(path: Path, entry: Entry, owner: int | None) -> None:
    if entry.kind == "l":
        os.symlink(os.fsdecode(entry.content), path)
    elif entry.kind == "d":
        path.mkdir(mode=0o700)
    else:
        path.write_bytes(entry.content)
        path.chmod(entry.mode)
    if owner is not None:
        os.chown(path, owner, owner, follow_symlinks=False)
