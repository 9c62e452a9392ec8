"""The other ends of the orchestrator's wires in a simulation: engines, trainer, environments, a renderer without text.

They take time as `Costs` says and compute nothing. Everything between them is the real orchestrator. Lengths are in
units of `scale` tokens, so that long rollouts cost the simulation no more than short ones.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.base.errors import EngineError
from stretto.config.sections.model import shares_prefixes
from stretto.data.model_file import find_model_file
from stretto.envs.base import LimitReached, Message, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.orchestrator.alone import AbsentTrainer
from stretto.records.control import Register, StepDone, StepMetrics, Stop
from stretto.records.generate import Completion, GenerateRequest, VersionSpan
from stretto.records.rollout import Task
from stretto.records.row_packing import PrefixTree
from stretto.records.sample import TrainBatch
from stretto.records.weight_manifest import WeightManifest
from stretto.virtual_clock import Cores, Job
from stretto_plan.costs import Costs
from stretto_plan.setup import EngineSetup
from stretto_plan.workload import Workload
from stretto_steering.run import PUBLISHING

_EPSILON = 1e-6


@dataclass(order=True)
class Reply:
    """One running reply. All running replies get tokens at the same rate, which `SimulatedEngine` counts once."""

    end: float
    """The reply ends when the engine's count of tokens reaches this."""
    offset: float = field(compare=False)
    """Its context is this plus the engine's count of tokens."""
    done: asyncio.Future = field(compare=False)
    first_version: int = field(default=0, compare=False)


@dataclass(eq=False)
class Reading:
    """One request in the queue for prefill."""

    prompt: float
    cached: float
    replies: list[float]
    done: asyncio.Future


