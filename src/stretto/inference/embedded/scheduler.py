"""Which tokens are computed in the next step: admission, chunked prefill, preemption, forks, finishes.

First come, first served, by arrival order. A step takes the one next token of every running sequence, then
pieces of prompts until `max_num_batched_tokens`. When blocks run out the latest sequence gives its blocks
back and is computed again later (its tokens stay; recomputing them gives the same bits). The earliest
sequence can always go on, because everything after it can be preempted and the cache holds at least one
sequence of full length.

A request's n samples are n slots: the first computes the prompt, then `fork` gives the others its blocks (the
half-full last block is copied) and all draw their first token from the same logits.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

import numpy as np

from stretto.inference.embedded.adapters import POLICY, Served
from stretto.inference.embedded.blocks import BlockPool, chain_hashes
from stretto.inference.embedded.routes import RouteStore
from stretto.inference.embedded.sampler import stream_key
from stretto.inference.embedded.slots import Slots, SlotState
from stretto.records.generate import Completion, GenerateRequest, VersionSpan

# As plain integers: looking members of an enum up costs more than the comparisons they are for.
_RESERVED, _RUNNING, _PREEMPTED = int(SlotState.RESERVED), int(SlotState.RUNNING), int(SlotState.PREEMPTED)
_MEMBERS = 1 << 20  # samples a request may have, as far as ordering goes


class RequestState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One GenerateRequest under way. `completions` and `stop_reasons` fill up member by member."""

    request: GenerateRequest
    stop_ids: list[int]
    seed: int
    end: int  # length at which a sample is cut off
    arrived_s: float = field(default_factory=time.monotonic)
    state: RequestState = RequestState.WAITING
    slots: list[int] = field(default_factory=list)
    is_forked: bool = False
    num_open: int = 0
    completions: list[Completion | None] = field(default_factory=list)
    stop_reasons: list[int | str | None] = field(default_factory=list)
    hash_seed: bytes = b""
    prompt_hashes: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    watcher: object | None = None  # engine.py's: reads this request's tokens as they come
    adapter: Served | None = None  # None: the engine's own model

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens start..start+count of each slot are computed; where that reaches num_tokens a token is drawn."""

    slots: np.ndarray
    start: np.ndarray
    count: np.ndarray
    is_last: np.ndarray


@dataclass(slots=True)
class Counters:
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Scheduler:
    """Moves requests from waiting to running to finished; owns slots and blocks."""

    def __init__(
        self, pool: BlockPool, slots: Slots, *, max_batched_tokens: int, routes: RouteStore | None = None
    ) -> None:
        self.pool, self.slots, self.max_batched_tokens, self.routes = pool, slots, max_batched_tokens, routes
        self.block_size = slots.block_size
        self.waiting: deque[Request] = deque()
        self.running = np.empty(0, np.int64)  # slots by arrival
        self.preempted: list[int] = []  # slots by arrival
        self.request_of: list[Request | None] = [None] * slots.capacity
        self.version = 0
        self.counters = Counters()
        self._arrivals = itertools.count()
        self._ended: list[int] = []
        self._count = np.zeros(slots.capacity, np.int64)  # tokens in this step, of running slots

    @property
    def num_requests(self) -> tuple[int, int]:
        """Sequences that run, and that wait (a preempted one waits)."""
        return len(self.running), len(self.waiting) + len(self.preempted)

    @property
    def has_work(self) -> bool:
        return bool(len(self.running) or self.waiting or self.preempted)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Plan | None:
        """Choose and reserve what the next step computes; None when there is nothing to do."""
        slots = self.slots
        num_preempted = self.counters.num_preemptions
        while True:
            run = self.running
            start = slots.num_computed[run]
            count = self._share_budget(slots.num_tokens[run] - start)
            need = -(-(start + count) // self.block_size) - slots.num_blocks[run]
            total = int(np.maximum(need, 0).sum())
            if total <= self.pool.num_free:
                break
            self._preempt(int(run[-1]))
        if total:
            self._grow(run, need, total)
        self._count[run] = count
        if self.counters.num_preemptions == num_preempted:
            self._admit_all(self.max_batched_tokens - int(count.sum()))
        return self._plan()

    def advance(self, plan: Plan) -> None:
        """The plan's keys and values are in the cache: register the prompt blocks that became full."""
        slots = self.slots
        slots.num_computed[plan.slots] += plan.count
        if not self.pool.is_caching:
            return
        for i in np.flatnonzero(plan.start < slots.num_prompt[plan.slots]).tolist():
            slot, start = int(plan.slots[i]), int(plan.start[i])
            hashes = self.request_of[slot].prompt_hashes
            full = min(int(slots.num_computed[slot]) // self.block_size, len(hashes))
            for b in range(start // self.block_size, full):
                self.pool.register(int(slots.blocks[slot, b]), hashes[b])

    def fork(self, leaders: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Give the siblings of these slots the prompt's blocks; returns (from, to) blocks whose content to
        copy.

        A sibling for whose copy no block is free becomes PREEMPTED: it has its place and computes its prompt
        itself.
        """
        slots, pool = self.slots, self.pool
        sources, targets, started = [], [], [self.running]
        for leader in leaders:
            request = self.request_of[leader]
            request.is_forked = True
            siblings = np.array(request.slots, np.int64)
            siblings = siblings[slots.state[siblings] == _RESERVED]
            if not len(siblings):
                continue
            length = int(slots.num_tokens[leader])
            full, partial = divmod(length, self.block_size)
            fit = min(len(siblings), pool.num_free) if partial else len(siblings)
            for late in siblings[fit:].tolist():
                slots.state[late] = _PREEMPTED
                self.preempted.append(late)
            siblings = siblings[:fit]
            if full and fit:
                pool.share(slots.blocks[leader, :full], fit)
                slots.blocks[siblings, :full] = slots.blocks[leader, :full]
            if partial and fit:
                copies = pool.take(fit)
                slots.blocks[siblings, full] = copies
                sources.append(np.full(fit, slots.blocks[leader, full]))
                targets.append(copies)
            slots.num_blocks[siblings] = full + bool(partial)
            slots.num_computed[siblings] = length
            slots.state[siblings] = _RUNNING
            started.append(siblings)
        self.preempted.sort(key=lambda slot: slots.order[slot])
        self._set_running(np.concatenate(started))
        if not sources:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(sources), np.concatenate(targets)

    def finish(self, slot: int, reason: str, stop_reason: int | str | None) -> Request | None:
        """Turn a slot into a completion; returns the request when it was the last of its samples.

        The slot and its blocks are free after `drop_finished`, so that many can finish in one step.
        """
        request, slots = self.request_of[slot], self.slots
        member = int(slots.member[slot])
        request.completions[member] = self._completion(slot, request, reason)
        request.stop_reasons[member] = stop_reason
        self._register(slot)
        self._ended.append(slot)
        self.request_of[slot] = None
        request.num_open -= 1
        if request.num_open:
            return None
        request.state = RequestState.FINISHED
        return request

    def drop_finished(self) -> None:
        """Free what `finish` ended."""
        if not self._ended:
            return
        slots, ended = self.slots, np.array(self._ended, np.int64)
        for slot in ended[slots.state[ended] == _PREEMPTED].tolist():
            self.preempted.remove(slot)
        self._release(ended)
        slots.free(self._ended)
        self._ended.clear()
        self.running = self.running[slots.state[self.running] == _RUNNING]

    def abort(self, request: Request) -> None:
        """End a request now with what it has; samples that never began are empty."""
        assert request.state is not RequestState.FINISHED, f"{request.request_id} is finished already"
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            empty = Completion(
                token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish_reason="abort"
            )
            request.completions = [empty] * request.request.n
            request.stop_reasons = [None] * request.request.n
            request.state = RequestState.FINISHED
            return
        for slot in request.slots:
            if self.request_of[slot] is request:
                self.finish(slot, "abort", None)
        self.drop_finished()

    def _share_budget(self, todo: np.ndarray) -> np.ndarray:
        """Tokens each running sequence computes: single tokens first, then prompts, by arrival."""
        if int(todo.sum()) <= self.max_batched_tokens:
            return todo
        order = np.argsort(todo > 1, kind="stable")
        before = np.cumsum(todo[order]) - todo[order]
        count = np.empty_like(todo)
        count[order] = np.clip(self.max_batched_tokens - before, 0, todo[order])
        return count

    def _grow(self, run: np.ndarray, need: np.ndarray, total: int) -> None:
        slots, fresh = self.slots, self.pool.take(total)
        rows = np.repeat(np.arange(len(run)), np.maximum(need, 0))
        nth = np.arange(total) - np.searchsorted(rows, rows)
        slots.blocks[run[rows], slots.num_blocks[run[rows]] + nth] = fresh
        slots.num_blocks[run] += np.maximum(need, 0)

    def _preempt(self, slot: int) -> None:
        slots = self.slots
        assert len(self.running) > 1, "one sequence of full length must fit into the cache"
        self._register(slot)
        self._release(np.array([slot]))
        slots.num_computed[slot] = 0
        slots.state[slot] = _PREEMPTED
        self.preempted.append(slot)
        self.preempted.sort(key=lambda s: slots.order[s])
        self.running = self.running[:-1]
        self.counters.num_preemptions += 1

    def _admit_all(self, budget: int) -> None:
        """Let preempted slots, then new requests, in while budget, slots and blocks last."""
        admitted: list[int] = []
        while self.preempted and budget > 0:
            taken = self._admit(self.preempted[0], budget, len(admitted))
            if not taken:
                break
            admitted.append(self.preempted.pop(0))
            budget -= taken
        while self.waiting and not self.preempted and budget > 0:
            if self.waiting[0].request.n > self.slots.num_free:
                break
            self._seat(self.waiting[0])
            leader = self.waiting.popleft().slots[0]
            taken = self._admit(leader, budget, len(admitted))
            if not taken:
                # It keeps its slots and stands first in line: nothing after it may overtake.
                self.preempted.append(leader)
                break
            admitted.append(leader)
            budget -= taken
        if admitted:
            self._set_running(np.concatenate([self.running, np.array(admitted, np.int64)]))

    def _seat(self, request: Request) -> None:
        """Give a request its slots and write what is known about each sample."""
        slots, asked = self.slots, request.request
        params, prompt = asked.sampling, asked.prompt_ids
        slots.reserve(request.end)
        seats = request.slots = slots.take(asked.n)
        arrival = next(self._arrivals) * _MEMBERS
        is_greedy = params.temperature == 0
        inv_temperature = 1.0 if is_greedy else 1 / params.temperature
        top_k = params.top_k or np.iinfo(np.int64).max
        is_filtered = not is_greedy and (params.top_k is not None or params.top_p < 1 or params.min_p > 0)
        for member, slot in enumerate(seats):
            slots.rows[slot] = (
                _RESERVED if member else _PREEMPTED, arrival + member, len(prompt), len(prompt), 0, 0,
                request.end, member, stream_key(request.seed, member), inv_temperature, is_greedy, top_k,
                params.top_p, params.min_p, is_filtered, request.watcher is not None,
                POLICY if request.adapter is None else request.adapter.id,
            )  # fmt: skip
            self.request_of[slot] = request
        slots.tokens[seats, : len(prompt)] = prompt
        slots.set_stop_ids(seats, request.stop_ids)
        request.state = RequestState.RUNNING
        request.num_open = asked.n
        request.completions, request.stop_reasons = [None] * asked.n, [None] * asked.n
        salt = f"version {self.version}" if asked.cache_salt is None else f"salt {asked.cache_salt}"
        if request.adapter is not None:
            salt = f"{request.adapter.salt} of version {self.version}, {salt}"
        request.hash_seed = blake2b(salt.encode(), digest_size=16).digest()
        if self.pool.is_caching:
            request.prompt_hashes = chain_hashes(request.hash_seed, prompt, self.block_size)

    def _admit(self, slot: int, budget: int, num_admitted: int) -> int:
        """Give a slot the blocks of its first chunk, known ones first; returns its tokens, 0: no room."""
        slots, pool, request = self.slots, self.pool, self.request_of[slot]
        length = int(slots.num_tokens[slot])
        known = np.empty(0, np.int64)
        if pool.is_caching and not (request.request.prompt_logprobs and not request.is_forked):
            known = pool.lookup(self._hashes(slot, length - 1))
        cached = len(known) * self.block_size
        count = min(length - cached, budget)
        need = -(-(cached + count) // self.block_size) - len(known)
        idle_known = int((pool.refs[known] == 0).sum())
        spare = pool.num_usable // 100 if len(self.running) + num_admitted else 0
        if need + spare > pool.num_free - idle_known:
            return 0
        pool.share(known)
        slots.blocks[slot, : len(known)] = known
        slots.blocks[slot, len(known) : len(known) + need] = pool.take(need)
        slots.num_blocks[slot] = len(known) + need
        slots.num_computed[slot] = cached
        slots.state[slot] = _RUNNING
        self._count[slot] = count
        if request.started_s is None:
            self._count_admission(request, cached)
        return count

    def _hashes(self, slot: int, length: int) -> list[bytes]:
        """Hashes of the full blocks among the first `length` tokens."""
        request, full = self.request_of[slot], length // self.block_size
        known = request.prompt_hashes[:full]
        if full > len(known):
            tail = self.slots.tokens[slot, len(known) * self.block_size : full * self.block_size]
            seed = known[-1] if known else request.hash_seed
            known = known + chain_hashes(seed, np.ascontiguousarray(tail), self.block_size)
        return known

    def _count_admission(self, request: Request, cached: int) -> None:
        request.started_s = time.monotonic()
        request.cached_tokens = cached
        prompt = len(request.request.prompt_ids)
        self.counters.prompt_tokens += prompt
        self.counters.prefix_queries += prompt
        self.counters.prefix_hits += cached

    def _plan(self) -> Plan | None:
        run = self.running
        count = self._count[run]
        if not (count > 0).all():
            run, count = run[count > 0], count[count > 0]
        if not len(run):
            return None
        start = self.slots.num_computed[run]
        return Plan(run, start, count, start + count == self.slots.num_tokens[run])

    def _register(self, slot: int) -> None:
        """Make the sampled full blocks of a slot findable: the next turn of a dialogue begins with them."""
        computed, num_prompt = int(self.slots.num_computed[slot]), int(self.slots.num_prompt[slot])
        num_full, num_prompt_full = computed // self.block_size, num_prompt // self.block_size
        if not self.pool.is_caching or num_full <= num_prompt_full:
            return
        hashes = self._hashes(slot, computed)
        for b in range(num_prompt_full, num_full):
            self.pool.register(int(self.slots.blocks[slot, b]), hashes[b])

    def _release(self, released: np.ndarray) -> None:
        """Give back the blocks of these slots."""
        slots = self.slots
        held = slots.num_blocks[released]
        most = int(held.max())
        if most:
            tables = slots.blocks[released, :most]
            self.pool.release(tables[np.arange(most) < held[:, None]])
            slots.blocks[released, :most] = 0
            slots.num_blocks[released] = 0

    def _set_running(self, run: np.ndarray) -> None:
        order = self.slots.order[run]
        self.running = run if (np.diff(order) > 0).all() else run[np.argsort(order)]

    def _completion(self, slot: int, request: Request, reason: str) -> Completion:
        slots = self.slots
        start, stop = int(slots.num_prompt[slot]), int(slots.num_tokens[slot])
        versions = slots.versions[slot, start:stop]
        return Completion(
            token_ids=slots.tokens[slot, start:stop].copy(),
            logprobs=slots.logprobs[slot, start:stop].copy(),
            finish_reason=reason,
            versions=version_spans(versions),
            cached_tokens=request.cached_tokens,
            prompt_logprobs=request.prompt_logprobs,
            routed_experts=self._routed_experts(slot, request.request.routed_experts_start),
        )

    def _routed_experts(self, slot: int, start: int) -> np.ndarray | None:
        """The experts that computed each token of prompt and reply, from `start` on."""
        if self.routes is None:
            return None
        slots = self.slots
        computed, length = int(slots.num_computed[slot]), int(slots.num_tokens[slot])
        return self.routes.read(slots.blocks[slot], start, computed, length)


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Runs of equal version."""
    if not len(versions):
        return ()
    if versions[0] == versions[-1]:  # versions only grow
        return (VersionSpan(int(versions[0]), 0, len(versions)),)
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(VersionSpan(int(versions[low]), low, high) for low, high in itertools.pairwise(cuts))
