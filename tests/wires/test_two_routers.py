"""Routers of one host: each has a port of its own for its metrics."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from ports import free_port

pytestmark = pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed")
DEADLINE_S = 120.0


def listening(router: subprocess.Popen) -> set[int]:
    """Ports on which a router listens for its metrics or requests."""
    found = psutil.Process(router.pid).net_connections("tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def test_two_routers_of_one_host_both_have_metrics(tmp_path: Path) -> None:
    """By itself each takes port 29000, and the second one ends."""
    routers, logs = [], [tmp_path / "0", tmp_path / "1"]
    words = ["--worker-urls", f"http://127.0.0.1:{free_port()}", "--host", "127.0.0.1"]
    try:
        for log in logs:
            command = [sys.executable, "-m", "stretto_routers.router", *words, "--port", str(free_port())]
            with log.open("w") as output:
                routers.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + DEADLINE_S
        while not all(map(listening, routers)):
            shown = [log.read_text() for log in logs]
            assert [router.poll() for router in routers] == [None, None] and time.monotonic() < deadline, shown
            time.sleep(0.1)
        assert not listening(routers[0]) & listening(routers[1])
    finally:
        for router in routers:
            router.kill()
            router.wait()
