"""The page's process: quick for its first view, behind everything else afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from stretto.base.paths import RunDir
from stretto.monitors.file import MetricsFile
from stretto_view.page.command import FIRST_S, NICENESS


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