class SimulatedEngine:
    """All engines of a run: continuous batching, prefill before decoding, caches of a bounded size.

    Engines of one role are simulated as one engine with several data-parallel groups, over which sequences are spread
    evenly.
    """

    num_ready = 1
    generation = 0
    paused_s = 0.0

    def __init__(
        self, costs: Costs, workload: Workload, cores: Cores, orchestrator: OrchestratorThread, scale: float
    ) -> None:
        self.costs, self.workload, self.cores, self.scale = costs, workload, cores, scale
        self.orchestrator = orchestrator
        by_role = {engine.role: engine for engine in costs.setup.engines}
        self.writer: EngineSetup = by_role.get("decode") or by_role["engine"]
        self.reader = by_role.get("prefill")
        self.groups = self.writer.count * self.writer.groups
        self.version = 0
        self.busy_s = self.idle_s = self.reading_s = self.loading_s = 0.0
        self._replies = itertools.count(1)
        self._waiting: deque[Reading] = deque()
        self._running: list[Reply] = []  # a heap
        self._written = self._offsets = 0.0
        self._wake = asyncio.Event()
        self._job: Job | None = None
        self._pause: asyncio.Future | None = None
        self._cached: dict[str, float] = {}
        self._reading_free_at = 0.0
        self._idle_since: float | None = None
        self._task = asyncio.create_task(self._run(), name="simulated engine")

    # -- called by the orchestrator --

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Answer a request with replies whose lengths are drawn from the workload."""
        is_turn = request.session_id is not None
        await self.orchestrator.work(self.costs.turn_s if is_turn else self.costs.rollout_s * request.n)
        limit = request.sampling.max_tokens or 1 << 30
        rng = random.Random(f"{request.sampling.seed}/{request.request_id}")
        units = [max(1, min(limit, round(self.workload.reply_tokens.draw(rng) / self.scale))) for _ in range(request.n)]
        prompt = len(request.prompt_ids) * self.scale
        cached = min(self._cached.get(request.session_id or "", 0.0), prompt)
        if self.reader is not None:
            await self._read_elsewhere(self.reader, prompt, cached)
        loop = asyncio.get_running_loop()
        replies = [unit * self.scale for unit in units]
        waiting = Reading(prompt, prompt if self.reader is not None else cached, replies, loop.create_future())
        self._waiting.append(waiting)
        self._interrupt()
        sequences: list[Reply] = []
        try:
            sequences = await waiting.done
            for sequence in sequences:
                await sequence.done
        except asyncio.CancelledError:
            self._abort(waiting, sequences)
            raise
        if request.session_id is not None:
            self._cached[request.session_id] = prompt + replies[0]
        return [self._completion(unit, each.first_version, limit) for unit, each in zip(units, sequences)]

    def _abort(self, waiting: Reading, sequences: list[Reply]) -> None:
        """Forget a request that the orchestrator has cancelled, for example of a group that became too old."""
        if not sequences and waiting.done.done() and not waiting.done.cancelled():
            sequences = waiting.done.result()
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        given_up = {id(sequence) for sequence in sequences}
        left = [reply for reply in self._running if id(reply) not in given_up]
        if len(left) < len(self._running):
            self._offsets = sum(reply.offset for reply in left)
            self._running[:] = left
            heapq.heapify(self._running)
            if self._job is not None:
                self._job.cut()

    def _completion(self, units: int, first: int, limit: int) -> Completion:
        split = units if first == self.version else max(1, units // 2)
        spans = [VersionSpan(first, 0, split), VersionSpan(self.version, split, units)]
        return Completion(
            token_ids=np.full(units, next(self._replies), np.int32),
            logprobs=np.zeros(units, np.float32),
            finish_reason="length" if units >= limit else "stop",
            versions=tuple(span for span in spans if span.end > span.start),
        )

    async def update_weights(self, manifest: WeightManifest) -> None:
        """Stand still while a version is loaded."""
        self._pause = asyncio.get_running_loop().create_future()
        self._interrupt()
        started = self._now()
        if manifest.version:
            await self.cores.work(self.costs.load_s)
        self.paused_s = self._now() - started
        self.loading_s += self.paused_s
        self.version = manifest.version
        pause, self._pause = self._pause, None
        pause.set_result(None)

    async def watch(self) -> None:
        """Wait for ever, or raise what ended the engine."""
        await asyncio.shield(self._task)

    async def wait_ready(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def abort(self, request_ids: Any = None) -> None:
        raise EngineError("a simulation interrupts no rollouts")

    async def metrics(self) -> dict[str, float]:
        """The gauges that adaptive concurrency reads."""
        return {
            "vllm:num_requests_running": float(len(self._running)),
            "vllm:num_requests_waiting": float(len(self._waiting)),
            "vllm:kv_cache_usage_perc": min(self._context / self.costs.room(self.writer), 1.0),
            "vllm:num_preemptions_total": 0.0,
        }

    async def metrics_by_engine(self) -> dict[str, dict[str, float]]:
        """Wait for ever: a look every few seconds, which nobody reads, would make long simulated times slow."""
        await self.watch()
        return {}

    @property
    def idle_now_s(self) -> float:
        """Seconds so far in which the engines that write had nothing to do."""
        return self.idle_s + (0.0 if self._idle_since is None else self._now() - self._idle_since)

    def close(self) -> None:
        self._task.cancel()

    # -- prompts on engines of their own --

    async def _read_elsewhere(self, reader: EngineSetup, prompt: float, cached: float) -> None:
        """Wait for a prefill engine, each of which computes one prompt at a time, and for the transfer of the cache."""
        fresh, groups = prompt - cached, reader.count * reader.groups
        seconds = self.costs.prefill_s(reader, fresh, (cached + prompt) / 2)
        now = self._now()
        # Groups work side by side: the queue moves as fast as all of them, a prompt as fast as one of them.
        start = max(now, self._reading_free_at)
        self._reading_free_at = start + seconds / groups
        self.reading_s += seconds / groups
        await asyncio.sleep(start - now + seconds + self.costs.transfer_s(reader, fresh))

    # -- the loop of the engine --

    async def _run(self) -> None:
        while True:
            if self._pause is not None:
                await self._pause
            if self._waiting and self._has_room():
                await self._read()
            elif self._running:
                await self._write()
            else:
                self._idle_since = self._now()
                self._wake.clear()
                await self._wake.wait()
                self.idle_s, self._idle_since = self.idle_now_s, None

    def _has_room(self) -> bool:
        if not self._running:
            return True
        first = self._waiting[0]
        most = self.writer.section.max_num_seqs * self.groups
        if len(self._running) + len(first.replies) > most:
            return False
        needed = (first.prompt + max(first.replies)) * len(first.replies)
        return self._context + needed <= self.costs.room(self.writer)

    @property
    def _context(self) -> float:
        """Cached tokens of all running replies."""
        return self._offsets + len(self._running) * self._written

    async def _read(self) -> None:
        """Prefill waiting prompts, up to the tokens of one step, and start their replies."""
        limit = self.writer.section.max_num_batched_tokens * self.groups
        chosen: list[Reading] = []
        fresh = keys = 0.0
        while self._waiting and (not chosen or fresh < limit) and self._has_room():
            reading = self._waiting.popleft()
            chosen.append(reading)
            new = reading.prompt - reading.cached
            fresh, keys = fresh + new, keys + new * (reading.cached + reading.prompt) / 2
        side_by_side = min(self.groups, len(chosen))
        seconds = self.costs.prefill_s(self.writer, fresh, keys / fresh) / side_by_side if fresh else 0.0
        seconds += self.costs.request_s * sum(len(each.replies) for each in chosen) / side_by_side
        started = self._now()
        await self.cores.work(seconds)
        self.busy_s += self._now() - started
        loop = asyncio.get_running_loop()
        for reading in chosen:
            if reading.done.cancelled():
                continue
            offset = reading.prompt - self._written
            replies = [
                Reply(self._written + length, offset, loop.create_future(), self.version) for length in reading.replies
            ]
            for reply in replies:
                heapq.heappush(self._running, reply)
                self._offsets += offset
            reading.done.set_result(replies)

    async def _write(self) -> None:
        """Decode until a reply ends, or until `_interrupt` cuts the work short."""
        num = len(self._running)
        groups = min(self.groups, num)
        steps = self._running[0].end - self._written
        step_s = self.costs.decode_s(self.writer, num / groups, self._context / groups)
        started = self._now()
        self._job = self.cores.start(steps * step_s)
        try:
            share = await self._job.done
        finally:
            self._job = None
        self.busy_s += self._now() - started
        self._written += share * steps
        while self._running and self._running[0].end - self._written <= _EPSILON:
            ended = heapq.heappop(self._running)
            self._offsets -= ended.offset
            if not ended.done.cancelled():
                ended.done.set_result(None)
        await asyncio.sleep(0)

    def _interrupt(self) -> None:
        self._wake.set()
        if self._job is not None and (self._pause is not None or (self._waiting and self._has_room())):
            self._job.cut()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class OrchestratorThread:
    """The time of the orchestrator's process, which has one thread."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._lock = cores, asyncio.Lock()
        self.busy_s = 0.0

    async def work(self, seconds: float) -> None:
        """Take this much time of the thread; one caller at a time."""
        if seconds <= 0:
            return
        async with self._lock:
            self.busy_s += seconds
            await self._cores.work(seconds)


