"""vLLM in several processes leaves no processes, shared memory or files, however its parent ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ports import free_port
from servers import needs_vllm, save
from test_parallel import two_headed

from stretto.base import keeper
from stretto.base.paths import RunDir

pytestmark = needs_vllm
DEADLINE_S = 900.0  # four processes import vLLM, which takes minutes on a busy machine
RL = """
max_steps = {max_steps}
seq_len = 64
output_dir = "{directory}"
[run]
name = "run"
[model]
name = "{model}"
[ckpt]
interval = 2
[inference]
engine = "vllm"
parallel = {{tp = 2}}
[orchestrator]
batch_size = 8
group_size = 4
filter_zero_advantages = false
[orchestrator.train.sampling]
max_completion_tokens = 4
[[orchestrator.env]]
id = "sort-letters"
"""


class Started:
    """A verb and all its descendants, which are known by a mark in their environment."""

    def __init__(self, words: list[str], directory: Path, log: Path) -> None:
        self.mark = f"test{os.urandom(4).hex()}.1;"
        self.directory, self.log = directory, log
        marks = os.environ.get(keeper.VARIABLE, "") + self.mark
        with log.open("a") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "stretto", *words],
                env=os.environ | {keeper.VARIABLE: marks, "TMPDIR": str(directory)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.names: set[str] = set()

    def until(self, is_so: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert self.popen.poll() is None, f"ended before {what}:\n{self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} in {DEADLINE_S:g} s:\n{self.output()[-4000:]}"
            time.sleep(0.1)

    def output(self) -> str:
        """Its log; the last character may be written only in part."""
        return self.log.read_text(errors="replace")

    def observe(self) -> list[int]:
        """Process ids of the descendants; also records the shared memory that they use."""
        pids = keeper.marked_processes(self.mark)
        self.names |= keeper.removable_shared_memory(pids)
        return pids

    def left(self) -> list[object]:
        shared = [name for name in self.names if (keeper.SHARED_MEMORY / name).exists()]
        return [*keeper.marked_processes(self.mark), *shared, *os.listdir(self.directory)]

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 120
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.left() == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    everything: list[Started] = []

    def begin(*words: str) -> Started:
        number = len(everything)
        # A short path: the sockets of vLLM are in there.
        directory = Path(tempfile.mkdtemp(prefix="left"))
        everything.append(Started(list(words), directory, tmp_path / f"log{number}"))
        return everything[-1]

    yield begin
    for each in everything:
        keeper.kill_marked(each.mark)
        shutil.rmtree(each.directory)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_ends_alone(tmp_path: Path, start: Callable[..., Started], number: signal.Signals) -> None:
    model = save(two_headed(0), tmp_path / "model")
    words = ["--model", str(model), "--engine", "vllm", "--parallel.tp", "2", "--output-dir", str(tmp_path / "out")]
    server = start("inference", *words, "--server.port", str(free_port()), "--device", "cpu")
    server.until(lambda: "Application startup complete" in server.output(), "server that answers")
    assert len(server.observe()) >= 4 and server.names and os.listdir(server.directory)
    server.popen.send_signal(number)
    assert server.popen.wait(timeout=DEADLINE_S) == (0 if number == signal.SIGTERM else -number), server.output()[
        -4000:
    ]
    server.check_nothing_is_left()


@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_and_one_that_is_stopped(tmp_path: Path, start: Callable[..., Started]) -> None:
    model, run = save(two_headed(0), tmp_path / "model"), RunDir(tmp_path / "run")
    toml = tmp_path / "rl.toml"
    toml.write_text(RL.format(max_steps=1000, directory=tmp_path, model=model))
    first = start("rl", "@", str(toml))
    first.until(run.latest_complete_checkpoint, "checkpoint")
    assert len(first.observe()) >= 6 and first.names
    first.popen.kill()
    first.popen.wait()
    first.check_nothing_is_left()

    second = start("rl", "@", str(toml), "--resume")
    saved = run.latest_complete_checkpoint()
    second.until(lambda: (run.latest_complete_checkpoint() or 0) > saved, "next checkpoint")
    assert second.observe() and second.names
    second.popen.send_signal(signal.SIGINT)
    assert second.popen.wait(timeout=DEADLINE_S) == 0, second.output()[-4000:]
    second.check_nothing_is_left()
