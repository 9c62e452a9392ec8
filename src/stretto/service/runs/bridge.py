"""The process that stands for the trainer of a run on a training service (`rl --service URL`).

    make the run at the service -> register with the orchestrator, as rank 0 of 1 -> have the first version published
    -> each step: receive the batch, send its micro batches, step, report, publish, save when due
    -> at max_steps, Stop or Ctrl-C: save, wait until the last version is loaded, end the run at the service, send Bye

To the orchestrator it is a trainer (trainer/rl.py): the same messages, transports and files. States lie at the service;
a checkpoint here says where. A run that is resumed is made anew at the service, from the state of that step: names of
versions in engines, and their caches, are then its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from types import FrameType

from stretto.base import log, rundir
from stretto.base.errors import ConfigError
from stretto.base.files import write_atomic
from stretto.base.status import is_supervised, report, stop_signals
from stretto.config.root import TrainerConfig
from stretto.config.sections.trainer import CkptSection, num_kept
from stretto.monitors import build_monitors
from stretto.records.codec import encode
from stretto.records.control import (
    Bye,
    CheckpointBegun,
    CheckpointSaved,
    Register,
    StepDone,
    VersionReady,
)
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.records.tenants import TenantWork
from stretto.records.token_counts import counts_of_step
from stretto.records.weights import WeightManifest
from stretto.service.runs.client import find_token, spec_of
from stretto.transports.orchestrator import Orchestrator
from stretto.transports.service import CreateRun, ServiceRun, encode_work

logger = logging.getLogger(__name__)

ROLE = "trainer"
TRANSPORT = "service"
STATE = "service.json"
"""File in the trainer's part of a checkpoint: where its state lies."""
MONITOR_CLOSE_S = 10.0


def main(cfg: TrainerConfig) -> int:
    """Train until max_steps, a Stop from the orchestrator, or the first Ctrl-C; the exit status."""
    is_new = cfg.resume is None
    claim = rundir.claim_part(cfg.run_dir, ROLE, is_new=is_new, clean=cfg.clean)
    with nullcontext() if is_supervised() else claim, ExitStack() as stack:
        log.setup(ROLE, cfg.run_dir, cfg.log.level, cfg.log.json_logging)
        Bridge(cfg, stack).run()
    return 0