@dataclass(frozen=True)
class SimulatedStep:
    """One trained step, in seconds of the simulation."""

    step: int
    wait_s: float
    train_s: float
    publish_s: float
    ended_at: float
    tokens: float
    """Trained tokens of all ranks."""


class SimulatedTrainer(AbsentTrainer):
    """All ranks, the control wire and the wire of batches; versions have no tensors."""

    def __init__(
        self, costs: Costs, cores: Cores, orchestrator: OrchestratorThread, *, max_steps: int, ranks: int, scale: float
    ) -> None:
        model = costs.setup.rl.model
        shares = shares_prefixes(model, find_model_file(model.name), is_on_cpu=costs.setup.is_cpu)
        super().__init__(ranks, 0, max_steps, shares_prefixes=shares)
        self.costs, self.cores, self.orchestrator = costs, cores, orchestrator
        self.max_steps, self.scale = max_steps, scale
        self.steps: list[SimulatedStep] = []
        self.ended = asyncio.Event()
        self._inbox: asyncio.Queue[list[TrainBatch] | Stop] = asyncio.Queue()
        self._task: asyncio.Task | None = None

    async def wait_registered(self) -> list[Register]:
        self._task = asyncio.create_task(self._train(), name="simulated trainer")
        return await super().wait_registered()

    async def send(self, message: Any, **_: object) -> None:
        """Receive a batch, or a message of the control wire."""
        if isinstance(message, list):
            await self.orchestrator.work(self.costs.step_s)
        if isinstance(message, list | Stop):
            self._inbox.put_nowait(message)
        await asyncio.sleep(0)

    async def _train(self) -> None:
        now = asyncio.get_running_loop().time
        for step in range(1, self.max_steps + 1):
            began = now()
            batch = await self._inbox.get()
            if isinstance(batch, Stop):
                break
            received = now()
            rows = [self._rows(each) for each in batch]
            await self.cores.work(max(map(self.costs.train_s, rows)) + self.costs.update_s)
            trained = now()
            wait_s = received - began
            self._emit(StepDone(step=step, metrics={}, num_tokens=1, time_s=trained - began, wait_s=wait_s))
            if batch[0].is_sent:
                await self.cores.work(self.costs.publish_s)
                self._emit(StepMetrics(step=step, metrics={PUBLISHING: now() - trained}))
                self._publish(step)
            tokens = self.scale * sum(float(row.cu_seqlens[-1]) for each in batch for row in each.micro_batches)
            self.steps.append(SimulatedStep(step, wait_s, trained - received, now() - trained, now(), tokens))
            self.ended.set()
        self._end()

    def _rows(self, batch: TrainBatch) -> list[tuple[float, float]]:
        """(tokens, mean keys of a token) of every row.

        What samples begin with alike counts once if the trainer shares all of it, else each time.
        """
        found = []
        for row in batch.micro_batches:
            starts, ends = np.zeros(len(row.cu_seqlens) - 1), np.diff(row.cu_seqlens)
            if self._shares_prefixes:
                tree = PrefixTree.of([[ids] for ids in np.split(row.token_ids, row.cu_seqlens[1:-1])])
                starts, ends = tree.starts, tree.ends
            starts, ends = starts * self.scale, ends * self.scale
            tokens = float((ends - starts).sum())
            found.append((tokens, float((ends**2 - starts**2).sum() / 2 / max(tokens, 1.0))))
        return found


