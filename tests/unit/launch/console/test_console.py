"""The lines that are drawn anew below a run's lines: at a real terminal, of any width; none without a cursor."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from stretto.launch.run.console import Console
from stretto.launch.run.footer import Footer, sparkline

PROGRAM = """
import sys, time
from stretto.launch.run.console import Console
console = Console(sys.stdout, max_steps=40)
try:
    console.show({"kind": "phase", "text": "waiting for the engine"})
    for step in range(1, 31):
        if step == 10:
            console.show({"kind": "warning", "role": "trainer", "text": "the loss is high " + "x" * 300})
        if step == 15:
            print("READY", file=sys.stderr, flush=True); sys.stdin.readline()
        console.show({"kind": "step", "step": step, "reward": step / 30, "tokens_per_s": 4200.0,
                      "waits": {"trainer": 0.25, "engine": 0.1}, "staleness": 1.0})
        console.show({"kind": "progress", "text": "eval of sort", "done": step, "total": 30})
    console.line("the end")
    if "hang" in sys.argv:
        print("READY", file=sys.stderr, flush=True); time.sleep(60)
finally:
    console.close()
"""
CODES = re.compile(r"(\r\n|\n|\r|\x1b\[[\d;]*[A-Za-z])")


class Screen:
    """What a terminal of a width shows: line feeds, cursor up, clear below; long lines go on in the next row."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row, self.column = width, [""], 0, 0

    def feed(self, text: str) -> None:
        for part in CODES.split(text):
            if part in ("\n", "\r\n"):
                self._down()
                self.column = 0
            elif part == "\r":
                self.column = 0
            elif part.endswith("A") and part.startswith("\x1b"):
                self.row -= int(part[2:-1] or 1)
                assert self.row >= 0, "above the first row"
            elif part == "\x1b[J":
                self.rows[self.row] = self.rows[self.row][: self.column]
                del self.rows[self.row + 1 :]
            elif not part.startswith("\x1b"):
                for char in part:
                    if self.column == self.width:
                        self._down()
                        self.column = 0
                    self.rows[self.row] = self.rows[self.row][: self.column] + char
                    self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")


def at_terminal(tmp_path: Path, *, width: int, env: dict[str, str], words: tuple[str, ...] = (), during=None) -> str:
    """What the program writes at a terminal; during: called when it is half-way, with process and terminal."""
    leader, follower = pty.openpty()
    set_width(leader, width)
    attributes = termios.tcgetattr(follower)
    attributes[3] &= ~termios.ECHO  # what is typed here is for the program alone
    termios.tcsetattr(follower, termios.TCSANOW, attributes)
    errors = tmp_path / "errors"
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")} | env
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stdin=follower, stdout=follower, stderr=stderr,
            env=environment, start_new_session=True,
        )  # fmt: skip
    os.close(follower)
    written, has_acted, deadline = b"", 0, time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                data = os.read(leader, 1 << 16)
            except OSError:  # all ends are closed
                break
            written += data
        elif errors.read_bytes().count(b"READY") > has_acted:
            has_acted += 1
            if has_acted == 1:
                if during is not None:
                    during(process, leader)
                os.write(leader, b"\n")
            else:
                os.kill(process.pid, signal.SIGINT)
    process.wait(10)
    os.close(leader)
    return written.decode().replace("\r\n", "\n").replace("\n", "\r\n")


def set_width(terminal: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))


@pytest.mark.heavy
@pytest.mark.parametrize("width", [20, 80, 200])
def test_lines_stay_above_and_nothing_of_what_is_drawn_is_left(tmp_path: Path, width: int) -> None:
    text = at_terminal(tmp_path, width=width, env={"TERM": "xterm"})
    screen = Screen(width)
    screen.feed(text)
    shown = "\n".join(screen.rows)
    assert "━" not in shown and "▁" not in shown and "waits: trainer 25%\n" not in shown
    assert "\n".join(screen.rows).count("step ") >= 30 and "the end" in shown
    assert "▁" in text and "eval of sort" in text and "! trainer: the" in text


