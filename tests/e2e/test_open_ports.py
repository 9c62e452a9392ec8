"""A run over several addresses goes on while strangers connect to all its ports; its secret is in one file only."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from runs import DEADLINE_S, HERE, over_addresses, start_rl, wait

from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics

NUM_HELD = 500  # by each of two strangers
NUM_STEPS = 60
ATTACKED = range(15, 45)
"""Steps in which strangers are there."""
MAX_GROWTH_BYTES = 96 << 20
"""Most that one process grows during the attack; the same run alone grows by less than half of that."""


def processes_of(nodes: list[subprocess.Popen[str]]) -> list[psutil.Process]:
    """Launchers and all that they have started."""
    launchers = [psutil.Process(node.pid) for node in nodes]
    return launchers + [child for each in launchers for child in each.children(recursive=True)]


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    found = set()
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {tuple(c.laddr) for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


def memory(processes: list[psutil.Process]) -> dict[int, int]:
    found = {}
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[each.pid] = each.memory_info().rss
    return found


def command_lines(processes: list[psutil.Process]) -> list[str]:
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += each.cmdline()
    return found


@contextlib.contextmanager
def strangers(places: set[tuple[str, int]], number: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that attack these ports, each with its first line read."""
    words = [f"{host}:{port}" for host, port in sorted(places)]
    script = [sys.executable, str(HERE / "strangers.py")]
    found = [
        subprocess.Popen(
            [*script, str(seed), str(NUM_HELD), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for seed in range(number)
    ]
    try:
        for each in found:
            assert each.stdout is not None and each.stdout.readline().startswith("holding")
        yield found
    finally:
        for each in found:
            each.kill()
            each.communicate()


def wait_for_step(run: RunDir, step: int, nodes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    path = run.metrics("orchestrator")
    while not path.exists() or max((row["step"] for row in read_metrics(path)), default=0) < step:
        assert nodes[0].poll() is None, nodes[0].communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached in {DEADLINE_S} s"
        time.sleep(0.1)


@pytest.mark.slow
def test_strangers_change_nothing(sorter: Path, tmp_path: Path) -> None:
    settings = over_addresses(sorter, num_hosts=3, max_steps=NUM_STEPS)
    settings["orchestrator"]["env"][0]["num_workers"] = 1
    nodes = [start_rl(tmp_path, settings, "--deployment.node-rank", str(rank)) for rank in range(3)]
    run = RunDir(tmp_path / "run")
    try:
        wait_for_step(run, ATTACKED.start, nodes)
        own = processes_of(nodes)
        ports, before = listening(own), memory(own)
        assert {host for host, _ in ports} <= {"127.0.0.1", "127.0.0.2", "127.0.0.3"}  # no wildcard
        assert len(ports) >= 8  # five that the config names, and those of process groups
        lines = command_lines(own)
        with strangers(ports, 2) as attackers:
            wait_for_step(run, ATTACKED.stop, nodes)
            sent = [each.communicate("", timeout=DEADLINE_S)[0].split() for each in attackers]
        assert all(int(connections) > 100 for connections, _ in sent), sent
        after = memory(own)
        assert nodes[2].poll() is None
        code, output = wait(nodes[0])
        assert code == 0, output
        outputs = [output, wait(nodes[1])[1]]
        nodes[2].terminate()
        outputs.append(wait(nodes[2])[1])
        assert [node.returncode for node in nodes] == [0, 0, 0], outputs
    finally:
        for node in nodes:
            node.kill()
    rows = read_metrics(run.metrics("orchestrator"))
    assert max(row["step"] for row in rows) == NUM_STEPS and audit(run) == []
    grown = {pid: after[pid] - before[pid] for pid in before if pid in after}
    assert set(grown) == set(before), "a process was replaced"
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown
    assert_is_nowhere(run, tmp_path, [*lines, *outputs])


def assert_is_nowhere(run: RunDir, directory: Path, texts: list[str]) -> None:
    """Neither the secret nor a key made from it is in a command line, the output, or another file than RUN/secret."""
    secret = load_secret(run)
    hidden = [run.secret.read_text().strip(), secret.text_key("inference.api_key")]
    hidden += [secret.key(wire).hex() for wire in ("control", "rollouts")]
    for word in hidden:
        assert not [text for text in texts if word in text]
        files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
        assert len(files) > 20
        assert [path for path in files if word.encode() in path.read_bytes()] == [run.secret] * (word == hidden[0])
