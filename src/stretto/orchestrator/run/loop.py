"""The run: draw -> play -> assign advantages -> pack -> ship -> load new versions.

Four loops share one event loop and the buffer; groups/buffer.py says which of them unblocks which:

    draw_groups             waits for a slot, draws a task, plays its group and assigns advantages (pipeline.py)
    ship_batches            waits for the groups of the next batch, packs them, sends them to the ranks (ship.py)
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
from stretto.config.sections.orchestrator import EvalSection
from stretto.orchestrator.eval.best import BestKeeper, best_of
from stretto.orchestrator.eval.results import format_table
from stretto.orchestrator.eval_scores import eval_row, mean_over_envs
from stretto.orchestrator.run import telemetry
from stretto.orchestrator.run.membership import POLL_S, Membership
from stretto.orchestrator.run.parts import Limit, RunParts, Steering, build_limit, load_steering
from stretto.orchestrator.run.pipeline import GroupPipeline
from stretto.orchestrator.run.ship import ENGINE_LOADS_INTERVAL_S, BatchShipper, engine_loads
from stretto.orchestrator.state import run_checkpoint
from stretto.orchestrator.state.run_checkpoint import Progress
from stretto.orchestrator.versions.read_check import ReadCheck
from stretto.records.control import (
    Bye,
    CheckpointBegun,
    CheckpointComplete,
    CheckpointSaved,
    Failed,
    StepDone,
    StepMetrics,
    Stop,
    VersionLoaded,
    VersionReady,
)
from stretto.transports.engine.client import EngineClient

logger = logging.getLogger(__name__)

BUDGET_INTERVAL_S = 30.0
"""The longest between two looks at what frozen models cost; times are known ahead."""
CLOCK_SLACK_S = 0.01
LONG_BATCH_S = 30.0


class CheckpointWriter:
    """The checkpoints that the trainer has begun and not yet saved."""

    def __init__(self, run: RunParts) -> None:
        self._parts = run
        self._begun: dict[int, Progress] = {}  # by step

    def begin(self, step: int) -> None:
        """Remember the state at `step`; it is written once the trainer has saved its half."""
        run, progress = self._parts, self._parts.progress
        if step != progress.step:
            raise WireError(f"the trainer began a checkpoint of step {step} after step {progress.step}")
        progress.curriculum = {} if run.curriculum is None else run.curriculum.state_at(step)
        progress.baselines = run.baselines.state_at(step)
        progress.next_draw, progress.open_draws = run.ledger.next_draw(), run.ledger.open_draws()
        self._begun[step] = run_checkpoint.snapshot(progress)

    async def complete(self, step: int) -> None:
        """Write our half and the marker: the trainer's half is on disk."""
        if step not in self._begun:
            raise WireError(f"the trainer saved a checkpoint of step {step} that it had not begun")
        run = self._parts
        await run.ledger.flush()  # a checkpoint needs the rows of all that was trained up to it
        # The ledger deletes payloads that no checkpoint needs, so it records a checkpoint only once complete.
        await asyncio.to_thread(run_checkpoint.save, run.run_dir, self._begun.pop(step))
        run.ledger.checkpoint_saved(step)
        await run.control.send(CheckpointComplete(step=step))
        logger.info("checkpoint step=%d complete", step)


