"""A user's `generate_rollout` in the place of the environments' rollouts: it gets tasks, and gives whole batches.

    generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput

It may be asynchronous; a plain function runs in a thread, and may take its time. Its samples bring their tokens
and log-probabilities along. Staleness, the ledger, credit and batches are the run's, as ever.

A sample that cannot be trained is a failed rollout, with the reason; anything else than groups of the data source
fails every group that the call had taken; an eval function that gives nonsense costs its eval.
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

from stretto.base.errors import EnvError, StrettoError, boundary
from stretto.hooks import Arguments, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample
from stretto.hooks.calls import Hook
from stretto.hooks.convert import rollout_of
from stretto.hooks.engine import salted
from stretto.hooks.sample import Status
from stretto.orchestrator.buffer import Slot
from stretto.orchestrator.rollout import Draw, describe, failed
from stretto.orchestrator.scores import Score
from stretto.records.rollout import Group, Rollout

logger = logging.getLogger(__name__)


class DataSource:
    """What a rollout function takes tasks from. Usable from a thread."""

    def __init__(
        self,
        draw: Callable[[], Slot],
        group_size: int,
        loop: asyncio.AbstractEventLoop,
        num_tasks: int | None = None,
    ) -> None:
        self._draw, self._group_size, self._loop = draw, group_size, loop
        self.num_tasks = num_tasks  # held-out ones of an eval, after which they come again; None: of training
        self.kept: dict[int, list[Sample]] = {}  # that were put back
        self.slots: dict[int, Slot] = {}  # of tasks that were given out and have not come back

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Groups of pending samples: those that were put back first, then new tasks."""
        groups = [self.kept.pop(each) for each in list(self.kept)[:num_samples]]
        return groups + [self._new() for _ in range(num_samples - len(groups))]

    def add_samples(self, groups: Sequence[list[Sample]]) -> None:
        """Put groups back, to be given out again: what a sample has so far stays in it.

        Raises: TypeError, ValueError for anything else than groups that were given out.
        """
        for group in groups:
            if not _is_group(group):
                kind = type(group).__name__
                raise TypeError(f"add_samples takes a list of groups, each a list of samples; got {kind}")
            numbers = {sample.group_index for sample in group}
            if len(numbers) != 1 or not numbers <= self.slots.keys():
                told = sorted(map(str, numbers))
                raise ValueError(f"add_samples takes groups as they were given out; got one of {told}")
            self.kept[numbers.pop()] = group

    def __len__(self) -> int:
        return len(self.kept)

    def _new(self) -> list[Sample]:
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        slot = (
            self._draw() if is_here else asyncio.run_coroutine_threadsafe(self._drawn(), self._loop).result()
        )
        self.slots[slot.group_id] = slot
        data = slot.task.data
        first = Sample(
            group_index=slot.group_id,
            prompt=data.get("prompt", ""),
            label=data.get("label"),
            metadata=dict(data.get("metadata") or {}) | {"task": data},
        )
        members = [copy.deepcopy(first) for _ in range(self._group_size)]
        for index, sample in enumerate(members):
            sample.index, sample.rollout_id = index, f"g{slot.group_id}.{index}"
        return members

    async def _drawn(self) -> Slot:
        return self._draw()


