"""The learner's part of a checkpoint: RUN/checkpoints/step_N/trainer, complete or absent.

A critic on ranks of its own writes a part in the same way, `critic` beside `trainer`.

    save: wait for the previous checkpoint -> copy this rank's slices to CPU memory -> training continues
    in a thread: write them (state/slice_files.py) -> all ranks have written -> the lead renames the directory

Files are written into a directory of another name, flushed to the disk, then the directory is renamed. The COMPLETE
marker beside it is written by the orchestrator in `rl` and by the trainer in `sft`; a checkpoint without it does not
count. File sizes are recorded, so that a file that was truncated later is reported by name instead of being read. Any
number of ranks and any mesh can continue from it. The first step does not wait for the import of slice_files.py, which
takes most of a second.
"""

from __future__ import annotations

import json
import logging
import mmap
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.base.files import flush_parents, put_in_place
from stretto.base.paths import RunDir
from stretto.base.rundir import recovery_advice
from stretto.base.status import bytes_below, growing
from stretto.check.checkpoint import OWN_KEYS, SCHEMA, VALUES, check_has_optimizer, check_sizes, read_values
from stretto.config.root import SFTConfig, TrainerConfig
from stretto.config.sections.trainer import CkptSection, is_by_time, is_checkpoint_due
from stretto.models.tensor_map import TensorSlice
from stretto.trainer.ranks import exchange
from stretto.trainer.ranks.mesh import Mesh, is_lead_process, new_values_group, num_ranks
from stretto.trainer.state.learner_state import LearnerState, StateSource, TensorInfo

if TYPE_CHECKING:
    from stretto.trainer.state.slice_files import SliceFiles

logger = logging.getLogger(__name__)

_OPTIMIZER_PREFIX = re.compile(r"(critic\.)?optim\.")
"""What names of an optimizer's tensors begin with."""
_ALIGNED = 64
"""Bytes at whose multiples tensors of a copy begin."""

OnWritten = Callable[[int], None]
"""Called with the step of a directory that is complete."""
Part = Literal["trainer", "critic"]
"""Whose directory it is; only a critic on ranks of its own has one."""


class Checkpointed(Protocol):
    """What a checkpoint saves: a learner, or a critic on ranks of its own."""

    step: int

    def check_finite(self) -> None:
        """Raises: EngineError when a weight is not finite."""

    def state(self) -> LearnerState:
        """This rank's slices, and plain values."""

    def load_state(self, source: StateSource) -> None:
        """Load what `state` returned."""

    def begin_anew(self) -> None:
        """Count steps from 0."""

    def begin_schedule(self) -> None:
        """Let warm-up and decay of the learning rate begin after this step."""


