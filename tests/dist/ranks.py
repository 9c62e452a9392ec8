"""Starts a script of this folder on several ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(script: str, *args: str | Path, world_size: int, log: Path, deadline_s: float = 200.0) -> None:
    """Run a script of this folder on several ranks and wait for them; their output is in `log`.

    Fails with the end of the log unless all of them end well and in time.
    """
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name(script)), *map(str, args)]
    group = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as file:
        ranks = [
            subprocess.Popen(command, env=os.environ | group | {"RANK": str(rank)}, stdout=file, stderr=file)
            for rank in range(world_size)
        ]
        try:
            codes = [rank.wait(deadline_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert codes == [0] * world_size, log.read_text()[-6000:]
