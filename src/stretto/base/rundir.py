"""Who may write into a run directory: a new run into an empty one, a resumed run into its own, one at a time.

`claim` is called by the process that starts a run (the launcher, `sft`). It refuses what would mix two runs, deletes
only with `--clean` and only run directories, and holds a lock until the last process that inherited it has ended.
A new run may start from a checkpoint of another run (`origin`), which is only read.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError, reason_of
from stretto.base.files import flush, read_holder, try_lock, whole_name, write_atomic, write_holder
from stretto.base.paths import RunDir, steps_in

logger = logging.getLogger(__name__)

# Left by a dry run, by another node that started earlier, or by a run that was stopped before its first step: a new
# run is not refused because of them.
_HARMLESS = frozenset(
    {"configs", "plan.json", "clock.json", "run.lock", "run.orchestrator.lock", "run.trainer.lock", "dry_run", "secret"}
    | {"logs", "dumps", "tokenizer", "launch.json", "nodes.json", "slurm", "ray", "given"}
)
# Left, too, by a run that trained no step: a new run of the same name deletes them.
_UNTRAINED = frozenset(
    {"ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "metrics", "tokens", "evals"}
    | {"broadcasts", "rollouts", "episodes", "summary.json"}
)
JOB_VAR = "STRETTO_JOB"
"""Set in a scheduler's job, which is recorded in RUN/launch.json since its submission."""
COMMAND_VAR = "STRETTO_COMMAND"
"""The command line that the user typed, where another one started the run; for messages that say how to continue."""
WITHOUT_NEXT_VAR = "STRETTO_WITHOUT_NEXT"
"""Set where another command started the run, and its own result is what counts: the run's end names no commands."""
CHECKPOINT = re.compile(r"/checkpoints/step_(\d+)$")
"""The end of a checkpoint's path."""
_LOCK_WAIT_S = 10.0  # the children of a killed launcher have ended by then


