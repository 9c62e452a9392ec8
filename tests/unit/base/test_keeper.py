"""Whatever a process has started ends with it, and leaves nothing in shared memory and temporary files."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest
from waiting import is_running

from stretto.base import keeper, process

pytestmark = pytest.mark.heavy

# A child that starts another in a session of its own, with which it shares memory; both have a temporary file.
CHILD = """
import os, subprocess, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
name = sys.argv[2] if len(sys.argv) > 2 else None
block = shared_memory.SharedMemory(name, create=name is None, size=4096)
resource_tracker.unregister(block._name, "shared_memory")
folder = tempfile.mkdtemp()
print(os.getpid(), block.name, folder, flush=True)
if name is None:
    subprocess.Popen([sys.executable, sys.argv[1], sys.argv[1], block.name], start_new_session=True)
time.sleep(600)
"""
# A process that starts such a child as stretto does, or by itself.
PARENT = """
import subprocess, sys, time
from pathlib import Path
from stretto.base import keeper, process
argv = [sys.executable, sys.argv[1], sys.argv[1]]
if sys.argv[3] == "start":
    process.start("child", argv, env={}, log=Path(sys.argv[2]))
elif sys.argv[3].startswith("own"):
    descendants = keeper.Descendants()
    subprocess.Popen(argv, stdout=open(sys.argv[2], "a"))
    if sys.argv[3] == "own, and looks":
        while Path(sys.argv[2]).read_text().count("\\n") < 2:
            time.sleep(0.01)
        descendants.record_shared_memory()
        open(sys.argv[2], "a").write("looked\\n")
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return path


def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def started(log: Path) -> list[tuple[int, Path, Path]]:
    """Process, shared memory and folder of the child and of what it started, once both are there."""
    until(lambda: log.exists() and log.read_text().count("\n") == 2, "two processes")
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(pid), Path("/dev/shm") / name, Path(folder)) for pid, name, folder in lines]


def is_left(everything: list[tuple[int, Path, Path]]) -> list[object]:
    return [each for pid, *paths in everything for each in (pid, *paths)
            if (is_running(each) if isinstance(each, int) else each.exists())]  # fmt: skip


@pytest.mark.parametrize("how", ["start", "own"])
def test_kill_9_of_a_process_ends_all_that_it_started(tmp_path: Path, child: Path, how: str) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(child), str(log), how])
    try:
        everything = started(log)
        assert len(is_left(everything)) == 6 and everything[0][1] == everything[1][1]
        directories = {folder.parent for _, _, folder in everything}
        assert len(directories) == 1 and directories != {Path(tempfile.gettempdir())}
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not is_left(everything), "an end of everything")
    [directory] = directories
    until(lambda: not directory.exists(), "an end of the directory of temporary files")


def test_shared_memory_goes_also_where_all_that_used_it_were_killed_before(tmp_path: Path, child: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(child), str(log), "own, and looks"])
    until(lambda: log.exists() and "looked" in log.read_text(), "a look")
    lines = [line.split() for line in log.read_text().splitlines()[:2]]
    block = Path("/dev/shm") / lines[0][1]
    for pid in (int(line[0]) for line in lines):
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not is_running(pid), "an end of it")
    assert block.exists()
    parent.kill()
    parent.wait()
    until(lambda: not block.exists(), "an end of the shared memory")


def test_a_child_that_is_stopped_leaves_nothing(tmp_path: Path, child: Path) -> None:
    log = tmp_path / "log"

    async def start_and_stop() -> list[tuple[int, Path, Path]]:
        one = process.start("child", [sys.executable, str(child), str(child)], env={}, log=log)
        everything = await asyncio.to_thread(started, log)
        await process.stop([one], grace_s=5)
        return everything

    everything = asyncio.run(start_and_stop())
    folders = {folder for *_, folder in everything}
    assert set(is_left(everything)) <= folders  # these go with the keeper of this process


def test_a_child_that_ended_by_itself_leaves_nothing_either(tmp_path: Path, child: Path) -> None:
    """The first is killed, alone; what it started is in another session and ends with `kill`."""
    log = tmp_path / "log"
    one = process.start("child", [sys.executable, str(child), str(child)], env={}, log=log)
    everything = started(log)
    os.kill(one.pid, signal.SIGKILL)
    one.popen.wait()
    assert is_running(everything[1][0])
    one.kill()
    assert not is_running(everything[1][0]) and not everything[1][1].exists()


def test_shared_memory_that_another_process_uses_stays(tmp_path: Path, child: Path) -> None:
    log = tmp_path / "log"
    one = process.start("child", [sys.executable, str(child), str(child)], env={}, log=log)
    everything = started(log)
    block = shared_memory.SharedMemory(name=everything[0][1].name)
    resource_tracker.unregister(block._name, "shared_memory")
    one.kill()
    assert not is_running(everything[1][0]) and everything[0][1].exists()
    block.close()
    keeper.remove_shared([everything[0][1].name])
    assert not everything[0][1].exists()


