"""The run: draw -> roll out -> score -> pack -> ship -> follow the policy.

Four loops share one event loop and meet in the buffer, whose file says who unblocks whom:

    draw_groups    waits for a slot, draws a task, starts its group, which plays and is scored on its own (draws.py)
    ship_batches   waits for the groups of the next batch, packs them, sends them to the ranks
    hear_trainer   steps done, versions published, checkpoints saved, and the end
    follow_policy  loads each published version, evaluates it if that is due, frees the slots of its step

Everything that decides what is trained is in the ledger before it takes effect. The first failure of any
loop ends the run. Built and ended by main.py.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stretto.algorithms.credit import WHITENED
from stretto.base.aio import in_slices, task_group
from stretto.base.errors import ConfigError, DataError, EngineError, EnvError, StrettoError, WireError
from stretto.base.paths import RunDir
from stretto.base.status import report
from stretto.base.watch import Watch
from stretto.config.concurrency import AdaptiveConcurrency
from stretto.config.orchestrator import OrchestratorSection
from stretto.monitors import Monitors
from stretto.orchestrator import checkpoint, telemetry
from stretto.orchestrator.baselines import Baselines
from stretto.orchestrator.batch_hooks import BatchHooks
from stretto.orchestrator.buffer import Buffer, Counts, Slot
from stretto.orchestrator.checkpoint import Progress
from stretto.orchestrator.concurrency import Aimd, Look
from stretto.orchestrator.curriculum import Curriculum
from stretto.orchestrator.draws import Cursor, Draws, RunLog
from stretto.orchestrator.evaluate import Evaluator
from stretto.orchestrator.filters import mean_reward
from stretto.orchestrator.own_rollouts import OwnRollouts
from stretto.orchestrator.packing import Cost, packing
from stretto.orchestrator.policy import Policy
from stretto.orchestrator.rollout import Player
from stretto.orchestrator.samples import to_samples, whiten_samples
from stretto.orchestrator.scores import overall, table
from stretto.orchestrator.tasks import TaskMix
from stretto.orchestrator.teacher import Tutors
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
from stretto.records.rollout import Group
from stretto.records.sample import TrainBatch, TrainSample
from stretto.transports.control import Event

logger = logging.getLogger(__name__)

WARN_EVERY_STEPS = 20


class Control(Protocol):
    """The orchestrator's end of the control wire (transports/control.py)."""

    async def wait_registered(self, timeout_s: float | None = None) -> list[Register]: ...

    async def next_event(self) -> Event: ...

    async def send(self, message: Any) -> None: ...


class Sender(Protocol):
    """The orchestrator's end of a rollout transport (transports/rollouts)."""

    async def send(self, batches: list[TrainBatch]) -> None: ...


class Engines(Protocol):
    """The engine client (transports/engine/client.py)."""

    async def wait_ready(self, timeout_s: float) -> None: ...

    async def watch(self) -> None: ...

    @property
    def num_ready(self) -> int: ...

    async def metrics(self) -> dict[str, float]: ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> None: ...