@dataclass
class Claim:
    """The right to write into a run directory, until close() or the end of the process."""

    run: RunDir
    resume_step: int | None
    """Step to resume from, in this run or its origin; None if it starts from the beginning."""
    is_new: bool
    """Whether the run is new, even if it starts from another run's checkpoint."""
    lock_fd: int
    """Pass it to child processes: the directory stays claimed as long as one of them lives."""

    def close(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def claim(
    run: RunDir,
    *,
    resume: bool,
    step: int | None,
    clean: bool,
    origin: Path | None = None,
    checkpoints: Path | None = None,
) -> Claim:
    """Create, check and lock the run directory; empty it first if `clean`.

    origin: with `resume`, the run or checkpoint directory from which a new run starts. checkpoints: another directory
    for the checkpoints of runs, with one directory per run name; None: they are in the run directory.

    Raises: ConfigError if the directory holds another run, has nothing to resume from, or is in use.
    """
    check(run, resume=resume, step=step, clean=clean, origin=origin)
    _make(run)
    fd = _lock(run, run.lock)
    try:
        # Again, now that nobody else can change it.
        resume_step = check(run, resume=resume, step=step, clean=clean, origin=origin)
        if clean:
            _empty(run)
        elif resume:
            drop_unfinished(run)
        if not resume or origin is not None:
            discard(run)
        if checkpoints is not None:
            _link_checkpoints(run, checkpoints)
        if run.checkpoints.is_symlink():
            write_atomic(run.checkpoints_of, os.path.realpath(run).encode())
        if JOB_VAR not in os.environ:
            record = {"by": "local", "host": socket.gethostname()}
            write_atomic(run.launch, json.dumps(record).encode() + b"\n")
    except BaseException:
        os.close(fd)
        raise
    return Claim(run, resume_step, is_new=not resume or origin is not None, lock_fd=fd)


@contextmanager
def claim_part(run: RunDir, role: str, *, is_new: bool, clean: bool) -> Iterator[None]:
    """Context of an orchestrator or trainer that is started alone, without a launcher.

    is_new: the run is new; otherwise it is resumed.

    Raises: ConfigError if a new run already exists, or another process has this part or the whole run.
    """
    if clean:
        raise ConfigError(
            f"--clean: a {role} started alone shares {run} with the other processes; delete the directory yourself "
            "before you start the first of them, or start all with `rl`."
        )
    _contents(run.path)
    _check_link(run)
    _make(run)
    with ExitStack() as stack:
        stack.callback(os.close, _lock(run, run.lock, is_shared=True))
        stack.callback(os.close, _lock(run, run.part_lock(role)))
        complete = run.complete_checkpoints()
        found = [f"checkpoints of steps {_listing([*map(str, complete)])}"] if complete else []
        if role == "orchestrator" and run.ledger.exists():
            found.append("a ledger")
        if is_new and found:
            raise ConfigError(
                f"run {run.path.name!r} exists in {run} ({', '.join(found)}). Continue it with --resume, or give this "
                "run another name with --run.name (the same for all its processes)."
            )
        if role == "trainer":  # only the trainer writes checkpoints
            drop_unfinished(run)
        yield


def drop_unfinished(run: RunDir) -> None:
    """Delete incomplete checkpoints and exports of a killed run; no process may be writing any now."""
    complete = {run.checkpoint(step) for step in run.complete_checkpoints()}
    _delete(path for path in run.checkpoints.glob("step_*") if path not in complete)
    for exports in (run.weights, run.critic):
        _delete([*exports.glob("*.part"), *exports.glob(".*")])


def go_back(run: RunDir, step: int) -> list[int]:
    """Set the complete checkpoints of later steps aside, since the run goes on after `step`; their steps.

    A later `--resume` would otherwise continue what was left, and limits on checkpoints would keep it alone.
    `prune_checkpoints` deletes them once the run has made another checkpoint. Evals of later versions count as not
    done, because the same version will be of other weights: their results are renamed. `weights/latest` points to the
    newest export that is left.
    """
    for results in run.evals.glob("version_*/results.json"):
        version = results.parent.name.removeprefix("version_")
        if version.isdigit() and int(version) > step:
            results.replace(results.with_name("results_undone.json"))
    _take_back_latest(run, step)
    later = [each for each in run.complete_checkpoints() if each > step]
    for each in reversed(later):
        run.undone.mkdir(exist_ok=True)
        aside = run.undone / run.checkpoint(each).name
        shutil.rmtree(aside, ignore_errors=True)
        run.checkpoint(each).rename(aside)
    if later:
        flush(run.undone)
        flush(run.checkpoints)
        steps = ", ".join(map(str, later))
        logger.info("undone: checkpoints of steps %s, which are in %s until there is another one", steps, run.undone)
    return later


def _take_back_latest(run: RunDir, step: int) -> None:
    """Mark exports of later steps; point `weights/latest` at the newest one that is left, if it is one of these."""
    exported = steps_in(run.weights)
    for each in exported:
        if each > step:
            run.undone_export(each).touch()
    if run.latest_export() <= step:
        return
    left = [each for each in exported if each <= step and not run.undone_export(each).exists()]
    if left:
        run.link_latest_weights(left[-1])
    else:
        run.latest_weights.unlink()
    flush(run.weights)
    where = f"now {run.weights_step(left[-1]).name}" if left else "gone until there is another export"
    logger.info("undone: the weights that %s pointed to; it is %s", run.latest_weights, where)


def prune_checkpoints(run: RunDir, keep_last: int | None, keep_interval: int | None = None) -> list[int]:
    """Once a checkpoint is complete, delete others, marker first, and what `go_back` has set aside; their steps.

    The newest `keep_last` are kept (None: all), and those of every `keep_interval`-th step.
    """
    complete = run.complete_checkpoints()
    deleted = [] if keep_last is None else complete[:-keep_last]
    deleted = [step for step in deleted if keep_interval is None or step % keep_interval]
    for step in deleted:
        run.complete_marker(step).unlink(missing_ok=True)
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
    if run.undone.is_dir():
        left = {int(path.name.removeprefix("step_")) for path in run.undone.glob("step_*")}
        deleted += sorted(left.difference(complete))
        shutil.rmtree(run.undone, ignore_errors=True)
    if deleted:
        logger.info("deleted checkpoints of steps %s", ", ".join(map(str, deleted)))
    return deleted


def prune_exports(directory: Path, step: int, keep_last: int | None, keep_interval: int | None = None) -> list[int]:
    """Delete exports `step_N` beyond the newest `keep_last` up to `step`; the steps that were deleted.

    Those of later steps stay: a run that was resumed from an earlier step has not come to them yet. keep_last None: all
    are kept; those of every `keep_interval`-th step always are.
    """
    steps = [each for each in steps_in(directory) if each <= step]
    deleted = [] if keep_last is None else steps[:-keep_last]
    deleted = [each for each in deleted if keep_interval is None or each % keep_interval]
    for each in deleted:
        # Renamed first, so that no reader finds half of a model; `drop_unfinished` deletes what a kill leaves.
        leaving = directory / f".step_{each}"
        shutil.rmtree(leaving, ignore_errors=True)
        (directory / f"step_{each}").rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
    if deleted:
        logger.info("deleted exports of steps %s in %s", ", ".join(map(str, deleted)), directory)
    return deleted


def discard(run: RunDir) -> None:
    """Delete a new run that trained no step, except its logs and dumps; its name can then be used again."""
    _delete_linked(run)
    _delete(entry for entry in run.path.iterdir() if entry.name not in _HARMLESS)


def _link_checkpoints(run: RunDir, directory: Path) -> None:
    """Make RUN/checkpoints a link to `directory`/<name of the run>.

    Raises: ConfigError if checkpoints in one of the two places would be hidden or mixed with others.
    """
    target = Path(os.path.abspath(directory.expanduser())) / run.path.name
    link = run.checkpoints
    if link.is_symlink() and Path(os.readlink(link)) == target:
        target.mkdir(parents=True, exist_ok=True)
        return
    if link.is_symlink() or link.exists():
        raise ConfigError(
            f"ckpt.output_dir: the checkpoints of this run are in {link.resolve()}, not in {target}; give the key its "
            "former value, or move them there and replace the former directory by a link to it"
        )
    if any(target.glob("step_*")):
        raise ConfigError(
            f"ckpt.output_dir: {target} has checkpoints of another run of this name; delete them, or give this run "
            "another name with --run.name"
        )
    if (other := _other_run_of(target, run)) is not None:
        raise ConfigError(f"ckpt.output_dir: {target} is for the checkpoints of {other}; give this run another name")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"ckpt.output_dir: cannot make {target}: {reason_of(cause, target)}") from cause
    link.symlink_to(target)


