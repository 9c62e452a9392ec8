"""Tasks as a rollout function gets them: groups of pending samples, each with its slot of the buffer."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

from stretto.orchestrator.groups.buffer import Slot
from stretto.records.rollout import Task
from stretto.vime.convert import Render, prompt_of, sample_number
from stretto.vime.sample import Sample

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
            if not is_group(group):
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


def is_group(group: Any) -> bool:
    """Whether this is a group of samples, or a member's samples."""
    return isinstance(group, list) and bool(group) and all(isinstance(each, Sample) for each in group)
