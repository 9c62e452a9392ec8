"""The page beside a run: a process of its own, which ends with the run and harms it in no way."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import waiting

from stretto.base.paths import RunDir
from stretto.launch.run import page
from stretto.monitors.file import MetricsFile
from stretto_view.page.command import FIRST_S, NICENESS

pytestmark = pytest.mark.heavy


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv(page.VARIABLE)
    found = RunDir(tmp_path / "run")
    found.configs.mkdir(parents=True)
    found.config("run").write_text('{"max_steps": 5}')
    return found


def get(address: str) -> bytes:
    return urllib.request.urlopen(address, timeout=60).read()


def test_the_page_answers_as_soon_as_its_address_is_known_and_ends_with_the_run(run: RunDir) -> None:
    with page.beside(run, is_wanted=True) as address:
        assert address is not None
        [row] = json.loads(get(f"{address}api/runs"))
        assert row["name"] == "run" and b"<title>stretto</title>" in get(address)
    with pytest.raises(urllib.error.URLError):
        get(address)
    assert run.log("view").read_text() == ""


async def test_its_process_imports_nothing_until_a_browser_connects(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = page._start
    monkeypatch.setattr(page, "_start", lambda *given: started.append(start(*given)) or started[0])

    def words() -> list[str]:
        return Path(f"/proc/{started[0].pid}/cmdline").read_text().split("\0")

    with page.beside(run, is_wanted=True) as address:
        await waiting.until(lambda: words()[4:5] == [page._AWAIT])
        await asyncio.sleep(0.3)
        assert words()[4:5] == [page._AWAIT]
        assert await asyncio.to_thread(get, f"{address}api/runs")
        assert words()[2:5] == ["-m", "stretto", "view"]


def test_two_runs_have_a_page_each(run: RunDir) -> None:
    with page.beside(run, is_wanted=True) as one, page.beside(run, is_wanted=True) as other:
        assert one != other and get(f"{one}api/runs") and get(f"{other}api/runs")


def test_there_is_none_where_it_is_not_wanted_or_nobody_could_look(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with page.beside(run, is_wanted=False) as address:
        assert address is None
    for name, value in ((page.VARIABLE, "0"), (page.JOB_VAR, "17")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with page.beside(run, is_wanted=True) as address:
                assert address is None


async def test_a_page_that_dies_is_the_end_of_nothing_else(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = page._start
    monkeypatch.setattr(page, "_start", lambda *given: started.append(start(*given)) or started[0])
    with page.beside(run, is_wanted=True) as address:
        assert address is not None and get(f"{address}api/runs")
        started[0].kill()
        await waiting.until(lambda: not waiting.is_running(started[0].pid))
    assert started[0].returncode is not None


async def test_a_page_ends_with_a_launcher_that_is_killed(run: RunDir) -> None:
    program = (
        "import sys, time; from pathlib import Path; from stretto.base.paths import RunDir\n"
        "from stretto.launch.run import page\n"
        "with page.beside(RunDir(Path(sys.argv[1])), is_wanted=True) as address:\n"
        "    print(address, flush=True); time.sleep(100)\n"
    )
    argv = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        address = launcher.stdout.readline().strip()
        assert json.loads(get(f"{address}api/runs"))
        launcher.kill()

    def is_gone() -> bool:
        try:
            get(address)
        except OSError:  # refused, or cut off while it ended
            return True
        return False

    await waiting.until(is_gone)


@pytest.mark.heavy
def test_every_thread_gives_way_once_the_first_view_is_there(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.config("run").write_text("{}")
    file = MetricsFile(run.metrics("orchestrator"))
    file.log(1, {"reward/mean": 0.5})
    file.close()
    command = [sys.executable, "-m", "stretto", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            urllib.request.urlopen(f"{address}api/run/run/curve?key=reward/mean", timeout=60).read()
            deadline = time.monotonic() + FIRST_S + 20
            while set(levels := _niceness(server.pid)) != {NICENESS} and time.monotonic() < deadline:
                time.sleep(0.1)
            assert set(levels) == {NICENESS} and len(levels) > 1
        finally:
            server.terminate()


def _niceness(pid: int) -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
