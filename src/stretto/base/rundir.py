"""Who may write into a run directory: a new run into an empty one, a resumed run into its own, one at a time.

`claim` is called by whoever starts a run (the launcher, `sft`). It refuses what would mix two runs, deletes
only on `--clean` and only what is a run directory, and holds a lock until the last process that inherited
it has ended. A new run may begin at a checkpoint of another one (`origin`), which is only ever read.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir

# A dry run leaves these; they are no reason to refuse a run.
_HARMLESS = frozenset({"configs", "plan.json", "run.lock", "dry_run"})
CHECKPOINT = re.compile(r"/checkpoints/step_(\d+)$")
"""How the path of a checkpoint ends."""
_LOCK_WAIT_S = 10.0  # for the children of a launcher that was killed to be gone


@dataclass
class Claim:
    """The right to write into a run directory; ends with close() or the process."""

    run: RunDir
    resume_step: int | None
    """Step to resume from, in this run or its origin; None: a run from the start."""
    lock_fd: int
    """Pass it to child processes: the directory stays claimed while one of them lives."""

    def close(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def claim(run: RunDir, *, resume: bool, step: int | None, clean: bool, origin: Path | None = None) -> Claim:
    """Make, check and lock the directory, emptied first with `clean`.

    origin: with `resume`, the run or checkpoint directory that a new run begins at.

    Raises: ConfigError when the directory holds another run, has nothing to resume from, or is in use.
    """
    check(run, resume=resume, step=step, clean=clean, origin=origin)
    run.path.mkdir(parents=True, exist_ok=True)
    fd = _lock(run)
    try:
        # Again, now that nobody else can change it.
        resume_step = check(run, resume=resume, step=step, clean=clean, origin=origin)
        if clean:
            _empty(run)
    except BaseException:
        os.close(fd)
        raise
    return Claim(run, resume_step, fd)


def check(
    run: RunDir, *, resume: bool, step: int | None, clean: bool, origin: Path | None = None
) -> int | None:
    """The step to resume from, None for a run from the start; changes nothing.

    Raises: ConfigError with the ways out.
    """
    contents = _contents(run.path)
    start = None
    if resume and origin is None:
        return _resume_step(run, contents, step)
    if resume and origin is not None:
        start = find_checkpoint(run, step, origin)[1]
    if clean and contents and not _is_run(run):
        raise ConfigError(
            f"--clean: {run} does not look like a run directory (neither configs/ nor ledger.sqlite in it; "
            f"it holds {_listing(contents)}), so nothing was deleted; give another run.name or output_dir."
        )
    if artefacts := _artefacts(contents):
        if clean:
            return start
        newest = run.latest_complete_checkpoint()
        can_resume = f" from step {newest}" if newest else " (once it has a complete checkpoint; it has none)"
        raise ConfigError(
            f"run {run.path.name!r} exists in {run} ({_listing(artefacts)}). Continue it with "
            f"--resume{can_resume}{' without resume.dir' if origin else ''}, start over and delete it with "
            f"--clean, or give this run a name of its own with --run.name."
        )
    return start


def find_checkpoint(run: RunDir, step: int | None, origin: Path | None) -> tuple[RunDir, int]:
    """The checkpoint that [resume] means, and the run it is of: `run` itself, or the one at `origin`.

    origin is a run directory, or one of its checkpoints, `RUN/checkpoints/step_N`; step None is the newest.

    Raises: ConfigError when it is not there, not complete, or no other run's.
    """
    if origin is None:
        return run, _resume_step(run, _contents(run.path), step)
    path = Path(os.path.abspath(origin.expanduser()))
    match = CHECKPOINT.search(path.as_posix())
    other = RunDir(path.parent.parent if match else path)
    step = int(match[1]) if match else step
    if os.path.realpath(other) == os.path.realpath(run):
        raise ConfigError(
            f"resume.dir = {str(origin)!r} is this run itself; continue it with --resume alone."
        )
    if not other.path.is_dir():
        raise ConfigError(f"resume.dir = {str(origin)!r}: there is no directory {other}.")
    complete = other.complete_checkpoints()
    if step is None and complete:
        return other, complete[-1]
    if step in complete:
        return other, step
    if not other.checkpoints.is_dir():
        raise ConfigError(
            f"resume.dir = {str(origin)!r} is neither a run directory (there is no {other.checkpoints}) nor one "
            "of a run's checkpoints, RUN/checkpoints/step_N."
        )
    which = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
    have = ", ".join(map(str, complete)) or "none"
    raise ConfigError(f"resume.dir = {str(origin)!r}: {other} has {which}; complete: {have}.")


def check_max_steps(max_steps: int | None, step: int) -> None:
    """Raises: ConfigError when a run that goes on after `step` is beyond its end."""
    if max_steps is not None and step > max_steps:
        raise ConfigError(
            f"max_steps = {max_steps}, but the run goes on after step {step}; steps are counted from the first one, "
            f"so raise max_steps above {step}, or resume from an earlier step."
        )


def is_used(run: RunDir) -> bool:
    """Whether a run has begun there; the leavings of a dry run do not count."""
    return bool(_artefacts(_contents(run.path)))


def _artefacts(contents: list[str]) -> list[str]:
    return [name for name in contents if name not in _HARMLESS]


def _resume_step(run: RunDir, contents: list[str], step: int | None) -> int:
    if not _artefacts(contents):
        there = [] if not run.path.parent.is_dir() else _runs_in(run.path.parent)
        known = f"; runs there: {', '.join(there)}" if there else ""
        raise ConfigError(
            f"--resume: there is no run {run.path.name!r} in {run.path.parent}{known}. Check run.name and "
            f"output_dir, or leave --resume out to start it."
        )
    complete = run.complete_checkpoints()
    if step is not None and step not in complete:
        have = ", ".join(map(str, complete)) or "none"
        raise ConfigError(
            f"--resume.step {step}: {run} has no complete checkpoint of that step; complete: {have}."
        )
    if not complete:
        raise ConfigError(
            f"--resume: {run} has no complete checkpoint to resume from. There is: "
            f"{_describe(run, contents)}. Nothing was changed or deleted. Start over with --clean; to have a "
            f"checkpoint sooner next time, lower ckpt.interval."
        )
    return step if step is not None else complete[-1]


def _describe(run: RunDir, contents: list[str]) -> str:
    """What an unfinished run left behind, in words."""
    parts = []
    if steps := _num_steps(run.metrics("orchestrator")):
        parts.append(f"{steps} trained step{'s' * (steps != 1)}")
    if run.ledger.exists():
        parts.append(f"a ledger of {run.ledger.stat().st_size / 1e6:.1f} MB with its rollouts")
    if run.checkpoints.is_dir() and (broken := sorted(os.listdir(run.checkpoints))):
        parts.append(f"checkpoints that were not finished ({', '.join(broken)})")
    return "; ".join(parts) or _listing(contents)


def _num_steps(metrics: Path) -> int:
    try:
        lines = metrics.read_text().splitlines()
    except OSError:
        return 0
    steps = set()
    for line in lines:
        try:
            steps.add(json.loads(line).get("step"))
        except (ValueError, AttributeError):
            continue
    return len(steps - {None, 0})


def _lock(run: RunDir) -> int:
    fd = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            # Its launcher was killed and the children are on their way out: worth waiting for.
            if holder and not _is_alive(holder) and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(fd)
            raise ConfigError(
                f"run {run.path.name!r} in {run} is in use by process {holder or 'unknown'}. Wait for it, "
                f"stop it (kill {holder or '<pid>'}), or give this run a name of its own with --run.name."
            ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _is_alive(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def _empty(run: RunDir) -> None:
    """Delete everything but the lock this process holds."""
    for entry in run.path.iterdir():
        if entry == run.lock:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_run(run: RunDir) -> bool:
    return run.configs.is_dir() or run.ledger.exists() or _contents(run.path) == [run.lock.name]


def _contents(path: Path) -> list[str]:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file, not a run directory; give another run.name or output_dir.")
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def _runs_in(output_dir: Path) -> list[str]:
    return sorted(p.name for p in output_dir.iterdir() if p.is_dir() and _is_run(RunDir(p)))[:8]


def _listing(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
