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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from types import FrameType

from stretto.base import log, rundir
from stretto.base.errors import ConfigError, EngineError, WireError
from stretto.base.files import write_atomic
from stretto.base.secret import load_secret
from stretto.base.status import is_supervised, report, stop_signals
from stretto.config.root import TrainerConfig
from stretto.config.sections.trainer import CkptSection, num_kept
from stretto.monitors import build_monitors
from stretto.records.codec import encode
from stretto.records.control import (
    Bye,
    CheckpointBegun,
    CheckpointComplete,
    CheckpointSaved,
    Failed,
    Register,
    StepDone,
    Stop,
    VersionLoaded,
    VersionReady,
)
from stretto.records.sample import MicroBatch, TrainBatch
from stretto.records.tenants import TenantWork
from stretto.records.token_counts import counts_of_step
from stretto.records.weights import WeightManifest
from stretto.service.runs.client import find_token, spec_of
from stretto.transports.control import ControlClient
from stretto.transports.rollouts import build_receiver
from stretto.transports.service import CreateRun, ServiceRun, encode_work

logger = logging.getLogger(__name__)

ROLE = "trainer"
TRANSPORT = "service"
STATE = "service.json"
"""File in the trainer's part of a checkpoint: where its state lies."""
POLL_S = 0.1
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
        self.control = ControlClient(cfg.control, cfg.run_name, load_secret(self.run_dir))
        stack.callback(self.control.close)
        self.step, self.num_tokens = 0, 0
        self.resumed_step: int | None = None
        self.stop: Stop | None = None
        self.loaded_version = -1
        self.saved_at = time.monotonic()

    def run(self) -> None:
        """Train every step, then end the run; an error is reported to the orchestrator first."""
        self.open_run()
        self.saved_step = self.complete_step = self.step
        self.register()
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
            self.report_failure(error)
            raise
        self.control.send(Bye())
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
        self.handle_messages()
        self.runner.run(self.remote.publish(self.step))
        manifest = WeightManifest(
            version=self.step, transport=TRANSPORT, location=self.remote.id, shards=(), tensors=(), checksum=0
        )
        self.control.post(VersionReady(manifest=manifest))

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
        start, step = time.perf_counter(), self.step + 1
        while not self.should_stop():
            if (batch := self.receiver.try_receive(POLL_S)) is not None:
                self.wait_s = time.perf_counter() - start
                if (batch.step, batch.rank, batch.world_size) != (step, 0, 1):
                    raise WireError(
                        f"got the batch of step {batch.step} for rank {batch.rank} of {batch.world_size}; expected "
                        f"step {step} for the only rank"
                    )
                return batch
            if time.perf_counter() - start > self.cfg.batch_timeout_s:
                raise EngineError(
                    f"the orchestrator sent no batch for step {step} within batch_timeout_s = "
                    f"{self.cfg.batch_timeout_s:g}; see its log for what it waits for"
                )
        return None

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
        self.control.post(done)
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
        self.control.send(CheckpointBegun(step=step))
        answer = self.runner.run(self.remote.save(state_name(step), {"step": step}))
        place = {"url": self.section.url, "run": self.remote.id, "path": answer["path"], "step": step}
        path = self.run_dir.checkpoint(step) / ROLE / STATE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(place, indent=2).encode() + b"\n", is_durable=True)
        self.control.send(CheckpointSaved(step=step))
        self.saved_step, self.saved_at = step, time.monotonic()

    def _is_due(self, ckpt: CkptSection) -> bool:
        if ckpt.interval is not None or ckpt.minutes is None:
            return ckpt.interval is not None and self.step % ckpt.interval == 0
        return time.monotonic() - self.saved_at >= 60 * ckpt.minutes

    def prune(self) -> None:
        """Delete checkpoints beyond those that [ckpt] keeps, here and at the service."""
        ckpt, complete = self.cfg.ckpt, self.run_dir.complete_checkpoints()
        kept = None if ckpt is None else num_kept(ckpt)
        for step in [] if kept is None else complete[:-kept]:
            if ckpt is not None and ckpt.keep_interval and step % ckpt.keep_interval == 0:
                continue
            self.run_dir.complete_marker(step).unlink(missing_ok=True)
            shutil.rmtree(self.run_dir.checkpoint(step), ignore_errors=True)
            self.runner.run(self.remote.forget(state_name(step)))

    # -- the orchestrator --

    def register(self) -> None:
        """Register with the orchestrator, and open the connection for batches.

        Raises: ConfigError when the orchestrator continues from another step.
        """
        registered = self.control.register(
            Register(rank=0, world_size=1, resumed_step=self.resumed_step, version=self.step)
        )
        if (registered.resume_step or 0) != self.step:
            raise ConfigError(
                f"the orchestrator continues after step {registered.resume_step or 0}, this process after step "
                f"{self.step}; start both with the same --resume"
            )
        self.receiver = build_receiver(self.cfg.rollout_transport, self.run_dir, 0, self.control.session)
        self.stack.callback(self.receiver.close)

    def handle_messages(self) -> None:
        for message in self.control.poll():
            self.handle_message(message)

    def handle_message(self, message: object) -> None:
        match message:
            case Stop():
                logger.info("the orchestrator asks to stop: %s", message.reason)
                self.stop = message
            case VersionLoaded(version=version):
                self.loaded_version = version
            case CheckpointComplete(step=step):
                self.complete_step = step
                self.prune()
            case _:
                raise WireError(
                    f"the orchestrator sent {type(message).__name__}, which only a trainer may send"
                )

    def should_stop(self) -> bool:
        self.handle_messages()
        return self.stop is not None or self.is_interrupted

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Handle the orchestrator's messages until is_done().

        Raises: EngineError after weight_broadcast.timeout_s, naming `what`.
        """
        timeout_s = self.cfg.weight_broadcast.timeout_s
        deadline = time.monotonic() + timeout_s
        while not is_done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"waited {timeout_s:g} s for {what}; see the orchestrator's log")
            for message in self.control.wait(left):
                self.handle_message(message)

    # -- the end --

    def end_run(self) -> None:
        """Save unless Stop says not to; return once the orchestrator does not need this process."""
        if self.stop is None or self.stop.save:
            self.save_if_due(is_last=True)
        self.wait_until(
            lambda: self.complete_step == self.saved_step,
            f"the orchestrator to complete the checkpoint of step {self.saved_step}",
        )
        self.wait_until(
            lambda: self.loaded_version == self.step, f"the engines to load the last version, {self.step}"
        )

    def report_failure(self, error: Exception) -> None:
        try:
            self.control.send(Failed(reason=f"{type(error).__name__}: {error}"), timeout_s=2.0)
        except (EngineError, WireError) as also:
            logger.debug("could not report the failure to the orchestrator: %s", also)


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
