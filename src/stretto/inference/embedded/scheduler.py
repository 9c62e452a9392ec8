"""Decides which tokens the next step computes: admission, chunked prefill, preemption, forks.

First come, first served. A step computes the next token of every running sequence, then pieces of prompts until
`max_num_batched_tokens`. When no block is free, the sequence that arrived last is preempted: it releases its blocks,
keeps its tokens, and is computed again later with the same bits. The earliest sequence can always continue, because all
others can be preempted and the cache holds at least one sequence of full length.

A request's n samples use n slots. The first slot computes the prompt; then `fork` shares its blocks with the others
(the half-full last block is copied), and all sample their first token from the same logits.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from stretto.inference.embedded.adapters import POLICY, LoadedAdapter
from stretto.inference.embedded.adjustments import Adjustments
from stretto.inference.embedded.blocks import BlockPool, chain_hashes
from stretto.inference.embedded.expert_choices import ExpertChoices
from stretto.inference.embedded.image_prompts import ImagePrompt
from stretto.inference.embedded.sampler import PromptScores, stream_key
from stretto.inference.embedded.slots import SequenceSlots, SequenceState
from stretto.records.generate import Completion, GenerateRequest, VersionSpan
from stretto.records.support import Support

if TYPE_CHECKING:
    from jaxtyping import Int, Int64

    from stretto.inference.text import TokenWatcher

# As plain integers: looking up members of an enum costs more than the comparisons that use them.
_, _RESERVED, _RUNNING, _PREEMPTED = map(int, SequenceState)
_MAX_SAMPLES = 1 << 20  # per request: the distance between the arrival numbers of two requests


class RequestState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One GenerateRequest in the engine; `completions` and `stop_reasons` have an entry per sample."""

    spec: GenerateRequest
    stop_ids: list[int]
    seed: int
    end: int  # length in tokens, with the prompt, at which a sample is cut off
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
    prompt_scores: PromptScores | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    watcher: TokenWatcher | None = None  # reads this request's tokens as they are sampled
    adjustments: Adjustments | None = None  # of its logits
    adapter: LoadedAdapter | None = None  # None for the engine's own model
    images: ImagePrompt | None = None
    image_marks: Mapping[int, bytes] = field(default_factory=dict)  # by block, for its hash
    failure: Exception | None = None  # why this request alone failed

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def results(self) -> list[Completion]:
        """The completions of a request that has finished; before that some are None."""
        done = [completion for completion in self.completions if completion is not None]
        assert len(done) == len(self.completions), f"{self.request_id} has open samples"
        return done


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: compute tokens start..start+count of each slot, sample where that is num_tokens.

    If all running slots take part, `slots` is the scheduler's `running` array itself, not a copy. With drafts, the last
    num_drafts tokens of a slot are guesses behind num_tokens, and a token is sampled behind each of them too.
    """

    slots: np.ndarray
    start: np.ndarray
    count: np.ndarray
    is_last: np.ndarray
    is_decode: bool  # every slot computes one token, its last
    is_following: bool = False  # the same sequences as in the previous plan, each one token further
    num_drafts: Int[np.ndarray, " slots"] | None = None  # None: no slot has any

    @property
    def is_checking(self) -> bool:
        """Whether there are drafts, and every slot computes its last token, and no others beside its drafts."""
        return self.num_drafts is not None and bool((self.count == self.num_drafts + 1).all() and self.is_last.all())


@dataclass(frozen=True, slots=True)
class Fork:
    """The copies to make when samples start from one prompt: half-full last blocks, and states of slots."""

    source_blocks: Int64[np.ndarray, " blocks"]
    target_blocks: Int64[np.ndarray, " blocks"]
    source_slots: Int64[np.ndarray, " slots"]
    target_slots: Int64[np.ndarray, " slots"]


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
        self,
        pool: BlockPool,
        slots: SequenceSlots,
        *,
        max_batched_tokens: int,
        expert_choices: ExpertChoices | None = None,
    ) -> None:
        self.pool, self.slots, self.max_batched_tokens = pool, slots, max_batched_tokens
        self.expert_choices = expert_choices
        self.block_size = slots.block_size
        self.waiting: OrderedDict[EngineRequest, None] = OrderedDict()  # by arrival; O(1) removal
        self.running = np.empty(0, np.int64)  # slots by arrival; replaced, never changed
        self.preempted: list[int] = []  # slots by arrival
        self.request_of: list[EngineRequest | None] = [None] * slots.capacity
        self.version = 0
        self.counters = Counters()
        self.returns_supports = False  # completions list the tokens left by top-k, top-p and min-p
        self.supports: dict[int, list[np.ndarray]] = {}  # the support of each token, by slot with a filter
        self._arrivals, self._allocation_ids = itertools.count(), itertools.count(1)
        self.failed: list[EngineRequest] = []  # `_assign_slots` raised for them; core.py removes them
        self._finished_slots: list[int] = []
        self._count = np.zeros(slots.capacity, np.int64)  # tokens in this step, of running slots
        self.latest: StepPlan | None = None  # the plan of this step, or of the one before
        self._num_free_positions = 0  # number of following plans before a sequence needs a new block

    @property
    def num_requests(self) -> tuple[int, int]:
        """The numbers of running sequences and of waiting requests; preempted sequences wait."""
        return len(self.running), len(self.waiting) + len(self.preempted)

    @property
    def has_work(self) -> bool:
        return bool(len(self.running) or self.waiting or self.preempted)

    def add(self, request: EngineRequest) -> None:
        self.waiting[request] = None

    def schedule(self, num_drafts: Int[np.ndarray, " capacity"] | None = None) -> StepPlan | None:
        """Choose what the next step computes and reserve its blocks; None if there is no work.

        num_drafts: tokens to check behind those of each slot; none are, if budget or blocks do not suffice for all.
        """
        self.latest = self._choose(num_drafts) if num_drafts is not None else self._follow() or self._choose()
        return self.latest

    def _follow(self) -> StepPlan | None:
        """The latest plan, one token further; None if the sequences change or one needs a block."""
        latest = self.latest
        if latest is None or not latest.is_decode or latest.slots is not self.running:
            return None
        if self.waiting or self.preempted or self._num_free_positions < 1:
            return None
        self._num_free_positions -= 1
        start = latest.start + 1
        return StepPlan(latest.slots, start, latest.count, latest.is_last, is_decode=True, is_following=True)

    def _choose(self, num_drafts: Int[np.ndarray, " capacity"] | None = None) -> StepPlan | None:
        slots = self.slots
        num_preempted = self.counters.num_preemptions
        while True:
            run = self.running
            start = slots.num_computed[run]
            count = self._divide_budget(slots.num_tokens[run] - start)
            if num_drafts is not None:
                if int(count.sum()) + int(num_drafts[run].sum()) > self.max_batched_tokens:
                    num_drafts = None
                else:
                    count = count + num_drafts[run]
            need = -(-(start + count) // self.block_size) - slots.num_blocks[run]
            total = int(np.maximum(need, 0).sum())
            if total <= self.pool.num_free:
                break
            if num_drafts is not None:
                num_drafts = None
                continue
            self._preempt(int(run[-1]))
        if total:
            self._grow(run, need, total)
        self._count[run] = count
        if self.counters.num_preemptions == num_preempted:
            self._admit_all(self.max_batched_tokens - int(count.sum()))
        return self._build_plan(num_drafts)

    def advance(self, plan: StepPlan) -> None:
        """Record that the plan's keys and values are cached; register prompt blocks that became full."""
        slots = self.slots
        slots.num_computed[plan.slots] = plan.start + plan.count
        if plan.is_following or not self.pool.is_caching:
            return  # its tokens come after the prompt
        for i in np.flatnonzero(plan.start < slots.num_prompt[plan.slots]).tolist():
            slot, start = int(plan.slots[i]), int(plan.start[i])
            hashes = self._request_in(slot).prompt_hashes
            full = min(int(slots.num_computed[slot]) // self.block_size, len(hashes))
            for b in range(start // self.block_size, full):
                self.pool.register(int(slots.blocks[slot, b]), hashes[b])

    def fork(self, leaders: list[int]) -> Fork:
        """Share the prompt's blocks with the requests' other samples; returns the copies to make.

        If no block is free for the copy of a sample, the sample becomes PREEMPTED: it keeps its place in the queue and
        computes its prompt itself.
        """
        slots, pool = self.slots, self.pool
        sources, targets, started, from_slots = [], [], [self.running], []
        for leader in leaders:
            request = self._request_in(leader)
            request.is_forked = True
            siblings = np.array(request.slots, np.int64)
            siblings = siblings[slots.state[siblings] == _RESERVED]
            if not len(siblings):
                continue
            length = int(slots.num_tokens[leader])
            full, partial = divmod(length, self.block_size)
            fit = min(len(siblings), pool.num_free) if partial else len(siblings)
            for slot in siblings[fit:].tolist():
                slots.state[slot] = _PREEMPTED
                self.preempted.append(slot)
            siblings = siblings[:fit]
            if full and fit:
                pool.share(slots.blocks[leader, :full], fit)
                slots.blocks[siblings, :full] = slots.blocks[leader, :full]
            if partial and fit:
                copies = pool.allocate(fit)
                slots.blocks[siblings, full] = copies
                sources.append(np.full(fit, slots.blocks[leader, full]))
                targets.append(copies)
            slots.num_blocks[siblings] = full + bool(partial)
            slots.num_computed[siblings] = length
            slots.allocation_id[siblings] = [next(self._allocation_ids) for _ in siblings]
            slots.state[siblings] = _RUNNING
            started.append(siblings)
            from_slots.append(np.full(len(siblings), leader))
        self.preempted.sort(key=lambda slot: slots.order[slot])
        self._set_running(np.concatenate(started))
        none = np.empty(0, np.int64)
        join = lambda parts: np.concatenate([none, *parts])
        return Fork(join(sources), join(targets), join(from_slots), join(started[1:]))

    def finish_sample(self, slot: int, reason: str, stop_reason: int | str | None) -> EngineRequest | None:
        """Turn a slot into a completion; returns the request if this was its last open sample.

        The slot and its blocks are freed by `drop_finished`, for all samples that finish in one step.
        """
        request, slots = self._request_in(slot), self.slots
        member = int(slots.member[slot])
        request.completions[member] = self._completion(slot, request, reason, stop_reason)
        request.stop_reasons[member] = stop_reason
        self._register(slot)
        self._finished_slots.append(slot)
        self.request_of[slot] = None
        request.num_open -= 1
        if request.num_open:
            return None
        request.state = RequestState.FINISHED
        return request

    def drop_finished(self) -> None:
        """Free the slots and blocks of samples that `finish_sample` ended."""
        if not self._finished_slots:
            return
        slots, finished = self.slots, np.array(self._finished_slots, np.int64)
        were_preempted = set(finished[slots.state[finished] == _PREEMPTED].tolist())
        if were_preempted:
            self.preempted = [slot for slot in self.preempted if slot not in were_preempted]
        self._release(finished)
        slots.free(self._finished_slots)
        self._finished_slots.clear()
        self.running = self.running[slots.state[self.running] == _RUNNING]

    def abort(self, requests: Iterable[EngineRequest]) -> None:
        """End these requests with the tokens they have; samples that have not started are empty."""
        for request in requests:
            assert request.state is not RequestState.FINISHED, f"{request.request_id} is finished already"
            if request.state is RequestState.WAITING:
                self._abort_waiting(request)
                continue
            for slot in request.slots:
                if self.request_of[slot] is request:
                    self.finish_sample(slot, "abort", None)
        self.drop_finished()

    def _abort_waiting(self, request: EngineRequest) -> None:
        del self.waiting[request]
        empty = Completion(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish_reason="abort")
        request.completions = [empty] * request.spec.n
        request.stop_reasons = [None] * request.spec.n
        request.state = RequestState.FINISHED

    def _request_in(self, slot: int) -> EngineRequest:
        """The request that has this slot."""
        request = self.request_of[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def _divide_budget(self, num_missing: np.ndarray) -> np.ndarray:
        """Tokens that each running sequence computes: single tokens first, then prompts, by arrival."""
        if int(num_missing.sum()) <= self.max_batched_tokens:
            return num_missing
        order = np.argsort(num_missing > 1, kind="stable")
        before = np.cumsum(num_missing[order]) - num_missing[order]
        count = np.empty_like(num_missing)
        count[order] = np.clip(self.max_batched_tokens - before, 0, num_missing[order])
        return count

    def _grow(self, run: np.ndarray, need: np.ndarray, total: int) -> None:
        slots, fresh = self.slots, self.pool.allocate(total)
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
        """Admit preempted slots, then new requests, while budget, slots and blocks last."""
        admitted: list[int] = []
        while self.preempted and budget > 0:
            count = self._admit(self.preempted[0], budget, len(admitted))
            if not count:
                break
            admitted.append(self.preempted.pop(0))
            budget -= count
        while self.waiting and not self.preempted and budget > 0:
            request = next(iter(self.waiting))
            if request.spec.n > self.slots.num_free:
                break
            del self.waiting[request]
            if not self._try_assign_slots(request):
                continue
            leader = request.slots[0]
            count = self._admit(leader, budget, len(admitted))
            if not count:
                # It keeps its slots and is first in the queue: no later request may overtake it.
                self.preempted.append(leader)
                break
            admitted.append(leader)
            budget -= count
        if admitted:
            self._set_running(np.concatenate([self.running, np.array(admitted, np.int64)]))

    def _try_assign_slots(self, request: EngineRequest) -> bool:
        """Assign a request its slots; if that raises, only this request fails and its slots are freed."""
        try:
            self._assign_slots(request)
        except Exception as error:  # the request gets it, whatever it is
            for slot in request.slots:
                self.request_of[slot] = None
            self.slots.free(request.slots)
            request.failure, request.state = error, RequestState.FINISHED
            self.failed.append(request)
            return False
        return True

    def _assign_slots(self, request: EngineRequest) -> None:
        """Assign a request its slots and write the settings of each sample into them."""
        slots, spec = self.slots, request.spec
        params, prompt = spec.sampling, spec.prompt_ids
        slots.reserve(request.end)
        allocated = request.slots = slots.allocate(spec.n)
        arrival = next(self._arrivals) * _MAX_SAMPLES
        is_greedy = params.temperature == 0
        inv_temperature = 1.0 if is_greedy else 1 / params.temperature
        top_k = params.top_k or np.iinfo(np.int64).max
        is_filtered = not is_greedy and (params.top_k is not None or params.top_p < 1 or params.min_p > 0)
        for member, slot in enumerate(allocated):
            slots.rows[slot] = (
                _RESERVED if member else _PREEMPTED, arrival + member, 0, len(prompt), len(prompt), 0, 0,
                request.end, member, stream_key(request.seed, member), inv_temperature, is_greedy, top_k,
                params.top_p, params.min_p, is_filtered, request.watcher is not None,
                request.adjustments is not None, POLICY if request.adapter is None else request.adapter.id,
                0 if request.images is None else request.images.shift,
            )  # fmt: skip
            self.request_of[slot] = request
            if request.images is not None:
                slots.images[slot] = request.images
            if self.returns_supports and is_filtered:
                self.supports[slot] = []
        slots.tokens[allocated, : len(prompt)] = prompt
        slots.set_stop_ids(allocated, request.stop_ids)
        request.state = RequestState.RUNNING
        request.num_open = spec.n
        request.completions, request.stop_reasons = [None] * spec.n, [None] * spec.n
        salt = f"version {self.version}" if spec.cache_salt is None else f"salt {spec.cache_salt}"
        if request.adapter is not None:
            salt = f"{request.adapter.salt} of version {self.version}, {salt}"
        request.hash_seed = blake2b(salt.encode(), digest_size=16).digest()
        if self.pool.is_caching:
            if request.images is not None:
                request.image_marks = request.images.marks(self.block_size)
            request.prompt_hashes = chain_hashes(request.hash_seed, prompt, self.block_size, request.image_marks)

    def _admit(self, slot: int, budget: int, num_admitted: int) -> int:
        """Assign a slot the blocks of its first chunk, cached blocks first.

        Returns the number of tokens that it computes in this step; 0 if too few blocks are free.
        """
        slots, pool, request = self.slots, self.pool, self._request_in(slot)
        length = int(slots.num_tokens[slot])
        cached_blocks = np.empty(0, np.int64)
        if pool.is_caching and not (request.spec.prompt_logprobs and not request.is_forked):
            cached_blocks = pool.lookup(self._hashes(slot, length - 1))
        num_cached = len(cached_blocks)
        cached_tokens = num_cached * self.block_size
        count = min(length - cached_tokens, budget)
        need = -(-(cached_tokens + count) // self.block_size) - num_cached
        num_cached_free = int((pool.refs[cached_blocks] == 0).sum())
        reserve = pool.num_usable // 100 if len(self.running) + num_admitted else 0
        if need + reserve > pool.num_free - num_cached_free:
            return 0
        pool.share(cached_blocks)
        slots.blocks[slot, :num_cached] = cached_blocks
        slots.blocks[slot, num_cached : num_cached + need] = pool.allocate(need)
        slots.num_blocks[slot] = num_cached + need
        slots.num_computed[slot] = cached_tokens
        slots.allocation_id[slot] = next(self._allocation_ids)
        slots.state[slot] = _RUNNING
        self._count[slot] = count
        if request.started_s is None:
            request.started_s = time.monotonic()
            request.cached_tokens = cached_tokens
            counters, num_prompt = self.counters, len(request.spec.prompt_ids)
            counters.prompt_tokens += num_prompt
            counters.prefix_queries += num_prompt
            counters.prefix_hits += cached_tokens
        return count

    def _hashes(self, slot: int, length: int) -> list[bytes]:
        """Hashes of the full blocks among the first `length` tokens."""
        request, full = self._request_in(slot), length // self.block_size
        hashes = request.prompt_hashes[:full]
        if full > len(hashes):
            tail = self.slots.tokens[slot, len(hashes) * self.block_size : full * self.block_size]
            seed = hashes[-1] if hashes else request.hash_seed
            marks = request.image_marks
            hashes = hashes + chain_hashes(
                seed, np.ascontiguousarray(tail), self.block_size, marks, first_block=len(hashes)
            )
        return hashes

    def _build_plan(self, num_drafts: Int[np.ndarray, " capacity"] | None) -> StepPlan | None:
        run = self.running
        count = self._count[run]
        if not (count > 0).all():
            run, count = run[count > 0], count[count > 0]
        if not len(run):
            return None
        start = self.slots.num_computed[run]
        if num_drafts is not None:
            drafts = num_drafts[run]
            is_last = start + count - drafts == self.slots.num_tokens[run]
            return StepPlan(run, start, count, is_last, is_decode=False, num_drafts=drafts)
        is_last = start + count == self.slots.num_tokens[run]
        is_decode = bool(is_last.all()) and int(count.max()) == 1
        if is_decode:
            room = self.slots.num_blocks[run] * self.block_size - (start + count)
            self._num_free_positions = int(room.min())
        return StepPlan(run, start, count, is_last, is_decode)

    def _register(self, slot: int) -> None:
        """Register the full blocks of a slot's reply: the next turn of a dialogue begins with them."""
        computed, num_prompt = int(self.slots.num_computed[slot]), int(self.slots.num_prompt[slot])
        num_full, num_prompt_full = computed // self.block_size, num_prompt // self.block_size
        if not self.pool.is_caching or num_full <= num_prompt_full:
            return
        hashes = self._hashes(slot, computed)
        for b in range(num_prompt_full, num_full):
            self.pool.register(int(self.slots.blocks[slot, b]), hashes[b])

    def _release(self, released: np.ndarray) -> None:
        """Release the blocks of these slots."""
        slots = self.slots
        num_blocks = slots.num_blocks[released]
        most = int(num_blocks.max())
        if most:
            tables = slots.blocks[released, :most]
            self.pool.release(tables[np.arange(most) < num_blocks[:, None]])
            slots.blocks[released, :most] = 0
            slots.num_blocks[released] = 0

    def _set_running(self, run: np.ndarray) -> None:
        order = self.slots.order[run]
        self.running = run if (np.diff(order) > 0).all() else run[np.argsort(order)]

    def _completion(self, slot: int, request: EngineRequest, reason: str, stop_reason: int | str | None) -> Completion:
        slots, scores = self.slots, request.prompt_scores
        start, stop = int(slots.num_prompt[slot]), int(slots.num_tokens[slot])
        return Completion(
            token_ids=slots.tokens[slot, start:stop].copy(),
            logprobs=slots.logprobs[slot, start:stop].copy(),
            finish_reason=reason,
            stop_reason=stop_reason,
            versions=version_spans(slots.versions[slot, start:stop]),
            cached_tokens=request.cached_tokens,
            prompt_logprobs=None if scores is None else scores.logprobs,
            top_prompt_ids=None if scores is None else scores.top_ids,
            top_prompt_logprobs=None if scores is None else scores.top_logprobs,
            target_prompt_logprobs=None if scores is None else scores.target_logprobs,
            routed_experts=self._routed_experts(slot, request.spec.routed_experts_start),
            support=self._support(slot),
        )

    def _support(self, slot: int) -> Support | None:
        """The tokens from which each token of the reply was sampled; None if nothing was filtered."""
        if not (self.returns_supports and self.slots.is_filtered[slot]):
            return None
        return Support.of(self.supports.pop(slot))

    def _routed_experts(self, slot: int, start: int) -> np.ndarray | None:
        """The experts that computed each token of prompt and reply, from token `start` on."""
        if self.expert_choices is None:
            return None
        slots = self.slots
        computed, length = int(slots.num_computed[slot]), int(slots.num_tokens[slot])
        return self.expert_choices.read(slots.blocks[slot], start, computed, length)


def version_spans(versions: Int[np.ndarray, " tokens"]) -> tuple[VersionSpan, ...]:
    """Group the tokens of a completion into runs of equal version."""
    if not len(versions):
        return ()
    if versions[0] == versions[-1]:  # versions only grow
        return (VersionSpan(int(versions[0]), 0, len(versions)),)
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(VersionSpan(int(versions[low]), low, high) for low, high in itertools.pairwise(cuts))
