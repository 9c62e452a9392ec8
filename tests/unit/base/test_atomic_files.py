"""base/files: what is whole or not there, and what is left after a failure."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from stretto.base.files import atomic_path, put_in_place, read_rows, write_atomic
from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto.config.load import write_json


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path, is_durable: bool) -> None:
    for content in (b"one", b"two"):
        write_atomic(tmp_path / "file", content, is_durable=is_durable)
        assert (tmp_path / "file").read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_could_not_be_finished_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", b"one")
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "file") as part:
        part.write_bytes(b"tw")
        assert (tmp_path / "file").read_bytes() == b"one"
        raise ZeroDivisionError
    assert (tmp_path / "file").read_bytes() == b"one" and os.listdir(tmp_path) == ["file"]


def test_a_full_disk_names_the_file_that_was_being_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as caught, atomic_path(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a.json")


def test_a_file_never_has_a_wider_mode_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / f".file.{os.getpid()}").write_text("of a process of this number")  # readable to all
    (tmp_path / "file").write_text("and so is this")
    write_atomic(tmp_path / "file", b"secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_directory_takes_the_place_of_a_full_one(tmp_path: Path, is_durable: bool) -> None:
    for name in ("one", "two"):
        (tmp_path / "part" / "below").mkdir(parents=True)
        (tmp_path / "part" / "below" / name).touch()
        put_in_place(tmp_path / "part", tmp_path / "model", is_durable=is_durable)
        assert os.listdir(tmp_path / "model" / "below") == [name]
    assert os.listdir(tmp_path) == ["model"]


def test_a_list_of_rows_that_was_cut_anywhere_is_no_list(tmp_path: Path) -> None:
    rows = [{"env": "a", "mode": "sampled", "mean": 0.5}, {"env": "é", "mode": "greedy", "mean": 1.0}]
    whole = json.dumps(rows, ensure_ascii=False).encode()
    path = tmp_path / "rows.json"
    assert read_rows(path) is None
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_rows(path) is None
    path.write_bytes(whole)
    assert read_rows(path, "env", "mean") == rows
    assert read_rows(path, "env", "k") is None
    for other in ("{}", "null", "[1]", '"rows"'):
        path.write_text(other)
        assert read_rows(path) is None


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes that fsync was called for."""
    inodes: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (inodes.append(os.fstat(fd).st_ino), fsync(fd)))
    return inodes


def test_a_new_secret_is_on_disk_before_it_is_used(tmp_path: Path, flushed: list[int]) -> None:
    run = RunDir(tmp_path / "run")
    load_secret(run)
    assert {run.secret.stat().st_ino, run.path.stat().st_ino} <= {*flushed}


def test_what_a_resume_reads_is_on_disk_before_a_run_begins(tmp_path: Path, flushed: list[int]) -> None:
    write_json(tmp_path / "trainer.json", {"max_steps": 3})
    assert (tmp_path / "trainer.json").stat().st_ino in flushed
