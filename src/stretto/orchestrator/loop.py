"""The run: draw -> play -> assign advantages -> pack -> ship -> load new versions.

Four loops share one event loop and the buffer; groups/buffer.py says which of them unblocks which:

    draw_groups             waits for a slot, draws a task, plays its group and assigns advantages (groups/pipeline.py)
    ship_batches            waits for the groups of the next batch, packs them, sends them to the ranks (batch/ship.py)
    handle_trainer_events   handles trained steps, published versions, saved checkpoints, and the trainer's end
    load_versions           loads each published version, evaluates it if an eval is due, frees the slots of its step

Every decision about what is trained is in the ledger before it takes effect. The first failure of any loop ends
the run. main.py builds the loop and shuts it down.
"""

from __future__ import annotations

import asyncio
import logging
import time

from stretto.base.aio import task_group
from stretto.base.errors import ConfigError, DataError, EngineError, EnvError, WireError
from stretto.base.status import DEVICES_FREE, is_supervised, report
from stretto.config.sections.orchestrator import AdaptiveConcurrency
from stretto.orchestrator import telemetry
from stretto.orchestrator.batch.ship import BatchShipper
from stretto.orchestrator.concurrency import AdaptiveLimit, EngineLoad
from stretto.orchestrator.diagnosis import Diagnosis
from stretto.orchestrator.eval.results import format_table, mean_over_envs
from stretto.orchestrator.groups.pipeline import GroupPipeline
from stretto.orchestrator.run import RunParts
from stretto.orchestrator.state import checkpoint
from stretto.orchestrator.state.checkpoint import Progress
from stretto.records.control import (
    Bye,
    CheckpointBegun,
    CheckpointComplete,
    CheckpointSaved,
    Failed,
    StepDone,
    Stop,
    VersionLoaded,
    VersionReady,
)

logger = logging.getLogger(__name__)


