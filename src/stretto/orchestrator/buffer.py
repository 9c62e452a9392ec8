"""Groups between their draw and the trainer: who may start, who waits, who is dropped.

Steps are counted from 1, policy versions from 0: step n trains on batch n and makes version n. A batch for
step n may hold no rollout whose first token came from a version older than n-1-max_off_policy_steps. And no
batch n is shipped before version n-1-max_async_level is loaded: so many steps may generation run ahead of
the trained weights.

A group holds a slot from its draw until the weights it was trained into are loaded on every engine; there are
(max_async_level + 1) batches of slots. Its states:

    RUNNING -> READY                 all members are done, they differ in reward, the group is fresh: waits for a batch
    RUNNING -> SPARE                 no signal, or rejected by a gate or filter; its slot went to another draw. Without
                                     signal it fills a batch if max_oversampling is used up, rejected never
    RUNNING -> FAILED                no member succeeded; its slot went to another draw
    READY, SPARE -> SHIPPED -> LOADED    trained on; LOADED frees the slot
    RUNNING, READY, SPARE -> DROPPED     too old, without signal, or the run ends; frees the slot

Who unblocks whom: `admit` waits for a slot, which `finish` (failed, no signal, stale) and `on_loaded` free.
`next_batch` waits for READY groups (`finish`) and for the version (`on_loaded`). Batches take the lowest
draw numbers, and in order of dispatch they wait for those that still run (or that a resume has yet to run
again): who finishes first has no say in what is trained, and long rollouts are in batches as often as they
were drawn. With max_async_level = 0 a batch is a function of the rewards alone, because as many draws are
made as needed and no more. Every drop is in the ledger before its slot is free.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from stretto.records.partial import Kept
from stretto.records.rollout import Group, Task


class SlotState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    SPARE = "spare"
    FAILED = "failed"
    SHIPPED = "shipped"
    LOADED = "loaded"
    DROPPED = "dropped"


MOVES = {
    SlotState.RUNNING: {SlotState.READY, SlotState.SPARE, SlotState.FAILED, SlotState.DROPPED},
    SlotState.READY: {SlotState.SHIPPED, SlotState.DROPPED},
    SlotState.SPARE: {SlotState.SHIPPED, SlotState.DROPPED},
    SlotState.SHIPPED: {SlotState.LOADED},
    SlotState.FAILED: set(),
    SlotState.LOADED: set(),
    SlotState.DROPPED: set(),
}


class DropReason(StrEnum):
    STALE = "stale"
    ZERO_SIGNAL = "zero_signal"
    CANCELLED = "cancelled"


class DropLog(Protocol):
    """The part of the ledger that hears of drops before they take effect."""

    def group_dropped(self, group_id: int, reason: str) -> None: ...


@dataclass(eq=False)
class Slot:
    """One drawn group. `version` is what was loaded when it started; only what it goes on from may be older."""

    group_id: int
    task: Task
    version: int
    is_frozen: bool = False  # no policy plays it, so it is never too old
    kept: Mapping[int, Kept] = field(default_factory=dict)  # by member: what it goes on from
    state: SlotState = SlotState.RUNNING
    group: Group | None = None
    has_signal: bool = False
    rejected: str | None = None  # by which gate or filter
    step: int | None = None  # the step it was shipped in
    job: asyncio.Task | None = None  # what produces it; cancelled when it is dropped

    def __post_init__(self) -> None:
        self._first_version = min((k.first_version for k in self.kept.values()), default=self.version)
        self._first_version = self._first_of(self.group)

    @property
    def first_version(self) -> int:
        """Version of the oldest first token of its members; of what it goes on from, or else of the draw."""
        return self._first_version

    def finish(self, group: Group, *, has_signal: bool, rejected: str | None) -> None:
        self.group, self.has_signal, self.rejected, self.job = group, has_signal, rejected, None
        self._first_version = self._first_of(group)

    def _first_of(self, group: Group | None) -> int:
        versions = [v for r in (group.rollouts if group else ()) if (v := r.first_version) is not None]
        return min(versions, default=self._first_version)

    def move(self, to: SlotState) -> None:
        assert to in MOVES[self.state], f"group {self.group_id} cannot go from {self.state} to {to}"
        self.state = to


@dataclass
class Counts:
    """What happened since the last batch; read and reset by whoever logs it."""

    drawn: int = 0
    finished: int = 0
    failed: int = 0
    zero_signal: int = 0
    rejected: int = 0
    stale: int = 0


@dataclass(frozen=True)
class Bounds:
    """How far generation may run ahead, in groups and steps."""

    groups_per_batch: int
    max_async_level: int
    max_off_policy_steps: int
    max_running_groups: int | None = None
    max_oversampling: float = 4.0
    filter_zero_signal: bool = True
    max_steps: int | None = None
    is_in_dispatch_order: bool = True
    oversampling_factor: float = 1.0

    @property
    def lead(self) -> int:
        """Steps ahead that are both allowed and not thrown away as too old."""
        return min(self.max_async_level, self.max_off_policy_steps)

    @property
    def num_slots(self) -> int:
        return int((self.lead + 1) * self.groups_per_batch * self.oversampling_factor)

    @property
    def max_replaced(self) -> int:
        """Groups without signal that are replaced for one batch."""
        return int((self.max_oversampling - 1) * self.groups_per_batch) if self.filter_zero_signal else 0

    def oldest_version(self, step: int) -> int:
        """The oldest version whose first tokens step `step` may train on."""
        return step - 1 - self.max_off_policy_steps


@dataclass(eq=False)
class Buffer:
    """All slots of a run. One event loop only; every method without `await` is atomic."""

    bounds: Bounds
    drops: DropLog
    version: int = 0  # loaded on every engine
    next_step: int = 1  # the next batch to ship
    counts: Counts = field(default_factory=Counts)
    slots: dict[int, Slot] = field(default_factory=dict)  # those that are not FAILED, LOADED or DROPPED
    is_closed: bool = False
    num_replaced: int = 0  # groups without signal since the last batch
    num_rejected: int = 0  # groups that gates and filters rejected since the last batch
    max_running: int | None = None  # groups; moves with the engines where concurrency is adaptive
    owed: set[int] = field(default_factory=set)  # draws that a resumed run has yet to start again
    _num: dict[SlotState, int] = field(default_factory=lambda: dict.fromkeys(SlotState, 0))
    _running: list[int] = field(
        default_factory=list
    )  # a heap of draw numbers; those that no longer run go late
    _usable: list[int] = field(default_factory=list)  # sorted: READY groups that batches prefer
    _waiters: list[asyncio.Future] = field(default_factory=list)
    _idle_s: float = 0.0
    _idle_since: float | None = field(default_factory=time.perf_counter)

    # -- who may start --

    def may_admit(self, num_groups: int = 1, held: int = 0) -> bool:
        """Is there a slot for so many groups that some batch will still need? `held` ones take none."""
        waiting = self._num[SlotState.RUNNING] + self._num[SlotState.READY] - held
        bounds = self.bounds
        if self.is_closed or waiting + self._num[SlotState.SHIPPED] + num_groups > bounds.num_slots:
            return False
        limits = [limit for limit in (bounds.max_running_groups, self.max_running) if limit is not None]
        if limits and self._num[SlotState.RUNNING] >= min(limits):
            return False
        if bounds.max_steps is not None:
            return waiting < (bounds.max_steps + 1 - self.next_step) * bounds.groups_per_batch
        return True

    def limit_running(self, num_groups: int) -> None:
        """From now on no more groups than this run at once; those that do are not stopped."""
        self.max_running = num_groups
        self._wake()

    @property
    def num_running(self) -> int:
        """Groups under way."""
        return self._num[SlotState.RUNNING]

    async def admit(self, num_groups: int = 1, held: int = 0) -> bool:
        """Wait for so many free slots; False when no more groups are to be drawn."""
        await self._until(lambda: self.is_closed or self.may_admit(num_groups, held))
        return not self.is_closed

    def start(
        self,
        group_id: int,
        task: Task,
        *,
        is_frozen: bool = False,
        kept: Mapping[int, Kept] | None = None,
        is_extra: bool = False,
    ) -> Slot:
        """Put a drawn group into a free slot, stamped with the version that is loaded now; an extra one needs none."""
        assert is_extra or self.may_admit(), f"group {group_id} started without a free slot"
        assert self.version >= self.bounds.oldest_version(self.next_step), "a group would be born too old"
        slot = Slot(group_id, task, self.version, is_frozen, kept or {})
        self._add(slot)
        self.owed.discard(group_id)
        self.counts.drawn += 1
        return slot

    # -- what becomes of them --

    def finish(self, slot: Slot, group: Group, *, has_signal: bool, rejected: str | None = None) -> None:
        """All members are done and at least one of them succeeded; `rejected` says what keeps it from a batch."""
        slot.finish(group, has_signal=has_signal, rejected=rejected)
        self.counts.finished += 1
        self.counts.zero_signal += not has_signal
        self.counts.rejected += rejected is not None
        if self._is_stale(slot):
            self._drop(slot, DropReason.STALE)
        elif rejected is not None:
            self.num_rejected += 1
            self._move(slot, SlotState.SPARE)
        elif has_signal or self.num_replaced >= self.bounds.max_replaced:
            self._move(slot, SlotState.READY)
        else:
            self.num_replaced += 1
            self._move(slot, SlotState.SPARE)
        self._wake()

    def fail(self, slot: Slot) -> None:
        """No member succeeded; the ledger has the causes."""
        self.counts.failed += 1
        slot.job = None
        self._move(slot, SlotState.FAILED)
        self._wake()

    def drop(self, slot: Slot, reason: str) -> None:
        """Nobody wants to know how it ends."""
        slot.job = None
        self._drop(slot, reason)
        self._wake()

    def restore(self, group: Group, *, has_signal: bool, rejected: str | None = None) -> None:
        """Take over a group that an earlier life of the run finished."""
        is_frozen = any(rollout.is_frozen for rollout in group.rollouts)
        slot = Slot(group.group_id, group.task, self.bounds.oldest_version(self.next_step), is_frozen)
        self._add(slot)
        self.finish(slot, group, has_signal=has_signal, rejected=rejected)
        self.counts.finished -= 1

    def owe(self, group_ids: Iterable[int]) -> None:
        """These draws of an earlier life will be started again: their batches wait for them."""
        self.owed.update(group_ids)

    # -- batches --

    async def next_batch(self) -> list[Slot] | None:
        """The groups of batch `next_step` in draw order, once it may be shipped.

        None when the buffer closed.
        """
        await self._until(lambda: self.is_closed or self._may_ship())
        return None if self.is_closed else self._choose()

    def finished(self) -> list[Slot]:
        """All groups that the next batch may have, in draw order; with signal, and those taken for lack of it."""
        ready = [slot for slot in self.slots.values() if slot.state is SlotState.READY]
        return sorted(ready, key=lambda slot: slot.group_id)

    def ship(self, chosen: list[Slot], left_out: list[Slot]) -> None:
        """These groups are on their way to the trainer, and the ledger says so; those left out are dropped."""
        step = self.next_step
        for slot in chosen:
            assert not self._is_stale(slot), f"group {slot.group_id} is too old for step {step}"
            slot.step = step
            self._move(slot, SlotState.SHIPPED)
        self.next_step += 1
        self.num_rejected = 0
        for slot in left_out:
            self._drop(slot, slot.rejected or DropReason.ZERO_SIGNAL)
        self._drop_stale()
        self.num_replaced = sum(slot.rejected is None for slot in self._spares())
        self._wake()

    def on_loaded(self, version: int) -> None:
        """Every engine samples from `version` now: the slots of the steps that made it are free."""
        assert version > self.version or version == 0, f"version {version} after {self.version}"
        self.version = version
        for slot in [s for s in self.slots.values() if s.state is SlotState.SHIPPED and s.step <= version]:
            self._move(slot, SlotState.LOADED)
        self._wake()

    def end_admission(self) -> None:
        """No more draws and batches; what is running goes on until `close`."""
        self.is_closed = True
        self._wake()

    def close(self) -> None:
        """No more draws and batches; what is still running is dropped. Finished groups stay for a resume."""
        self.is_closed = True
        for slot in [s for s in self.slots.values() if s.state is SlotState.RUNNING]:
            self._move(slot, SlotState.DROPPED)
            if slot.job:
                slot.job.cancel()
        self._wake()

    def left_out(self, chosen: list[Slot]) -> list[Slot]:
        """The groups that are decided with this batch and not in it, in draw order.

        Where rollouts are generated ahead, spare ones drawn after its last group are left to a later batch.
        """
        end = max((slot.group_id for slot in chosen), default=-1)
        is_whole = self.bounds.lead == 0 or not self.bounds.is_in_dispatch_order
        taken = {slot.group_id for slot in chosen}
        spares = {s.group_id: s for s in self._without_signal() if s.state is SlotState.READY}
        spares |= {s.group_id: s for s in self._spares() if is_whole or s.group_id < end}
        return [spares[group_id] for group_id in sorted(spares) if group_id not in taken]

    # -- for metrics and dumps --

    def gauges(self) -> dict[str, int]:
        """Queue depths by state, and where the run stands."""
        depths = {str(state): num for state, num in self._num.items() if num}
        return {
            "next_step": self.next_step,
            "version": self.version,
            "slots": self.bounds.num_slots,
            **depths,
        }

    def staleness(self, slot: Slot) -> int:
        """Versions between a group's first token and the one its batch trains."""
        if slot.is_frozen:
            return 0
        return (slot.step or self.next_step) - 1 - slot.first_version

    @property
    def idle_s(self) -> float:
        """Seconds so far in which no group was running: generation waited for the trainer."""
        since = self._idle_since
        return self._idle_s + (time.perf_counter() - since if since is not None else 0.0)

    # -- inside --

    def _may_ship(self) -> bool:
        if self.version < self.next_step - 1 - self.bounds.lead:
            return False
        num_groups = self.bounds.groups_per_batch
        if self._num[SlotState.READY] < num_groups:
            return False
        if not self.bounds.is_in_dispatch_order:
            return True
        last = (
            self._usable[num_groups - 1] if len(self._usable) >= num_groups else self._choose()[-1].group_id
        )
        return last < self._first_unfinished()

    def _first_unfinished(self) -> float:
        """The lowest draw number that still runs, or will be run again as soon as there is a slot for it."""
        running = self._running
        while running and not ((slot := self.slots.get(running[0])) and slot.state is SlotState.RUNNING):
            heapq.heappop(running)
        first = running[0] if running else math.inf
        return min(first, *self.owed) if self.owed and self.may_admit() else first

    def _choose(self) -> list[Slot]:
        """Lowest draw numbers first; groups without signal only where there are not enough others."""
        chosen = [self.slots[group_id] for group_id in self._usable[: self.bounds.groups_per_batch]]
        missing = self.bounds.groups_per_batch - len(chosen)
        if missing:
            chosen += sorted(self._without_signal(), key=lambda s: s.group_id)[:missing]
        return sorted(chosen, key=lambda s: s.group_id)

    def _without_signal(self) -> list[Slot]:
        """Groups that waited only to fill up a batch that lacked better ones."""
        if not self.bounds.filter_zero_signal:
            return []
        waiting = (SlotState.READY, SlotState.SPARE)
        mine = (s for s in self.slots.values() if s.state in waiting and s.rejected is None)
        return [slot for slot in mine if not slot.has_signal]

    def _spares(self) -> list[Slot]:
        return (
            [s for s in self.slots.values() if s.state is SlotState.SPARE]
            if self._num[SlotState.SPARE]
            else []
        )

    def _is_stale(self, slot: Slot) -> bool:
        return not slot.is_frozen and slot.first_version < self.bounds.oldest_version(self.next_step)

    def _drop_stale(self) -> None:
        alive = (SlotState.RUNNING, SlotState.READY, SlotState.SPARE)
        for slot in [s for s in self.slots.values() if s.state in alive and self._is_stale(s)]:
            self._drop(slot, DropReason.STALE)

    def _drop(self, slot: Slot, reason: str) -> None:
        self.drops.group_dropped(slot.group_id, reason)
        self.counts.stale += reason is DropReason.STALE
        self._move(slot, SlotState.DROPPED)
        if slot.job:
            slot.job.cancel()

    def _add(self, slot: Slot) -> None:
        self.slots[slot.group_id] = slot
        self._num[SlotState.RUNNING] += 1
        heapq.heappush(self._running, slot.group_id)
        self._mark_idle()

    def _move(self, slot: Slot, to: SlotState) -> None:
        is_usable = slot.has_signal or not self.bounds.filter_zero_signal
        if slot.state is SlotState.READY and is_usable:
            del self._usable[bisect_left(self._usable, slot.group_id)]
        if to is SlotState.READY and is_usable:
            insort(self._usable, slot.group_id)
        self._num[slot.state] -= 1
        slot.move(to)
        if MOVES[to]:
            self._num[to] += 1
        else:
            del self.slots[slot.group_id]
        self._mark_idle()

    def _mark_idle(self) -> None:
        is_idle = not self._num[SlotState.RUNNING]
        if is_idle and self._idle_since is None:
            self._idle_since = time.perf_counter()
        elif not is_idle and self._idle_since is not None:
            self._idle_s += time.perf_counter() - self._idle_since
            self._idle_since = None

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