def _check_link(run: RunDir) -> None:
    """Raises: ConfigError if RUN/checkpoints is a link to those of another run: one of the two is a copy."""
    if run.checkpoints.is_symlink() and (other := _other_run_of(run.checkpoints, run)) is not None:
        here, target = (shlex.quote(str(path)) for path in (run.checkpoints, run.checkpoints.resolve()))
        raise ConfigError(
            f"{run.checkpoints} is a link to the checkpoints of {other}: one of the two directories is a copy, and "
            f"both would change them. If this is the copy, remove the link (the checkpoints stay), and copy them to "
            f"its place if this run goes on from them: rm {here}; cp -r {target} {here}. If {other} is the copy: rm "
            f"{target}/{run.checkpoints_of.name}"
        )


def _other_run_of(checkpoints: Path, run: RunDir) -> RunDir | None:
    """The run whose checkpoints these are by their own file, if it is still there and is not this one."""
    try:
        owner = RunDir(Path((checkpoints / run.checkpoints_of.name).read_text(errors="replace")))
        links_here = os.path.samefile(owner.checkpoints, checkpoints)
        return owner if links_here and not os.path.samefile(owner, run) else None
    except OSError:
        return None


def _delete_linked(run: RunDir) -> None:
    """Delete checkpoints behind a link: `_delete` removes the link alone."""
    if run.checkpoints.is_symlink():
        _delete([*run.checkpoints.glob("step_*"), run.undone])


def check(run: RunDir, *, resume: bool, step: int | None, clean: bool, origin: Path | None = None) -> int | None:
    """The step to resume from, None to start from the beginning; changes nothing on disk.

    Raises: ConfigError if the directory cannot be used; it says what the user can do.
    """
    _check_writable(run.path)
    contents = _contents(run.path)
    _check_link(run)
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
        if clean or _has_trained_nothing(run, artefacts):
            return start
        newest = run.latest_complete_checkpoint()
        can_resume = f" from step {newest}" if newest else " (once it has a complete checkpoint; it has none)"
        raise ConfigError(
            f"run {run.path.name!r} exists in {run} ({_listing(artefacts)}). Continue it with "
            f"--resume{can_resume}{' without resume.dir' if origin else ''}, start over and delete it with "
            f"--clean, or give this run another name with --run.name."
        )
    return start


