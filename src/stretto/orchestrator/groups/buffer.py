"""Groups between their draw and the trainer: which may start, which wait, which are dropped.

Steps are counted from 1, policy versions from 0: step n trains on batch n and makes version n. A batch for
step n may hold no rollout whose first token came from a version older than n-1-max_off_policy_steps. Batch n
is not shipped before version n-1-max_async_level, or a newer one, is loaded, so generation is at most max_async_level
steps ahead of the trained weights. If engines get every k-th version, k is at most max_async_level + 1: of any
max_async_level + 1 versions in a row they get one, so the version for which a batch waits comes. Where steering lowers
the level while more versions in a row are not sent, generation is as far ahead as these until the next one is
(`steps_ahead`).

A group holds a slot from its draw until the weights it was trained into are loaded on every engine; there are
(max_async_level + 1) batches of slots. Its states:

    RUNNING -> READY                  has signal and is fresh: waits for a batch
    RUNNING -> REPLACED               zero-signal or rejected: its slot was reused. Zero-signal groups may fill a batch
                                      once max_oversampling is reached; rejected groups never do
    RUNNING -> FAILED                 no member succeeded: its slot was reused
    READY, REPLACED -> SHIPPED        is in a batch that was sent to the trainer
    SHIPPED -> LOADED                 all engines have the weights it was trained into; frees the slot
    RUNNING, READY, REPLACED -> DROPPED    too old, zero-signal, or the run ends; frees the slot

What unblocks what: `admit` waits for a slot, which `complete` (zero-signal, rejected, stale), `fail` and `on_loaded`
free. `next_batch` waits for READY groups (`complete`) and for the version (`on_loaded`).

Batches take the lowest draw numbers. In dispatch order they wait for lower draws that still run or that a resume
has yet to start again, so that fast groups are not preferred and long rollouts are trained as often as they were
drawn. With max_async_level = 0 a batch is a function of the rewards alone, because only as many draws are made as
are needed. Every drop is in the ledger before its slot is free.

In the order in which groups finish, a batch takes the oldest of those that are ready. If keeps_late, it also waits for
groups that later batches could not take any more: of groups that began with version v or an older one, no more may be
left than the batches up to step v+1+max_off_policy_steps have room for. So none is dropped for its age, and long
rollouts are trained as often as they were drawn here too. While max_async_level <= max_off_policy_steps there is always
such an order.

If is_deterministic, batches are played one after the other, and each by one version as a whole (`version_of`): draws
begin once the batch before is shipped and that version is loaded, and the next version is loaded once no batch needs
this one (`wait_for_turn`). So the draws of a batch are the shortest run of draws that has enough groups with a signal,
whatever the order in which they end.

With tokens_per_batch a batch ends with the group that brings it to so many tokens. How many groups are drawn for it
follows from the tokens of those that were played; groups that are left over are in the next batch unless too old. If
keeps_late it takes more, up to groups_per_batch, where later batches could not take all that are left in time, and
no more are drawn with a version than these batches have room for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from stretto.ledger.writer import Ledger
from stretto.orchestrator.groups.bounds import Bounds
from stretto.orchestrator.groups.ends import Counts
from stretto.records.partial import PartialRollout
from stretto.records.rollout import Group, Task


class SlotState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    REPLACED = "replaced"
    FAILED = "failed"
    SHIPPED = "shipped"
    LOADED = "loaded"
    DROPPED = "dropped"


MOVES = {
    SlotState.RUNNING: {SlotState.READY, SlotState.REPLACED, SlotState.FAILED, SlotState.DROPPED},
    SlotState.READY: {SlotState.SHIPPED, SlotState.DROPPED},
    SlotState.REPLACED: {SlotState.SHIPPED, SlotState.DROPPED},
    SlotState.SHIPPED: {SlotState.LOADED},
    SlotState.FAILED: set(),
    SlotState.LOADED: set(),
    SlotState.DROPPED: set(),
}


class DropReason(StrEnum):
    STALE = "stale"
    ZERO_SIGNAL = "zero_signal"


@dataclass(eq=False)
class Slot:
    """One drawn group, from its draw until its weights are loaded."""

    group_id: int
    task: Task
    version: int  # the version that was loaded when it started; only its partial rollouts may be older
    is_frozen: bool = False  # played by a teacher, so it is never too old
    partials: Mapping[int, PartialRollout] = field(default_factory=dict)  # by member: what it continues
    state: SlotState = SlotState.RUNNING
    group: Group | None = None
    has_signal: bool = False
    rejected: str | None = None  # the gate or filter that rejected it
    num_tokens: int = 0  # prompts and replies of the played group
    step: int | None = None  # the step whose batch it is in
    job: asyncio.Task[None] | None = None  # plays it; cancelled when the group is dropped

    def __post_init__(self) -> None:
        # Version of the oldest first token; before the group is played, of what it starts with.
        self.first_version = min((k.first_version for k in self.partials.values()), default=self.version)
        self.started_with = self.first_version  # what `first_version` is until the group is played

    @property
    def played(self) -> Group:
        """The group of a slot that is ready, in a batch or discarded."""
        assert self.group is not None, f"group {self.group_id} is still played"
        return self.group

    def complete(self, group: Group, *, has_signal: bool, rejected: str | None) -> None:
        """Store the played group."""
        self.group, self.has_signal, self.rejected, self.job = group, has_signal, rejected, None
        branches = (branch for rollout in group.rollouts if rollout.is_counted for branch in rollout.branches)
        self.num_tokens = sum(len(branch.token_ids) for branch in branches)
        versions = [version for r in group.rollouts if (version := r.first_version) is not None]
        self.first_version = min(versions, default=self.first_version)

    def move(self, to: SlotState) -> None:
        """Change the state; asserts that MOVES allows it."""
        assert to in MOVES[self.state], f"group {self.group_id} cannot go from {self.state} to {to}"
        self.state = to


@dataclass(eq=False)
class Buffer:
    """All slots of a run. Used by one event loop; every method without `await` is atomic."""

    bounds: Bounds
    ledger: Ledger
    version: int = 0  # loaded on every engine
    next_step: int = 1  # the next batch to ship
    counts: Counts = field(default_factory=Counts)
    slots: dict[int, Slot] = field(default_factory=dict)  # by draw number; not FAILED, LOADED or DROPPED ones
    is_closed: bool = False
    num_replaced: int = 0  # zero-signal groups since the last batch
    num_unsent: int = 0  # latest shipped steps whose versions engines do not get
    num_rejected: int = 0  # groups that gates and filters rejected since the last batch
    max_running: int | None = None  # groups; set by adaptive concurrency
    recorded_sizes: dict[int, int] = field(default_factory=dict)  # groups of batches that were recorded, by step
    pending_redraws: set[int] = field(default_factory=set)  # draws that a resumed run has yet to start again
    _num_by_state: dict[SlotState, int] = field(default_factory=lambda: dict.fromkeys(SlotState, 0))
    _num_added: int = 0
    _num_ended: int = 0  # shipped, dropped or failed
    _running: list[int] = field(default_factory=list)  # heap; groups that ended are removed lazily
    _running_by_version: Counter[int] = field(default_factory=Counter)  # by `started_with`; those that can be too old
    _preferred: list[int] = field(default_factory=list)  # sorted: READY groups, taken first
    _fillers: list[int] = field(default_factory=list)  # sorted: zero-signal groups, which may fill a batch
    _redraw_heap: list[int] = field(default_factory=list)  # heap; draws that were started are removed lazily
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)
    _num_played: int = 0  # groups
    _num_tokens: int = 0  # of these groups
    _late_since: float | None = None  # since then a batch waits for groups that would be late
    _idle_s: float = 0.0
    _idle_since: float | None = field(default_factory=time.perf_counter)

    # -- starting groups --

    def may_admit(self, num_groups: int = 1, num_put_back: int = 0) -> bool:
        """Are num_groups slots free, and will a batch need the groups?

        num_put_back: running groups that take no slot, because they wait to be started again.
        """
        waiting = self._num_by_state[SlotState.RUNNING] + self._num_by_state[SlotState.READY] - num_put_back
        bounds = self.bounds
        if self.is_closed or waiting + self._num_by_state[SlotState.SHIPPED] + num_groups > self.num_slots:
            return False
        if bounds.is_deterministic and (
            self.version != bounds.version_of(self.next_step) or waiting + num_groups > bounds.groups_per_batch
        ):
            return False
        if bounds.tokens_per_batch is not None:
            if self.version < self._needed_version:
                return False  # a short batch leaves slots free before its weights are there
            if self._are_too_many(waiting + self._num_by_state[SlotState.SHIPPED] + num_groups):
                return False
            if bounds.keeps_late and waiting + num_groups > bounds.room(self.version, self.oldest_version):
                return False  # shorter batches were shipped: those that are left would not take it in time
        limits = [limit for limit in (bounds.max_running_groups, self.max_running) if limit is not None]
        if limits and self._num_by_state[SlotState.RUNNING] >= min(limits):
            return False
        if bounds.max_steps is not None:
            return waiting < (bounds.max_steps + 1 - self.next_step) * bounds.groups_per_batch
        return True

    async def wait_for_turn(self, version: int) -> None:
        """Wait until a deterministic run may load this version: until no batch needs an earlier one."""
        await self._wait_until(lambda: self.is_closed or self._is_over(version - 1))

    def _is_over(self, version: int) -> bool:
        """Is every batch of a deterministic run shipped that is played by this version?"""
        bounds, step = self.bounds, self.next_step
        are_all_shipped = bounds.max_steps is not None and step > bounds.max_steps
        return are_all_shipped or version < bounds.first_version or bounds.version_of(step) > version

    def set_async_level(self, level: int) -> None:
        """Let generation be this many steps ahead from now on; what is ahead already stays."""
        self.bounds = replace(self.bounds, max_async_level=level)
        self._wake()

    def limit_running(self, num_groups: int) -> None:
        """Start no group while num_groups run; running groups are not stopped."""
        self.max_running = num_groups
        self._wake()

    @property
    def num_running(self) -> int:
        """Number of running groups."""
        return self._num_by_state[SlotState.RUNNING]

    async def admit(self, num_groups: int = 1, num_put_back: int = 0) -> bool:
        """Wait for num_groups free slots; False if no more groups are to be drawn."""
        await self._wait_until(lambda: self.is_closed or self.may_admit(num_groups, num_put_back))
        return not self.is_closed

    def start(
        self,
        group_id: int,
        task: Task,
        *,
        is_frozen: bool = False,
        partials: Mapping[int, PartialRollout] | None = None,
        is_extra: bool = False,
    ) -> Slot:
        """Put a drawn group into a free slot, stamped with the loaded version.

        is_extra: it needs no free slot, and is dropped as stale if the loaded version is too old by now.
        """
        assert is_extra or self.may_admit(), f"group {group_id} started without a free slot"
        assert is_extra or self.version >= self.oldest_version, f"group {group_id} would be too old from the start"
        slot = Slot(group_id, task, self.version, is_frozen, partials or {})
        self._add(slot)
        self.pending_redraws.discard(group_id)
        self.counts.drawn += 1
        return slot

    # -- ending groups --

    def complete(self, slot: Slot, group: Group, *, has_signal: bool, rejected: str | None = None) -> None:
        """Record a played group of which a member succeeded; `rejected` says why it is not trained."""
        slot.complete(group, has_signal=has_signal, rejected=rejected)
        self._num_played, self._num_tokens = self._num_played + 1, self._num_tokens + slot.num_tokens
        self.counts.finished += 1
        self.counts.zero_signal += not has_signal
        self.counts.rejected += rejected is not None
        if self._is_stale(slot):
            self._drop(slot, DropReason.STALE)
        elif rejected is not None:
            self.num_rejected += 1
            self._move(slot, SlotState.REPLACED)
        elif has_signal or self.num_replaced >= self.bounds.max_replaced:
            self._move(slot, SlotState.READY)
        else:
            self.num_replaced += 1
            self._move(slot, SlotState.REPLACED)
        self._wake()

    def fail(self, slot: Slot) -> None:
        """Record that no member succeeded; the ledger has the causes."""
        self.counts.failed += 1
        self._num_ended += 1
        slot.job = None
        self._move(slot, SlotState.FAILED)
        self._wake()

    def drop(self, slot: Slot, reason: str) -> None:
        """Drop a group that is not to be trained, and free its slot."""
        slot.job = None
        self._drop(slot, reason)
        self._wake()

    def restore(self, group: Group, *, has_signal: bool, rejected: str | None = None) -> None:
        """Add a group that an earlier incarnation of the run finished."""
        is_frozen = any(rollout.is_frozen for rollout in group.rollouts)
        slot = Slot(group.group_id, group.task, self.oldest_version, is_frozen)
        self._add(slot)
        counts = replace(self.counts)  # they are of groups that this incarnation has played
        self.complete(slot, group, has_signal=has_signal, rejected=rejected)
        counts.stale = self.counts.stale
        self.counts = counts

    def expect_redraws(self, group_ids: Iterable[int]) -> None:
        """Let batches wait for these draws of an earlier incarnation, which will be started again."""
        for group_id in group_ids:
            self.pending_redraws.add(group_id)
            heapq.heappush(self._redraw_heap, group_id)

    # -- batches --

    async def next_batch(self) -> list[Slot] | None:
        """Wait until batch `next_step` may be shipped; its groups in draw order, or None if closed."""
        await self._wait_until(lambda: self.is_closed or self._may_ship())
        if self._late_since is not None:
            self.counts.late_s += time.perf_counter() - self._late_since
            self._late_since = None
        return None if self.is_closed else self._choose()

    def ready_slots(self) -> list[Slot]:
        """All READY groups in draw order, from which the next batch may be chosen."""
        return sorted(self._in(SlotState.READY), key=lambda slot: slot.group_id)

    def ship(self, chosen: list[Slot], discarded: list[Slot], *, is_sent: bool = True) -> None:
        """Record that the chosen groups are shipped, and drop the discarded and the stale ones.

        is_sent: do engines get the version that the step makes?
        """
        step = self.next_step
        self.num_unsent = 0 if is_sent else self.num_unsent + 1
        for slot in chosen:
            assert not self._is_stale(slot), f"group {slot.group_id} is too old for step {step}"
            slot.step = step
            self._num_ended += 1
            self._move(slot, SlotState.SHIPPED)
        self.recorded_sizes.pop(step, None)
        self.next_step += 1
        self.num_rejected = 0
        dropped = {slot: slot.rejected or DropReason.ZERO_SIGNAL for slot in discarded}
        for slot in self._in(SlotState.RUNNING, SlotState.READY, SlotState.REPLACED):
            if self._is_stale(slot):
                dropped.setdefault(slot, DropReason.STALE)
        if dropped:
            with self.ledger.transaction():
                for slot, reason in dropped.items():
                    self._drop(slot, reason)
        self.num_replaced = sum(slot.rejected is None for slot in self._in(SlotState.REPLACED))
        self._wake()

    def on_loaded(self, version: int) -> None:
        """Free the slots of the steps up to `version`, which every engine has loaded."""
        assert version > self.version or version == 0, f"version {version} after {self.version}"
        self.version = version
        for slot in self._in(SlotState.SHIPPED):
            assert slot.step is not None, "a batch has the slot"
            if slot.step <= version:
                self._move(slot, SlotState.LOADED)
        self._wake()

    def end_admission(self) -> None:
        """Allow no more draws and batches; running groups continue until `close`."""
        self.is_closed = True
        self._wake()

    def close(self) -> None:
        """Allow no more draws and batches, cancel running groups, keep finished ones for a resume."""
        self.is_closed = True
        for slot in self._in(SlotState.RUNNING):
            self._num_ended += 1
            self._move(slot, SlotState.DROPPED)
            if slot.job:
                slot.job.cancel()
        self._wake()

    def discarded(self, chosen: list[Slot]) -> list[Slot]:
        """The groups that neither this batch nor a later one will use, in draw order.

        With async generation, replaced groups drawn after the last chosen one are kept for a later batch.
        """
        end = max((slot.group_id for slot in chosen), default=-1)
        are_all_over = self.bounds.max_steps_ahead == 0 or not self.bounds.is_in_dispatch_order
        unused = {group_id for group_id in self._fillers if self.slots[group_id].state is SlotState.READY}
        unused |= {s.group_id for s in self._in(SlotState.REPLACED) if are_all_over or s.group_id < end}
        return [self.slots[group_id] for group_id in sorted(unused - {slot.group_id for slot in chosen})]

    # -- for metrics and dumps --

    def gauges(self) -> dict[str, int]:
        """Number of groups per state, the next step and the loaded version."""
        depths = {str(state): num for state, num in self._num_by_state.items() if num}
        return {"next_step": self.next_step, "version": self.version, "slots": self.num_slots, **depths}

    def staleness(self, slot: Slot) -> int:
        """Versions between a group's first token and the version that its step starts from."""
        if slot.is_frozen:
            return 0
        return (slot.step or self.next_step) - 1 - slot.first_version

    @property
    def steps_ahead(self) -> int:
        """Steps that generation may be ahead now."""
        return max(self.bounds.max_steps_ahead, self.num_unsent)

    @property
    def num_slots(self) -> int:
        """Groups that may run, wait or be in training now."""
        return max(self.bounds.num_slots, (self.num_unsent + 1) * self.bounds.groups_per_batch)

    @property
    def oldest_version(self) -> int:
        """The oldest version whose first tokens the next step may train."""
        return self.next_step - 1 - self.bounds.max_off_policy_steps

    @property
    def num_unaccounted(self) -> int:
        """Groups of which nobody knows what became of them: not shipped, dropped, failed, running or waiting."""
        waiting = self._in(SlotState.RUNNING, SlotState.READY, SlotState.REPLACED)
        return self._num_added - self._num_ended - len(waiting)

    @property
    def idle_s(self) -> float:
        """Total seconds without a running group: generation waited for the trainer."""
        since = self._idle_since
        return self._idle_s + (time.perf_counter() - since if since is not None else 0.0)

    # -- private --

    @property
    def _needed_version(self) -> int:
        """The version from which on generation is not too far ahead of the next batch's step."""
        return self.next_step - 1 - self.steps_ahead

    def _are_too_many(self, num_groups: int) -> bool:
        """Are these more groups than generation may be ahead, by the tokens of those played?

        Never while no batch is ready and no group runs that could complete one.
        """
        if self._size_of_batch() is None and not self._num_by_state[SlotState.RUNNING]:
            return False
        bounds = self.bounds
        if not self._num_played:
            return num_groups > bounds.groups_per_batch
        per_batch = math.ceil((bounds.tokens_per_batch or 0) * self._num_played / max(self._num_tokens, 1))
        size = min(max(per_batch, bounds.min_groups), bounds.groups_per_batch)
        return num_groups > max(self.steps_ahead + 1, bounds.oversampling_factor or 0) * size

    def _may_ship(self) -> bool:
        if self.version < self._needed_version:
            return False
        num_groups = self._size_of_batch()
        if num_groups is None:
            return False
        if not self.bounds.is_in_dispatch_order:
            if not self.bounds.keeps_late or not self._would_be_late(num_groups):
                return True
            self._late_since = self._late_since or time.perf_counter()
            return False
        return self._last_of_batch(num_groups) < self._first_unfinished()

    def _size_of_batch(self) -> int | None:
        """Number of groups of the next batch; None if too few are ready."""
        bounds, num_ready = self.bounds, self._num_by_state[SlotState.READY]
        if (recorded := self.recorded_sizes.get(self.next_step)) is not None:
            return recorded if num_ready >= recorded else None
        if bounds.tokens_per_batch is not None:
            num_fillers = num_ready - len(self._preferred)  # further ones have been replaced
            num_tokens, in_order = 0, self._in_order()
            ordered = itertools.chain(in_order, self._fillers[:num_fillers])
            for count, group_id in enumerate(itertools.islice(ordered, bounds.groups_per_batch), 1):
                num_tokens += self.slots[group_id].num_tokens
                if num_tokens >= bounds.tokens_per_batch and count >= bounds.min_groups:
                    size = max(count, self._num_due(in_order)) if bounds.keeps_late else count
                    return size if size <= num_ready else None
        return bounds.groups_per_batch if num_ready >= bounds.groups_per_batch else None

    def _num_due(self, in_order: list[int]) -> int:
        """Groups that the next batch must take, whatever its tokens; in_order: the preferred ones, the oldest first."""
        ready = [self.slots[group_id] for group_id in in_order]
        left = Counter(_age_of(slot) for slot in ready if not slot.is_frozen) + self._running_by_version
        return self.bounds.num_due(left, self.oldest_version)

    def _last_of_batch(self, num_groups: int) -> int:
        """The highest draw number that `_choose` would return."""
        if len(self._preferred) >= num_groups:
            return self._preferred[num_groups - 1]
        filler = self._fillers[num_groups - len(self._preferred) - 1]
        return max(filler, self._preferred[-1]) if self._preferred else filler

    def _first_unfinished(self) -> float:
        """The lowest draw number that runs, or that will be started again once a slot is free."""
        running = self._running
        while running and not ((slot := self.slots.get(running[0])) and slot.state is SlotState.RUNNING):
            heapq.heappop(running)
        redraws = self._redraw_heap
        while redraws and redraws[0] not in self.pending_redraws:
            heapq.heappop(redraws)
        first = running[0] if running else math.inf
        return min(first, redraws[0]) if redraws and self.may_admit() else first

    def _would_be_late(self, num_groups: int) -> bool:
        """If the batch was shipped now, would a running group be too old for a place in a later one?

        Later batches are taken to be as large as this one. It does not wait for what could not be in it anyway.
        """
        if self.pending_redraws and self.may_admit():
            return True  # of those that start at once, some continue what is old
        oldest, running = self.oldest_version, self._running_by_version
        num_waiting = self._num_by_state[SlotState.RUNNING] + self._num_by_state[SlotState.READY]
        if not running or (min(running) - oldest) * num_groups >= num_waiting:
            return False  # later batches have room for everything
        ordered = [self.slots[group_id] for group_id in self._in_order()]
        chosen, waiting = ordered[:num_groups], ordered[num_groups:]
        newest = max(map(_age_of, chosen)) if len(chosen) == num_groups else math.inf
        left = Counter(_age_of(slot) for slot in waiting if not slot.is_frozen) + running
        num_left = num_running = 0
        for version in sorted(left):
            if version >= newest:
                return False  # this batch has no place that an older group could take
            num_left, num_running = num_left + left[version], num_running + running[version]
            if num_running and num_left > max(version - oldest, 0) * num_groups:
                return True
        return False

    def _in_order(self) -> list[int]:
        """The preferred groups as batches take them: by draw number, or the oldest first."""
        if not self.bounds.keeps_late:
            return self._preferred
        return sorted(self._preferred, key=lambda group_id: _age_of(self.slots[group_id]))

    def _choose(self) -> list[Slot]:
        """The lowest draw numbers, or the oldest; zero-signal groups only if there are too few others."""
        num_groups = self._size_of_batch()
        assert num_groups is not None, "a batch is chosen when it may be shipped"
        chosen = self._in_order()[:num_groups]
        chosen += self._fillers[: num_groups - len(chosen)]
        return [self.slots[group_id] for group_id in sorted(chosen)]

    def _queue_of(self, slot: Slot) -> list[int] | None:
        """The sorted list in which a slot waits for a batch; None if it does not wait."""
        if slot.state is SlotState.READY and (slot.has_signal or not self.bounds.filter_zero_signal):
            return self._preferred
        is_waiting = slot.state in (SlotState.READY, SlotState.REPLACED)
        return self._fillers if is_waiting and slot.rejected is None else None

    def _in(self, *states: SlotState) -> list[Slot]:
        """The slots in these states."""
        return [slot for slot in self.slots.values() if slot.state in states]

    def _is_stale(self, slot: Slot) -> bool:
        return not slot.is_frozen and slot.first_version < self.oldest_version

    def _drop(self, slot: Slot, reason: str) -> None:
        self.ledger.group_dropped(slot.group_id, reason)
        self.counts.stale += reason is DropReason.STALE
        self._num_ended += 1
        self._move(slot, SlotState.DROPPED)
        if slot.job:
            slot.job.cancel()

    def _add(self, slot: Slot) -> None:
        self.slots[slot.group_id] = slot
        self._num_added += 1
        self._num_by_state[SlotState.RUNNING] += 1
        if not slot.is_frozen:
            self._running_by_version[slot.started_with] += 1
        heapq.heappush(self._running, slot.group_id)
        self._mark_idle()

    def _move(self, slot: Slot, to: SlotState) -> None:
        if (waiting := self._queue_of(slot)) is not None:
            del waiting[bisect_left(waiting, slot.group_id)]
        self._num_by_state[slot.state] -= 1
        if slot.state is SlotState.RUNNING and not slot.is_frozen:
            self._running_by_version[slot.started_with] -= 1
            if not self._running_by_version[slot.started_with]:
                del self._running_by_version[slot.started_with]
        slot.move(to)
        if (waiting := self._queue_of(slot)) is not None:
            insort(waiting, slot.group_id)
        if MOVES[to]:
            self._num_by_state[to] += 1
        else:
            del self.slots[slot.group_id]
        self._mark_idle()

    def _mark_idle(self) -> None:
        is_idle = not self._num_by_state[SlotState.RUNNING]
        if is_idle and self._idle_since is None:
            self._idle_since = time.perf_counter()
        elif not is_idle and self._idle_since is not None:
            self._idle_s += time.perf_counter() - self._idle_since
            self._idle_since = None

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _age_of(slot: Slot) -> int:
    """The version by which a group is older than others; what a teacher plays goes by when it was drawn."""
    return slot.version if slot.is_frozen else slot.first_version
