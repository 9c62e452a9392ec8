"""Ships batches: builds samples, packs rows, writes the ledger, sends to the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from stretto.algorithms.credit import CENTERED
from stretto.base.aio import run_in_slices
from stretto.base.errors import EngineError, EnvError, StrettoError
from stretto.monitors.monitor import Values
from stretto.orchestrator.batch import build_samples, pack, whiten_samples
from stretto.orchestrator.eval.results import example_rows
from stretto.orchestrator.groups.buffer import Slot
from stretto.orchestrator.groups.ends import Counts
from stretto.orchestrator.groups.filters import mean_reward
from stretto.orchestrator.groups.hooks import BatchHooks
from stretto.orchestrator.run.parts import RunParts, StepRow
from stretto.records.rollout import Group, Rollout, RolloutStatus
from stretto.records.sample import TrainSample
from stretto.transports.engine.client import EngineClient

logger = logging.getLogger(__name__)

WARN_INTERVAL_STEPS = 20
ENGINE_GAUGES_INTERVAL_S = 1.0
ENGINE_LOADS_INTERVAL_S = 5.0
NUM_EXAMPLES = 16
"""Rollouts of a step in a tracker's table."""

ENGINE_METRICS = {
    "vllm:num_requests_running": "inference/num_requests_running",
    "vllm:num_requests_waiting": "inference/num_requests_waiting",
    "vllm:kv_cache_usage_perc": "inference/kv_cache_usage",
    "vllm:num_preemptions_total": "inference/num_preemptions",
    "vllm:num_preemptions": "inference/num_preemptions",
}