class Loop:
    """Runs one incarnation of a run until its last step is trained or `stop` is called."""

    def __init__(self, run: RunParts) -> None:
        self.parts, self.cfg, self.buffer, self.progress = run, run.cfg, run.buffer, run.progress
        self.start = run.progress.step
        self._reads = ReadCheck(run.versions, run.engines, run.cfg.seq_len)
        self._pipeline = GroupPipeline(run, self._reads)
        self._shipper = BatchShipper(run, self._end_early)
        self._checkpoints = CheckpointWriter(run)
        self._best = BestKeeper(run.run_dir, self.start)
        self.stopped_because: str | None = None
        """Why the run ended before its last step, if early_stop, its budget or the cost of a model ended it."""
        for spending in run.beside.spendings:
            spending.stop = self._end_early
        self._shown_batch = (0, 0.0, False)  # a step, since when it is the next or was shown, and was it shown
        self._limit: Limit | None = build_limit(run)
        self._steering: Steering | None = None if run.cfg.steering is None else load_steering().RunSteering(run)
        self._reports = telemetry.StepReports(run, [each for each in (self._steering, self._limit) if each is not None])
        self._is_stopping = asyncio.Event()
        self._interrupting: asyncio.Task[None] | None = None
        self._drawing: asyncio.Task[None] | None = None  # from the first loaded version on
        # Notified when a step is trained, a version is announced to the trainer, or the trainer ends.
        self._trainer_changed = asyncio.Condition()
        self._announced_version = self.start - 1  # the newest version that the trainer knows to be loaded
        self._is_trainer_gone = False

    async def run(self) -> Progress:
        """Train until the last step, or until `stop`.

        Raises: StrettoError, whose class says who must act.
        """
        if not await self._wait_for_peers():
            return self.progress
        if self.cfg.eval is not None and self.cfg.eval.keep_best:
            best = best_of(self._scores())
            self._best.resume(best if best and best > self.progress.first_step else None, self.start)
        async with task_group() as tasks:
            trainer_events = tasks.create_task(self.handle_trainer_events(), name="handle_trainer_events")
            loading = tasks.create_task(self.load_versions(tasks), name="load_versions")
            background = [
                loading,
                tasks.create_task(self.parts.engines.watch(), name="watch_engines"),
                tasks.create_task(self.record_engines(), name="record_engines"),
                tasks.create_task(self.watch_budget(), name="watch_budget"),
            ]
            if self._limit is not None:
                background.append(tasks.create_task(self._limit.follow(), name="adapt_concurrency"))
            if isinstance(self.parts.engines, EngineClient):
                background.append(tasks.create_task(self.follow_membership(), name="follow_membership"))
            await tasks.create_task(self._shipper.ship_batches(), name="ship_batches")
            await self._wait_for_last_step(loading)
            await trainer_events
            if self._interrupting is not None:
                await self._interrupting
            self.buffer.close()  # cancels groups that batches counted in tokens have left over
            for task in (*background, *filter(None, [self._drawing, self._reads.task])):
                task.cancel()
        self._reports.count_so_far()
        if self._best.wanted is not None:
            self._best.keep_if_there()
        if (missing := self._best.wanted) is not None:
            report("note", text=f"version {missing} was the best, and it was not exported; see eval.keep_best")
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
        """Interrupt running rollouts; once their turns are saved, cancel them."""
        try:
            await self._pipeline.interruption.interrupt(self.parts.engines.abort)
        finally:
            self.buffer.close()

    @property
    def verdict(self) -> str | None:
        """One line about whether this incarnation learned; None after too few steps."""
        return self._reports.verdict()

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
        devices = self.parts.versions.devices
        if devices is not None:
            await self.parts.engines.wait_ready(self.cfg.client.ready_timeout_s)
            await devices.begin()
            report(DEVICES_FREE, is_early=True)
        async with task_group() as tasks:
            if devices is None:
                tasks.create_task(self.parts.engines.wait_ready(self.cfg.client.ready_timeout_s))
            tasks.create_task(self.parts.beside.wait_ready())
            registering = tasks.create_task(self.parts.control.wait_registered())
        # Not by what this process's configuration says: a row packed so is too long for ranks that compute each sample.
        self._shipper.packs_prefixes = all(register.shares_prefixes for register in registering.result())
        for register in registering.result():
            resumed = register.resumed_step or 0
            if resumed != self.start or register.version != self.start:
                raise WireError(
                    f"rank {register.rank} continues after step {resumed} with version {register.version}, "
                    f"the orchestrator after step {self.start}; start both with the same --resume."
                )
        self.parts.watch.progress("engines and trainer are ready")
        report("phase", text="waiting for the first weights", is_early=True)

    async def record_engines(self) -> None:
        """Write what each engine does into the ledger from time to time, less often if there are many.

        What they sample for rollouts is progress: an episode of many turns, and a long reply, may take longer than
        `stall_timeout_s` until its group is finished.
        """
        engines, before = self.parts.engines, (0, 0.0)
        while True:
            try:
                loads, num_tokens = await engine_loads(engines)
                if loads:
                    self.parts.ledger.event("engines", loads)
                has_replies, have_sampled = engines.num_replies != before[0], num_tokens != before[1]
                if has_replies or (have_sampled and self.buffer.num_running):  # others may use these engines, too
                    self.parts.watch.progress("tokens sampled")
                    self._show_long_batch()
                before = engines.num_replies, num_tokens
            except EngineError as error:  # one that is really down fails its next request
                logger.debug("no loads of engines: %s", error)
            await asyncio.sleep(max(ENGINE_LOADS_INTERVAL_S, ENGINE_LOADS_INTERVAL_S * engines.num_ready / 10))

    def _show_long_batch(self) -> None:
        """Report how many groups of a batch are played, now and then; the launcher ends a run that is silent."""
        step, total, now = self.buffer.next_step, self.buffer.bounds.groups_per_batch, time.monotonic()
        of_step, at, is_shown = self._shown_batch
        if step != of_step:
            if is_shown:
                report("progress", text=f"groups of step {of_step}", done=total, total=total)
            self._shown_batch = step, now, False
        elif now - at >= LONG_BATCH_S:
            num_ready = self.buffer.gauges().get("ready", 0)
            report("progress", text=f"groups of step {step}", done=min(num_ready, total - 1), total=total)
            self._shown_batch = step, now, True

    async def follow_membership(self) -> None:
        """Let engines join and leave as `stretto engines` asks."""
        membership = Membership(self.parts)
        async with asyncio.TaskGroup() as tasks:
            while True:
                membership.update(tasks)
                await asyncio.sleep(POLL_S)

    async def watch_budget(self) -> None:
        """End the run when time brings it to a bound of its budget, also while a batch is played."""
        purse = self.parts.purse
        while purse.has_bounds and not self.was_stopped:
            if (reason := purse.excess()) is not None:
                self._end_early(reason)
            await asyncio.sleep(min(purse.seconds_left(), BUDGET_INTERVAL_S) + CLOCK_SLACK_S)

    def _begin_drawing(self, tasks: asyncio.TaskGroup) -> None:
        """Draw and play groups from now on: the first version is loaded."""
        report("phase", text="playing the first rollouts")
        self._reports.begin()
        self._shipper.idle_s, self._shipper.trained_at = self.buffer.idle_s, asyncio.get_running_loop().time()
        self._drawing = tasks.create_task(self._pipeline.run(tasks, self.start), name="draw_groups")

    # -- versions and the trainer --

    async def load_versions(self, tasks: asyncio.TaskGroup) -> None:
        """Load each version as it is published, evaluate it if due, and free slots; the first one begins the draws.

        A slot becomes free only when every engine has loaded the weights into which its group was trained. Ends after
        the last version.
        """
        while True:
            if self.cfg.deterministic:
                await self.buffer.wait_for_turn(self.parts.versions.next_version)
            version = await self.parts.versions.load_next()
            self.parts.watch.progress(f"version {version} loaded")
            if self._steering is not None:
                self._steering.on_loaded(version)
            sending = asyncio.create_task(self._announce_loaded(version))
            is_due = self.cfg.eval is not None and self._should_evaluate(self.cfg.eval, version)
            if self.parts.curriculum is not None:
                self.parts.curriculum.advance(version)
            if is_due and self.cfg.max_async_level == 0:  # synchronous: an eval runs alone
                await self.evaluate(version)
            self.buffer.on_loaded(version)
            if self._drawing is None:
                self._begin_drawing(tasks)
            await sending
            if is_due and self.cfg.max_async_level > 0:
                await self.evaluate(version)
            if version == self.cfg.max_steps:
                return

    async def _announce_loaded(self, version: int) -> None:
        wants_canary = self.parts.versions.wants_canary
        await self.parts.control.send(VersionLoaded(version=version, wants_canary=wants_canary))
        async with self._trainer_changed:
            self._announced_version = version
            self._trainer_changed.notify_all()

    def _should_evaluate(self, section: EvalSection, version: int) -> bool:
        if self.was_stopped or version in self.progress.sampled:
            return False
        return section.is_due(version, end=self.cfg.max_steps)

    async def evaluate(self, version: int) -> None:
        """Evaluate the loaded version on held-out tasks; the next version waits for it."""
        evaluator, hooks = self.parts.evaluator, self.parts.hooks
        assert evaluator is not None, "an eval is due and there is no evaluator"
        report("phase", text=f"evaluating version {version}")
        logged: tuple[dict[str, float], bool] = ({}, False)
        try:
            scores = await evaluator.evaluate(version, end=self.cfg.max_steps)
            played, evaluator.played = evaluator.played, {}
            if hooks is not None:
                logged = await hooks.log_eval(version, played)
        except (EnvError, ConfigError, DataError) as error:  # an eval is lost, not the run
            logger.error("no eval of version %d: %s", version, error)
            self.parts.ledger.event("eval_lost", {"version": version, "error": str(error)})
            report("note", text=f"no eval of version {version}: {error}")
            return
        sampled = mean_over_envs(scores, "sampled")
        assert sampled is not None, "every eval plays sampled rollouts"
        self.progress.sampled[version] = sampled
        if (greedy := mean_over_envs(scores, "greedy")) is not None:
            self.progress.greedy[version] = greedy
        user_row, replaces_ours = logged
        self._act_on_scores(version)
        row = user_row if replaces_ours else evaluator.user_metrics | eval_row(scores) | user_row
        self.parts.ledger.event("eval", {"version": version, **row})
        self.parts.monitors.log(version, row)
        self.parts.monitors.log_table(version, "eval/samples", evaluator.examples)
        self._reports.report_eval(version, scores)
        logger.info("eval of version %d:\n%s", version, format_table(scores))
        self.parts.watch.progress(f"version {version} evaluated")

    def _scores(self) -> dict[int, float]:
        """The score of each version that was evaluated."""
        section = self.cfg.eval
        return self.progress.greedy if section is not None and section.score_by == "greedy" else self.progress.sampled

    def _act_on_scores(self, version: int) -> None:
        """Keep the weights of a version that is the best, and end the run if it stays behind the best."""
        section = self.cfg.eval
        assert section is not None, "a version was evaluated"
        scores = self._scores()
        if section.keep_best and best_of(scores) == version:
            self.parts.ledger.event("best", {"version": version, "score": scores[version]})
            if version > self.progress.first_step:
                self._best.want(version)
        stop = section.early_stop
        if stop is None or version == self.cfg.max_steps or (reason := stop.reason_to_stop(scores)) is None:
            return
        self._end_early(reason, version)

    def _end_early(self, reason: str, version: int | None = None) -> None:
        """Stop in order before the last step, and say why; version: that of the eval which decided it."""
        if self.was_stopped:
            return
        logger.info("the run ends early: %s", reason)
        self.parts.ledger.event(
            "early_stop", {"version": self.progress.step if version is None else version, "reason": reason}
        )
        report("note", text=f"the run ends early: {reason}")
        self.stopped_because = reason
        self.stop()

    async def handle_trainer_events(self) -> None:
        """Handle the messages of all ranks until each has sent Bye."""
        ranks = set(range(self.cfg.num_train_workers))
        while ranks:
            event = await self.parts.control.next_event()
            match event.message:
                case StepMetrics(step=step, metrics=metrics):
                    self.parts.monitors.log(step, metrics)
                    if self._steering is not None:
                        self._steering.on_metrics(step, metrics)
                case VersionReady(manifest=manifest):
                    self.parts.versions.on_published(manifest)
                case StepDone() as done:
                    await self._on_step_done(done)
                case CheckpointBegun(step=step):
                    self._checkpoints.begin(step)
                case CheckpointSaved(step=step):
                    await self._checkpoints.complete(step)
                case Failed(reason=reason):
                    raise EngineError(f"trainer rank {event.rank} failed: {reason}")
                case Bye():
                    ranks.discard(event.rank)
                case other:
                    raise WireError(
                        f"trainer rank {event.rank} sent {type(other).__name__}, which only the orchestrator sends"
                    )
        async with self._trainer_changed:
            self._is_trainer_gone = True
            self._trainer_changed.notify_all()
        if not self.was_stopped and self.progress.step != self.cfg.max_steps:
            raise EngineError(f"the trainer ended after step {self.progress.step}, before the run did; see its log")

    async def _on_step_done(self, done: StepDone) -> None:
        if done.step != self.progress.step + 1 or done.step not in self._shipper.rows:
            raise WireError(f"the trainer finished step {done.step} after step {self.progress.step}")
        row, purse = self._shipper.rows.pop(done.step), self.parts.purse
        cost = sum(each.cost for each in self.parts.beside.spendings)
        row.metrics |= purse.end_step(done.step, row.num_batch_tokens, row.num_played_tokens, cost)
        self.parts.ledger.step_trained(done.step, done.metrics, purse.saved)
        self._reports.report(done, row)
        if self._best.wanted is not None:
            self._best.keep_if_there()
        self._shipper.trained_at = asyncio.get_running_loop().time()
        self._shipper.step_done.set()
        if self._steering is not None:
            self._steering.on_trained(done, row)
        if purse.has_bounds and done.step != self.cfg.max_steps and (reason := purse.excess()) is not None:
            self._end_early(reason)
        async with self._trainer_changed:
            self._trainer_changed.notify_all()

    # -- the end --

    async def _wait_for_last_step(self, loading: asyncio.Task[None]) -> None:
        """Wait until all shipped batches are trained.

        Then wait for the last version's eval, or tell the trainer to stop if the run was stopped.
        """
        devices, shipped = self.parts.versions.devices, self.buffer.next_step - 1
        async with self._trainer_changed:
            await self._trainer_changed.wait_for(lambda: self.progress.step >= shipped or self._is_trainer_gone)
        if not self.was_stopped:
            await asyncio.wait([loading])
        elif self.progress.step != self.cfg.max_steps:
            step = self.progress.step
            report("phase", text=f"stopping after step {step}" if step else "stopping before the first step")
            if devices is not None and not self._is_trainer_gone:
                async with self._trainer_changed:
                    await self._trainer_changed.wait_for(lambda: self._announced_version == self.progress.step)
                loading.cancel()  # no eval may send requests to engines that sleep
                await devices.end_rollouts()  # the trainer takes the engines' memory to save
            await self.parts.control.send(Stop(reason="interrupted", save=self.progress.step > self.start))
