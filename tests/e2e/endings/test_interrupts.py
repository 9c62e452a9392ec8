"""Ctrl-C and SIGTERM while `rl` and `sft` start: one line, nothing left, and the same command starts the run again."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from runs import DEADLINE_S, start, toml, until, untrained_model, wait
from test_kill import children, wait_for_child

from stretto.base import keeper
from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

NUM_MOMENTS = 10  # of each signal and verb, in the slow test
ENDED = re.compile(
    r"^(interrupted|terminated|stopped before the first step: .*|.* \| stopped before the first step: .*)$", re.M
)
FINISHED = re.compile(r"(stopped early  saved as checkpoint|\| stopped at step [1-9]\d* of|stopped at once; the last)")
Moment = tuple[str, Callable[[Popen[str]], bool], list[signal.Signals], set[int]]
"""What it is, when it has come, what is sent, and the exit statuses that may be of it."""


class Command:
    """A verb that is started again and again with the same words, in the same run directory."""

    def __init__(self, verb: str, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.verb, self._directory = verb, directory
        self.run = RunDir(directory / f"{verb}-{os.urandom(3).hex()}")
        self.gate = directory / "gate"
        self.temporary = directory / "temporary"
        settings = rl_of(directory, self.gate) if verb == "rl" else sft_of(self.gate)
        self.temporary.mkdir()
        self._mark = f"interrupts{os.urandom(4).hex()}.1;"
        patch.setenv(keeper.VARIABLE, os.environ.get(keeper.VARIABLE, "") + self._mark)
        patch.setenv("TMPDIR", str(self.temporary))
        (directory / "c.toml").write_text(
            toml({"output_dir": directory, "run": {"name": self.run.path.name}} | settings)
        )

    def start(self, *words: str, is_forked: bool = False) -> Popen[str]:
        return start(self.verb, ["@", "c.toml", *words], self._directory, is_forked=is_forked)

    def words(self) -> list[str]:
        """What a person adds after a stop: nothing before the first step."""
        if self.run.latest_complete_checkpoint():
            return ["--resume"]
        return ["--clean"] if self.run.ledger.exists() else []

    def left(self) -> list[object]:
        """What is left of it: processes, shared memory, temporary files."""
        files = [path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        shared = [name for name in os.listdir(keeper.SHARED_MEMORY) if self.run.path.name in name]
        return [*keeper.marked_processes(self._mark), *files, *shared]


def takes_signals(popen: Popen[str]) -> bool:
    """Does it handle SIGTERM itself?"""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{popen.pid}/status").read_text())
    return bool(caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def check_end(command: Command, popen: Popen[str], what: str) -> int:
    """One line and no traceback; the exit status."""
    code, output = wait(popen)
    what = f"{what}: {code}\n{output}"
    assert code in (0, 130, 143), what
    assert "Traceback" not in output and "Error" not in output, what
    assert len(ENDED.findall(output)) + bool(FINISHED.search(output)) == 1, what
    deadline = time.monotonic() + DEADLINE_S
    while left := command.left():
        assert time.monotonic() < deadline, f"{left} is left behind of {what}"
        time.sleep(0.05)
    return code


def rl_of(directory: Path, gate: Path) -> dict[str, Any]:
    return {
        "max_steps": 100_000,
        "seq_len": 128,
        "model": {"name": untrained_model(directory / "model")},
        "orchestrator": {
            "batch_size": 16,
            "group_size": 4,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "envs:Gated", "args": {"gate": str(gate)}, "num_workers": 1}],
        },
    }


def sft_of(gate: Path) -> dict[str, Any]:
    return {
        "max_steps": 100_000,
        "seq_len": 128,
        "batch_size": 16,
        "num_threads": 1,
        "model": {"scratch": {"hidden_size": 16, "num_layers": 1}},
        "data": {"type": "environment", "id": "envs:Gated", "args": {"gate": str(gate)}, "num_rows": 64},
    }


@pytest.fixture
def rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command("rl", tmp_path, monkeypatch)


@pytest.fixture
def sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command("sft", tmp_path, monkeypatch)


def log_has(command: Command, role: str, text: str) -> bool:
    path = command.run.log(role)
    return path.exists() and text in path.read_text()


def stop_at_each(command: Command, moments: list[Moment]) -> None:
    """Start it for each moment, stop it then, and look at what is left."""
    for what, is_now, signals, codes in moments:
        popen = command.start()
        until(lambda: is_now(popen), popen, what)  # noqa: B023 - used at once
        for number in signals:
            popen.send_signal(number)
        assert check_end(command, popen, what) in codes, what
        assert not command.run.ledger.exists() and not command.run.checkpoints.exists(), what


@pytest.mark.slow
def test_rl_that_is_stopped_while_it_starts_can_be_started_again(rl: Command) -> None:
    moments: list[Moment] = [
        ("imports", takes_signals, [signal.SIGINT], {130, 0}),
        ("imports", takes_signals, [signal.SIGTERM, signal.SIGTERM], {143, 0}),
        ("claim", lambda popen: rl.run.lock.exists(), [signal.SIGTERM], {143, 0}),
        ("first child", lambda popen: bool(children(popen.pid)), [signal.SIGINT, signal.SIGINT], {0}),
    ]
    stop_at_each(rl, moments)

    rl.gate.touch()  # the others are started after the tasks are there
    stop_at_each(rl, [("all children", lambda popen: len(children(popen.pid)) == 3, [signal.SIGTERM], {0})])
    popen = rl.start(is_forked=True)
    trainer = wait_for_child(popen, "trainer")
    os.kill(trainer, signal.SIGSTOP)  # nothing is played before it has published the first weights
    until(rl.run.ledger.exists, popen, "ledger")
    popen.send_signal(signal.SIGINT)
    until(lambda: log_has(rl, "launcher", "Ctrl-C while"), popen, "word of the signal")
    os.kill(trainer, signal.SIGCONT)
    assert check_end(rl, popen, "ledger") == 0
    assert not rl.run.ledger.exists()

    code, output = wait(rl.start("--max-steps", "2", is_forked=True))
    assert code == 0 and rl.run.complete_checkpoints() == [2], output
    assert audit(rl.run) == []


def test_sft_that_is_stopped_while_it_starts_can_be_started_again(sft: Command) -> None:
    moments: list[Moment] = [
        ("imports", takes_signals, [signal.SIGTERM], {143}),
        ("imports of torch", is_loading_torch, [signal.SIGINT, signal.SIGINT], {130}),
        ("model and data", lambda popen: sft.run.config("run").exists(), [signal.SIGINT], {130}),
    ]
    stop_at_each(sft, moments)
    sft.gate.touch()
    code, output = wait(sft.start("--max-steps", "2", is_forked=True))
    assert code == 0 and sft.run.complete_checkpoints() == [2], output


def is_loading_torch(popen: Popen[str]) -> bool:
    return "libtorch_python" in Path(f"/proc/{popen.pid}/maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["rl", "sft"])
def test_a_start_can_be_stopped_at_any_moment(verb: str, request: pytest.FixtureRequest) -> None:
    command: Command = request.getfixturevalue(verb)
    command.gate.touch()
    popen = command.start()
    until(lambda: takes_signals(popen), popen, "its first handlers")
    began = time.monotonic()
    until(lambda: log_has(command, "trainer" if verb == "rl" else verb, "| step 1"), popen, "its first step")
    longest = time.monotonic() - began
    popen.send_signal(signal.SIGTERM)
    check_end(command, popen, "first step")
    moments = random.Random(11)
    for number in range(4 * NUM_MOMENTS):
        after, again = longest * (number // 4) / NUM_MOMENTS, moments.choice((0.0, 0.02, 0.3))
        kind = (signal.SIGINT, signal.SIGTERM)[number % 2]
        popen = command.start(*command.words())
        until(lambda: takes_signals(popen), popen, "its first handlers")  # noqa: B023 - used at once
        time.sleep(after)
        popen.send_signal(kind)
        if number % 4 > 1:
            time.sleep(again)
            popen.send_signal(kind)
        check_end(
            command, popen, f"{kind.name} after {after:.2f} s of {longest:.2f}" + f", again {again}" * (number % 4 > 1)
        )
    if command.words() != ["--resume"]:
        step = 0
    else:
        step = command.run.latest_complete_checkpoint() or 0
    code, output = wait(command.start(*command.words(), "--max-steps", str(step + 2)))
    assert code == 0 and command.run.latest_complete_checkpoint() == step + 2, output
