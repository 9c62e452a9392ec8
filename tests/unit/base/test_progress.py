"""Progress of what grows on a disk, as the launcher reads it from the pipe."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest

from stretto.base import status


@pytest.fixture
def reports(monkeypatch):
    """Reads what has been reported so far."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setenv(status.STATUS_FD_VAR, str(writing))
    monkeypatch.setattr(status, "_pipe", None)

    def read() -> list[dict]:
        try:
            return [json.loads(line) for line in os.read(reading, 1 << 16).decode().splitlines()]
        except BlockingIOError:
            return []

    yield read
    os.close(reading)
    os.close(writing)


@pytest.mark.heavy
def test_a_growing_file_is_reported_until_its_end(reports, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(status, "FIRST_SHOWN_S", 0.02)
    monkeypatch.setattr(status, "SHOWN_EVERY_S", 0.02)
    file = tmp_path / "part"
    with status.growing("checkpoint, MB", 5e6, lambda: status.bytes_below(tmp_path)):
        for _ in range(5):
            with file.open("ab") as end:
                end.write(bytes(1_000_000))
            time.sleep(0.1)
    found = reports()
    done = [each["done"] for each in found]
    assert {each["text"] for each in found} == {"checkpoint, MB"} and {each["total"] for each in found} == {5}
    assert done == sorted(done) and len(set(done)) > 2
    assert done[-1] == 5 and max(done[:-1]) == 4  # only its end is the end


def test_a_process_without_a_launcher_logs_texts_as_they_are_and_progress_now_and_then(monkeypatch, caplog) -> None:
    now = [100.0]
    monkeypatch.delenv(status.STATUS_FD_VAR, raising=False)
    monkeypatch.setattr(status, "_pipe", None)
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level("INFO", logger="stretto.base.status")
    status.report("phase", text="starting an engine")
    for done in range(1, 11):
        status.report("progress", text="eval", done=done, total=10)
        now[0] += status.LOGGED_EVERY_S / 4
    status.report("warning", role="eval", text="it was logged before")
    assert [record.getMessage() for record in caplog.records] == [
        "starting an engine",
        "eval: 5 of 10",
        "eval: 9 of 10",
    ]


def test_what_takes_less_than_a_second_has_no_progress(reports, tmp_path) -> None:
    with status.growing("checkpoint, MB", 5e6, lambda: 0):
        time.sleep(0.05)
    assert reports() == []


def test_progress_of_what_fails_goes_away(reports, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(status, "FIRST_SHOWN_S", 0.01)
    with pytest.raises(OSError), status.growing("download, MB", 5e6, lambda: 1e6):
        time.sleep(0.1)
        raise OSError("the disk is full")
    assert reports()[-1]["done"] == 5


def test_bytes_of_a_directory_that_is_not_there(tmp_path) -> None:
    assert status.bytes_below(tmp_path / "nowhere") == 0
