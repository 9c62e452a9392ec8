"""A verb that a script has started: what it prints, how far it is, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stretto.base.paths import RunDir
from stretto_python.live import Live
from stretto_python.started import Started

pytestmark = pytest.mark.heavy  # starts processes


def test_an_interrupt_while_the_run_is_drawn_stops_it_and_is_no_error() -> None:
    started, draws = Started("rl", ["--help", "all"]), []

    def draw() -> None:
        draws.append(1)
        if len(draws) == 1:
            raise KeyboardInterrupt

    assert started.follow(lambda line: None, draw, time.monotonic() + 60)
    assert started.num_interrupts == 1 and not started.is_running
    started.check()


def test_a_run_has_begun_once_its_configuration_is_new_whatever_the_clock_says(tmp_path: Path) -> None:
    """An earlier run of this name has left one; the clock is set back before the next one is written."""
    run = RunDir(tmp_path)
    run.configs.mkdir()
    run.config("run").write_text("{}")
    past = time.time() - 3600
    live = Live(SimpleNamespace(is_running=True), run, is_shown=False)
    waiting = threading.Thread(target=live.begin, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "the earlier run's configuration is not this one's"
    run.config("run").write_text('{"max_steps": 3}')
    os.utime(run.config("run"), (past, past))
    waiting.join(60)
    assert not waiting.is_alive()


def test_an_interrupt_while_the_interpreter_starts_is_no_error() -> None:
    for delay in (0.0, 0.004, 0.008, 0.012, 0.016):
        started = Started("rl", ["--help", "all"])
        time.sleep(delay)
        started.interrupt()
        assert started.follow(lambda line: None, lambda: None, time.monotonic() + 60)
        started.check()


def test_an_interrupt_before_a_run_that_is_not_waited_for_has_its_directory_ends_it(
    tmp_path: Path, monkeypatch
) -> None:
    started = Started("rl", ["--help", "all"])
    live = Live(started, RunDir(tmp_path / "none"), is_shown=False)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    live.begin()
    assert not live.is_running and started.num_interrupts == 1


def test_status_lines_say_how_far_it_is(tmp_path: Path) -> None:
    started, shown = Started("rl", ["--help"], has_status=True), []
    reader, writer = os.pipe()
    lines = [
        {"kind": "phase", "text": "starting an engine"},
        {"kind": "progress", "text": "eval of x, greedy", "done": 3, "total": 8},
        {"kind": "warning", "role": "eval", "text": "slow \x1b[2J"},
    ]
    os.write(writer, "".join(json.dumps(line) + "\n" for line in lines).encode())
    os.close(writer)
    started._read_status(reader)
    assert started.part == ("eval of x, greedy", 3, 8)
    assert started.follow(shown.append, lambda: None, time.monotonic() + 60)
    assert "starting an engine" in shown and any(line.startswith("warning: slow ") for line in shown)
    live = Live(started, RunDir(tmp_path / "eval-x"), is_shown=False)
    live.progress.part, live.progress.state = started.part, "running"
    assert live.progress.title() == "eval-x · running · eval of x, greedy: 3 of 8" and live.progress.share == 3 / 8