class Loop:
    """Runs one incarnation of a run until its last step is trained or `stop` is called."""

    def __init__(self, run: RunParts) -> None:
        self.parts, self.cfg, self.buffer, self.progress = run, run.cfg, run.buffer, run.progress
        self.start = run.progress.step
        self._started_at = self._step_done_at = time.perf_counter()
        self._earlier_s = (run.progress.train_s, run.progress.wall_s)  # of earlier incarnations
        self._first_draw_at: float | None = None
        self._begun_checkpoints: dict[int, Progress] = {}  # that the trainer is writing, by step
        self._is_stopping = asyncio.Event()
        self._has_first_version = asyncio.Event()
        self._has_last_version = asyncio.Event()
        self._step_trained = asyncio.Condition()
        self._announced_version = self.start - 1  # the newest one that the trainer knows to be loaded
        self._version_announced = asyncio.Condition()
        self._is_trainer_gone = False
        self._interrupting: asyncio.Task | None = None
        self._max_inflight: int | None = None  # rollouts; None if concurrency is not adaptive
        self._pipeline = GroupPipeline(run)
        self._shipper = BatchShipper(run, self._pipeline.pop_filter_flags)
        self._diagnosis = Diagnosis(run.cfg.train.sampling.max_completion_tokens)

    async def run(self) -> Progress:
        """Train until the last step, or until `stop`.

        Raises: StrettoError, whose class says who must act.
        """
        if not await self._wait_for_peers():
            return self.progress
        async with task_group() as tasks:
            trainer_events = tasks.create_task(self.handle_trainer_events(), name="handle_trainer_events")
            loading = tasks.create_task(self.load_versions(), name="load_versions")
            drawing = tasks.create_task(self.draw_groups(tasks), name="draw_groups")
            watching = tasks.create_task(self.parts.engines.watch(), name="watch_engines")
            adapting = tasks.create_task(self.adapt_concurrency(), name="adapt_concurrency")
            await self._shipper.ship_batches()
            await self._wait_for_last_step(loading)
            await trainer_events
            if self._interrupting is not None:
                await self._interrupting
            self.buffer.close()  # batches counted in tokens leave groups over, which nobody trains
            loading.cancel()
            drawing.cancel()
            watching.cancel()
            adapting.cancel()
        self.progress.wall_s = self._earlier_s[1] + time.perf_counter() - self._started_at
        return self.progress

    def stop(self) -> None:
        """Stop in order: draw no more, train what was shipped, then have the trainer save and end."""
        self._is_stopping.set()
        if not self.cfg.partial_rollout or self.parts.rollout_function is not None:
            self.buffer.close()
        elif self._interrupting is None:
            self.buffer.end_admission()
            self._interrupting = asyncio.create_task(self._interrupt(), name="interrupt_rollouts")

    async def _interrupt(self) -> None:
        """Interrupt running rollouts after their sampled turns are saved."""
        try:
            await self._pipeline.interruption.interrupt(self.parts.engines.abort)
        finally:
            self.buffer.close()

    @property
    def verdict(self) -> str | None:
        """Whether this part of the run learned, in a line."""
        return self._diagnosis.verdict()

    @property
    def was_stopped(self) -> bool:
        return self._is_stopping.is_set()

    # -- waiting for engines and trainer --

    async def _wait_for_peers(self) -> bool:
        """Wait for engines and trainer; False if the run was stopped first.

        Under a launcher it waits in any case: the launcher ends the others too.
        """
        connecting = asyncio.create_task(self._connect(), name="connect")
        if is_supervised():
            await connecting
            return True
        stopping = asyncio.create_task(self._is_stopping.wait(), name="wait_for_stop")
        try:
            await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                await connecting
                return True
            logger.info("stopped before engines and trainer were ready")
            return False
        finally:
            for task in (connecting, stopping):
                task.cancel()
            await asyncio.gather(connecting, stopping, return_exceptions=True)

    async def _connect(self) -> None:
        """Wait until engines are healthy and all ranks are registered.

        Raises: WireError for a rank that continues from another step than the orchestrator.
        """
        report("phase", text="waiting for the engine and the trainer", is_early=True)
        turns = self.parts.versions.turns
        if turns.are_taken:
            await self.parts.engines.wait_ready(self.cfg.client.ready_timeout_s)
            await turns.begin()
            report(DEVICES_FREE, is_early=True)
        async with task_group() as tasks:
            if not turns.are_taken:
                tasks.create_task(self.parts.engines.wait_ready(self.cfg.client.ready_timeout_s))
            tasks.create_task(self.parts.teachers.wait_ready())
            registering = tasks.create_task(self.parts.control.wait_registered())
        for register in registering.result():
            resumed = register.resumed_step or 0
            if resumed != self.start or register.version != self.start:
                raise WireError(
                    f"rank {register.rank} continues after step {resumed} with version {register.version}, "
                    f"the orchestrator after step {self.start}; start both with the same --resume."
                )
        self.parts.watch.progress("engines and trainer are ready")
        report("phase", text="waiting for the first weights", is_early=True)

    async def adapt_concurrency(self) -> None:
        """Adjust the limit on running groups to the engines' load, if concurrency is adaptive."""
        cfg = self.cfg.concurrency
        if not isinstance(cfg, AdaptiveConcurrency):
            return
        group_size = self.cfg.group_size
        upper_bound = self.cfg.max_inflight_rollouts or self.buffer.bounds.num_slots * group_size
        adaptive = AdaptiveLimit(cfg, upper_bound)
        while True:
            self.buffer.limit_running(max(adaptive.limit // group_size, 1))
            self._max_inflight = adaptive.limit
            await asyncio.sleep(cfg.interval_s)
            metrics = await telemetry.engine_metrics(self.parts.engines)
            load = EngineLoad.of(metrics, self.parts.engines.num_ready)
            if load is not None:
                adaptive.update(load, self.buffer.num_running * group_size, time.monotonic())

    async def draw_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Draw and play groups once the first version is loaded (groups/pipeline.py)."""
        await self._has_first_version.wait()
        report("phase", text="playing the first rollouts")
        self._first_draw_at = self._step_done_at = time.perf_counter()
        self._shipper.idle_s = self.buffer.idle_s
        await self._pipeline.run(tasks, self.start)

    # -- versions and the trainer --

    async def load_versions(self) -> None:
        """Load each version as it is published, evaluate it if due, and free slots.

        A slot becomes free only when every engine has loaded the weights it was trained into.
        """
        while True:
            version = await self.parts.versions.load_next()
            self.parts.watch.progress(f"version {version} loaded")
            sending = asyncio.create_task(self._announce_loaded(version))
            is_due = self._should_evaluate(version)
            self.parts.curriculum.advance(version)
            if is_due and self.cfg.max_async_level == 0:  # synchronous: an eval runs alone
                await self.evaluate(version)
            self.buffer.on_loaded(version)
            self._has_first_version.set()
            await sending
            if is_due and self.cfg.max_async_level > 0:
                await self.evaluate(version)
            if version == self.cfg.max_steps:
                self._has_last_version.set()

    async def _announce_loaded(self, version: int) -> None:
        wants_canary = self.parts.versions.wants_canary
        await self.parts.control.send(VersionLoaded(version=version, wants_canary=wants_canary))
        async with self._version_announced:
            self._announced_version = version
            self._version_announced.notify_all()

    def _should_evaluate(self, version: int) -> bool:
        if self.was_stopped or version in self.progress.sampled:
            return False
        return self.cfg.eval is not None and self.cfg.eval.is_due(version, end=self.cfg.max_steps)

    async def evaluate(self, version: int) -> None:
        """Evaluate the loaded version on held-out tasks; the next version waits for it."""
        assert self.parts.evaluator is not None, "an eval is due and there is no evaluator"
        report("phase", text=f"evaluating version {version}")
        try:
            scores = await self.parts.evaluator.evaluate(version, end=self.cfg.max_steps)
            own, is_instead = await self._user_eval_metrics(version)
        except (EnvError, ConfigError, DataError) as error:  # an eval is lost, not the run
            logger.error("no eval of version %d: %s", version, error)
            self.parts.ledger.event("eval_lost", {"version": version, "error": str(error)})
            report("note", text=f"no eval of version {version}: {error}")
            return
        self.progress.sampled[version] = mean_over_envs(scores, "sampled")
        if (greedy := mean_over_envs(scores, "greedy")) is not None:
            self.progress.greedy[version] = greedy
        row = own if is_instead else self.parts.evaluator.user_metrics | telemetry.eval_row(scores) | own
        self.parts.ledger.event("eval", {"version": version, **row})
        self.parts.monitors.log(version, row)
        self.parts.monitors.log_table(version, "eval/samples", self.parts.evaluator.examples)
        telemetry.report_eval(version, scores)
        logger.info("eval of version %d:\n%s", version, format_table(scores))
        self.parts.watch.progress(f"version {version} evaluated")

    async def _user_eval_metrics(self, version: int) -> tuple[dict[str, float], bool]:
        """What the user's log function says of the eval that was just made.

        Raises: EnvError if it raises.
        """
        evaluator, hooks = self.parts.evaluator, self.parts.hooks
        assert evaluator is not None
        played, evaluator.played = evaluator.played, {}
        return ({}, False) if hooks is None else await hooks.log_eval(version, played)

    async def handle_trainer_events(self) -> None:
        """Handle the messages of all ranks until each has sent Bye."""
        ranks = set(range(self.cfg.num_train_workers))
        while ranks:
            event = await self.parts.control.next_event()
            match event.message:
                case VersionReady(manifest=manifest):
                    self.parts.versions.on_published(manifest)
                case StepDone() as done:
                    await self._on_step_done(done)
                case CheckpointBegun(step=step):
                    self._begin_checkpoint(step)
                case CheckpointSaved(step=step):
                    await self._complete_checkpoint(step)
                case Failed(reason=reason):
                    raise EngineError(f"trainer rank {event.rank} failed: {reason}")
                case Bye():
                    ranks.discard(event.rank)
                case other:
                    raise WireError(
                        f"trainer rank {event.rank} sent {type(other).__name__}, which only the orchestrator sends"
                    )
        async with self._step_trained:
            self._is_trainer_gone = True
            self._step_trained.notify_all()
        if not self._is_complete():
            raise EngineError(
                f"the trainer ended after step {self.progress.step}, before the run did; see its log"
            )

    async def _on_step_done(self, done: StepDone) -> None:
        if done.step != self.progress.step + 1 or done.step not in self._shipper.rows:
            raise WireError(f"the trainer finished step {done.step} after step {self.progress.step}")
        self.parts.ledger.step_trained(done.step, done.metrics)
        row = self._shipper.rows.pop(done.step)
        self._count_step(done, row)
        metrics, waits = self._step_metrics(done, row)
        self.parts.monitors.log(done.step, metrics)
        if row.samples:
            self.parts.monitors.log_table(done.step, "train/samples", row.samples)
        if row.distributions:
            self.parts.monitors.log_histograms(done.step, row.distributions)
        telemetry.report_step(done.step, self.cfg.max_steps, metrics, waits)
        for text in self._diagnosis.add(metrics):
            logger.warning(text)
        self.parts.watch.progress(f"step {done.step} trained")
        async with self._step_trained:
            self._step_trained.notify_all()

    def _count_step(self, done: StepDone, row: telemetry.StepRow) -> None:
        progress, now = self.progress, time.perf_counter()
        progress.step = done.step
        progress.num_rollouts += row.num_rollouts
        progress.num_tokens += row.num_tokens
        progress.train_s = self._earlier_s[0] + now - self._first_draw_at
        progress.wall_s = self._earlier_s[1] + now - self._started_at
        mismatch = done.metrics.get("mismatch_kl/mean")
        if mismatch is not None:
            progress.mismatch_kl_max = max(mismatch, progress.mismatch_kl_max or mismatch)

    def _step_metrics(
        self, done: StepDone, row: telemetry.StepRow
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The step's row of metrics, and the share of the step that each process waited."""
        now = time.perf_counter()
        step_s, self._step_done_at = now - self._step_done_at, now
        metrics = row.metrics | {
            "time/step": step_s,
            "time/wait_for_trainer": row.idle_s,
            "time/wait_for_rollouts": done.wait_s,
            "time/update_weights": self.parts.versions.load_s,
            "canary/error": self.parts.versions.canary_error,
            **({} if self._max_inflight is None else {"concurrency/limit": float(self._max_inflight)}),
            # Ends of two steps may be heard at once: then the trainer knows how long the second one took.
            "tokens_per_s": row.num_tokens / max(step_s, done.time_s),
            "trainer/step_s": done.time_s,
            "trainer/wait_s": done.wait_s,
            **self.parts.curriculum.gauges(),
            **self.parts.baselines.gauges(),
            "progress/rollouts": float(self.progress.num_rollouts),
            "progress/tokens": float(self.progress.num_tokens),
        }
        waits = {
            "engine": min(row.idle_s / step_s, 1.0),
            "trainer": min(done.wait_s / max(done.time_s, 1e-9), 1.0),
        }
        return telemetry.merge_metrics(metrics, done.metrics), waits

    def _begin_checkpoint(self, step: int) -> None:
        """Remember the state at `step`; it is written once the trainer has saved its half."""
        if step != self.progress.step:
            raise WireError(f"the trainer began a checkpoint of step {step} after step {self.progress.step}")
        self.progress.curriculum = self.parts.curriculum.state_at(step)
        self.progress.baselines = self.parts.baselines.state_at(step)
        self.progress.next_draw, self.progress.open_draws = (
            self.parts.ledger.next_draw(),
            self.parts.ledger.open_draws(),
        )
        self._begun_checkpoints[step] = checkpoint.snapshot(self.progress)

    async def _complete_checkpoint(self, step: int) -> None:
        """Write our half and the marker: the trainer's half is on disk."""
        if step not in self._begun_checkpoints:
            raise WireError(f"the trainer saved a checkpoint of step {step} that it had not begun")
        await self.parts.ledger.flush()  # a checkpoint needs the rows of all that was trained up to it
        # The ledger deletes payloads that no checkpoint needs, so it records a checkpoint only once complete.
        await asyncio.to_thread(checkpoint.save, self.parts.run_dir, self._begun_checkpoints.pop(step))
        self.parts.ledger.checkpoint_saved(step)
        await self.parts.control.send(CheckpointComplete(step=step))
        logger.info("checkpoint step=%d complete", step)

    # -- the end --

    def _is_complete(self) -> bool:
        return self.was_stopped or self.progress.step == self.cfg.max_steps

    async def _wait_for_last_step(self, loading: asyncio.Task[None]) -> None:
        """Wait until all shipped batches are trained.

        Then wait for the last version's eval, or tell the trainer to stop if the run was stopped.
        """
        turns = self.parts.versions.turns
        shipped = self.buffer.next_step - 1
        async with self._step_trained:
            await self._step_trained.wait_for(lambda: self.progress.step >= shipped or self._is_trainer_gone)
        if not self.was_stopped:
            await self._has_last_version.wait()
        elif self.progress.step != self.cfg.max_steps:
            report("phase", text=f"stopping after step {self.progress.step}")
            if turns.are_taken and not self._is_trainer_gone:
                async with self._version_announced:
                    await self._version_announced.wait_for(
                        lambda: self._announced_version == self.progress.step
                    )
                loading.cancel()  # an eval must not be asked of engines that sleep
                await turns.end_rollouts()  # the trainer takes its memory to save
            await self.parts.control.send(Stop(reason="interrupted", save=self.progress.step > self.start))
