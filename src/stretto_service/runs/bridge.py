"""The process that replaces the trainer of a run on a training service (`rl --service URL`).

    create the run at the service -> register with the orchestrator, as rank 0 of 1 -> publish the first version
    -> each step: receive the batch, send its micro batches, step, report, publish, save when due
    -> at max_steps, Stop or Ctrl-C: save, wait until the last version is loaded, end the run at the service, send Bye

To the orchestrator it is a trainer (trainer/rl.py): the same messages, transports and files. The states are at the
service, and a checkpoint here names them. A resumed run is created again at the service, from the state of that step,
so that its versions and their caches in the engines are not mixed with earlier ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
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
from stretto.config.sections.trainer import is_checkpoint_due, num_kept
from stretto.monitors.base import MONITOR_CLOSE_S, build_monitors
from stretto.monitors.steps import StepClock
from stretto.records.codec import encode
from stretto.records.control import Bye, CheckpointBegun, CheckpointSaved, Register, VersionReady
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.records.token_counts import counts_of_step
from stretto.records.weight_manifest import WeightManifest
from stretto.transports.orchestrator import Orchestrator
from stretto_service.runs.client import spec_of
from stretto_service.wires.operations import TenantWork
from stretto_service.wires.service import CreateRun, ServiceRun, encode_work, find_token

logger = logging.getLogger(__name__)

ROLE = "trainer"
TRANSPORT = "service"
STATE = "service.json"
"""File in the trainer's part of a checkpoint, which names the state at the service."""


def main(cfg: TrainerConfig) -> int:
    """Train until max_steps, a Stop from the orchestrator, or the first Ctrl-C; returns the exit status."""
    is_new = cfg.resume is None
    claim = rundir.claim_part(cfg.run_dir, ROLE, is_new=is_new, clean=cfg.clean)
    with nullcontext() if is_supervised() else claim, ExitStack() as stack:
        log.setup(ROLE, cfg.run_dir, cfg.log.level, cfg.log.json_logging)
        Bridge(cfg, stack).run()
    return 0


class Bridge:
    """Passes batches and messages between the orchestrator and the service; `stack` closes the connections."""

    def __init__(self, cfg: TrainerConfig, stack: ExitStack) -> None:
        assert cfg.service is not None, "a run on a service"
        self.cfg, self.section, self.run_dir, self.stack = cfg, cfg.service, cfg.run_dir, stack
        self.is_interrupted = False
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        self.runner = stack.enter_context(asyncio.Runner())
        self.remote = ServiceRun(self.section.url, find_token(self.section))
        stack.callback(lambda: self.runner.run(self.remote.close()))
        self.step = 0
        self.resumed_step: int | None = None
        self.saved_at = time.monotonic()

    def run(self) -> None:
        """Train every step, then end the run; an error is reported to the orchestrator first."""
        self.open_run()
        self.saved_step = self.step
        self.orchestrator = Orchestrator(
            self.cfg, self.stack, self.step, on_loaded=lambda _: None, on_complete=self.prune
        )
        self.orchestrator.register(Register(rank=0, world_size=1, resumed_step=self.resumed_step, version=self.step))
        try:
            monitors = build_monitors(
                self.cfg.monitors,
                self.run_dir,
                ROLE,
                self.cfg.run_name,
                resumed_step=self.resumed_step,
                has_trackers=False,
            )
            self.stack.callback(monitors.close, MONITOR_CLOSE_S)
            self.publish()
            report("ready", is_early=True)
            self.clock = StepClock()
            while self.step != self.cfg.max_steps and (batch := self.next_batch()) is not None:
                metrics = self.train(batch)
                self.publish()
                monitors.log(self.step, metrics)
                self.save_if_due()
            self.end_run()
        except Exception as error:  # the orchestrator learns why, whatever it is
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
        """Create the run at the service; a resumed one gets the state of its checkpoint.

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
        saved_step = (answer.get("progress") or {}).get("step", step)
        if saved_step != step:
            raise ConfigError(
                f"the service's state {state_name(step)} of this run is of step {saved_step}; another run has taken "
                "its name"
            )

    def publish(self) -> None:
        """Publish the current weights at the service and report them; the version is the number of steps done."""
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
            work = TenantWork(tenant="", micro_batches=part, loss=loss, counts=(*counts,))
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
        """Make one optimizer step at the service and report it to the orchestrator; returns its metrics."""
        start = time.perf_counter()
        metrics = self.runner.run(self._train(batch.micro_batches))
        metrics.pop("step", None)
        self.step = batch.step
        metrics |= self.clock.end_step(
            num_tokens=sum(mb.num_tokens for mb in batch.micro_batches),
            num_micro_batches=len(batch.micro_batches),
            wait_s=self.wait_s,
            train_s=time.perf_counter() - start,
        )
        self.orchestrator.report_step(self.step, metrics)
        logger.info(
            "step %d loss=%.4f grad_norm=%.3f %.3fs (waited %.3fs)",
            self.step,
            metrics.get("loss/mean", 0.0),
            metrics.get("optim/grad_norm", 0.0),
            metrics["time/step"],
            self.wait_s,
        )
        return metrics

    def save_if_due(self, *, is_last: bool = False) -> None:
        """Save a state at the service if one is due, and write a checkpoint that names it."""
        ckpt, step = self.cfg.ckpt, self.step
        if ckpt is None or step == self.saved_step:
            return
        if not (is_last or is_checkpoint_due(ckpt, step, time.monotonic() - self.saved_at)):
            return
        self.orchestrator.send(CheckpointBegun(step=step))
        answer = self.runner.run(self.remote.save(state_name(step), {"step": step}))
        place = {"url": self.section.url, "run": self.remote.id, "path": answer["path"], "step": step}
        path = self.run_dir.checkpoint(step) / ROLE / STATE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(place, indent=2).encode() + b"\n", is_durable=True)
        self.orchestrator.send(CheckpointSaved(step=step))
        self.saved_step, self.saved_at = step, time.monotonic()

    def prune(self, complete_step: int) -> None:
        """Once a checkpoint is complete, delete checkpoints beyond those that [ckpt] keeps, here and at the service."""
        if (ckpt := self.cfg.ckpt) is not None:
            for step in rundir.prune_checkpoints(self.run_dir, num_kept(ckpt), ckpt.keep_interval):
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
    """The name at the service of the state after a step."""
    return f"step_{step}"


def parts(micro_batches: Sequence[MicroBatch], max_bytes: int) -> Iterator[tuple[MicroBatch, ...]]:
    """The micro batches in parts of at most max_bytes, or one micro batch."""
    part: list[MicroBatch] = []
    size = 0
    for micro_batch in micro_batches:
        num_bytes = sum(memoryview(frame).nbytes for frame in encode(micro_batch))
        if part and size + num_bytes > max_bytes:
            yield tuple(part)
            part, size = [], 0
        part.append(micro_batch)
        size += num_bytes
    if part:
        yield tuple(part)