class BatchShipper:
    """Ships each batch as soon as its groups are ready and max_async_level allows it."""

    def __init__(self, run: RunParts, end_early: Callable[[str], None]) -> None:
        """end_early: ends the run, which is told why."""
        self.parts, self.cfg, self.buffer, self.end_early = run, run.cfg, run.buffer, end_early
        self.rows: dict[int, StepRow] = {}  # by step, of those shipped and not trained yet
        self.idle_s = 0.0  # the buffer's, at the last batch
        self.trained_at: float | None = None  # when the latest step was trained, or the first task drawn
        self.step_done = asyncio.Event()  # set whenever a step is trained
        self._filters, self._has_trackers = run.cfg.all_filters, run.monitors.has_trackers
        self._num_lost = 0  # groups in a row that were dropped because a hook raised
        self._next_warning = 0  # the first step that may warn again
        self.packs_prefixes = False
        """Samples that begin alike stand in one row, and what they share counts once."""
        self._gauges: dict[str, float] = {}
        self._engine_totals: dict[str, float] = {}  # the engines' metrics as they were read last
        self._next_gauges_at = 0.0  # time.monotonic()
        algos = {env.name or env.id: self.cfg.algo_of(env.name or env.id) for env in self.cfg.env}
        self._whitened = [n for n, algo in algos.items() if getattr(algo, "whiten", False)]
        self._centered = {name for name, algo in algos.items() if algo.type in CENTERED}

    async def ship_batches(self) -> None:
        """Ship until the last step, or until the buffer is closed.

        Raises: EnvError if hooks that raise cost too many groups in a row.
        """
        last = self.cfg.max_steps
        while last is None or self.buffer.next_step <= last:
            slots = await self.buffer.next_batch()
            if slots is None or (self.parts.purse.has_bounds and not await self._is_affordable()):
                return
            try:
                if (hooks := self.parts.hooks) is not None and hooks.selects_groups:
                    slots = await self._select_slots(hooks, slots)
                groups = [slot.played for slot in slots]
                credited = self.parts.baselines.subtract(groups) if self.parts.baselines.algos else groups
                samples = await run_in_slices(build_samples(credited))  # chosen slots do not change meanwhile
                logged: tuple[dict[str, float], bool] = ({}, False)
                if hooks is not None:
                    samples = await hooks.transform_samples(self.buffer.next_step, credited, samples)
                    logged = await hooks.log(self.buffer.next_step, groups)
            except StrettoError as error:
                self._on_failed_batch(slots, error)
                continue
            self._num_lost = 0
            await self.ship(slots, samples, logged)

    async def _is_affordable(self) -> bool:
        """Whether the budget allows another step; if not, the run is told to end.

        A batch waits while the steps under way are expected to reach a bound, and until this start knows how long a
        step takes.
        """
        while self.rows and self._reaches_bound():
            self.step_done.clear()
            await self.step_done.wait()
        if (reason := self.parts.purse.excess()) is not None:
            self.end_early(reason)
        return not self.buffer.is_closed

    def _reaches_bound(self) -> bool:
        """Are the steps under way expected to use up the budget?"""
        purse, rows = self.parts.purse, self.rows.values()
        used = purse.spent_after(len(rows), sum(row.num_batch_tokens for row in rows))
        return not purse.has_timed_a_step or purse.excess(used) is not None

    async def _select_slots(self, hooks: BatchHooks, slots: list[Slot]) -> list[Slot]:
        """The slots that a hook selects from all ready ones.

        Raises: EnvError if the hook raises.
        """
        ready = {slot.group_id: slot for slot in self.buffer.ready_slots()}
        groups = [slot.played for slot in ready.values()]
        chosen = await hooks.select_groups(self.buffer.next_step, groups, len(slots))
        return [ready[group_id] for group_id in sorted(chosen)]

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
        """Pack the samples, write the ledger and send the batch; logged: the user's metrics, and do they replace ours?

        Each part takes up to tens of milliseconds for a large batch. Between them other tasks run.
        """
        run, step, started = self.parts, self.buffer.next_step, time.perf_counter()
        if self._whitened:
            samples[:] = whiten_samples(samples, self._whitened)
        batches = await run_in_slices(
            pack(
                samples,
                step=step,
                is_sent=(is_sent := run.versions.decide(step)),
                seq_len=self.cfg.seq_len,
                row_tokens=self.cfg.row_tokens,
                world_size=self.cfg.num_train_workers,
                cost=run.cost,
                max_patches=None if self.cfg.model.vlm is None else self.cfg.model.vlm.max_patches,
                shares_prefixes=self.packs_prefixes,
            )
        )
        discarded = self.buffer.discarded(slots)
        staleness = [self.buffer.staleness(slot) for slot in slots]
        groups, unused = [slot.played for slot in slots], [slot.played for slot in discarded]
        num_played_tokens = sum(self.buffer.counts.ends.lengths)
        row = self._build_row(groups, unused, staleness)
        row.num_played_tokens = num_played_tokens
        row.num_batch_tokens = sum(slot.num_tokens for slot in slots)
        user_metrics, replaces_ours = logged
        row.metrics = ({} if replaces_ours else row.metrics) | user_metrics
        if run.baselines.algos:
            run.baselines.commit(step)
        if run.curriculum is not None:
            decided = sorted((*groups, *unused), key=lambda group: group.group_id)
            run.curriculum.observe(step, [(g.task.env, g.task.task_id, mean_reward(g)) for g in decided])
        await asyncio.sleep(0)
        run.ledger.batch_shipped(step, [slot.group_id for slot in slots])
        await asyncio.sleep(0)
        self.buffer.ship(slots, discarded, is_sent=is_sent)
        row.metrics["groups/unaccounted"] = float(self.buffer.num_unaccounted)
        row.metrics["time/pack"] = time.perf_counter() - started
        row.idle_s, self.idle_s = self.buffer.idle_s - self.idle_s, self.buffer.idle_s
        if not self.rows and self.trained_at is not None:
            row.waited_s = asyncio.get_running_loop().time() - self.trained_at
        self.rows[step] = row
        if self.cfg.filter_zero_advantages and not all(slot.has_signal for slot in slots):
            self._warn_without_signal(step, slots)
        await asyncio.sleep(0)
        if run.versions.devices is not None:
            await run.versions.devices.end_rollouts()
        await run.sender.send(batches)
        run.watch.progress(f"batch {step} shipped")
        await run_in_slices(_release(slots, samples))
        row.metrics |= await self._engine_gauges()

    async def _engine_gauges(self) -> dict[str, float]:
        """The engines' gauges, at most ENGINE_GAUGES_INTERVAL_S old."""
        if time.monotonic() >= self._next_gauges_at:
            self._next_gauges_at = time.monotonic() + ENGINE_GAUGES_INTERVAL_S
            metrics = await engine_metrics(self.parts.engines)
            self._gauges = {ours: metrics[name] for name, ours in ENGINE_METRICS.items() if name in metrics}
            self._gauges |= speculation_metrics(self._engine_totals, metrics)
            self._engine_totals = metrics or self._engine_totals
        return self._gauges

    def _build_row(self, groups: Sequence[Group], unused: Sequence[Group], staleness: Sequence[int]) -> StepRow:
        counts, self.buffer.counts = self.buffer.counts, Counts()
        row = _batch_row(groups, unused, staleness, counts)
        total = max(sum(len(group.rollouts) for group in (*groups, *unused)), 1)
        row.metrics |= {f"filter/{each.type}": counts.flags[each.type] / total for each in self._filters}
        if centered := [group for group in groups if group.task.env in self._centered]:
            row.metrics["advantage/group_sum"] = max(map(group_sum, centered))
        if self.buffer.bounds.keeps_late:
            row.metrics["time/wait_for_late"] = counts.late_s
        if self.parts.rollout_function is not None:
            row.metrics |= self.parts.rollout_function.metrics
        interval = self.cfg.monitors.samples_interval
        step = self.buffer.next_step
        if self._has_trackers and interval is not None and (step - 1) % interval == 0:
            row.examples = example_rows(
                groups, self.parts.player.renderer, "train", version=step - 1, count=NUM_EXAMPLES
            )
            row.distributions = _distributions_of(groups)
        return row

    def _warn_without_signal(self, step: int, slots: Sequence[Slot]) -> None:
        num_empty = sum(not slot.has_signal for slot in slots)
        if step >= self._next_warning:
            self._next_warning = step + WARN_INTERVAL_STEPS
            logger.info(
                "step %d: %d of %d groups have equal rewards: max_oversampling = %g is used up; tasks are "
                "too easy or too hard for this policy",
                step,
                num_empty,
                len(slots),
                self.cfg.max_oversampling,
            )


