"""How long commands take to start, and runs to end: wall time, and CPU time of all their processes.

    python benchmarks/start.py [--rounds 5] [--quick] [--beside OTHER_CLONE]

The run is the demo's `rl`, from its warm-up, on a terminal. With --beside each round also measures the code of another
clone, in turns; the last line then has both. Times are medians over the rounds, seconds:

    version, help, rl_help, dry_run       until the command has ended
    first_output, first_step              of `rl`, until the terminal shows something, and the line of step 1
    processes                             CPU time per process until then; `phases`: when each was started or ready
    first_error                           until `rl` with a mistake in the environment's code has said so and ended
    interrupted_at_start                  from Ctrl-C a second after Enter until the prompt
    finished, stopped                     from Ctrl-C until the prompt, with a checkpoint; from the second Ctrl-C
    restarted                             from the line about an engine that died by SIGKILL until a step that needs
                                          it anew; missing if the run ended
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
DEADLINE_S = 300.0
BROKEN = "from stretto.envs.bundled.sort_letters import SortLetters\n\n\nclass Broken(SortLetters):\n    x = 1 / 0\n"
PHASES = {
    "orchestrator started": ("launcher", "started orchestrator"),
    "trainer started": ("launcher", "started trainer"),
    "code checked": ("orchestrator", "messages are rendered by"),
    "trainer has its model": ("trainer", "parameters on"),
    "engine ready": ("inference", "ready on"),
    "version 0 loaded": ("inference", "loaded version=0"),
    "step 1 trained": ("trainer", "step 1 "),
}
"""The log and the words of the first line of each."""

Figures = dict[str, Any]


class Terminal:
    """A command on a terminal of its own, whose output is read as it comes."""

    def __init__(self, argv: list[str], cwd: Path, env: Mapping[str, str]) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.began, self.output, self._fd = time.time(), b"", ours
        self.popen = subprocess.Popen(
            argv, cwd=cwd, env={**env, "TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)

    def until(self, words: bytes) -> float:
        """Seconds since the start when the output has these words, or anything if there are none."""
        pattern, deadline = re.compile(words), time.monotonic() + DEADLINE_S
        while not (self.output and pattern.search(self.output)):
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"it ended, or took {DEADLINE_S:g} s, without {words!r}:\n{self.output.decode()}")
        return time.time() - self.began

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], max(timeout_s, 0.0))[0]:
            return False
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # all of its processes have closed the terminal
            return False
        self.output += data
        return bool(data)

    def interrupt(self) -> None:
        self.popen.send_signal(signal.SIGINT)

    def end(self) -> float:
        """Seconds until it has ended."""
        began = time.monotonic()
        while self._read(DEADLINE_S):
            pass
        self.popen.wait(DEADLINE_S)
        os.close(self._fd)
        return time.monotonic() - began


def cpu_of_run(pid: int) -> dict[str, float]:
    """CPU seconds so far of a run's processes, by role."""
    parents, names, seconds = {}, {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        own = int(entry.name)
        parents[own] = int(fields[1])
        seconds[own] = sum(map(int, fields[11:15])) / TICKS  # children that were waited for, too
        verbs = [verb for verb in ("orchestrator", "trainer", "inference", "view", "rl") if verb in words]
        names[own] = verbs[0] if verbs else "others"
    found: dict[str, float] = {}
    for own in seconds:
        above = own
        while above not in (pid, 0):
            above = parents.get(above, 0)
        if above == pid:
            found[names[own]] = round(found.get(names[own], 0.0) + seconds[own], 2)
    return found


def phases(run: Path, began: float) -> dict[str, float]:
    """When each of PHASES was reached, seconds after the start."""
    midnight = datetime.datetime.fromtimestamp(began).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    found = {}
    for name, (log, words) in PHASES.items():
        for line in (run / "logs" / f"{log}.log").read_text().splitlines():
            if words in line and (time_of_day := re.match(r"(\d+):(\d+):([\d.]+) ", line)):
                hours, minutes, seconds = map(float, time_of_day.groups())
                found[name] = round(midnight + 3600 * hours + 60 * minutes + seconds - began, 2)
                break
    return found


class Clone:
    """The code of one clone, and what is measured of it."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.directory = root, directory
        directory.mkdir()
        (directory / "broken.py").write_text(BROKEN)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.env = env | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        self.rounds: list[Figures] = []

    def words(self, verb: str, *words: str) -> list[str]:
        file = self.root / "examples" / "sort_letters" / f"{verb}.toml"
        return [*self.command(verb, "@", str(file)), *words]

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "stretto", *words]

    def warm_up(self) -> None:
        """Make the model from which `rl` begins, and whatever a first start compiles."""
        subprocess.run(self.words("sft"), cwd=self.directory, env=self.env, check=True, capture_output=True)

    def ended(self, argv: list[str]) -> dict[str, float]:
        """Wall and CPU seconds of a command that ends by itself."""
        began = time.monotonic()
        popen = subprocess.Popen(argv, cwd=self.directory, env=self.env, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(popen.pid, 0)
        popen.returncode = os.waitstatus_to_exitcode(status)
        assert popen.returncode == 0, argv
        return {"wall": time.monotonic() - began, "cpu": used.ru_utime + used.ru_stime}

    def rl(self, *words: str) -> Terminal:
        return Terminal(self.words("rl", "--clean", *words), self.directory, self.env)

    def measure(self) -> None:
        commands = {
            "version": self.command("--version"),
            "help": self.command("--help"),
            "rl_help": self.command("rl", "--help"),
            "dry_run": self.words("rl", "--dry-run", "--clean"),
        }
        found: Figures = {name: self.ended(argv) for name, argv in commands.items()}
        for measured in (self.first_step, self.first_error, self.at_start, self.stopped, self.restarted):
            found |= measured()
        self.rounds.append(found)

    def first_step(self) -> Figures:
        terminal = self.rl()
        found: Figures = {"first_output": terminal.until(b""), "first_step": terminal.until(rb"step +1/")}
        found["processes"] = cpu_of_run(terminal.popen.pid)
        found["phases"] = phases(self.directory / "outputs" / "sort-letters", terminal.began)
        terminal.interrupt()
        return found | {"finished": terminal.end()}

    def first_error(self) -> Figures:
        terminal = self.rl("--orchestrator.env", json.dumps([{"id": "broken:Broken"}]))
        terminal.end()
        assert b"division by zero" in terminal.output, terminal.output.decode()
        return {"first_error": time.time() - terminal.began}

    def at_start(self) -> Figures:
        terminal = self.rl()
        time.sleep(1.0)
        terminal.interrupt()
        return {"interrupted_at_start": terminal.end()}

    def stopped(self) -> Figures:
        terminal = self.rl()
        terminal.until(rb"step +2/")
        terminal.interrupt()
        terminal.until(rb"finishing this step")
        terminal.interrupt()
        return {"stopped": terminal.end()}

    def restarted(self) -> Figures:
        """An engine that is killed while its run trains."""
        terminal = self.rl("--inference.max-restarts", "1")
        terminal.until(rb"step +3/")
        log = (self.directory / "outputs" / "sort-letters" / "logs" / "launcher.log").read_text()
        os.kill(int(re.findall(r"started inference pid=(\d+)", log)[-1]), signal.SIGKILL)
        began = terminal.until(rb"was started anew")
        seen = max(int(step) for step in re.findall(rb"step +(\d+)/", terminal.output))
        # Batches that were sampled before may still be trained; after these comes one of the new engine.
        step_or_end = terminal.until(rb"step +%d/|FAILED" % (seen + 3)) - began
        found = {} if b"FAILED" in terminal.output else {"restarted": step_or_end}
        for _ in range(2):
            terminal.interrupt()
            time.sleep(0.1)
        terminal.end()
        return found

    def medians(self) -> Figures:
        return _median(self.rounds)


def _median(values: list[Any]) -> Any:
    if not isinstance(values[0], dict):
        return round(statistics.median(values), 3)
    every: Callable[[str], list[Any]] = lambda name: [each[name] for each in values if name in each]
    return {name: _median(every(name)) for each in values for name in each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--beside", type=Path, help="another clone, measured in turns with this one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        clones = {"here": Clone(HERE, Path(name) / "here")}
        if args.beside is not None:
            clones["beside"] = Clone(args.beside.resolve(), Path(name) / "beside")
        for clone in clones.values():
            clone.warm_up()
        for number in range(1 if args.quick else args.rounds):
            for clone in list(clones.values())[:: 1 if number % 2 else -1]:
                clone.measure()
                print(json.dumps({"clone": str(clone.root), **clone.rounds[-1]}), flush=True)
        print(json.dumps({name: clone.medians() for name, clone in clones.items()}))


if __name__ == "__main__":
    main()