def model_near(directory: Path) -> str:
    """The model near a directory without one, as a run or its checkpoint has, or what to give instead."""
    run = directory.parent.parent
    places = [
        directory / "weights" / "latest", directory / "latest", directory.expanduser() / "model",
        run / "weights" / directory.name, run / "weights" / "latest",
    ]  # fmt: skip
    is_adapter = (directory.expanduser() / "adapter_config.json").is_file()
    if is_adapter:
        places.insert(0, directory.parent)  # where `ckpt.weights.save_adapter_separately` writes it
    found = next((each for each in places if (each.expanduser() / "config.json").is_file()), None)
    if found is not None:
        return f"did you mean {found}?"
    if is_adapter:
        return (
            "it holds an adapter of PEFT; merge that into its model first, by peft's AutoPeftModelForCausalLM: "
            "from_pretrained(DIR).merge_and_unload().save_pretrained(NEW_DIR), with the tokenizer beside it."
        )
    return "give a directory with config, safetensors and tokenizer."


def find_checkpoint(run: RunDir, step: int | None, origin: Path | None) -> tuple[RunDir, int]:
    """The run and step of the checkpoint that [resume] names.

    origin: a run directory or one of its checkpoints, `RUN/checkpoints/step_N`. step: None is the newest.

    Raises: ConfigError if the checkpoint does not exist or is incomplete, or if `origin` is this run itself.
    """
    if origin is None:
        return run, _resume_step(run, _contents(run.path), step)
    path = Path(os.path.abspath(origin.expanduser()))
    match = CHECKPOINT.search(path.as_posix())
    other = RunDir(path.parent.parent if match else path)
    step = int(match[1]) if match else step
    if os.path.realpath(other) == os.path.realpath(run):
        raise ConfigError(f"resume.dir = {str(origin)!r} is this run itself; continue it with --resume alone.")
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
    """Raises: ConfigError if a run that continues after `step` is already past max_steps."""
    if max_steps is not None and step > max_steps:
        raise ConfigError(
            f"max_steps = {max_steps}, but the run continues after step {step}; steps are counted from the first one, "
            f"so raise max_steps above {step}, or resume from an earlier step."
        )


def recovery_advice(run: RunDir, step: int) -> str:
    """What the user can do if the checkpoint of `step` is damaged, for error messages."""
    earlier = [complete for complete in run.complete_checkpoints() if complete < step]
    if earlier:
        return f"resume from the one before it with --resume.step {earlier[-1]}"
    return "there is no checkpoint before it: start over with --clean"


def is_used(run: RunDir) -> bool:
    """Whether the directory holds a run; files left by a dry run do not count."""
    return bool(_artefacts(_contents(run.path)))


def _artefacts(contents: list[str]) -> list[str]:
    return [name for name in contents if whole_name(name) not in _HARMLESS]


def _has_trained_nothing(run: RunDir, artefacts: list[str]) -> bool:
    """Whether a run was here that failed before its first step, and nothing else."""
    num_steps = sum(_num_steps(run.metrics(role)) for role in ("orchestrator", "trainer", "sft"))
    is_only_linked = run.checkpoints.is_symlink() and not any(run.checkpoints.glob("step_*"))
    allowed = _UNTRAINED | ({run.checkpoints.name} if is_only_linked else set())
    return _is_run(run) and allowed.issuperset(map(whole_name, artefacts)) and num_steps == 0


def has_ended_before_step_1(run: RunDir) -> bool:
    """Whether the run in this directory ended in order, with a summary, and has trained nothing."""
    if not run.summary.exists() or not (artefacts := _artefacts(_contents(run.path))):
        return False
    return _has_trained_nothing(run, artefacts)


def _resume_step(run: RunDir, contents: list[str], step: int | None) -> int:
    if not _artefacts(contents):
        others = _runs_in(run.path.parent) if run.path.parent.is_dir() else []
        others = [name for name in others if name != run.path.name]
        known = f"; runs there: {', '.join(others)}" if others else ""
        raise ConfigError(
            f"--resume: there is no run {run.path.name!r} in {run.path.parent}{known}. Check run.name and "
            f"output_dir, or leave --resume out to start it."
        )
    if run.checkpoints.is_symlink() and not run.checkpoints.exists():
        raise ConfigError(
            f"--resume: {run.checkpoints} is a link to {os.readlink(run.checkpoints)}, which is not there; mount that "
            "disk, or move the directory back and correct the link."
        )
    complete = run.complete_checkpoints()
    if step is not None and step not in complete:
        have = ", ".join(map(str, complete)) or "none"
        undone = f" Later ones are undone, and in {run.undone} until there is another." if run.undone.is_dir() else ""
        message = f"--resume.step {step}: {run} has no complete checkpoint of that step; complete: {have}."
        raise ConfigError(message + undone)
    if not complete:
        raise ConfigError(
            f"--resume: {run} has no complete checkpoint to resume from. There is: "
            f"{_describe(run, contents)}. Nothing was changed or deleted. Start over with --clean; to get a "
            f"checkpoint sooner next time, lower ckpt.interval."
        )
    return step if step is not None else complete[-1]