async def engine_metrics(engines: EngineClient) -> dict[str, float]:
    """The engines' own metrics; empty if they do not answer.

    An error here is not fatal: an engine that is really down fails its next request.
    """
    try:
        return await engines.metrics()
    except EngineError as error:
        logger.debug("no engine metrics: %s", error)
        return {}


async def engine_loads(engines: EngineClient) -> tuple[dict[str, list[float | None]], float]:
    """By address of an engine: requests that it computes, requests that wait, use of its cache, version; None: unknown.

    The second value is the tokens that all have sampled since they began; it stays 0 where they do not tell.

    Raises: EngineError if one does not answer.
    """
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "weight_version")
    found = await engines.metrics_by_engine()
    loads = {url.partition("://")[2]: [own.get(f"vllm:{name}") for name in names] for url, own in found.items()}
    return loads, sum(own.get("vllm:generation_tokens_total", 0.0) for own in found.values())


def speculation_metrics(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """What became of drafts between two readings of the engines' metrics.

    Empty if engines do not draft, and if one has left or begun anew: the totals have lost its counts.
    """
    prefix, at = "vllm:spec_decode_", "num_accepted_tokens_per_pos_total/"
    grown = {
        name.removeprefix(prefix): value - before.get(name, 0.0)
        for name, value in now.items()
        if name.startswith(prefix) and not name.endswith("_created")
    }
    if any(value < 0 for value in grown.values()):
        return {}
    found = {}
    if passes := grown.get("num_passes_total"):
        found["speculation/on_share"] = grown.get("num_passes_on_total", 0.0) / passes
    if drafted := grown.get("num_draft_tokens_total"):
        found["speculation/acceptance"] = grown["num_accepted_tokens_total"] / drafted
    if drafts := grown.get("num_drafts_total"):
        found["speculation/accepted_length"] = grown["num_accepted_tokens_total"] / drafts
        positions = {name.removeprefix(at): value for name, value in grown.items() if name.startswith(at)}
        found |= {f"speculation/accepted_at/{position}": value / drafts for position, value in positions.items()}
    return found


def _batch_row(
    groups: Sequence[Group], discarded: Sequence[Group], staleness: Sequence[int], counts: Counts
) -> StepRow:
    """The metrics that are known when a batch is shipped; staleness: of each of its groups.

    Mean rewards include discarded groups: without those of equal rewards the mean would not show how good the
    policy is.
    """
    rollouts = [r for group in groups for r in group.rollouts if r.is_counted]
    played = rollouts + [r for group in discarded for r in group.rollouts if r.is_counted]
    lengths = np.array([rollout.num_sampled_tokens for rollout in rollouts])
    rewards = np.array([rollout.reward for rollout in played])
    truncated = sum(rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/trained": float(np.mean([rollout.reward for rollout in rollouts])),
        "off_policy/mean": float(np.mean(staleness)),
        "off_policy/max": float(max(staleness)),
        "off_policy/dropped": float(counts.stale),
        "groups/drawn": float(counts.drawn),
        "groups/failed": float(counts.failed),
        "groups/rejected": float(counts.rejected),
        "groups/zero_signal_share": counts.zero_signal / max(counts.finished, 1),
        "completion/mean": float(lengths.mean()),
        "completion/max": float(lengths.max()),
        "completion/truncated_share": truncated / len(rollouts),
    }
    metrics |= counts.ends.metrics() | _by_env(played) | _of_turns(groups)
    return StepRow(metrics, len(rollouts), int(lengths.sum()))


def group_sum(group: Group) -> float:
    """The sum of a group's advantages, as a share of the sum of their magnitudes; 0 if agents or branches have own."""
    if group.agent_advantages or group.branch_advantages:
        return 0.0
    return abs(sum(group.advantages)) / max(sum(map(abs, group.advantages)), 1e-30)


def _of_turns(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and advantages of scored turns of the rollouts that count; {} if there are none."""
    counted = [(group, r) for group in groups for r in group.rollouts if r.turns and r.is_counted]
    rewards = [turn.reward for _, rollout in counted for turn in rollout.turns if turn.reward is not None]
    metrics = {"turns/reward": float(np.mean(rewards))} if rewards else {}
    credits = [a for group, rollout in counted if group.turn_advantages for a in group.turn_advantages[rollout.member]]
    return metrics | ({"turns/credited_share": float(np.mean(np.array(credits) != 0.0))} if credits else {})


def _distributions_of(groups: Sequence[Group]) -> dict[str, Values]:
    """Rewards and sampled tokens of each rollout that counts, for histograms; {} if none does."""
    rollouts = [r for group in groups for r in group.rollouts if r.is_counted]
    if not rollouts:
        return {}
    return {
        "reward/distribution": np.array([rollout.reward for rollout in rollouts]),
        "completion/distribution": np.array([float(rollout.num_sampled_tokens) for rollout in rollouts]),
    }


def _by_env(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards, custom = defaultdict(list), defaultdict(list)
    for rollout in rollouts:
        rewards[rollout.task.env].append(rollout.reward)
        for name, value in rollout.metrics.items():
            custom[f"env/{rollout.task.env}/{name}"].append(value)
    row = {name: float(np.mean(values)) for name, values in custom.items()}
    if len(rewards) > 1:
        row |= {f"reward/{env}/mean": float(np.mean(values)) for env, values in rewards.items()}
        row |= {f"batch/{env}": float(len(values)) for env, values in rewards.items()}
    return row


def _release(slots: Sequence[Slot], samples: list[TrainSample]) -> Generator[None, None, None]:
    """Free shipped rollouts one by one: freeing five thousand at once takes a tenth of a second."""
    while samples:
        samples.pop()
        yield
    for slot in slots:
        slot.group = None
        yield
