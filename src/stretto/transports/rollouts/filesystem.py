"""Batches as files RUN/rollouts/step_N/rank_K.bin, for machines that share a file system but no network port.

Three small files per rank, each replaced atomically, take the place of a socket: `rank_K.hello` (the session of the
running rank), `rank_K.next` (the step to read, for that session), `rank_K.ack` (a copy of the offer that was read).
Both ends poll a known file name, with a pause that grows from 1 to 100 ms; directories are never listed. The sessions
distinguish current files from those of an earlier incarnation of the run.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from pathlib import Path

import msgspec

from stretto.base.errors import DataError, EngineError, WireError
from stretto.base.files import write_atomic
from stretto.base.paths import RunDir
from stretto.config.sections.transport import FilesystemRollouts
from stretto.records.codec import decode_blob, encode_blob
from stretto.records.sample import TrainBatch
from stretto.transports.rollouts.delivery import StepGate, check_batches

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.1


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A batch is ready to be read; an acknowledgement repeats the offer."""

    sender: str
    receiver: str
    step: int


class FilesystemSender:
    """The orchestrator's end."""

    def __init__(self, cfg: FilesystemRollouts, run_dir: RunDir, world_size: int) -> None:
        self._cfg = cfg
        self._run_dir = run_dir
        self._world_size = world_size
        self._session = secrets.token_hex(8)
        self._steps: list[int] = []

    async def open(self) -> None:
        """Remove the files of an earlier incarnation of the run."""
        self._run_dir.rollouts.mkdir(parents=True, exist_ok=True)
        for rank in range(self._world_size):
            for kind in ("next", "ack"):
                _path(self._run_dir, rank, kind).unlink(missing_ok=True)
        for directory in self._run_dir.rollouts.glob("step_*"):
            shutil.rmtree(directory, ignore_errors=True)

    async def send(self, batches: list[TrainBatch]) -> None:
        step = check_batches(batches, self._world_size)
        try:
            for batch in batches:
                path = self._run_dir.rollout(step, batch.rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, encode_blob(batch))
        except OSError as cause:
            raise EngineError(f"cannot write the batch of step {step}: {cause}; free some space.") from cause
        if step not in self._steps:
            self._steps.append(step)
        deadline = time.monotonic() + self._cfg.timeout_s
        waits = (self._offer(rank, step, deadline) for rank in range(self._world_size))
        late = ", ".join(who for who in await asyncio.gather(*waits) if who)
        if late:
            raise EngineError(f"the batch of step {step} was not received in {self._cfg.timeout_s:g} s by {late}.")
        while len(self._steps) > self._cfg.keep_steps:
            shutil.rmtree(self._run_dir.rollout(self._steps.pop(0), 0).parent, ignore_errors=True)

    async def close(self) -> None:
        return None

    async def _offer(self, rank: int, step: int, deadline: float) -> str | None:
        """Offer a rank its batch until it acknowledges; returns its name if it does not in time."""
        receiver, pause = "", FIRST_PAUSE_S
        while True:
            current = _read(_path(self._run_dir, rank, "hello"))
            if current and current.decode() != receiver:
                receiver = current.decode()
                offer = msgspec.msgpack.encode(Offer(sender=self._session, receiver=receiver, step=step))
                write_atomic(_path(self._run_dir, rank, "next"), offer)
            if receiver and _read(_path(self._run_dir, rank, "ack")) == offer:
                return None
            if time.monotonic() > deadline:
                return f"trainer rank {rank}" + ("" if receiver else " (it never started)")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LAST_PAUSE_S)


class FilesystemReceiver:
    """The end of one rank; `receive` reads and acknowledges batches in the caller's thread."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._gate = StepGate(rank)
        self._session = secrets.token_hex(8)
        self._last_offer = b""
        run_dir.rollouts.mkdir(parents=True, exist_ok=True)
        write_atomic(_path(run_dir, rank, "hello"), self._session.encode())

    def receive(self, timeout_s: float) -> TrainBatch | None:
        deadline, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while True:
            if (batch := self._read_offer()) is not None:
                return batch
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LAST_PAUSE_S)

    def close(self) -> None:
        return None

    def _read_offer(self) -> TrainBatch | None:
        """The offered batch, None if there is none or it was delivered before."""
        path = _path(self._run_dir, self._rank, "next")
        raw = _read(path)
        if raw is None or raw == self._last_offer:
            return None
        try:
            offer = msgspec.msgpack.decode(raw, type=Offer)
        except msgspec.MsgspecError as cause:
            raise WireError(f"{path} does not contain an offer of a batch: {cause}") from cause
        if offer.receiver != self._session:
            return None
        batch = self._load(offer.step)
        is_new = self._gate.admits(batch)
        write_atomic(_path(self._run_dir, self._rank, "ack"), raw)
        self._last_offer = raw
        return batch if is_new else None

    def _load(self, step: int) -> TrainBatch:
        path = self._run_dir.rollout(step, self._rank)
        try:
            batch = decode_blob(path.read_bytes(), TrainBatch, where=str(path))
        except (OSError, DataError) as cause:
            raise WireError(f"cannot read the batch of step {step}: {cause}") from cause
        if batch.step != step:
            raise WireError(f"{path} holds step {batch.step}, but step {step} was offered.")
        return batch


def _path(run_dir: RunDir, rank: int, kind: str) -> Path:
    return run_dir.rollouts / f"rank_{rank}.{kind}"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