class Saver:
    """Writes checkpoints of a run, one at a time; all ranks have one and call it alike.

    With is_async, `save` copies the state to CPU memory and a thread writes the copy. A copy of what is on a GPU is
    kept for the next checkpoint, because it is pinned; that of a trainer on CPUs, three times the weights with AdamW,
    goes back to the system once it is written. Without is_async, `save` returns when everything is written, and there
    is no copy.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        is_async: bool,
        on_written: OnWritten,
        part: Part = "trainer",
        skip_optimizer: bool = False,
    ) -> None:
        """on_written: called on the lead when a step is written; in another thread if is_async.

        part: the name of the directory within the checkpoint. skip_optimizer: leave the optimizer's state out.
        """
        self._run, self._is_async, self._on_written, self._part = run, is_async, on_written, part
        self._has_optimizer = not skip_optimizer
        # A group of its own, because training uses the others at the same time.
        self._group = new_values_group()
        self._buffers: dict[str, Tensor] = {}  # pinned
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.copy_s = 0.0
        """For how long the last `save` kept training waiting."""

    def save(self, learner: Checkpointed, cursor: dict[str, Any] | None = None) -> None:
        """Write the learner's state after `learner.step`.

        cursor: the caller's position in its data.

        Raises: EngineError when the weights are not finite; then nothing is written or deleted.
        """
        self.wait()
        learner.check_finite()
        start, step, state = time.perf_counter(), learner.step, learner.state()
        # A run that resumed from an earlier step overwrites this checkpoint, which is then no longer complete.
        if is_lead_process():
            self._run.complete_marker(step).unlink(missing_ok=True)
            shutil.rmtree(_directory(self._run, step, self._part), ignore_errors=True)
        values, slices = state.values | {"schema": SCHEMA, "cursor": cursor or {}}, state.slices
        if not self._has_optimizer:
            values["optim"] = None
            slices = {name: part for name, part in slices.items() if not _OPTIMIZER_PREFIX.match(name)}
        if not self._is_async:
            self._write(step, slices, values, start)
            return
        memory = _new_memory(part.tensor for part in slices.values() if not part.tensor.is_cuda)
        slices = {name: self._copy_to_host(name, part, memory) for name, part in slices.items()}
        del memory  # the thread's copy alone keeps it
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.copy_s = time.perf_counter() - start
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(step, slices, values, start), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises: the error that stopped the writing; its directory then does not exist.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises: the error that stopped a write since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy_to_host(self, name: str, part: TensorSlice, memory: Iterator[Tensor]) -> TensorSlice:
        source, buffer = part.tensor, self._buffers.get(name)
        if not source.is_cuda:
            buffer = next(memory)
        elif buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self._buffers[name] = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return TensorSlice(buffer.copy_(source, non_blocking=True), part.start, part.shape)

    def _write_in_thread(self, *job: Any) -> None:
        try:
            self._write(*job)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, slices: dict[str, TensorSlice], values: dict[str, Any], start: float) -> None:
        directory = _directory(self._run, step, self._part)
        # The lead sees all files; ranks have about as much each.
        total = num_ranks() * sum(each.tensor.nbytes for each in slices.values())
        shown = growing(f"checkpoint of step {step}, MB", total, lambda: bytes_below(_part_of(directory)))
        try:
            with shown if is_lead_process() else nullcontext():
                write_directory(directory, slices, values, self._group)
        except OSError as error:
            if error.errno and not error.filename:  # a write to an open file names none
                error.filename = str(directory)
            raise
        if not is_lead_process():
            return
        flush_parents(directory, self._run.path.parent)
        logger.info(
            "saved checkpoint step=%d in %.2fs (%.2fs before training went on)",
            step,
            time.perf_counter() - start,
            self.copy_s if self._is_async else time.perf_counter() - start,
        )
        self._on_written(step)


def _new_memory(sources: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors like these in one new mapping, which the system gets back when the last of them is gone.

    glibc would keep the memory of those that the allocator makes (`keep_freed_memory`). Each has a storage of its own
    size: torch's writer copies what is part of a larger one.
    """
    shapes = [(source.shape, source.dtype) for source in sources]
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
    starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
    memory = mmap.mmap(-1, max(starts[-1], 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where the system has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    for start, (shape, dtype) in zip(starts, shapes):
        if count := shape.numel():
            yield torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
        else:
            yield torch.empty(shape, dtype=dtype)


def build_saver(cfg: TrainerConfig | SFTConfig, on_written: OnWritten, *, part: Part = "trainer") -> Saver | None:
    """The saver that [ckpt] asks for; None without it."""
    if (ckpt := cfg.ckpt) is None:
        return None
    options = {"is_async": ckpt.is_async, "skip_optimizer": ckpt.skip_optimizer}
    return Saver(cfg.run_dir, on_written=on_written, part=part, **options)


def write_directory(
    directory: Path, slices: dict[str, TensorSlice], values: dict[str, Any], group: Any = exchange.ALONE
) -> None:
    """Write a state: afterwards all its files are in `directory`, or none.

    group: a gloo group of all ranks, which must all call this.
    """
    is_lead = exchange.find_rank(group) == 0
    part = _part_of(directory)
    if is_lead:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    exchange.gather(None, None, group)  # the directory exists when all are here
    from stretto.trainer.state.slice_files import write_slices

    write_slices(slices, part, group)
    if is_lead:
        finish_directory(part, directory, values)


def finish_directory(part: Path, directory: Path, values: dict[str, Any]) -> None:
    """Put files of slices, which are in `part`, in their place, with the values of the state."""
    files = sorted(path for path in part.iterdir())
    values = values | {"num_bytes": {path.name: path.stat().st_size for path in files}}
    (part / VALUES).write_text(json.dumps(values, indent=2) + "\n")
    put_in_place(part, directory, is_durable=True)


def _part_of(directory: Path) -> Path:
    """Where the files of a directory are until all of them are written."""
    return directory.with_name(f"{directory.name}.part")


class SavedState:
    """The files of directories that `write_directory` wrote, as a StateSource; the first has the values."""

    def __init__(self, *directories: Path, advice: str, skip_optimizer: bool = False) -> None:
        """advice: what the user can do if they are damaged, for error messages.

        skip_optimizer: ignore the optimizer's state; values["optim"] is then None.

        Raises: DataError when one is missing or damaged.
        """
        values = [read_values(directory, advice) for directory in directories]
        self._files = [_open_files(*each, advice) for each in zip(directories, values)]
        self.values, self._has_optimizer = values[0], not skip_optimizer
        if skip_optimizer:
            self.values["optim"] = None

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        tensors = {name: info for files in self._files for name, info in files.tensors.items()}
        return {
            name: info for name, info in tensors.items() if self._has_optimizer or not _OPTIMIZER_PREFIX.match(name)
        }

    def read(self, targets: Mapping[str, TensorSlice]) -> None:
        for files in self._files:
            files.read({name: target for name, target in targets.items() if name in files.tensors})


def _open_files(directory: Path, values: dict[str, Any], advice: str) -> SliceFiles:
    """The files of one part, all of which have the size that was recorded."""
    check_sizes(directory, values, advice)
    from stretto.trainer.state.slice_files import SliceFiles

    try:
        return SliceFiles(directory)
    except DataError as cause:
        raise DataError(f"{cause}; {advice}") from cause


def load(run: RunDir, learner: Checkpointed, step: int, *, skip_optimizer: bool = False) -> dict[str, Any]:
    """Load the learner's state after `step`; the cursor. Every rank reads its slices only.

    skip_optimizer: begin with a new optimizer.

    Raises: DataError when the checkpoint is missing, damaged, or of another model.
    """
    parts = [_directory(run, step, part) for part in ("trainer", "critic")]
    directories = [parts[0], *filter(Path.is_dir, parts[1:])]
    source = SavedState(*directories, advice=recovery_advice(run, step), skip_optimizer=skip_optimizer)
    if not skip_optimizer:
        check_has_optimizer(source.values, parts[0])
    from stretto.trainer.state.slice_files import DamagedError

    try:
        learner.load_state(source)
    except DamagedError as cause:
        raise DataError(f"{cause}; {recovery_advice(run, step)}") from cause
    except DataError as cause:
        raise DataError(f"{parts[0]}: {cause}; {OWN_KEYS}") from cause
    return source.values["cursor"]


def resume(cfg: TrainerConfig | SFTConfig, learner: Checkpointed, run: RunDir, step: int) -> int | None:
    """Load the checkpoint of a step, this run's or another's, as [resume] and [ckpt] say.

    Returns: the step after which the run goes on; None if it counts its steps from 0.

    Raises: DataError as `load`.
    """
    ckpt = cfg.ckpt or CkptSection()
    load(run, learner, step, skip_optimizer=ckpt.skip_optimizer)
    if cfg.resume is not None and cfg.resume.skip_progress:
        learner.begin_anew()
        logger.info("begins with what was learned up to step %d of %s", step, run)
        return None
    if ckpt.skip_scheduler:
        learner.begin_schedule()
    logger.info("resumed from step %d%s", step, "" if run == cfg.run_dir else f" of {run}")
    return step


def read_cursor(run: RunDir, step: int) -> dict[str, Any]:
    """The cursor that `save` was given.

    Raises: DataError when it cannot be read.
    """
    return read_values(_directory(run, step, "trainer"), recovery_advice(run, step))["cursor"]


def is_interval_end(step: int, interval: int | None) -> bool:
    """True if an interval ends with this step; None: the interval ends with the run."""
    return interval is not None and step % interval == 0


class Due:
    """Whether a checkpoint is due: after a number of steps, or after minutes by the clock of the lead."""

    def __init__(self, ckpt: CkptSection | None, mesh: Mesh) -> None:
        self._ckpt, self._mesh = ckpt, mesh
        self._last_s = time.monotonic()

    def __call__(self, step: int) -> bool:
        """True if one is due after this step; all ranks must call it."""
        if self._ckpt is None:
            return False
        now = time.monotonic()
        is_due = is_checkpoint_due(self._ckpt, step, now - self._last_s)
        if is_by_time(self._ckpt):
            is_due = self._mesh.broadcast(is_due, bool)
        self._last_s = now if is_due else self._last_s
        return is_due


def _directory(run: RunDir, step: int, part: Part) -> Path:
    return run.checkpoint(step) / part
