"""A session of tests that leaves something behind fails, and says what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

TESTS = Path(__file__).parents[2]

CLEAN = "def test_nothing(): pass"
PROCESS = """
import subprocess
def test_process(): subprocess.Popen(["sleep", "300"], start_new_session=True)
"""
MEMORY = """
import mmap, os, time
def test_memory():
    fd = os.open("/dev/shm/{name}", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
    mapped = mmap.mmap(fd, 4096)
    time.sleep(1.2)
    mapped.close()
"""
DIRECTORY = """
import tempfile
def test_directory(): tempfile.mkdtemp(prefix="forgotten-")
"""


IMPATIENT = "from processes import leftovers\nleftovers.ENDING_S = leftovers.LOOK_EVERY_S = 0.3\n"


def session(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_planted.py").write_text(IMPATIENT + text)
    (directory / "pytest.ini").write_text("[pytest]")
    path = os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "processes.leftovers", "-p", "no:cacheprovider", str(directory)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=directory,
        capture_output=True,
        text=True,
    )


def test_a_session_that_leaves_nothing_passes(tmp_path: Path) -> None:
    ended = session(tmp_path, CLEAN)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_process_is_named_and_ended(tmp_path: Path) -> None:
    ended = session(tmp_path, PROCESS)
    assert ended.returncode == 1 and "sleep 300" in ended.stdout, ended.stdout + ended.stderr


def test_shared_memory_is_named_and_removed(tmp_path: Path) -> None:
    name = f"left_{os.getpid()}"
    ended = session(tmp_path, MEMORY.replace("{name}", name))
    assert ended.returncode == 1 and name in ended.stdout, ended.stdout + ended.stderr
    assert not Path(f"/dev/shm/{name}").exists()


def test_a_temporary_directory_is_named_and_removed(tmp_path: Path) -> None:
    ended = session(tmp_path, DIRECTORY)
    assert ended.returncode == 1 and "forgotten-" in ended.stdout, ended.stdout + ended.stderr