@dataclass(eq=False)
class Loop:
    """One life of a run, from step `progress.step` on.

    `run` ends when the last step is trained or on `stop`.
    """

    cfg: OrchestratorSection
    run_dir: RunDir
    mix: TaskMix
    cursor: Cursor
    player: Player
    buffer: Buffer
    policy: Policy
    engines: Engines
    ledger: RunLog
    sender: Sender
    control: Control
    monitors: Monitors
    watch: Watch
    cost: Cost
    progress: Progress
    evaluator: Evaluator | None = None
    curriculum: Curriculum = field(default_factory=Curriculum)
    baselines: Baselines = field(default_factory=Baselines)  # of environments whose credit is rae
    hooks: BatchHooks | None = None  # a user's own functions about groups and batches
    own_rollouts: OwnRollouts | None = None  # ... or one in the place of the environments' rollouts
    tutors: Tutors = field(default_factory=Tutors)  # of environments that are distilled
    vocab_size: int | None = None  # of the tokenizer; what gibberish is measured against

    def __post_init__(self) -> None:
        self.start = self.progress.step
        self._started_at = self._step_done_at = time.perf_counter()
        self._before = (self.progress.train_s, self.progress.wall_s)  # of earlier lives
        self._first_draw_at: float | None = None
        self._rows: dict[int, telemetry.StepRow] = {}
        self._num_lost = 0  # groups in a row, to hooks that raised
        self._next_warning = 0  # step
        self._begun: dict[int, Progress] = {}  # checkpoints the trainer is writing, by step
        self._is_stopping = asyncio.Event()
        self._has_first_version = asyncio.Event()
        self._trained = asyncio.Condition()
        self._is_trainer_gone = False
        self._has_last_version = asyncio.Event()
        self._idle_s = 0.0
        self.max_inflight: int | None = None  # rollouts, where concurrency is adaptive
        self._interrupting: asyncio.Task | None = None
        self._draws = Draws(
            self.cfg,
            self.mix,
            self.cursor,
            self.player,
            self.buffer,
            self.ledger,
            self.watch,
            tutors=self.tutors,
            hooks=self.hooks,
            own=self.own_rollouts,
            vocab_size=self.vocab_size,
        )
        algos = {env.name or env.id: self.cfg.algo_of(env.name or env.id) for env in self.cfg.env}
        self._whitened = [n for n, algo in algos.items() if algo.type in WHITENED and algo.whiten]

    async def run(self) -> Progress:
        """Train until the last step, or until `stop`.

        Raises: StrettoError naming who must act.
        """
        await self._meet()
        async with task_group() as tasks:
            hearing = tasks.create_task(self.hear_trainer(), name="hear_trainer")
            following = tasks.create_task(self.follow_policy(), name="follow_policy")
            drawing = tasks.create_task(self.draw_groups(tasks), name="draw_groups")
            watching = tasks.create_task(self.engines.watch(), name="watch_engines")
            adapting = tasks.create_task(self.follow_engines(), name="follow_engines")
            await self.ship_batches()
            await self._last_step()
            await hearing
            if self._interrupting is not None:
                await self._interrupting
            following.cancel()
            drawing.cancel()
            watching.cancel()
            adapting.cancel()
        self.progress.wall_s = self._before[1] + time.perf_counter() - self._started_at
        return self.progress

    def stop(self) -> None:
        """End in good order: no more draws; what was shipped is trained, then the trainer saves and ends."""
        self._is_stopping.set()
        if not self.cfg.partial_rollout or self.own_rollouts is not None:
            self.buffer.close()
        elif self._interrupting is None:
            self.buffer.end_admission()
            self._interrupting = asyncio.create_task(self._interrupt(), name="interrupt_rollouts")

    async def _interrupt(self) -> None:
        """End what is running, with what it has sampled written down."""
        try:
            await self._draws.interruption.begin(self.engines.abort)
        finally:
            self.buffer.close()

    @property
    def was_stopped(self) -> bool:
        return self._is_stopping.is_set()

    # -- meeting the others --

    async def _meet(self) -> None:
        """Wait until engines are healthy and all ranks are there; they must continue where we do."""
        report("phase", text="waiting for the engine and the trainer")
        async with task_group() as tasks:
            tasks.create_task(self.engines.wait_ready(self.cfg.client.ready_timeout_s))
            tasks.create_task(self.tutors.wait_ready())
            registering = tasks.create_task(self.control.wait_registered())
        for register in registering.result():
            resumed = register.resumed_step or 0
            if resumed != self.start or register.version != self.start:
                raise WireError(
                    f"rank {register.rank} continues after step {resumed} with version {register.version}, "
                    f"the orchestrator after step {self.start}; start both with the same --resume."
                )
        if registering.result()[0].world_size != self.cfg.num_train_workers:
            raise WireError(
                f"the trainer has {registering.result()[0].world_size} ranks and batches are packed for "
                f"num_train_workers = {self.cfg.num_train_workers}; make them equal."
            )
        self.watch.progress("everyone is there")
        report("phase", text="waiting for the first weights")

    async def follow_engines(self) -> None:
        """Let as many rollouts run as the engines take, where concurrency is adaptive."""
        cfg = self.cfg.concurrency
        if not isinstance(cfg, AdaptiveConcurrency):
            return
        each = self.cfg.group_size
        aimd = Aimd(cfg, most=self.cfg.max_inflight_rollouts or self.buffer.bounds.num_slots * each)
        while True:
            self.buffer.limit_running(max(aimd.limit // each, 1))
            self.max_inflight = aimd.limit
            await asyncio.sleep(cfg.interval_s)
            look = Look.of(await self._engine_metrics(), self.engines.num_ready)
            if look is not None:
                aimd.update(look, self.buffer.num_running * each, time.monotonic())

    async def draw_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Draw and play from the first version on (draws.py)."""
        await self._has_first_version.wait()
        self._first_draw_at = self._step_done_at = time.perf_counter()
        self._idle_s = self.buffer.idle_s
        await self._draws.run(tasks, self.start)

    # -- pack and ship --

    async def ship_batches(self) -> None:
        """Send a batch as soon as its groups are there and the bound on staleness allows it."""
        last = self.cfg.max_steps
        while last is None or self.buffer.next_step <= last:
            slots = await self.buffer.next_batch()
            if slots is None:
                return
            try:
                if self.hooks is not None and self.hooks.chooses:
                    finished = {slot.group_id: slot for slot in self.buffer.finished()}
                    groups = [slot.group for slot in finished.values()]
                    chosen = await self.hooks.choose(self.buffer.next_step, groups, len(slots))
                    slots = [finished[group_id] for group_id in sorted(chosen)]
                samples = await self._samples_of(slots)
            except StrettoError as error:
                self._on_failed_batch(slots, error)
                continue
            self._num_lost = 0
            await self.ship(slots, samples)

    async def _samples_of(self, slots: Sequence[Slot]) -> list[TrainSample]:
        """What is trained of these groups.

        Raises: EnvError when a hook does.
        """
        groups = self.baselines.subtract([slot.group for slot in slots])
        samples = await in_slices(_sampling(groups))  # chosen slots wait for nobody but us
        return samples if self.hooks is None else await self.hooks.shape(groups, samples)

    def _on_failed_batch(self, slots: Sequence[Slot], error: StrettoError) -> None:
        """A hook about batches raised: these groups are dropped, and others are drawn.

        Raises: EnvError when too many groups in a row were lost so.
        """
        logger.warning("batch %d: %d groups dropped: %s", self.buffer.next_step, len(slots), error)
        self._num_lost += len(slots)
        if self._num_lost >= self.cfg.max_failed_groups:
            text = f"{self._num_lost} groups in a row were lost to a hook (max_failed_groups); the last error: {error}"
            raise EnvError(text) from error
        for slot in slots:
            self.buffer.drop(slot, "a hook failed")

    async def ship(self, slots: Sequence[Slot], samples: list[TrainSample]) -> None:
        """Samples, rows, ledger, wire: from here on these groups are trained."""
        step = self.buffer.next_step
        started = time.perf_counter()
        if self._whitened:
            samples[:] = whiten_samples(samples, self._whitened)
        batches = await in_slices(
            packing(
                samples,
                step=step,
                seq_len=self.cfg.seq_len,
                world_size=self.cfg.num_train_workers,
                cost=self.cost,
            )
        )
        left_out = self.buffer.left_out(list(slots))
        row = telemetry.batch_row(slots, left_out, self.buffer, self._take_counts())
        row.metrics |= telemetry.filter_row(self.cfg.filters, self._draws.take_flags(), [*slots, *left_out])
        row.metrics |= {} if self.own_rollouts is None else self.own_rollouts.metrics
        self.baselines.commit(step)
        decided = sorted((*slots, *left_out), key=lambda slot: slot.group_id)
        self.curriculum.observe(
            step, [(slot.task.env, slot.task.task_id, mean_reward(slot.group)) for slot in decided]
        )
        await asyncio.sleep(0)
        self.ledger.batch_shipped(step, [slot.group_id for slot in slots])
        await asyncio.sleep(0)
        self.buffer.ship(list(slots), left_out)
        row.metrics["time/pack"] = time.perf_counter() - started
        row.idle_s, self._idle_s = self.buffer.idle_s - self._idle_s, self.buffer.idle_s
        self._rows[step] = row
        self._warn_without_signal(step, slots)
        await asyncio.sleep(0)
        await self.sender.send(batches)
        self.watch.progress(f"batch {step} shipped")
        await in_slices(_let_go(slots, samples))
        row.metrics |= telemetry.engine_row(await self._engine_metrics())

    def _take_counts(self) -> Counts:
        counts, self.buffer.counts = self.buffer.counts, Counts()
        return counts

    def _warn_without_signal(self, step: int, slots: Sequence[Slot]) -> None:
        num_empty = sum(not slot.has_signal for slot in slots)
        if num_empty and self.cfg.filter_zero_advantages and step >= self._next_warning:
            self._next_warning = step + WARN_EVERY_STEPS
            logger.warning(
                "step %d: %d of %d groups have equal rewards: max_oversampling = %g is used up; tasks are "
                "too easy or too hard for this policy",
                step,
                num_empty,
                len(slots),
                self.cfg.max_oversampling,
            )

    # -- the policy and the trainer --

    async def follow_policy(self) -> None:
        """Load versions as they come.

        A slot is free only when the weights it was trained into are everywhere.
        """
        while True:
            version = await self.policy.load_next()
            self.watch.progress(f"version {version} loaded")
            telling = asyncio.create_task(self.control.send(VersionLoaded(version=version)))
            is_due = self._should_evaluate(version)
            self.curriculum.advance(version)
            if is_due and self.cfg.max_async_level == 0:  # synchronous: nothing runs beside an eval
                await self.evaluate(version)
            self.buffer.on_loaded(version)
            self._has_first_version.set()
            await telling
            if is_due and self.cfg.max_async_level > 0:
                await self.evaluate(version)
            if version == self.cfg.max_steps:
                self._has_last_version.set()

    def _should_evaluate(self, version: int) -> bool:
        if self.was_stopped or version in self.progress.sampled:
            return False
        return self.cfg.eval is not None and self.cfg.eval.is_due(version, end=self.cfg.max_steps)

    async def evaluate(self, version: int) -> None:
        """Held-out reward of the weights that are loaded; the next version waits until it is done."""
        assert self.evaluator is not None, "an eval is due and there is no evaluator"
        report("phase", text=f"evaluating version {version}")
        try:
            scores = await self.evaluator.evaluate(version, end=self.cfg.max_steps)
        except (EnvError, ConfigError, DataError) as error:  # an eval is lost, not the run
            logger.error("no eval of version %d: %s", version, error)
            self.ledger.event("eval_lost", {"version": version, "error": str(error)})
            report("note", text=f"no eval of version {version}: {error}")
            return
        self.progress.sampled[version] = overall(scores, "sampled")
        if (greedy := overall(scores, "greedy")) is not None:
            self.progress.greedy[version] = greedy
        row = self.evaluator.own_metrics | telemetry.eval_row(scores)
        self.ledger.event("eval", {"version": version, **row})
        self.monitors.log(version, row)
        telemetry.report_eval(version, scores)
        logger.info("eval of version %d:\n%s", version, table(scores))
        self.watch.progress(f"version {version} evaluated")

    async def hear_trainer(self) -> None:
        """Take what the ranks say, until the last of them has said Bye."""
        ranks = set(range(self.cfg.num_train_workers))
        while ranks:
            event = await self.control.next_event()
            match event.message:
                case VersionReady(manifest=manifest):
                    self.policy.publish(manifest)
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
                        f"trainer rank {event.rank} sent {type(other).__name__}, which is ours to send"
                    )
        async with self._trained:
            self._is_trainer_gone = True
            self._trained.notify_all()
        if not self._is_complete():
            raise EngineError(
                f"the trainer ended after step {self.progress.step}, before the run did; see its log"
            )

    async def _on_step_done(self, done: StepDone) -> None:
        if done.step != self.progress.step + 1 or done.step not in self._rows:
            raise WireError(f"the trainer finished step {done.step} after step {self.progress.step}")
        self.ledger.step_trained(done.step, done.metrics)
        row = self._rows.pop(done.step)
        self._count_step(done, row)
        metrics, waits = self._step_metrics(done, row)
        self.monitors.log(done.step, metrics)
        telemetry.report_step(done.step, self.cfg.max_steps, metrics, waits)
        self.watch.progress(f"step {done.step} trained")
        async with self._trained:
            self._trained.notify_all()

    def _count_step(self, done: StepDone, row: telemetry.StepRow) -> None:
        progress, now = self.progress, time.perf_counter()
        progress.step = done.step
        progress.num_rollouts += row.num_rollouts
        progress.num_tokens += row.num_tokens
        progress.train_s = self._before[0] + now - self._first_draw_at
        progress.wall_s = self._before[1] + now - self._started_at
        mismatch = done.metrics.get("mismatch_kl/mean")
        if mismatch is not None:
            progress.mismatch_kl_max = max(mismatch, progress.mismatch_kl_max or mismatch)

    def _step_metrics(
        self, done: StepDone, row: telemetry.StepRow
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The step's row, and which share of it each process waited."""
        now = time.perf_counter()
        step_s, self._step_done_at = now - self._step_done_at, now
        metrics = row.metrics | {
            "time/step": step_s,
            "time/wait_for_trainer": row.idle_s,
            "time/wait_for_rollouts": done.wait_s,
            "time/update_weights": self.policy.load_s,
            "canary/error": self.policy.canary_error,
            **({} if self.max_inflight is None else {"concurrency/limit": float(self.max_inflight)}),
            "tokens_per_s": row.num_tokens / step_s,
            "trainer/step_s": done.time_s,
            "trainer/wait_s": done.wait_s,
            **self.curriculum.gauges(),
            **self.baselines.gauges(),
            "progress/rollouts": float(self.progress.num_rollouts),
            "progress/tokens": float(self.progress.num_tokens),
        }
        waits = {
            "engine": min(row.idle_s / step_s, 1.0),
            "trainer": min(done.wait_s / max(done.time_s, 1e-9), 1.0),
        }
        return telemetry.beside(metrics, done.metrics), waits

    async def _engine_metrics(self) -> dict[str, float]:
        try:
            return await self.engines.metrics()
        except (
            EngineError
        ) as error:  # figures for a curve; an engine that is really gone fails its next request
            logger.debug("no engine metrics: %s", error)
            return {}

    def _begin_checkpoint(self, step: int) -> None:
        """Put aside what a checkpoint says, which is written when the trainer's half is there."""
        if step != self.progress.step:
            raise WireError(f"the trainer began a checkpoint of step {step} after step {self.progress.step}")
        self.progress.curriculum = self.curriculum.state_at(step)
        self.progress.baselines = self.baselines.state_at(step)
        self.progress.next_draw, self.progress.open_draws = self.ledger.next_draw(), self.ledger.open_draws()
        self._begun[step] = copy.deepcopy(self.progress)

    async def _complete_checkpoint(self, step: int) -> None:
        """The trainer's half is on disk: write ours and the marker."""
        if step not in self._begun:
            raise WireError(f"the trainer saved a checkpoint of step {step} that it had not begun")
        # The ledger gives up payloads that no checkpoint needs: it hears of one only when it is complete.
        checkpoint.save(self.run_dir, self._begun.pop(step))
        self.ledger.checkpoint_saved(step)
        await self.control.send(CheckpointComplete(step=step))
        logger.info("checkpoint step=%d complete", step)

    # -- the end --

    def _is_complete(self) -> bool:
        return self.was_stopped or self.progress.step == self.cfg.max_steps

    async def _last_step(self) -> None:
        """All that was shipped is trained.

        Then the last version is evaluated, or the trainer is told to stop.
        """
        shipped = self.buffer.next_step - 1
        async with self._trained:
            await self._trained.wait_for(lambda: self.progress.step >= shipped or self._is_trainer_gone)
        if not self.was_stopped:
            await self._has_last_version.wait()
        elif self.progress.step != self.cfg.max_steps:
            report("phase", text=f"stopping after step {self.progress.step}")
            await self.control.send(Stop(reason="interrupted", save=self.progress.step > self.start))


def _sampling(groups: Sequence[Group]) -> Generator[None, None, list[TrainSample]]:
    samples = []
    for group in groups:
        samples += to_samples([group])
        yield
    return samples


def _let_go(slots: Sequence[Slot], samples: list[TrainSample]) -> Generator[None, None, None]:
    """Free what was shipped bit by bit: five thousand rollouts take a tenth of a second."""
    while samples:
        samples.pop()
        yield
    for slot in slots:
        slot.group = None
        yield
