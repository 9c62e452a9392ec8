"""`stretto replay RUN`: a run is played again, and compared with what it was.

A deterministic run is played as a whole. Of another one the training is repeated on the batches that it has recorded:
what its engines sampled followed from the moment at which weights arrived. A bundle is one step of a run as a file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stretto import state
from stretto.base.errors import ConfigError
from stretto.base.files import identity
from stretto.base.paths import RunDir
from stretto.base.rundir import WITHOUT_NEXT_VAR
from stretto.base.status import harmless
from stretto.config.load import write_json
from stretto.config.reading.plain import PlainParser
from stretto.monitors.file import read_metrics
from stretto_review.diff import Comparison, Side, difference_text, first_difference
from stretto_review.recorded import SUFFIX, as_training, played, unpack, with_models, without_ports, write_bundle

POLL_S = 0.2
NOT_PLAYED = 125
"""Exit status if `rl` has failed or trained nothing: no difference, and `git bisect run` passes over such a commit."""


def replay(words: Sequence[str]) -> int:
    """Play a run again in a directory beside it, and print where the two differ; exit status 1 if they do.

    It is NOT_PLAYED if the run has failed or trained nothing, and that of a signal if it was stopped by one.
    """
    args, rest = _parse(words)
    is_bundle = args.run.endswith(SUFFIX) and not Path(args.run).is_dir()
    if is_bundle and not Path(args.run).is_file():
        raise ConfigError(
            f"stretto replay: {args.run}: there is no such file; `stretto replay RUN --bundle N` writes one"
        )
    first = Side(str(unpack(Path(args.run))) if is_bundle else args.run)
    here, start = first.run.dir, args.start
    if args.bundle is not None:
        path = write_bundle(first.run, args.bundle, args.out)
        print(f"wrote {path}; play it: stretto replay {shlex.quote(str(path))}")
        return 0
    if not first.batches:
        raise ConfigError(f"{here} has trained no step")
    if is_bundle:
        if start is not None:
            raise ConfigError(f"stretto replay: --from {start}: a bundle has one step")
        start = min(first.batches) - 1 or None
    newest = max(first.batches)
    if start is not None:
        _check_start(here, start, newest)
    is_whole = bool(first.run.config.get("deterministic")) and not is_bundle and not args.training
    name = args.name or f"{here.path.name}-replay"
    again = RunDir((args.output_dir or here.path.parent).absolute() / name)
    if args.name is not None and again.path.exists():
        raise ConfigError(f"--name {name}: {again} is there already and would be deleted; take another")
    last = newest if args.steps is None else min(newest, (start or 0) + args.steps)
    data = with_models(without_ports(json.loads(here.config("run").read_text())), here.path)
    had_budget = data.pop("budget", None) is not None  # it ends where the recorded run did
    data.pop("resume", None)  # of the run's last start
    if not is_whole:
        data = as_training(data, here.path.absolute())
        data["orchestrator"]["env"] = played(data["orchestrator"]["env"], here)
        if data.get("max_steps") is None:
            data["max_steps"] = last
    given = ["--clean", "--output-dir", str(again.path.parent), "--run.name", name, *rest]
    if start is not None:
        given += ["--resume.dir", str(here), "--resume.step", str(start)]
    # Shorter than it was to be, it is stopped: a schedule of the learning rate goes by max_steps.
    is_shorter = (had_budget or args.steps is not None) if is_whole else last < data["max_steps"]
    with tempfile.TemporaryDirectory(prefix="stretto-replay-") as scratch:  # the run's own directory stays as it is
        write_json(config := Path(scratch) / "run.json", data)
        command = [sys.executable, "-m", "stretto", "rl", "@", str(config), *given]
        code = _play(command, again, last if is_shorter else None)
    if code != 0:
        return NOT_PLAYED if 0 < code < 128 else code
    other = Side(str(again))
    steps = [step for step in sorted(first.batches.keys() & other.batches.keys()) if step <= last]
    if not steps:
        print(harmless(f"{again} has trained no step that {here} has: nothing is compared"), file=sys.stderr)
        return NOT_PLAYED
    found = first_difference(Comparison(first, other, args.tolerance, is_whole=is_whole), steps)
    num_unread, what = len(first.gone | other.gone), "" if is_whole else " of training"
    verdict = difference_text([vars(each) for each in found], len(steps), num_unread, what)
    print(harmless(f"\n{here}, played again as {again}:\n{verdict}"))
    return int(bool(found))


def _check_start(here: RunDir, start: int, newest: int) -> None:
    """Raises: ConfigError if a run cannot be played from this step on."""
    if start not in (known := here.complete_checkpoints()):
        there = f"it has {', '.join(map(str, known))}" if known else "it has none"
        raise ConfigError(f"stretto replay: --from {start}: {here} has no checkpoint of that step; {there}")
    if start >= newest:
        raise ConfigError(f"stretto replay: --from {start}: {here} has trained no step after {newest}; begin earlier")


def _play(command: Sequence[str], run: RunDir, last: int | None) -> int:
    """Run `rl` to its end, or stop it in order once step `last` is trained; its exit status, 0 if it was stopped."""
    metrics = run.metrics("trainer")
    before = identity(metrics)  # of an earlier replay, which `rl` deletes
    process = subprocess.Popen(command, env=os.environ | {WITHOUT_NEXT_VAR: "1"})
    is_stopped = False
    while process.poll() is None:
        try:
            if last is None:
                process.wait()
            elif not is_stopped and _has_trained(metrics, last, before):
                process.send_signal(signal.SIGINT)
                is_stopped = True
            time.sleep(POLL_S)
        except KeyboardInterrupt:  # it has got the signal, too, and stops in order
            last = None
    return 0 if is_stopped and process.returncode == 128 + signal.SIGINT else process.returncode


def _has_trained(path: Path, step: int, before: tuple[int, int] | None) -> bool:
    """Whether a step is trained, by metrics at `path`; before: the identity of those that do not count."""
    return identity(path) not in (None, before) and any(row["step"] >= step for row in read_metrics(path))


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    about = (
        "Play a run again, and say where it differs from what it was; exit status 1 if it does. A run that was not "
        "deterministic is trained again on what it has recorded. Further words are words of `rl`."
    )
    parser = PlainParser("replay", about, missing=state.runs_here)
    parser.add_argument("run", help=f"run directory, such as outputs/demo, or a file step_N{SUFFIX}")
    parser.add_argument("--from", dest="start", type=int, metavar="N", help="begin with its checkpoint of step N")
    parser.add_argument("--steps", type=int, metavar="M", help="stop after M steps")
    parser.add_argument("--training", action="store_true", help="only the training, of a deterministic run too")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="T", help="numbers may differ by T (0)")
    parser.add_argument("--name", metavar="NAME", help="name of the new run (NAME of the run, and -replay)")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="where the new run is (beside the run)")
    parser.add_argument("--bundle", type=int, metavar="N", help="play nothing: write step N as a file to send")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the file (RUN/exports/step_N{SUFFIX})")
    parser.refuse_near(words)
    args, rest = parser.parse_known_args(list(words))
    if args.bundle is not None:
        played = {"--from": args.start, "--steps": args.steps, "--name": args.name, "--training": args.training or None}
        played["--output-dir"] = args.output_dir
        if idle := [flag for flag, value in played.items() if value is not None] + rest[:1]:
            raise ConfigError(
                f"stretto replay: {idle[0]} does nothing with --bundle, which plays nothing; leave it out"
            )
    elif args.out is not None:
        raise ConfigError(f"stretto replay: --out {args.out} is the file of --bundle N; give that too, or leave it out")
    if named := [word for word in rest if word.partition("=")[0] in ("--run.name", "--run-name")]:
        raise ConfigError(f"stretto replay: {named[0]}: the name of the new run is --name NAME here")
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"stretto replay: --steps {args.steps}: give at least 1")
    if not 0 <= args.tolerance < math.inf:
        raise ConfigError(f"stretto replay: --tolerance {args.tolerance:g}: give 0 or more")
    return args, rest