@dataclass
class OwnRollouts:
    """Calls a rollout function and checks what it gives."""

    hook: Hook
    args: Arguments
    temperature: float
    urls: Sequence[str] = ()  # of the policy's engines
    metrics: dict[str, float] = field(default_factory=dict)

    async def play(
        self, rollout_id: int, source: DataSource, version: Callable[[], int]
    ) -> list[tuple[Slot, Group]]:
        """The groups of one call; `version` is what the engines have at the moment.

        Raises: EnvError when it raises, or gives anything else than groups of the samples it got.
        """
        with salted(self.urls, version):
            output = await self._called(rollout_id, source, evaluation=False)
        with boundary(EnvError, self.hook.where):
            samples = output.samples if isinstance(output, RolloutFnTrainOutput) else output
            if not isinstance(samples, list):
                kind = type(output).__name__
                rule = "return RolloutFnTrainOutput(samples=groups)"
                raise EnvError(f"{self.hook.where} returned {kind}; {rule}")
            metrics = output.metrics if isinstance(output, RolloutFnTrainOutput) else None
            self.metrics |= self._numbers(metrics, "rollout")
            slots = self._slots(samples, source)
            errors: list[str] = []
            played = [self._group(slot, group, errors) for slot, group in zip(slots, samples)]
        if errors:
            count = sum(map(len, samples))
            told = f"{len(errors)} of {count} samples cannot be trained, such as {errors[0]}"
            logger.warning("%s: %s", self.hook.where, told)
        for slot in slots:
            del source.slots[slot.group_id]
        return played

    async def evaluate(self, version: int, source: DataSource) -> dict[str, dict[str, Any]]:
        """What an eval function says of a version, by data set.

        Raises: EnvError as `play`.
        """
        self.metrics = {}
        with salted(self.urls, lambda: version):
            output = await self._called(version, source, evaluation=True)
        with boundary(EnvError, self.hook.where):
            data = output.data if isinstance(output, RolloutFnEvalOutput) else output
            if not isinstance(data, dict) or not data:
                kind = type(output).__name__
                rule = 'return RolloutFnEvalOutput(data={"name": {"rewards": [...]}})'
                if isinstance(output, RolloutFnTrainOutput | list):
                    rule += ', or have the environments play: eval_function = "environments"'
                raise EnvError(f"{self.hook.where} returned {kind} for evaluation=True; {rule}")
            self.metrics = self._numbers(getattr(output, "metrics", None), "eval")
            for name, entry in data.items():
                self._check_entry(name, entry)
        return {str(name): entry for name, entry in data.items()}

    def score(self, name: str, entry: dict[str, Any], version: int, time_s: float) -> Score:
        """What an eval function says of one data set."""
        rewards = [float(reward) for reward in entry["rewards"]]
        lengths = [sample.response_length for sample in entry.get("samples") or ()]
        return Score(
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

    def failed(self, slot: Slot, error: StrettoError, group_size: int) -> Group:
        """A group whose function raised."""
        draw = Draw(slot.group_id, slot.task, group_size, slot.version)
        rollouts = tuple(failed(draw, member, describe(error), time.time()) for member in range(group_size))
        return Group(group_id=slot.group_id, task=slot.task, rollouts=rollouts)

    async def _called(self, rollout_id: int, source: DataSource, *, evaluation: bool) -> Any:
        arguments = (self.args, rollout_id, source)
        if inspect.iscoroutinefunction(self.hook.function):
            return await self.hook.call(*arguments, evaluation=evaluation)
        return await asyncio.to_thread(self.hook.call_now, *arguments, evaluation=evaluation)

    def _slots(self, groups: list[Any], source: DataSource) -> list[Slot]:
        """The slot of each returned group.

        Raises: EnvError for what is no group, or not one that is out.
        """
        numbers: list[int] = []
        for group in groups:
            if not _is_group(group):
                kind = type(group).__name__
                raise EnvError(f"{self.hook.where}: a group must be a list of samples, got {kind}")
            mine = {sample.group_index for sample in group}
            is_out = len(mine) == 1 and mine <= source.slots.keys() and not mine & source.kept.keys()
            if not is_out or not mine.isdisjoint(numbers):
                rule = f"has samples of the groups {sorted(map(str, mine))}"
                raise EnvError(
                    f"{self.hook.where}: a group {rule}; return each group of the data source once, as it was"
                )
            numbers += mine
        return [source.slots[number] for number in numbers]

    def _group(self, slot: Slot, samples: list[Sample], errors: list[str]) -> tuple[Slot, Group]:
        """A returned group; why members of it cannot be trained is added to `errors`."""
        draw = Draw(slot.group_id, slot.task, len(samples), slot.version)
        rollouts = []
        for member, sample in enumerate(samples):
            try:
                with boundary(EnvError, "it does not fit together"):
                    rollouts.append(self._rollout(slot, member, sample))
            except EnvError as error:
                errors.append(f"sample {member} of group {slot.group_id}: {error}")
                cause = f"EnvError: {self.hook.where}: {errors[-1]}"
                rollouts.append(failed(draw, member, cause, time.time()))
        return slot, Group(group_id=slot.group_id, task=slot.task, rollouts=tuple(rollouts))

    def _rollout(self, slot: Slot, member: int, sample: Sample) -> Rollout:
        has_failed = sample.status in (Status.FAILED, Status.ABORTED)  # and needs no reward
        reward = 0.0 if has_failed else sample.get_reward_value(self.args)
        if not math.isfinite(reward):
            raise EnvError(f"its reward is {reward}, not a finite number")
        return rollout_of(
            sample,
            slot.task,
            group_id=slot.group_id,
            member=member,
            version=slot.version,
            temperature=self.temperature,
            reward=reward,
        )

    def _check_entry(self, name: Any, entry: Any) -> None:
        """Raises: EnvError for what an eval function says of a data set when it says nonsense."""
        where = f"{self.hook.where}:"
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

    def _numbers(self, metrics: Any, prefix: str) -> dict[str, float]:
        """The metrics that a function gives, under a prefix.

        Raises: EnvError for those that are no numbers.
        """
        if metrics is not None and not isinstance(metrics, dict):
            kind = type(metrics).__name__
            raise EnvError(f"{self.hook.where}: metrics are {kind}, not a dictionary of numbers")
        numbers = {}
        for name, value in (metrics or {}).items():
            try:
                numbers[f"{prefix}/{name}"] = float(value)
            except (TypeError, ValueError):
                raise EnvError(f"{self.hook.where}: the metric {name} is {value!r}, not a number") from None
        return numbers


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(isinstance(each, Sample) for each in group)
