"""The order in which trainer and engines serve tenants: pure logic over queues, without clocks, wires or files.

`TrainQueue` holds the requests of every tenant in order. A pass over data is split into units (micro batches), and
deficit round robin serves units of several tenants per turn, so that a long request delays others by one turn only.
In each round a tenant gets `quantum` * weight tokens of credit, and keeps unused credit while it has work. Tenants of
a higher priority are served first. A quota is a bucket that holds a minute's tokens: a tenant whose bucket is empty
waits, even if the trainer is idle.

`SlotQueue` gives slots of the engines to the tenant with the fewest running slots for its weight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

CONTROL_TOKENS = 64
"""Cost of an operation without data, such as an optimizer step, so that many of them are not free."""
MAX_ROUNDS = 10_000
_MINUTE_S = 60.0


@dataclass(eq=False)
class Request:
    """Work of one tenant. units: tokens of each micro batch, () for an operation without data."""

    tenant: Hashable
    units: Sequence[int] = ()
    payload: Any = None
    num_sent: int = 0
    """Units that were given out; an operation without data counts as one."""

    @property
    def num_units(self) -> int:
        return max(1, len(self.units))

    @property
    def is_pass(self) -> bool:
        return bool(self.units)

    def cost(self, unit: int) -> int:
        return self.units[unit] if self.units else CONTROL_TOKENS


@dataclass(frozen=True)
class Share:
    """A tenant's work in a turn: units [start, stop) of its oldest request."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_units


@dataclass
class _Tenant:
    weight: float
    priority: int
    tokens_per_minute: float | None
    bucket: float = 0.0
    filled_at: float = 0.0
    credit: float = 0.0
    queue: deque[Request] = field(default_factory=deque)

    def fill(self, now: float) -> None:
        if self.tokens_per_minute is not None:
            earned = (now - self.filled_at) * self.tokens_per_minute / _MINUTE_S
            self.bucket = min(self.tokens_per_minute, self.bucket + earned)
        self.filled_at = now

    @property
    def may_run(self) -> bool:
        has_tokens = self.tokens_per_minute is None or self.bucket > 0
        return bool(self.queue) and has_tokens


class TrainQueue:
    """Requests of all tenants for the trainer. quantum: tokens per round; max_tokens: of a turn, over all tenants.

    A unit larger than max_tokens is given out alone.
    """

    def __init__(self, *, quantum: int, max_tokens: int) -> None:
        self._quantum, self._max_tokens = quantum, max_tokens
        self._tenants: dict[Hashable, _Tenant] = {}
        self._ring: deque[Hashable] = deque()

    def add(
        self,
        tenant: Hashable,
        *,
        weight: float = 1.0,
        priority: int = 0,
        tokens_per_minute: float | None = None,
        now: float = 0.0,
    ) -> None:
        """Admit a tenant, with a full bucket."""
        assert tenant not in self._tenants, f"{tenant} was added twice"
        bucket = 0.0 if tokens_per_minute is None else tokens_per_minute
        self._tenants[tenant] = _Tenant(weight, priority, tokens_per_minute, bucket, now)
        self._ring.append(tenant)

    def remove(self, tenant: Hashable) -> list[Request]:
        """Remove a tenant; returns its requests that are not finished."""
        self._ring.remove(tenant)
        return list(self._tenants.pop(tenant).queue)

    def push(self, request: Request, *, is_first: bool = False) -> None:
        """Add a request behind the others of its tenant, or before those that have not begun."""
        queue = self._tenants[request.tenant].queue
        if is_first:
            queue.insert(int(bool(queue) and queue[0].num_sent > 0), request)
        else:
            queue.append(request)

    def drop(self, tenant: Hashable, is_dropped: Callable[[Request], bool]) -> list[Request]:
        """Remove the requests of a tenant that have not begun and for which this is true; returns them."""
        state = self._tenants[tenant]
        dropped = [request for request in state.queue if not request.num_sent and is_dropped(request)]
        state.queue = deque(request for request in state.queue if request not in dropped)
        return dropped

    def waiting(self, tenant: Hashable) -> int:
        """Number of requests of a tenant that are not finished."""
        return len(self._tenants[tenant].queue)

    def requests(self, tenant: Hashable) -> list[Request]:
        """Requests of a tenant that are not finished, in order."""
        return list(self._tenants[tenant].queue)

    def next(self, now: float) -> list[Share]:
        """The next turn: at most one share per tenant; [] if none may run now.

        The tenants of a turn are those of one priority. Finish every share with `finish` before the next call.
        """
        for state in self._tenants.values():
            state.fill(now)
        ready = [name for name in self._ring if self._tenants[name].may_run]
        if not ready:
            return []
        top = max(self._tenants[name].priority for name in ready)
        ready = [name for name in ready if self._tenants[name].priority == top]
        shares: dict[Hashable, Share] = {}
        used, largest = 0, self._max_tokens
        for _ in range(MAX_ROUNDS):
            for name in ready:
                if used >= largest:
                    break
                state = self._tenants[name]
                if not self._is_open(name, shares):
                    continue
                state.credit += self._quantum * state.weight
                used += self._extend(name, state, shares, largest - used, is_first=not shares)
            open_ = [name for name in ready if self._is_open(name, shares)]
            if used >= largest or not open_ or (shares and not self._fits(open_, largest - used)):
                break
        # The next turn begins after the last tenant served, so that full turns do not always serve the same ones.
        for name in shares:
            self._ring.remove(name)
            self._ring.append(name)
        return list(shares.values())

    def next_at(self, now: float) -> float | None:
        """When the first tenant that waits for its quota may run; None if there is none."""
        times = [
            now + max(0.0, -state.bucket) * _MINUTE_S / state.tokens_per_minute
            for state in self._tenants.values()
            if state.queue and state.tokens_per_minute and state.bucket <= 0
        ]
        return min(times) + 1e-3 if times else None

    def finish(self, share: Share) -> bool:
        """Report a share as done; True if that was the end of its request, which is then removed."""
        state = self._tenants.get(share.request.tenant)
        if not share.is_last or state is None:
            return share.is_last
        if state.queue and state.queue[0] is share.request:
            state.queue.popleft()
        if not state.queue:
            state.credit = 0.0  # credit is for tenants that wait: an idle one collects none
        return True

    def _extend(
        self, name: Hashable, state: _Tenant, shares: dict[Hashable, Share], room: int, *, is_first: bool
    ) -> int:
        """Give out units of the tenant's oldest request within its credit and the turn's room; returns their tokens."""
        request = state.queue[0]
        start = shares[name].start if name in shares else request.num_sent
        stop, used = request.num_sent, 0
        while stop < request.num_units:
            cost = request.cost(stop)
            is_alone = is_first and stop == start and used == 0
            is_spent = state.tokens_per_minute is not None and state.bucket <= 0
            if cost > state.credit or is_spent or (used + cost > room and not is_alone):
                break
            state.credit -= cost
            state.bucket -= cost
            stop, used = stop + 1, used + cost
        if stop > start:
            request.num_sent = stop
            shares[name] = Share(request, start, stop)
        return used

    def _is_open(self, name: Hashable, shares: dict[Hashable, Share]) -> bool:
        """Whether a tenant could get more units in this turn."""
        share = shares.get(name)
        return not (share is not None and share.is_last) and self._tenants[name].may_run

    def _fits(self, names: Sequence[Hashable], room: int) -> bool:
        """Whether the next unit of one of these tenants fits into the rest of this turn."""
        requests = [self._tenants[name].queue[0] for name in names]
        return any(request.cost(request.num_sent) <= room for request in requests)


