"""Ships batches: builds samples, packs rows, writes the ledger, sends to the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence

from stretto.base.aio import run_in_slices
from stretto.base.errors import EnvError, StrettoError
from stretto.orchestrator.batch.packing import pack
from stretto.orchestrator.batch.samples import to_samples, whiten_samples
from stretto.orchestrator.eval.examples import example_rows
from stretto.orchestrator.groups.buffer import Counts, Slot
from stretto.orchestrator.groups.filters import mean_reward
from stretto.orchestrator.run import telemetry
from stretto.orchestrator.run.parts import RunParts
from stretto.records.rollout import Group
from stretto.records.sample import TrainSample

logger = logging.getLogger(__name__)

WARN_INTERVAL_STEPS = 20
ENGINE_GAUGES_INTERVAL_S = 1.0
NUM_EXAMPLES = 16
"""Rollouts of a step in a tracker's table."""


class BatchShipper:
    """Ships each batch as soon as its groups are ready and max_async_level allows it."""

    def __init__(self, run: RunParts, pop_filter_flags: Callable[[], Counter[str]]) -> None:
        """pop_filter_flags: returns the flagged rollouts by filter since the last call."""
        self.parts, self.cfg, self.buffer = run, run.cfg, run.buffer
        self.rows: dict[int, telemetry.StepRow] = {}  # by step, of those shipped and not trained yet
        self.idle_s = 0.0  # the buffer's, at the last batch
        self._pop_filter_flags = pop_filter_flags
        self._num_lost = 0  # groups in a row that were dropped because a hook raised
        self._next_warning = 0  # the first step that may warn again
        self._gauges: dict[str, float] = {}
        self._next_gauges_at = 0.0  # time.monotonic()
        algos = {env.name or env.id: self.cfg.algo_of(env.name or env.id) for env in self.cfg.env}
        self._whitened = [n for n, algo in algos.items() if getattr(algo, "whiten", False)]

    async def ship_batches(self) -> None:
        """Ship until the last step, or until the buffer is closed.

        Raises: EnvError if hooks that raise cost too many groups in a row.
        """
        last = self.cfg.max_steps
        while last is None or self.buffer.next_step <= last:
            slots = await self.buffer.next_batch()
            if slots is None:
                return
            try:
                slots = await self._select_slots(slots)
                samples = await self._samples_of(slots)
                logged = await self._user_metrics(slots)
            except StrettoError as error:
                self._on_failed_batch(slots, error)
                continue
            self._num_lost = 0
            await self.ship(slots, samples, logged)

    async def _user_metrics(self, slots: Sequence[Slot]) -> tuple[dict[str, float], bool]:
        """Metrics of a batch by the user's log function; do they replace ours?

        Raises: EnvError if it raises.
        """
        if self.parts.hooks is None:
            return {}, False
        groups = [slot.played for slot in slots if slot.group is not None]
        return await self.parts.hooks.log(self.buffer.next_step, groups)

    async def _select_slots(self, slots: list[Slot]) -> list[Slot]:
        """The slots that a hook selects from all ready ones; these slots without such a hook.

        Raises: EnvError if the hook raises.
        """
        hooks = self.parts.hooks
        if hooks is None or not hooks.selects_groups:
            return slots
        ready = {slot.group_id: slot for slot in self.buffer.ready_slots()}
        groups = [slot.played for slot in ready.values()]
        chosen = await hooks.select_groups(self.buffer.next_step, groups, len(slots))
        return [ready[group_id] for group_id in sorted(chosen)]

    async def _samples_of(self, slots: Sequence[Slot]) -> list[TrainSample]:
        """The training samples of these groups.

        Raises: EnvError if a hook raises.
        """
        groups = self.parts.baselines.subtract([slot.played for slot in slots])
        samples = await run_in_slices(_build_samples(groups))  # chosen slots do not change meanwhile
        if self.parts.hooks is None:
            return samples
        return await self.parts.hooks.transform_samples(self.buffer.next_step, groups, samples)

    def _on_failed_batch(self, slots: Sequence[Slot], error: StrettoError) -> None:
        """Drop these groups because a hook raised; others will be drawn.

        Raises: EnvError if too many groups in a row were dropped for this reason.
        """
        logger.warning("batch %d: %d groups dropped: %s", self.buffer.next_step, len(slots), error)
        self._num_lost += len(slots)
        if self._num_lost >= self.cfg.max_failed_groups:
            text = f"{self._num_lost} groups in a row were lost to a hook (max_failed_groups); the last error: {error}"
            raise EnvError(text) from error
        for slot in slots:
            self.buffer.drop(slot, "a hook failed")

    async def ship(self, slots: list[Slot], samples: list[TrainSample], logged: tuple[dict[str, float], bool]) -> None:
        """Pack the samples, write the ledger and send the batch; logged: of `_user_metrics`."""
        run, step, started = self.parts, self.buffer.next_step, time.perf_counter()
        if self._whitened:
            samples[:] = whiten_samples(samples, self._whitened)
        batches = await run_in_slices(
            pack(
                samples,
                step=step,
                seq_len=self.cfg.seq_len,
                row_tokens=self.cfg.row_tokens,
                world_size=self.cfg.num_train_workers,
                cost=run.cost,
                max_patches=None if self.cfg.model.vlm is None else self.cfg.model.vlm.max_patches,
            )
        )
        discarded = self.buffer.discarded(slots)
        row = self._build_row(slots, discarded)
        user_metrics, replaces_ours = logged
        row.metrics = ({} if replaces_ours else row.metrics) | user_metrics
        run.baselines.commit(step)
        decided = sorted((*slots, *discarded), key=lambda slot: slot.group_id)
        rewards = [(slot.task.env, slot.task.task_id, mean_reward(slot.played)) for slot in decided]
        run.curriculum.observe(step, rewards)
        await asyncio.sleep(0)
        run.ledger.batch_shipped(step, [slot.group_id for slot in slots])
        await asyncio.sleep(0)
        self.buffer.ship(slots, discarded)
        row.metrics["time/pack"] = time.perf_counter() - started
        row.idle_s, self.idle_s = self.buffer.idle_s - self.idle_s, self.buffer.idle_s
        self.rows[step] = row
        self._warn_without_signal(step, slots)
        await asyncio.sleep(0)
        await run.versions.turns.end_rollouts()
        await run.sender.send(batches)
        run.watch.progress(f"batch {step} shipped")
        await run_in_slices(_release(slots, samples))
        row.metrics |= await self._engine_gauges()

    async def _engine_gauges(self) -> dict[str, float]:
        """The engines' gauges, at most ENGINE_GAUGES_INTERVAL_S old."""
        if time.monotonic() >= self._next_gauges_at:
            self._next_gauges_at = time.monotonic() + ENGINE_GAUGES_INTERVAL_S
            self._gauges = telemetry.engine_row(await telemetry.engine_metrics(self.parts.engines))
        return self._gauges

    def _build_row(self, slots: Sequence[Slot], discarded: Sequence[Slot]) -> telemetry.StepRow:
        counts, self.buffer.counts = self.buffer.counts, Counts()
        row = telemetry.batch_row(slots, discarded, self.buffer, counts)
        row.metrics |= telemetry.filter_row(self.cfg.all_filters, self._pop_filter_flags(), [*slots, *discarded])
        if self.parts.rollout_function is not None:
            row.metrics |= self.parts.rollout_function.metrics
        interval = self.cfg.monitors.samples_interval
        step = self.buffer.next_step
        if self.parts.monitors.has_trackers and interval is not None and (step - 1) % interval == 0:
            groups = [slot.played for slot in slots]
            row.examples = example_rows(
                groups, self.parts.player.renderer, "train", version=step - 1, count=NUM_EXAMPLES
            )
            row.distributions = telemetry.distributions_of(slots)
        return row

    def _warn_without_signal(self, step: int, slots: Sequence[Slot]) -> None:
        num_empty = sum(not slot.has_signal for slot in slots)
        if num_empty and self.cfg.filter_zero_advantages and step >= self._next_warning:
            self._next_warning = step + WARN_INTERVAL_STEPS
            logger.info(
                "step %d: %d of %d groups have equal rewards: max_oversampling = %g is used up; tasks are "
                "too easy or too hard for this policy",
                step,
                num_empty,
                len(slots),
                self.cfg.max_oversampling,
            )


def _build_samples(groups: Sequence[Group]) -> Generator[None, None, list[TrainSample]]:
    samples = []
    for group in groups:
        samples += to_samples([group])
        yield
    return samples


def _release(slots: Sequence[Slot], samples: list[TrainSample]) -> Generator[None, None, None]:
    """Free shipped rollouts one by one: freeing five thousand at once takes a tenth of a second."""
    while samples:
        samples.pop()
        yield
    for slot in slots:
        slot.group = None
        yield
