"""`stretto replay RUN`: a deterministic run is played again, and compared with what it was."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from stretto.api import state
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.status import harmless
from stretto.config.reading.plain import PlainParser
from stretto.monitors.file import read_metrics
from stretto_review.diff import Comparison, Side, difference_text, first_difference

POLL_S = 0.2


def replay(words: Sequence[str]) -> int:
    """Play a run again in a directory beside it, and print where the two differ; exit status 1 if they do."""
    args = _parse(words)
    first = Side(args.run)
    here, start = first.run.dir, args.start
    if not first.run.config.get("deterministic"):
        raise ConfigError(
            f"{here} was not deterministic: what it did depends on what ended first, too. `rl ... --deterministic` "
            "makes runs that can be played again; `stretto diff` compares any two"
        )
    if start is not None and start not in (known := here.complete_checkpoints()):
        there = f"it has {', '.join(map(str, known))}" if known else "it has none"
        raise ConfigError(f"stretto replay: --from {start}: {here} has no checkpoint of that step; {there}")
    name = args.name or f"{here.path.name}-replay"
    beside = here.path.absolute().parent
    again = RunDir(beside / name)
    command = [sys.executable, "-m", "stretto", "rl", "@", str(here.config("run")), "--clean"]
    command += ["--output-dir", str(beside), "--run.name", name]
    if start is not None:
        command += ["--resume.dir", str(here), "--resume.step", str(start)]
    last = None if args.steps is None else (start or 0) + args.steps
    if (code := _play(command, again, last)) != 0:
        return code
    other = Side(str(again))
    steps = [step for step in sorted(first.batches.keys() & other.batches.keys()) if last is None or step <= last]
    if not steps:
        raise ConfigError(f"{again}: it has trained no step that {here} has")
    found = first_difference(Comparison(first, other, 0.0), steps)
    print(harmless(difference_text([vars(each) for each in found], len(steps))))
    return int(bool(found))


def _play(command: Sequence[str], run: RunDir, last: int | None) -> int:
    """Run `rl` to its end, or stop it in order once step `last` is trained; its exit status, 0 if it was stopped."""
    process = subprocess.Popen(command)
    is_stopped = False
    while process.poll() is None:
        try:
            if last is None:
                process.wait()
            elif not is_stopped and any(row["step"] >= last for row in read_metrics(run.metrics("trainer"))):
                process.send_signal(signal.SIGINT)
                is_stopped = True
            time.sleep(POLL_S)
        except KeyboardInterrupt:  # it has got the signal, too, and stops in order
            last = None
    return 0 if is_stopped and process.returncode == 128 + signal.SIGINT else process.returncode


def _parse(words: Sequence[str]) -> argparse.Namespace:
    about = "Play a deterministic run again, and say where it differs from what it was; exit status 1 if it does."
    parser = PlainParser("replay", about, missing=state.runs_here)
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument("--from", dest="start", type=int, metavar="N", help="begin with its checkpoint of step N")
    parser.add_argument("--steps", type=int, metavar="M", help="stop after M steps")
    parser.add_argument("--name", metavar="NAME", help="name of the new run (NAME of the run, and -replay)")
    args = parser.parse_args(list(words))
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"stretto replay: --steps {args.steps}: give at least 1")
    return args
