"""A user's `generate_rollout` in the place of the environments' rollouts: it gets tasks, and gives whole batches.

    generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput

It may be asynchronous; a plain function runs in a thread, and may take its time. Its samples bring their tokens
and log-probabilities along. Staleness, the ledger, credit and batches are the run's, as ever.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import EnvError, StrettoError
from stretto.hooks import Arguments, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample
from stretto.hooks.calls import Hook
from stretto.hooks.convert import rollout_of
from stretto.hooks.engine import salted
from stretto.orchestrator.buffer import Slot
from stretto.orchestrator.rollout import Draw, describe, failed
from stretto.orchestrator.scores import Score
from stretto.records.rollout import Group


class DataSource:
    """What a rollout function takes tasks from. Usable from a thread."""

    def __init__(self, draw: Callable[[], Slot], group_size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._draw, self._group_size, self._loop = draw, group_size, loop
        self.kept: list[list[Sample]] = []  # that were put back
        self.slots: dict[int, Slot] = {}  # of tasks that were given out and have not come back

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Groups of pending samples: those that were put back first, then new tasks."""
        groups, self.kept = self.kept[:num_samples], self.kept[num_samples:]
        return groups + [self._new() for _ in range(num_samples - len(groups))]

    def add_samples(self, groups: Sequence[list[Sample]]) -> None:
        """Put groups back, to be given out again: what a sample has so far stays in it."""
        self.kept += groups

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
        samples = output.samples if isinstance(output, RolloutFnTrainOutput) else output
        if isinstance(output, RolloutFnTrainOutput) and output.metrics:
            self.metrics |= {f"rollout/{name}": float(value) for name, value in output.metrics.items()}
        if not isinstance(samples, list):
            kind = type(output).__name__
            raise EnvError(f"{self.hook.where} returned {kind}; return RolloutFnTrainOutput(samples=groups)")
        return [self._group(group, source) for group in samples]

    async def evaluate(self, version: int, source: DataSource) -> dict[str, dict[str, Any]]:
        """What an eval function says of a version, by data set.

        Raises: EnvError as `play`.
        """
        with salted(self.urls, lambda: version):
            output = await self._called(version, source, evaluation=True)
        data = output.data if isinstance(output, RolloutFnEvalOutput) else output
        if not isinstance(data, dict) or not all("rewards" in entry for entry in data.values()) or not data:
            kind = type(output).__name__
            rule = 'return RolloutFnEvalOutput(data={"name": {"rewards": [...]}})'
            raise EnvError(f"{self.hook.where} returned {kind}; {rule}")
        return data

    def score(self, name: str, entry: dict[str, Any], version: int, time_s: float) -> Score:
        """What an eval function says of one data set.

        Raises: EnvError where that are no numbers.
        """
        try:
            rewards = [float(reward) for reward in entry["rewards"]]
        except (TypeError, ValueError):
            raise EnvError(f"{self.hook.where}: the rewards of {name!r} are no list of numbers") from None
        if not rewards:
            raise EnvError(f"{self.hook.where}: {name!r} has no reward")
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

    def _group(self, samples: Any, source: DataSource) -> tuple[Slot, Group]:
        if not isinstance(samples, list) or not samples or not all(isinstance(s, Sample) for s in samples):
            raise EnvError(
                f"{self.hook.where}: a group must be a list of samples, got {type(samples).__name__}"
            )
        numbers = {sample.group_index for sample in samples}
        slot = source.slots.pop(next(iter(numbers)), None) if len(numbers) == 1 else None
        if slot is None:
            rule = f"has samples of the groups {sorted(map(str, numbers))}"
            raise EnvError(
                f"{self.hook.where}: a group {rule}; return each group of the data source once, as it was"
            )
        rollouts = []
        for member, sample in enumerate(samples):
            try:
                reward = sample.get_reward_value(self.args)
                rollouts.append(
                    rollout_of(
                        sample,
                        slot.task,
                        group_id=slot.group_id,
                        member=member,
                        version=slot.version,
                        temperature=self.temperature,
                        reward=reward,
                    )
                )
            except EnvError as error:
                raise EnvError(
                    f"{self.hook.where}: sample {member} of group {slot.group_id}: {error}"
                ) from None
        return slot, Group(group_id=slot.group_id, task=slot.task, rollouts=tuple(rollouts))