# -- environments and text --


class UnitRenderer:
    """A renderer without text: the content of a message is its number of tokens, in units, and which token they are.

    Samples then begin alike as those of a run do: by the prompt of their task, and by the replies before.
    """

    stop_ids = (1,)
    image_token_id = None
    tokenizer = None

    def images_of(self, messages: Sequence[Message]) -> tuple:
        return ()

    def check_images(self, token_ids: Any, images: Any, where: str = "") -> None: ...

    def render_prompt(self, messages: Sequence[Message], tools: Any = None) -> np.ndarray:
        return np.concatenate([_tokens_of(message) for message in messages])

    def extend(
        self, prompt: np.ndarray, completion: np.ndarray, history: Any, new: Sequence[Message], tools: Any = None
    ) -> np.ndarray:
        return np.concatenate((prompt, completion, *map(_tokens_of, new)), dtype=np.int32)

    def parse(self, completion: np.ndarray, prompt: Any = None, tools: Any = None) -> Message:
        return {"role": "assistant", "content": f"{len(completion)} {completion[0] if len(completion) else 0}"}

    def decode(self, token_ids: Any) -> str:
        return ""

    readable = decode


def _tokens_of(message: Message) -> np.ndarray:
    units, token = map(int, message["content"].split())
    return np.full(units, token, np.int32)


@dataclass(eq=False)
class Tasks:
    """What the environments of a simulation have in common: prompts, rewards, waits."""

    name: str
    workload: Workload
    scale: float
    rng: random.Random = field(default_factory=random.Random)
    durations: list[tuple[float, float]] = field(default_factory=list)
    """When each finished rollout ended, and the seconds it took."""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"0/{self.name}")
        self._began: dict[str, float] = {}

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            rng = random.Random(f"0/{self.name}/{index}")
            units = max(1, round(self.workload.prompt_tokens.draw(rng) / self.scale))
            data = {"units": units, "signal": rng.random() < self.workload.signal}
            return Task(env=self.name, task_id=str(index), data=data)

        return TaskSource(make)

    def end(self, task: Task) -> None:
        """Record the seconds of a rollout of one turn since its prompt was made."""
        self.note(self._began[task.task_id])

    def note(self, began: float) -> None:
        """Record the seconds of a rollout."""
        now = asyncio.get_running_loop().time()
        self.durations.append((now, now - began))

    def prompt(self, task: Task) -> list[Message]:
        self._began[task.task_id] = asyncio.get_running_loop().time()
        token = zlib.crc32(f"{self.name}/{task.task_id}".encode()) >> 1
        return [{"role": "user", "content": f"{task.data['units']} {token}"}]

    def reward(self, task: Task) -> float:
        """Different for every rollout of a task with signal."""
        return self.rng.random() if task.data["signal"] else 0.5


class OneTurn(Tasks, SingleTurnEnv):
    """One reply, scored in no time."""

    def score(self, task: Task, text: str) -> float:
        self.end(task)
        return self.reward(task)


class OneSlowTurn(Tasks, SingleTurnEnv):
    """One reply; its score takes time."""

    async def score(self, task: Task, text: str) -> float:
        await asyncio.sleep(self.workload.score_s.draw(self.rng))
        self.end(task)
        return self.reward(task)


class SeveralTurns(Tasks):
    """Several replies, with a message of the environment between two."""

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        messages, began = self.prompt(task), asyncio.get_running_loop().time()
        turns = max(1, round(self.workload.turns.draw(self.rng)))
        for turn in range(turns):
            try:
                reply = await ctx.chat(messages)
            except LimitReached:  # the row is full, or there are no more turns
                break
            messages.append(reply.message)
            if turn + 1 == turns:
                break
            await asyncio.sleep(self.workload.turn_wait_s.draw(self.rng))
            units = round(self.workload.observation_tokens.draw(self.rng) / self.scale)
            messages.append({"role": "user", "content": f"{max(1, units)} 0"})
        await asyncio.sleep(self.workload.score_s.draw(self.rng))
        self.note(began)
        return RolloutResult(reward=self.reward(task))


def build_env(name: str, workload: Workload, scale: float) -> Tasks:
    """The environment that plays rollouts like these."""
    kind: type[Tasks] = SeveralTurns
    if workload.is_single_turn:
        kind = OneSlowTurn if workload.score_s.mean else OneTurn
    return kind(name, workload, scale)