@pytest.mark.heavy
def test_a_terminal_that_becomes_narrow_keeps_its_lines(tmp_path: Path) -> None:
    text = at_terminal(
        tmp_path, width=160, env={"TERM": "xterm"}, during=lambda process, terminal: set_width(terminal, 30)
    )
    frames = re.split(r"\x1b\[J", text)
    last = [line for line in frames[-3].replace("\r", "").split("\n") if "━" in line or "▁" in line]
    assert last and all(len(re.sub(r"\x1b\[\d*m", "", line)) < 30 for line in last)


@pytest.mark.heavy
def test_ctrl_c_leaves_a_clean_screen(tmp_path: Path) -> None:
    screen = Screen(80)
    screen.feed(at_terminal(tmp_path, width=80, env={"TERM": "xterm"}, words=("hang",)))
    assert "━" not in "".join(screen.rows) and "the end" in "\n".join(screen.rows)


@pytest.mark.heavy
def test_a_terminal_without_a_cursor_gets_plain_lines(tmp_path: Path) -> None:
    text = at_terminal(tmp_path, width=80, env={"TERM": "dumb"})
    assert "\x1b" not in text and "━" not in text and "waiting for the engine" in text


@pytest.mark.heavy
def test_no_color_has_no_color(tmp_path: Path) -> None:
    text = at_terminal(tmp_path, width=80, env={"TERM": "xterm", "NO_COLOR": "1"})
    assert "━" in text and not re.search(r"\x1b\[\d*m", text)


# -- the lines --


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_line_fits_at_any_width() -> None:
    footer = Footer(100, Clock())
    for step in range(1, 60):
        footer.add_step({"step": step, "reward": step % 7, "waits": {"a": 0.5}, "tokens_per_s": 1e5})
    footer.set_progress("a long name of an eval " * 5, 3, 10)
    footer.add_alert("first\nsecond " * 40)
    for width in (1, 2, 10, 33, 80, 300):
        assert all(len(line) <= width and "\n" not in line for line in footer.lines(width))


def test_a_part_has_time_left_and_goes_when_it_is_done() -> None:
    clock = Clock()
    footer = Footer(None, clock)
    for done in (1, 2, 3):
        clock.now += 2
        footer.set_progress("eval", done, 5)
    assert footer.lines(200)[-1].endswith("eval 3/5  4s left")
    footer.set_progress("eval", 5, 5)
    assert not any("eval" in line for line in footer.lines(200))


def test_a_phase_that_lasts_says_for_how_long() -> None:
    clock = Clock()
    footer = Footer(None, clock)
    footer.set_phase("loading")
    assert footer.lines(80) == ["... loading"]
    clock.now = 61
    assert footer.lines(80) == ["... loading (1m01s)"]


def test_sparklines_show_low_and_high() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 1], 8) == "▁▁▁"
    assert len(sparkline(list(range(1000)), 10)) == 10 and sparkline([float(i) for i in range(1000)], 2) == "▁█"
    footer = Footer(5, Clock())
    for step, reward in enumerate((0.0, float("nan"), 1.0)):
        footer.add_step({"step": step, "reward": reward})
    assert "▁█" in "".join(footer.lines(60))


def test_a_warning_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.show({"kind": "warning", "role": "orchestrator", "text": "env: \x1b[2J\x1b]0;title\x07gone"})
    console.close()
    assert stream.getvalue() == "warning (orchestrator): env:  [2J ]0;title gone\n"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_that_was_closed_ends_no_run(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    theirs, ours = pty.openpty()
    with os.fdopen(ours, "w") as stream:
        console = Console(stream, max_steps=3)
        console.show({"kind": "phase", "text": "waiting for the engine"})
        os.close(theirs)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(ours, b"nobody reads this")
        for step in (1, 2, 3):
            console.show({"kind": "step", "step": step, "reward": 0.5})
        console.line("saved")
        console.close()
        stream.flush()
