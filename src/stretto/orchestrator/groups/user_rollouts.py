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
import copy
import inspect
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.base.errors import EnvError, StrettoError, boundary
from stretto.config.sections.orchestrator import SamplingSection
from stretto.data.values import checked_number, with_whole_text
from stretto.envs.result import checked_reward
from stretto.orchestrator.eval_scores import EvalScore
from stretto.orchestrator.groups.buffer import Slot
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import describe, failed_rollout
from stretto.records.rollout import Group, Rollout, Task
from stretto.vime import Arguments, RecordedBatch, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample
from stretto.vime.calls import Hook
from stretto.vime.convert import Render, has_failed, prompt_of, rollout_of, sample_number, trained_tokens
from stretto.vime.engine import EngineRequests, requests_to_engines

logger = logging.getLogger(__name__)

Members = list[list[Sample]]
"""A group: the samples of each member."""


class DataSource:
    """Gives tasks to a rollout function, as groups of pending samples. Thread-safe."""

    def __init__(
        self,
        draw: Callable[[Task | None, int | None], Slot],
        group_size: int,
        loop: asyncio.AbstractEventLoop,
        num_tasks: int | None = None,
        *,
        render: Render | None = None,
    ) -> None:
        self._render = render
        self._draw, self._group_size, self._loop = draw, group_size, loop
        self.num_tasks = num_tasks  # held-out tasks of an eval, which then start over; None in training
        self.put_back: dict[int, list[Sample]] = {}  # groups that were put back, by draw number
        self.slots: dict[int, Slot] = {}  # of tasks that were given out and not returned

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Get groups of pending samples: first those that were put back, then new tasks."""
        groups = [self.put_back.pop(each) for each in list(self.put_back)[:num_samples]]
        return groups + [self._new_group() for _ in range(num_samples - len(groups))]

    def draw_slot(self, task: Task | None = None, num_members: int | None = None) -> Slot:
        """The slot of a group that a function made by itself, of the next task, or of this one.

        num_members: None for as many as the environment's groups have. Called in the event loop.
        """
        slot = self._draw(task, num_members)
        self.slots[slot.group_id] = slot
        return slot

    def add_samples(self, groups: Sequence[list[Sample]]) -> None:
        """Put groups back for the next `get_samples`; samples keep what they have so far.

        Raises: TypeError, ValueError for anything but groups that were given out.
        """
        for group in groups:
            if not _is_group(group):
                raise TypeError(
                    f"add_samples takes a list of groups, each a list of samples; got {type(group).__name__}"
                )
            numbers = {sample.group_index for sample in group}
            if len(numbers) != 1 or not numbers <= self.slots.keys():
                indices = sorted(map(str, numbers))
                raise ValueError(f"add_samples takes groups as they were given out; got one of {indices}")
            [number] = self.slots.keys() & numbers
            self.put_back[number] = group

    def __len__(self) -> int:
        return len(self.put_back)

    def _new_group(self) -> list[Sample]:
        try:
            is_in_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_in_loop = False
        if is_in_loop:
            slot = self._draw(None, None)
        else:
            slot = asyncio.run_coroutine_threadsafe(self._draw_in_loop(), self._loop).result()
        self.slots[slot.group_id] = slot
        data = slot.task.data
        prompt, metadata = prompt_of(data, self._render)
        first = Sample(
            group_index=slot.group_id, prompt=prompt, label=data.get("label"), metadata=metadata | {"task": data}
        )
        members = [copy.deepcopy(first) for _ in range(self._group_size)]
        for index, sample in enumerate(members):
            sample.index = sample.rollout_id = sample_number(slot.group_id, index, self._group_size)
        return members

    async def _draw_in_loop(self) -> Slot:
        return self._draw(None, None)


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
            self.metrics |= self._checked_metrics(metrics, "rollout")
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

    async def evaluate(self, version: int, source: DataSource) -> dict[str, dict[str, Any]]:
        """Call the function to evaluate a version; its entries by data set.

        Raises: EnvError if it raises, or returns anything but entries with rewards.
        """
        self.metrics = {}
        with requests_to_engines(self.urls, lambda: version, key=self.key):
            output = await self._call(version, source, evaluation=True)
        with boundary(EnvError, self.hook.place):
            data = output.data if isinstance(output, RolloutFnEvalOutput) else output
            if not isinstance(data, dict) or not data:
                rule = 'return RolloutFnEvalOutput(data={"name": {"rewards": [...]}})'
                if isinstance(output, RolloutFnTrainOutput | list):
                    rule += ', or let the environments play: eval_function = "environments"'
                returned = type(output).__name__
                raise EnvError(f"{self.hook.place} returned {returned} for evaluation=True; {rule}")
            self.metrics = self._checked_metrics(getattr(output, "metrics", None), "eval")
            for name, entry in data.items():
                self._check_entry(name, entry)
        return {str(name): entry for name, entry in data.items()}

    def build_score(self, name: str, entry: dict[str, Any], version: int, time_s: float) -> EvalScore:
        """The eval score of one data set."""
        rewards = [float(reward) for reward in entry["rewards"]]
        lengths = [sample.response_length for sample in entry.get("samples") or ()]
        return EvalScore(
            env=name,
            mode="sampled",
            mean=sum(rewards) / len(rewards),
            k=1,
            pass_at_k={},
            pass_all_k={},
            num_tasks=len(rewards),
            num_failed=0,
            num_truncated=sum(map(bool, entry.get("truncated") or ())),
            completion_tokens=sum(lengths) / max(len(lengths), 1),
            time_s=time_s,
            version=version,
        )

    def failed_group(self, slot: Slot, error: StrettoError, group_size: int) -> Group:
        """The failed group of a slot, for which the function raised."""
        draw = Draw(slot.group_id, slot.task, group_size, slot.version)
        rollouts = tuple(failed_rollout(draw, member, describe(error), time.time()) for member in range(group_size))
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
        if not members or not all(map(_is_group, members)):
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

    def _check_entry(self, name: Any, entry: Any) -> None:
        """Raises: EnvError if the entry of a data set is not valid."""
        where = f"{self.hook.place}:"
        if not isinstance(entry, dict) or "rewards" not in entry:
            raise EnvError(f"{where} {name!r} is {type(entry).__name__}, not a dictionary with rewards")
        try:
            is_finite = all([math.isfinite(float(reward)) for reward in entry["rewards"]])
        except (TypeError, ValueError):
            is_finite = False
        if not is_finite:
            raise EnvError(f"{where} the rewards of {name!r} are no list of finite numbers")
        if not len(entry["rewards"]):
            raise EnvError(f"{where} {name!r} has no reward")
        samples, truncated = entry.get("samples") or [], entry.get("truncated")
        if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
            raise EnvError(f"{where} the samples of {name!r} are no list of Sample")
        if not isinstance(truncated, list | tuple | None):
            raise EnvError(f"{where} truncated of {name!r} is {type(truncated).__name__}, not a list")

    def _checked_metrics(self, metrics: Any, prefix: str) -> dict[str, float]:
        """The function's metrics, under a prefix.

        Raises: EnvError for a metric that is no number.
        """
        where = self.hook.place
        if not isinstance(metrics, dict | None):
            raise EnvError(f"{where}: metrics are {type(metrics).__name__}, not a dictionary of numbers")
        return {
            f"{prefix}/{with_whole_text(str(name))}": checked_number(value, where, f"the metric {name}")
            for name, value in (metrics or {}).items()
        }


def _task_of(slot: Slot, sample: Sample) -> Task:
    """The task of a group: what was drawn, or what the function made in its place."""
    if sample.group_index == slot.group_id:
        return slot.task
    data = {"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata}
    return msgspec.structs.replace(slot.task, task_id=f"own-{slot.group_id}", data=data)


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(isinstance(each, Sample) for each in group)
