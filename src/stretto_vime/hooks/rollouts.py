"""Calls a user's `generate_rollout`, which plays whole batches instead of the environments.

    generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput

It may be a coroutine function; a plain function runs in a thread and may block. Its samples have their tokens, and
their log-probabilities if the function knows them: otherwise the trainer uses its own. Staleness, the ledger,
advantages and batches work as in any run.

A returned group is one of the data source, or one that the function made by itself, which takes the place of the next
task. A member of a group is a sample, or a list of samples that come from one episode. A sample that cannot be trained
makes its member a failed rollout with the reason. A group may also be a `records.rollout.Group` of a ledger, which is
trained as it was recorded. A call that returns a `RecordedBatch` gives the batch of its step, of however many groups.
If the function returns anything but groups, all groups that the call has taken fail. If an eval function returns
something invalid, that eval is lost.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stretto.base.errors import ConfigError, EnvError, StrettoError, boundary
from stretto.chat.render import Renderer
from stretto.config.sections.orchestrator import EvalSection, OrchestratorSection, SamplingSection
from stretto.envs.result import checked_reward
from stretto.orchestrator.build import urls_of
from stretto.orchestrator.eval.results import write_samples
from stretto.orchestrator.eval_scores import EvalScore
from stretto.orchestrator.groups.buffer import Buffer, Slot, SlotState
from stretto.orchestrator.groups.hooks import Drawing
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import describe, failed_rollout
from stretto.records.rollout import Group, Rollout, Task
from stretto.vime.arguments import Arguments
from stretto.vime.calls import Hook
from stretto.vime.sample import Sample
from stretto_vime.hooks.batches import arguments_of
from stretto_vime.hooks.engine import EngineRequests, requests_to_engines
from stretto_vime.hooks.evals import build_score, checked_metrics, checked_results, sample_lines
from stretto_vime.hooks.load import load_batch_hook
from stretto_vime.hooks.outputs import RecordedBatch, RolloutFnTrainOutput
from stretto_vime.hooks.source import DataSource, Members, is_group
from stretto_vime.hooks.trained import has_failed, rollout_of, trained_tokens

logger = logging.getLogger(__name__)


@dataclass
class UserRolloutFunction:
    """A user's rollout or eval function, with checks of what it returns."""

    hook: Hook
    args: Arguments
    sampling: SamplingSection  # of training
    seq_len: int  # tokens of the longest sample that can be trained
    urls: Sequence[str] = ()  # of the policy's engines
    key: str | None = None  # the engines' API key
    max_support: int | None = None  # most tokens in a support, if top_p, top_k and min_p are replayed
    group_size: int = 1  # of training
    max_failed_groups: int = 1  # calls without a group, one after the other, that end the run
    renderer: Renderer | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    is_recorded: bool = False  # the latest call returned a RecordedBatch

    async def play(self, call_index: int, source: DataSource, version: Callable[[], int]) -> list[tuple[Slot, Group]]:
        """Call the function and return its groups with their slots; `version` returns the loaded version.

        Raises: EnvError if it raises, or returns anything but groups of the data source.
        """
        self.is_recorded = False
        with requests_to_engines(
            self.urls, version, key=self.key, is_truncated_sampling_refused=self.max_support is None, is_trained=True
        ) as requested:
            output = await self._call(call_index, source, evaluation=False)
        with boundary(EnvError, self.hook.place):
            samples = output.samples if isinstance(output, RolloutFnTrainOutput) else output
            if not isinstance(samples, list):
                rule = "return RolloutFnTrainOutput(samples=groups)"
                raise EnvError(f"{self.hook.place} returned {type(output).__name__}; {rule}")
            metrics = output.metrics if isinstance(output, RolloutFnTrainOutput) else None
            self.metrics |= checked_metrics(metrics, "rollout", self.hook.place)
            groups = [self._members_of(group) for group in samples]
            self.is_recorded = isinstance(output, RecordedBatch)
            slots = self._slots_of(groups, source)
            errors: list[str] = []
            built = [
                (slot, self._recorded(slot, group))
                if isinstance(group, Group)
                else (slot, self._build_group(slot, group, errors, requested=requested))
                for slot, group in zip(slots, groups)
            ]
        if errors:
            text = "%s: %d of %d samples cannot be trained, such as %s"
            num_samples = sum(len(group.rollouts if isinstance(group, Group) else group) for group in groups)
            logger.warning(text, self.hook.place, len(errors), num_samples, errors[0])
        for slot in slots:
            del source.slots[slot.group_id]
        return built

    async def play_groups(self, pipeline: Drawing, start: int) -> None:
        """Call the function whenever a batch has free slots, until the buffer is closed.

        Groups that it neither returns nor puts back are dropped.
        """
        buffer = pipeline.buffer
        source = self._open_source(
            lambda task, num_members: pipeline.draw(is_extra=True, task=task, num_members=num_members), self.group_size
        )
        num_empty = 0  # calls in a row
        for number in itertools.count(start):
            num_put_back = sum(slot.state is SlotState.RUNNING for slot in source.slots.values())
            if not await buffer.admit(buffer.bounds.groups_per_batch, num_put_back):
                return
            try:
                played = await self.play(number, source, lambda: buffer.version)
            except StrettoError as error:
                source.put_back.clear()
                played = [(slot, self._failed_group(slot, error)) for slot in source.slots.values()]
                source.slots.clear()
                if not played:
                    raise  # it had not drawn a task yet
            num_empty = 0 if played else num_empty + 1
            if num_empty >= self.max_failed_groups:
                raise EnvError(
                    f"{self.hook.place} returned no group {num_empty} times in a row (max_failed_groups); it must "
                    "return groups of data_source.get_samples"
                )
            for slot, group in played:
                if slot.state is SlotState.RUNNING:  # not dropped meanwhile: too old, or the run ends
                    pipeline.hand_over(slot, group)
            if self.is_recorded:
                _expect_recorded(buffer, number + 1, [slot for slot, _ in played])
            not_returned = [group_id for group_id in source.slots if group_id not in source.put_back]
            for slot in map(source.slots.pop, not_returned):
                if slot.state is SlotState.RUNNING:
                    buffer.drop(slot, "not returned by rollout_function")
            await asyncio.sleep(0)

    async def evaluate(
        self, version: int, tasks: Sequence[Task], section: EvalSection, path_of: Callable[[str], Path] | None
    ) -> tuple[list[EvalScore], dict[str, dict[str, Any]]]:
        """Call the function to evaluate a version on these held-out tasks, in order: scores, and entries by data set.

        path_of: from a data set to the file of its samples; None if they are not written.

        Raises: EnvError if it raises, or returns anything but entries with rewards.
        """
        self.metrics = {}
        started, numbers = time.perf_counter(), itertools.count()

        def draw(_: Task | None, __: int | None) -> Slot:
            number = next(numbers)
            return Slot(number, tasks[number % len(tasks)], version)

        source = self._open_source(draw, section.group_size, len(tasks))
        try:
            with requests_to_engines(self.urls, lambda: version, key=self.key):
                output = await self._call(version, source, evaluation=True)
            data, self.metrics = checked_results(output, self.hook.place)
            time_s = time.perf_counter() - started
            with boundary(EnvError, f"{self.hook.where}: its samples"):
                task_ids: dict[int | None, str] = {number: slot.task.task_id for number, slot in source.slots.items()}
                for name, entry in data.items() if path_of is not None else ():
                    if entry.get("samples"):
                        assert path_of is not None and self.renderer is not None, "a run has a renderer"
                        await write_samples(path_of(name), sample_lines(name, entry, self.renderer, version, task_ids))
                return [build_score(name, entry, version, time_s) for name, entry in data.items()], data
        except StrettoError as error:  # even if an engine failed: the eval is lost, not the run
            raise EnvError(str(error)) from error

    def _open_source(
        self, draw: Callable[[Task | None, int | None], Slot], group_size: int, num_tasks: int | None = None
    ) -> DataSource:
        render = None if self.renderer is None else self.renderer.render_text
        return DataSource(draw, group_size, asyncio.get_running_loop(), num_tasks, render=render)

    def _failed_group(self, slot: Slot, error: StrettoError) -> Group:
        """The failed group of a slot, for which the function raised."""
        draw, members = Draw(slot.group_id, slot.task, self.group_size, slot.version), range(self.group_size)
        rollouts = tuple(failed_rollout(draw, member, describe(error), time.time()) for member in members)
        return Group(group_id=slot.group_id, task=slot.task, rollouts=rollouts)

    async def _call(self, call_index: int, source: DataSource, *, evaluation: bool) -> Any:
        arguments = (self.args, call_index, source)
        if inspect.iscoroutinefunction(self.hook.function):
            return await self.hook.call(*arguments, evaluation=evaluation)
        return await asyncio.to_thread(self.hook.call_sync, *arguments, evaluation=evaluation)

    def _members_of(self, group: Any) -> Members | Group:
        """The samples of each member of a returned group; a recorded group as it is.

        Raises: EnvError for anything but a list of samples and of lists of samples.
        """
        if isinstance(group, Group):
            return group
        entries = group if isinstance(group, list | tuple) else ()
        members = [each if isinstance(each, list) else [each] for each in entries]
        if not members or not all(map(is_group, members)):
            raise EnvError(
                f"{self.hook.place}: a group must be a list of samples (or of lists, for members with several), "
                f"got {type(group).__name__}"
            )
        return members

    def _slots_of(self, groups: Sequence[Members | Group], source: DataSource) -> list[Slot]:
        """The slot of each returned group; one that is not of the data source gets that of the next task.

        Raises: EnvError for a group that was returned twice, or has samples of several groups.
        """
        slots: list[Slot] = []
        for members in groups:
            if isinstance(members, Group):
                slots.append(source.draw_slot(members.task, len(members.rollouts)))
                continue
            indices = {sample.group_index for samples in members for sample in samples}
            known = source.slots.keys() & indices
            if not known:
                slots.append(source.draw_slot())
                continue
            is_unchanged = len(indices) == 1 and not indices & source.put_back.keys()
            if not is_unchanged or known & {slot.group_id for slot in slots}:
                raise EnvError(
                    f"{self.hook.place}: a group has samples of the groups {sorted(map(str, indices))}; return each "
                    "group of the data source once, unchanged"
                )
            slots.append(source.slots[known.pop()])
        return slots

    def _recorded(self, slot: Slot, group: Group) -> Group:
        """A recorded group under the number of its slot. Raises: EnvError for a longer sample than fits in a row."""
        longest = max((len(branch.token_ids) for rollout in group.rollouts for branch in rollout.branches), default=0)
        if longest > self.seq_len:
            raise EnvError(
                f"{self.hook.place}: a recorded sample has {longest} tokens, more than seq_len = {self.seq_len}"
            )
        rollouts = tuple(
            msgspec.structs.replace(each, group_id=slot.group_id, rollout_id=f"g{slot.group_id}.{each.member}")
            for each in group.rollouts
        )
        return msgspec.structs.replace(group, group_id=slot.group_id, rollouts=rollouts)

    def _build_group(self, slot: Slot, members: Members, errors: list[str], *, requested: EngineRequests) -> Group:
        """Build the group of returned samples; `errors` collects why some cannot be trained.

        requested: the sampling that the function requested from the policy's engines.
        """
        task = _task_of(slot, members[0][0])
        draw = Draw(slot.group_id, task, len(members), slot.version)
        rollouts = []
        for member, samples in enumerate(members):
            try:
                with boundary(EnvError, "its fields do not fit together"):
                    rollouts.append(self._build_rollout(slot, task, member, samples, requested=requested))
            except EnvError as error:
                errors.append(f"sample {member} of group {slot.group_id}: {error}")
                cause = f"EnvError: {self.hook.place}: {errors[-1]}"
                rollouts.append(failed_rollout(draw, member, cause, time.time()))
        return Group(group_id=slot.group_id, task=task, rollouts=tuple(rollouts))

    def _build_rollout(
        self, slot: Slot, task: Task, member: int, samples: list[Sample], *, requested: EngineRequests
    ) -> Rollout:
        rewards = []
        for sample in samples:
            if has_failed(sample):  # it needs no reward
                continue
            rewards.append(checked_reward(sample.get_reward_value(self.args), "", "its reward"))
            self._check_tokens(sample)
            if trained_tokens(sample)[1].any():
                self._check_temperature(sample, requested)
                self._check_support(sample, requested)
        return rollout_of(
            samples,
            task,
            group_id=slot.group_id,
            member=member,
            version=slot.version,
            temperature=self.sampling.temperature,
            rewards=rewards,
        )

    def _check_tokens(self, sample: Sample) -> None:
        """Raises: EnvError for more tokens than fit in a row, and for numbers that are no token ids."""
        if len(sample.tokens) > self.seq_len:
            rule = f"more than seq_len = {self.seq_len}; raise seq_len or shorten the replies"
            raise EnvError(f"it has {len(sample.tokens)} tokens, {rule}")
        if len(sample.tokens) and not 0 <= min(sample.tokens) <= max(sample.tokens) < 2**31:
            bad = next(token for token in sample.tokens if not 0 <= token < 2**31)
            raise EnvError(f"{bad} is no token id")

    def _check_temperature(self, sample: Sample, requested: EngineRequests) -> None:
        """Raises: EnvError if it is unknown which of several temperatures sampled its tokens."""
        others = sorted(requested.temperatures - {self.sampling.temperature})
        if sample.temperature is None and others:
            raise EnvError(
                f"its function requested temperature = {others[0]:g}, the run has {self.sampling.temperature:g}, and "
                "it does not say at which of them its tokens were sampled; set its temperature"
            )

    def _check_support(self, sample: Sample, requested: EngineRequests) -> None:
        """Raises: EnvError for tokens whose support is too large or not known."""
        if self.max_support is None:
            return
        widest = max(sample.rollout_top_p_token_lengths or [0])
        if widest > self.max_support:
            limit = f"orchestrator.train.replay.max_tokens = {self.max_support}"
            raise EnvError(f"one of its tokens was drawn from {widest}, more than {limit}; give requests a top_k")
        cuts = self.sampling.cuts()
        if sample.rollout_top_p_token_lengths is not None or not (cuts or requested.has_truncated_sampling):
            return
        settings = ", ".join(f"{key} = {value}" for key, value in cuts.items())
        requested_cuts = "its function requested top_p, top_k, min_p, min_tokens, bad_words or allowed_token_ids"
        what = f"the run samples with {settings}" if cuts else requested_cuts
        raise EnvError(
            f"{what}, and it does not say what its tokens were drawn from; give requests a top_k, and set "
            "rollout_top_p_token_ids and rollout_top_p_token_lengths from the engine's sampling_mask "
            "(0: drawn from all tokens)"
        )


