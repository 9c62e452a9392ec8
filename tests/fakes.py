"""Fakes of the real protocols: an engine, a renderer, environments, a trainer, and a clock.

None of them records calls to be asserted on; tests check the results of the code under test.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from stretto.base.errors import EngineError
from stretto.envs.base import Message, RolloutResult, SingleTurnEnv, TaskSource
from stretto.records.control import (
    Bye,
    CheckpointBegun,
    CheckpointComplete,
    CheckpointSaved,
    Failed,
    Register,
    StepDone,
    StepMetrics,
    Stop,
    VersionLoaded,
    VersionReady,
)
from stretto.records.generate import Completion, GenerateRequest, VersionSpan, member_seed
from stretto.records.rollout import Task
from stretto.records.sample import TrainBatch
from stretto.records.weight_manifest import WeightManifest
from stretto.transports.control import Event
from stretto.virtual_clock import run_virtual as run_virtual

# -- text --


class CharRenderer:
    """One token per character; a message is its role's first letter, its content and a full stop."""

    END = ord(".")
    stop_ids = (END,)
    image_token_id = None

    def images_of(self, messages: list[Message]) -> tuple:
        return ()

    def readable(self, token_ids) -> str:
        return self.decode(token_ids)

    def check_images(self, token_ids, images, where: str = "") -> None:
        assert not images

    def render_prompt(self, messages: list[Message], tools: Any = None) -> np.ndarray:
        text = "".join(f"{m['role'][0].upper()}{m.get('content') or ''}." for m in messages)
        return self.encode(text + "A")

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(c) for c in text], dtype=np.int32)

    def render_text(self, messages: list[Message], tools: Any = None) -> str:
        return self.decode(self.render_prompt(messages, tools))

    def render_leading(self, messages: list[Message]) -> np.ndarray:
        return self.render_prompt(messages)[:-1]

    def text_owners(self, messages: list[Message], tools: Any = None, *, after: Any = None) -> np.ndarray:
        owners = [each for i, m in enumerate(messages) for each in (-1, *[i] * len(m.get("content") or ""), -1)]
        if after is None:
            return np.array([*owners, -1])
        num_before = len(self.extend(*after, messages)) - len(owners) - 1
        return np.array([-1] * num_before + [*owners, -1])

    def extend(self, prompt_ids, completion_ids, history, new_messages, tools: Any = None) -> np.ndarray | None:
        closing = [] if len(completion_ids) and completion_ids[-1] == self.END else [self.END]
        return np.concatenate((prompt_ids, completion_ids, closing, self.render_prompt(new_messages))).astype(np.int32)

    def parse(self, completion_ids, prompt_ids: Any = None, tools: Any = None) -> Message:
        text = "".join(chr(i) for i in completion_ids if i != self.END)
        return {"role": "assistant", "content": text}

    def decode(self, token_ids) -> str:
        return "".join(map(chr, token_ids))


# -- an engine --

Answer = Callable[[str, random.Random, int], str]
"""(prompt text, random numbers of this sample, policy version) -> the policy's reply."""


def parrot(skill: float) -> Answer:
    """A policy that repeats the last message with probability `skill`, else adds a wrong letter."""

    def answer(prompt: str, rng: random.Random, version: int) -> str:
        text = prompt.rsplit("U", 1)[-1].removesuffix(".A")
        return text if rng.random() < skill else text + "x"

    return answer