class Bridge:
    """One run between its orchestrator and the service; `stack` closes its connections."""

    def __init__(self, cfg: TrainerConfig, stack: ExitStack) -> None:
        assert cfg.service is not None, "a run on a service"
        self.cfg, self.section, self.run_dir, self.stack = cfg, cfg.service, cfg.run_dir, stack
        self.is_interrupted = False
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        self.runner = stack.enter_context(asyncio.Runner())
        self.remote = ServiceRun(self.section.url, find_token(self.section))
        stack.callback(lambda: self.runner.run(self.remote.close()))
        self.step, self.num_tokens = 0, 0
        self.resumed_step: int | None = None
        self.saved_at = time.monotonic()

    def run(self) -> None:
        """Train every step, then end the run; an error is reported to the orchestrator first."""
        self.open_run()
        self.saved_step = self.step
        self.orchestrator = Orchestrator(
            self.cfg, self.stack, self.step, on_loaded=lambda _: None, on_complete=self.prune
        )
        self.orchestrator.register(
            Register(rank=0, world_size=1, resumed_step=self.resumed_step, version=self.step)
        )
        try:
            monitors = build_monitors(
                self.cfg.monitors, self.run_dir, ROLE, self.cfg.run_name, resumed_step=self.resumed_step
            )
            self.stack.callback(monitors.close, MONITOR_CLOSE_S)
            self.publish()
            report("ready", is_early=True)
            self.step_started_at = time.perf_counter()
            while self.step != self.cfg.max_steps and (batch := self.next_batch()) is not None:
                metrics = self.train(batch)
                self.publish()
                monitors.log(self.step, metrics)
                self.save_if_due()
            self.end_run()
        except Exception as error:
            self.orchestrator.report_failure(error)
            raise
        self.orchestrator.send(Bye())
        self.runner.run(self.remote.end())
        logger.info("done at step %d", self.step)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_interrupted and number != signal.SIGUSR2:
            raise KeyboardInterrupt
        self.is_interrupted = True

    # -- the service --

    def open_run(self) -> None:
        """Make the run at the service; a resumed one gets the state of its checkpoint.

        Raises: EngineError or ConfigError with the service's reason.
        """
        self.runner.run(self._open_run())
        logger.info("run %s at %s, after step %d", self.remote.id, self.section.url, self.step)

    async def _open_run(self) -> None:
        spec = spec_of(self.cfg)
        if self.cfg.resume is not None:
            await self.remote.end_named(spec.name)  # an incarnation that was killed
        await self.remote.create(CreateRun(spec=spec, base_model=self.cfg.model.name))
        if self.cfg.resume is None:
            return
        _, step = rundir.find_checkpoint(self.run_dir, self.cfg.resume.step, None)
        self.resumed_step = self.step = step
        answer = await self.remote.load(state_name(step))
        if (found := answer.get("progress") or {}).get("step", step) != step:
            raise ConfigError(
                f"the service's state {state_name(step)} of this run is of step {found['step']}; another run has taken "
                "its name"
            )

    def publish(self) -> None:
        """Have engines offer the weights as they are now, and tell the orchestrator; the version is the step."""
        self.orchestrator.poll()
        self.runner.run(self.remote.publish(self.step))
        manifest = WeightManifest(
            version=self.step, transport=TRANSPORT, location=self.remote.id, shards=(), tensors=(), checksum=0
        )
        self.orchestrator.post(VersionReady(manifest=manifest))

    async def _train(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        counts = counts_of_step(micro_batches, self.cfg.loss.reduction)
        loss = self.cfg.loss.model_dump(mode="json")
        requests = []
        for part in parts(micro_batches, self.section.max_bytes):
            work = TenantWork(tenant="", micro_batches=part, loss=loss, counts=tuple(counts))
            requests.append(await self.remote.submit("batch", encode_work(work)))
        for request in requests:
            await self.remote.wait(request)
        return dict((await self.remote.step())["metrics"])

    # -- a step --

    def next_batch(self) -> TrainBatch | None:
        """The batch of the next step; None if training should stop.

        Raises: EngineError when none comes in batch_timeout_s, WireError for one of another step.
        """
        start = time.perf_counter()
        batch = self.orchestrator.receive(self.step + 1, self.should_stop)
        self.wait_s = time.perf_counter() - start
        return batch

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step at the service, reported to the orchestrator; its metrics."""
        start = time.perf_counter()
        metrics = self.runner.run(self._train(batch.micro_batches))
        metrics.pop("step", None)
        self.step = batch.step
        now = time.perf_counter()
        num_tokens = sum(mb.num_tokens for mb in batch.micro_batches)
        self.num_tokens += num_tokens
        time_s, self.step_started_at = now - self.step_started_at, now
        metrics |= {
            "batch/tokens": num_tokens,
            "batch/micro_batches": len(batch.micro_batches),
            "progress/total_tokens": self.num_tokens,
            "perf/throughput": num_tokens / time_s,
            "time/step": time_s,
            "time/wait_for_batch": self.wait_s,
            "time/train": now - start,
        }
        done = StepDone(
            step=self.step, metrics=metrics, num_tokens=num_tokens, time_s=time_s, wait_s=self.wait_s
        )
        self.orchestrator.post(done)
        logger.info(
            "step %d loss=%.4f grad_norm=%.3f %.3fs (waited %.3fs)",
            self.step,
            metrics.get("loss/mean", 0.0),
            metrics.get("optim/grad_norm", 0.0),
            time_s,
            self.wait_s,
        )
        return metrics

    def save_if_due(self, *, is_last: bool = False) -> None:
        """Have the service keep the state, if one is due, and enter here where it lies."""
        ckpt, step = self.cfg.ckpt, self.step
        if ckpt is None or step == self.saved_step or not (is_last or self._is_due(ckpt)):
            return
        self.orchestrator.send(CheckpointBegun(step=step))
        answer = self.runner.run(self.remote.save(state_name(step), {"step": step}))
        place = {"url": self.section.url, "run": self.remote.id, "path": answer["path"], "step": step}
        path = self.run_dir.checkpoint(step) / ROLE / STATE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(place, indent=2).encode() + b"\n", is_durable=True)
        self.orchestrator.send(CheckpointSaved(step=step))
        self.saved_step, self.saved_at = step, time.monotonic()

    def _is_due(self, ckpt: CkptSection) -> bool:
        if ckpt.interval is not None or ckpt.minutes is None:
            return ckpt.interval is not None and self.step % ckpt.interval == 0
        return time.monotonic() - self.saved_at >= 60 * ckpt.minutes

    def prune(self, complete_step: int) -> None:
        """Once a checkpoint is complete, delete checkpoints beyond those that [ckpt] keeps, here and at the service."""
        ckpt, complete = self.cfg.ckpt, self.run_dir.complete_checkpoints()
        kept = None if ckpt is None else num_kept(ckpt)
        for step in [] if kept is None else complete[:-kept]:
            if ckpt is not None and ckpt.keep_interval and step % ckpt.keep_interval == 0:
                continue
            self.run_dir.complete_marker(step).unlink(missing_ok=True)
            shutil.rmtree(self.run_dir.checkpoint(step), ignore_errors=True)
            self.runner.run(self.remote.forget(state_name(step)))

    def should_stop(self) -> bool:
        self.orchestrator.poll()
        return self.orchestrator.stop is not None or self.is_interrupted

    # -- the end --

    def end_run(self) -> None:
        """Save unless Stop says not to; return once the orchestrator does not need this process."""
        if (stop := self.orchestrator.stop) is None or stop.save:
            self.save_if_due(is_last=True)
        self.orchestrator.wait_complete(saved_step=self.saved_step, version=self.step)


def state_name(step: int) -> str:
    """What the service calls the state after a step."""
    return f"step_{step}"


def parts(micro_batches: Sequence[MicroBatch], max_bytes: int) -> Iterator[tuple[MicroBatch, ...]]:
    """The micro batches in parts of about so many bytes, each with one at least."""
    part: list[MicroBatch] = []
    size = 0
    for micro_batch in micro_batches:
        own = sum(memoryview(frame).nbytes for frame in encode(micro_batch))
        if part and size + own > max_bytes:
            yield tuple(part)
            part, size = [], 0
        part.append(micro_batch)
        size += own
    if part:
        yield tuple(part)