def load_rollout_function(cfg: OrchestratorSection, key: str, renderer: Renderer) -> UserRolloutFunction:
    """Load the function at a key of [orchestrator.hooks]. Raises: ConfigError as `Hook.load`."""
    return UserRolloutFunction(
        load_batch_hook(key, getattr(cfg.hooks, key)),
        arguments_of(cfg),
        cfg.train.sampling,
        cfg.seq_len,
        urls_of(cfg.client),
        key=os.environ.get(cfg.client.api_key_var),
        max_support=None if cfg.train.replay is None else cfg.train.replay.max_tokens,
        group_size=cfg.group_size,
        max_failed_groups=cfg.max_failed_groups,
        renderer=renderer,
    )


def _expect_recorded(buffer: Buffer, step: int, slots: Sequence[Slot]) -> None:
    """Have the batch of `step` consist of these recorded groups, without those that filters reject now.

    Raises: ConfigError if they reject all.
    """
    num_kept = sum(slot.state is SlotState.READY for slot in slots)
    if not num_kept and slots and not buffer.is_closed:
        raise ConfigError(
            f"gates, filters and hooks of this config reject all {len(slots)} groups that were recorded for step "
            f"{step}; leave out those that the recorded run did not have"
        )
    buffer.recorded_sizes[step] = num_kept


def _task_of(slot: Slot, sample: Sample) -> Task:
    """The task of a group: what was drawn, or what the function made in its place."""
    if sample.group_index == slot.group_id:
        return slot.task
    data = {"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata}
    return msgspec.structs.replace(slot.task, task_id=f"own-{slot.group_id}", data=data)