class FakeEngine:
    """An engine client and its engine in one; replies depend on seed, sample and version alone.

    `delay(request)` is the time a request takes; tokens after an update have the newer version.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        delay: Callable[[GenerateRequest], float] | None = None,
        load_delay: float = 0.0,
        fail: Callable[[GenerateRequest], str | None] = lambda request: None,
    ) -> None:
        self.answer, self.delay, self.load_delay, self.fail = answer, delay, load_delay, fail
        self.version = 0
        self.num_running = 0
        self.num_requests = 0
        self._ends: dict[str, asyncio.Event] = {}  # by open request; when set, the request returns what it has

    num_ready = 1
    num_replies = 0
    paused_s = 0.0
    generation = 0

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.num_requests += 1
        self.num_running += 1
        try:
            first_version, share = self.version, 1.0
            if self.delay is not None:
                share = await self._wait(request.request_id, self.delay(request))
            if cause := self.fail(request):
                raise EngineError(cause)
            return [self._sample(request, i, first_version, share) for i in range(request.n)]
        finally:
            self.num_running -= 1

    async def _wait(self, request_id: str, delay_s: float) -> float:
        """Wait for the end of a request or its abort; the completed share of it."""
        now = asyncio.get_running_loop().time
        started, end = now(), self._ends.setdefault(request_id, asyncio.Event())
        try:
            async with asyncio.timeout(delay_s):
                await end.wait()
            return (now() - started) / delay_s
        except TimeoutError:
            return 1.0
        finally:
            del self._ends[request_id]

    async def abort(self, request_ids: Any = None) -> None:
        """End requests early: each returns the share of its reply for which time has passed."""
        await asyncio.sleep(0)
        for request_id in list(self._ends) if request_ids is None else request_ids:
            if request_id in self._ends:
                self._ends[request_id].set()

    def _sample(self, request: GenerateRequest, index: int, first_version: int, share: float) -> Completion:
        """Sample a reply from prompt, seed and version; a reply that begins in the prompt is continued."""
        head, turn, begun = "".join(map(chr, request.prompt_ids)).rpartition(".A")
        seed = request.sampling.seed
        rng = random.Random(f"{None if seed is None else member_seed(seed, index)}/{first_version}")
        reply = self.answer(head + turn, rng, first_version) + "."
        logprobs = [-rng.random() for _ in reply][len(begun) :]
        text = reply[len(begun) :][: request.sampling.max_tokens]
        is_cut = share < 1 and int(share * len(text)) < len(text)
        text = text[: int(share * len(text))] if is_cut else text
        split = 1 if self.version != first_version else len(text)
        spans = [VersionSpan(first_version, 0, split), VersionSpan(self.version, split, len(text))]
        return Completion(
            token_ids=np.array([ord(c) for c in text], dtype=np.int32),
            logprobs=np.array(logprobs[: len(text)], dtype=np.float32),
            finish_reason="abort" if is_cut else "stop" if text.endswith(".") else "length",
            versions=tuple(span for span in spans if span.end > span.start),
        )

    async def wait_ready(self, timeout_s: float) -> None:
        await asyncio.sleep(0)

    async def update_weights(self, manifest: WeightManifest) -> None:
        await asyncio.sleep(self.load_delay)
        self.paused_s = self.load_delay
        assert manifest.version >= self.version, f"{manifest.version} after {self.version}"
        self.version = manifest.version

    async def metrics(self) -> dict[str, float]:
        return {"vllm:num_requests_running": float(self.num_running)}

    async def metrics_by_engine(self) -> dict[str, dict[str, float]]:
        return {"http://fake:1": await self.metrics()}


# -- environments --


class EchoEnv(SingleTurnEnv):
    """The task is to repeat a word. `broken` makes every score fail, `num_tasks` limits the tasks."""

    def __init__(self, broken: bool = False, num_tasks: int | None = None) -> None:
        self.name = "echo"
        self.broken = broken
        self.num_tasks = num_tasks

    def tasks(self, split: str) -> TaskSource:
        def make(index: int) -> Task:
            return Task(env=self.name, task_id=f"{split}-{index}", data={"word": f"{split}{index}"})

        return TaskSource(make, self.num_tasks)

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": task.data["word"]}]

    def score(self, task: Task, text: str) -> float:
        if self.broken:
            raise ValueError("the scorer is on strike")
        return float(text == task.data["word"])


class GuessEnv:
    """Several turns: repeat three words, one per turn; the reward is the share of correct ones."""

    def __init__(self, num_turns: int = 3, rewrite_history: bool = False) -> None:
        self.name = "guess"
        self.num_turns = num_turns
        self.rewrite_history = rewrite_history

    def tasks(self, split: str) -> TaskSource:
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={"word": f"w{i}"}))

    async def rollout(self, task: Task, ctx: Any) -> RolloutResult:
        messages: list[Message] = []
        right = 0
        for turn in range(self.num_turns):
            messages.append({"role": "user", "content": f"{task.data['word']}{turn}"})
            reply = await ctx.chat(messages)
            right += reply.text == f"{task.data['word']}{turn}"
            content = "forgotten" if self.rewrite_history else reply.message["content"]
            messages.append({**reply.message, "content": content})
        return RolloutResult(reward=right / self.num_turns, metrics={"right": float(right)})


# -- a trainer --


class FakeTrainer:
    """All ranks, the control wire and the rollout wire in one: trains by sleeping `step_delay(step)`.

    Has the methods of `ControlServer` and of a rollout sender that the orchestrator calls.
    """

    def __init__(
        self,
        *,
        max_steps: int | None,
        start: int = 0,
        world_size: int = 1,
        step_delay: Callable[[int], float] = lambda step: 0.0,
        checkpoint_every: int | None = None,
        die_after: int | None = None,
        time_s: float = 0.0,
        publish_s: float = 0.0,
        shares_prefixes: bool = False,
    ) -> None:
        self.max_steps, self.start, self.world_size, self.time_s = max_steps, start, world_size, time_s
        self.shares_prefixes = shares_prefixes
        self.published, self.publish_s = start, publish_s
        self.step_delay, self.checkpoint_every, self.die_after = step_delay, checkpoint_every, die_after
        self.step = start
        self.batches: list[list[TrainBatch]] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._inbox: asyncio.Queue[list[TrainBatch] | Stop] = asyncio.Queue()
        self._completed: asyncio.Queue[int] = asyncio.Queue()
        self._has_loaded = asyncio.Event()
        self._training: asyncio.Task | None = None

    # -- called by the orchestrator --

    async def wait_registered(self, timeout_s: float | None = None) -> list[Register]:
        self._training = asyncio.create_task(self._train())
        said = Register(
            world_size=self.world_size,
            resumed_step=self.start or None,
            version=self.start,
            shares_prefixes=self.shares_prefixes,
        )
        return [msgspec.structs.replace(said, rank=rank) for rank in range(self.world_size)]

    async def next_event(self) -> Event:
        return await self._events.get()

    async def send(self, message: Any) -> None:
        if isinstance(message, list | Stop):
            self._inbox.put_nowait(message)
        elif isinstance(message, CheckpointComplete):
            self._completed.put_nowait(message.step)
        elif isinstance(message, VersionLoaded) and message.version == self.step:
            self._has_loaded.set()
        await asyncio.sleep(0)

    # -- the trainer's side --

    async def _train(self) -> None:
        self._emit(VersionReady(manifest=manifest(self.start)))
        while self.max_steps is None or self.step < self.max_steps:
            order = await self._inbox.get()
            if isinstance(order, Stop):
                if order.save:
                    await self._save()
                break
            assert {b.step for b in order} == {self.step + 1}, "batches come one by one"
            assert [b.rank for b in order] == list(range(self.world_size))
            await asyncio.sleep(self.step_delay(self.step + 1))
            self.step += 1
            self.batches.append(order)
            metrics = {"loss/mean": 0.5, "mismatch_kl/mean": 1e-7}
            self._emit(StepDone(step=self.step, metrics=metrics, time_s=self.time_s))
            if order[0].is_sent:
                if self.publish_s:
                    await asyncio.sleep(self.publish_s)
                    self._emit(StepMetrics(step=self.step, metrics={"time/publish": self.publish_s}))
                self._publish()
            if self.die_after == self.step:
                self._events.put_nowait(Event(0, Failed(reason="killed")))
                return
            if self.checkpoint_every and self.step % self.checkpoint_every == 0:
                await self._save()
        if self.published != self.step:
            self._has_loaded.clear()
            self._publish()
            await self._has_loaded.wait()
        for rank in range(self.world_size):
            self._events.put_nowait(Event(rank, Bye()))

    def _publish(self) -> None:
        self.published = self.step
        self._emit(VersionReady(manifest=manifest(self.step)))

    async def _save(self) -> None:
        self._emit(CheckpointBegun(step=self.step))
        self._emit(CheckpointSaved(step=self.step))
        assert await self._completed.get() == self.step

    def _emit(self, message: Any) -> None:
        self._events.put_nowait(Event(0, message))


def manifest(version: int) -> WeightManifest:
    """A manifest without tensors."""
    return WeightManifest(
        version=version, transport="filesystem", location="nowhere", shards=(), tensors=(), checksum=0
    )


class AgingTrainer(FakeTrainer):
    """The effective sample size loses `decay` with each version of age; a token is worth its power."""

    def __init__(self, decay: float, power: float = 2.0, **settings) -> None:
        super().__init__(**settings)
        self.decay, self.power, self.worth = decay, power, []  # seconds, and effective tokens, of each step

    def _emit(self, message) -> None:
        if isinstance(metrics := getattr(message, "metrics", None), dict) and "loss/mean" in metrics:
            rows = [row for batch in self.batches[-1] for row in batch.micro_batches]
            ages = [message.step - 1 - version for row in rows for version in row.first_versions]
            metrics["ess/tokens"] = fmean(math.exp(-self.decay * age) for age in ages)
            tokens = sum(int(row.loss_mask.sum()) for row in rows)
            self.worth.append((asyncio.get_running_loop().time(), tokens * metrics["ess/tokens"] ** self.power))
        super()._emit(message)