WEIGHTS = """
import os, subprocess, sys, time
from pathlib import Path
from stretto.base import process
from stretto.base.files import open_locked
if sys.argv[1] == "parent":
    process.start("child", [sys.executable, "-c", sys.argv[2], "child"], env={}, log=Path(sys.argv[3]))
else:
    name = f"{os.getpid()}"
    for each in (f"stretto-copy-{name}", f"stretto-copy-{name}.lock"):
        Path("/dev/shm", each).write_bytes(b"tensors")
    open_locked(Path(f"/dev/shm/stretto-copy-{name}.users"), is_shared=True)
    open_locked(Path(f"/dev/shm/stretto-weights-{name}"))
    print(name, flush=True)
time.sleep(600)
"""


def test_weights_of_what_was_killed_with_its_launcher_are_removed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", WEIGHTS, "parent", WEIGHTS, str(log)])
    until(lambda: log.exists() and log.read_text().endswith("\n"), "weights")
    name = log.read_text().strip()
    assert len(list(Path("/dev/shm").glob(f"stretto-*-{name}*"))) == 4
    parent.kill()
    parent.wait()
    until(lambda: not list(Path("/dev/shm").glob(f"stretto-*-{name}*")), "an end of the weights")


def test_a_semaphore_is_found_by_its_creator() -> None:
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    assert semaphore._semlock.name.removeprefix("/") in "".join(keeper.removable_shared_memory([os.getpid()]))


def test_two_children_are_distinguished(tmp_path: Path, child: Path) -> None:
    children = []
    for number in range(12):  # the mark of the first is not part of that of the tenth
        log = tmp_path / f"log{number}"
        children.append(process.start(str(number), ["/bin/sleep", "600"], env={}, log=log))
    first = keeper.marked_processes(children[0].mark)
    assert first == [children[0].pid]
    children[0].kill()
    assert all(each.returncode is None for each in children[1:])
    for each in children[1:]:
        each.kill()


def test_directories_of_dead_keepers_are_removed_and_those_of_live_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("stretto-0123abcd", "stretto-89abcdef", "stretto-sandbox-x", "stretto-ports-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    live = os.open(tmp_path / "stretto-89abcdef", os.O_RDONLY)
    fcntl.flock(live, fcntl.LOCK_EX)
    assert keeper.remove_stale() == 1
    os.close(live)
    assert sorted(os.listdir(tmp_path)) == ["stretto-89abcdef", "stretto-ports-0", "stretto-sandbox-x"]


def test_a_directory_is_never_taken_for_stale_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    is_over = threading.Event()

    def sweep() -> None:
        while not is_over.is_set():
            keeper.remove_stale()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(200):
            directory, lock = keeper._make_directory(f"{number:08x}")
            assert directory.is_dir()
            os.close(lock)
    finally:
        is_over.set()
        sweeper.join()


def test_shared_memory_of_a_killed_keeper_goes_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [shared_memory.SharedMemory(create=True, size=4096) for _ in range(2)]
    with tempfile.TemporaryDirectory() as short:  # as sockets in it must be
        monkeypatch.setattr(tempfile, "tempdir", short)
        killed = keeper.Keeper()
        killed.report_shared_memory([block.name for block in blocks])
        killed.pid = 0  # as if its process had been killed, too: nobody starts it again
        os.kill(killed._popen.pid, signal.SIGKILL)
        until(lambda: not is_running(killed._popen.pid), "an end of the keeper")
        resource_tracker.unregister(blocks[0]._name, "shared_memory")
        blocks[0].close()
        assert keeper.remove_stale() == 1
        assert killed.directory is not None and not killed.directory.exists()
    assert not Path(f"/dev/shm/{blocks[0].name}").exists()
    assert Path(f"/dev/shm/{blocks[1].name}").exists(), "it is in use"
    blocks[1].close()
    blocks[1].unlink()


def test_caches_of_compiled_code_and_of_vocabularies_outlive_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    headers, vocabularies = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "TIKTOKEN_RS_CACHE_DIR"
    for name in ("TORCHINDUCTOR_CACHE_DIR", headers, vocabularies):
        monkeypatch.delenv(name, raising=False)
    mine = keeper.persistent_caches()
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert mine == {
        "TORCHINDUCTOR_CACHE_DIR": default_cache_dir(),
        headers: "0",
        vocabularies: str(tmp_path / "tiktoken-rs-cache"),
    }
    for name in ("TORCHINDUCTOR_CACHE_DIR", vocabularies):
        monkeypatch.setenv(name, "/somewhere")
    monkeypatch.setenv(headers, "1")
    assert keeper.persistent_caches() == {}


def test_a_keeper_that_is_killed_is_started_again(tmp_path: Path, child: Path) -> None:
    """Then kill -9 of its process still ends all that this has started."""
    log = tmp_path / "log"
    words = [sys.executable, "-c", PARENT, str(child), str(log), "start"]
    parent = subprocess.Popen(words, stderr=subprocess.PIPE)
    try:
        until(lambda: log.exists() and len(started(log)) == 2, "both children")
        everything = started(log)
        [first] = keepers_of(parent.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: keepers_of(parent.pid) not in ([], [first]), "another keeper")
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not is_left(everything), "the end of everything")


def keepers_of(pid: int) -> list[int]:
    """Living keepers that this process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        children += (thread / "children").read_text().split()
    return [each for each in {int(child) for child in children} if keeper._is_keeper(each)]