@dataclass
class _Slots:
    weight: float
    max_running: int | None
    running: int = 0
    waiting: deque[tuple[Any, int]] = field(default_factory=deque)
    """Items, and how many slots each takes."""


class SlotQueue:
    """Slots of the engines: tenants are served in order of their running slots over weight."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.num_running = num_slots, 0
        self._tenants: dict[Hashable, _Slots] = {}

    def add(self, tenant: Hashable, *, weight: float = 1.0, max_running: int | None = None) -> None:
        """Admit a tenant, or give these settings to one that was added before."""
        known = self._tenants.get(tenant)
        if known is None:
            self._tenants[tenant] = _Slots(weight, max_running)
        else:
            known.weight, known.max_running = weight, max_running

    def waiting(self, tenant: Hashable) -> int:
        return len(self._tenants[tenant].waiting)

    def push(self, tenant: Hashable, item: Any, *, size: int = 1) -> None:
        """Add an item that takes so many slots, or as many as its tenant may have."""
        state = self._tenants[tenant]
        most = self.num_slots if state.max_running is None else min(state.max_running, self.num_slots)
        state.waiting.append((item, min(size, most)))

    def drop(self, tenant: Hashable, item: Any) -> None:
        """Remove a waiting item."""
        state = self._tenants[tenant]
        state.waiting = deque(each for each in state.waiting if each[0] is not item)

    def pop(self) -> tuple[Hashable, Any, int] | None:
        """Take the next item; returns its tenant, the item and its size. None if none waits or the next has no room.

        A large item keeps its turn until there is room: smaller ones do not overtake it.
        """
        ready = [
            (state.running / state.weight if state.weight else math.inf, name)
            for name, state in self._tenants.items()
            if state.waiting and (state.max_running is None or state.running + state.waiting[0][1] <= state.max_running)
        ]
        if not ready:
            return None
        _, name = min(ready, key=lambda pair: pair[0])
        state = self._tenants[name]
        item, size = state.waiting[0]
        if self.num_running + size > self.num_slots:
            return None
        state.waiting.popleft()
        state.running += size
        self.num_running += size
        # The tenant becomes the last one among those with as many running slots.
        self._tenants[name] = self._tenants.pop(name)
        return name, item, size

    def release(self, tenant: Hashable, size: int = 1) -> None:
        """Give slots back."""
        self._tenants[tenant].running -= size
        self.num_running -= size