def _describe(run: RunDir, contents: list[str]) -> str:
    """What a run without a checkpoint left behind, for the message."""
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
        lines = metrics.read_text(errors="replace").splitlines()
    except OSError:
        return 0
    steps = set()
    for line in lines:
        try:
            steps.add(json.loads(line).get("step"))
        except (ValueError, AttributeError):
            continue
    return len(steps - {None, 0})


def _make(run: RunDir) -> None:
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise unusable(run.path, cause) from cause


def _check_writable(path: Path) -> None:
    """Raises: ConfigError if this user cannot make or change the directory."""
    for each in (path, *path.absolute().parents):
        if each.is_symlink() and not os.path.exists(each):
            raise ConfigError(
                f"cannot use {path} as a run directory: {each} is a link to {os.readlink(each)}, which is not there; "
                "make that directory, or give another output_dir."
            )
    try:
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
    except OSError as cause:
        raise unusable(path, cause) from cause
    if not above.is_dir():
        raise unusable(path, NotADirectoryError())
    if os.statvfs(above).f_flag & os.ST_RDONLY:
        raise unusable(path, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    if not os.access(above, os.W_OK | os.X_OK):
        raise unusable(path, PermissionError())


def unusable(path: Path, cause: OSError) -> ConfigError:
    """The error about a run directory that cannot be made or written."""
    way = "give a shorter run.name" if cause.errno == errno.ENAMETOOLONG else "give another output_dir"
    return ConfigError(f"cannot use {path} as a run directory: {reason_of(cause, path)}; {way}.")


def _lock(run: RunDir, path: Path, *, is_shared: bool = False) -> int:
    """Open and lock a file; it contains the pid of the process that locked it last.

    Raises: ConfigError if another process holds the lock.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as cause:
        raise unusable(run.path, cause) from cause
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not try_lock(fd, is_shared=is_shared):
        holder = read_holder(fd)
        # The launcher was killed and its children are about to end: wait for them.
        if holder and not _is_alive(holder) and time.monotonic() < deadline:
            time.sleep(0.05)
            continue
        os.close(fd)
        part = "" if path == run.lock else f" as its {path.name.split('.')[1]}"
        raise ConfigError(
            f"run {run.path.name!r} in {run} is in use{part} by process {holder or 'unknown'}. Wait for it, "
            f"stop it (kill {holder or '<pid>'}), or give this run another name with --run.name."
        )
    write_holder(fd)
    return fd


def _is_alive(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def _empty(run: RunDir) -> None:
    """Delete everything but the lock that is held, the secret, which others may have read, and a job's own files.

    What a Python call gave stays too: the configuration that was read names it.
    The configs, which mark a run directory, are deleted last: an interrupted deletion can then be repeated.
    """
    kept = [run.lock, run.secret, run.configs, run.given]
    if JOB_VAR in os.environ:
        kept += [run.launch, run.slurm, run.ray]
    _delete_linked(run)
    rest = [entry for entry in run.path.iterdir() if entry not in kept]
    _delete([*rest, run.configs])


def _delete(entries: Iterable[Path]) -> None:
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _is_run(run: RunDir) -> bool:
    contents = set(_contents(run.path))
    is_just_created = bool(contents) and contents <= {
        path.name for path in (run.lock, run.secret, run.launch, run.slurm, run.ray, run.given)
    }
    is_just_created |= run.lock.name in contents and contents <= _HARMLESS  # claimed, with its logs
    return run.configs.is_dir() or run.ledger.exists() or is_just_created


def _contents(path: Path) -> list[str]:
    try:
        is_file = path.exists() and not path.is_dir()
    except OSError as cause:
        raise unusable(path, cause) from cause
    if is_file:
        raise ConfigError(f"{path} is a file, not a run directory; give another run.name or output_dir.")
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    except OSError as cause:
        raise unusable(path, cause) from cause


def _runs_in(output_dir: Path) -> list[str]:
    found = (RunDir(path) for path in output_dir.iterdir() if path.is_dir())
    return sorted(run.path.name for run in found if _is_run(run) and is_used(run))[:8]


def _listing(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
