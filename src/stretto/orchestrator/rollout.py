"""One group: render -> generate -> score. What comes out is always a Group; what went wrong is data in it.

The n samples of a single-turn task are one request with one rendered prompt. Any other environment plays
its members side by side, each with a `Recorder` as its context, which writes down every token, logprob and
version and opens a new branch when a turn does not extend the tokens so far. A member that fails is tried
again under a fresh request id and seed, at most max_retries times and before the group's deadline; then it
is FAILED with its cause.

What a member samples depends on (seed, group_id, member, attempt) only.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stretto.base.errors import DataError, EngineError, EnvError, StrettoError, boundary
from stretto.chat.render import Renderer
from stretto.config.orchestrator import SamplingSection
from stretto.envs.base import (
    Environment,
    Message,
    OutOfContext,
    Reply,
    RolloutContext,
    RolloutResult,
    SingleTurnEnv,
    scored,
)
from stretto.orchestrator.tasks import seed_of
from stretto.records.generate import Completion, GenerateRequest, SamplingParams, VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task


class Engine(Protocol):
    """The part of an engine client that rollouts need."""

    async def generate(self, request: GenerateRequest) -> list[Completion]: ...


@dataclass(frozen=True)
class Draw:
    """A task that is about to be played: its number, how many members, and the weights it starts under."""

    group_id: int
    task: Task
    num_members: int
    version: int
    name: str = "g"  # first letter of its rollout ids: `g12.3`; evals have names of their own

    def rollout_id(self, member: int) -> str:
        return f"{self.name}{self.group_id}.{member}"


@dataclass(frozen=True)
class Player:
    """Everything that playing a group needs and that is the same for all of them."""

    engine: Engine
    renderer: Renderer
    sampling: SamplingSection
    seq_len: int
    seed: int = 0
    run_id: str = "run"
    timeout_s: float | None = None
    max_retries: int = 2

    async def play(self, env: Environment, draw: Draw) -> Group:
        """Play all members of a draw. Never raises for what an environment or an engine does."""
        started_at = time.time()
        outcomes: list[Rollout | None] = [None] * draw.num_members
        causes: dict[int, str] = {}
        try:
            async with asyncio.timeout(self.timeout_s):
                if isinstance(env, SingleTurnEnv):
                    await self._play_single_turn(env, draw, outcomes, causes, started_at)
                else:
                    members = range(draw.num_members)
                    plays = (self._play_member(env, draw, m, outcomes, causes, started_at) for m in members)
                    await asyncio.gather(*plays)
        except TimeoutError:
            for member, rollout in enumerate(outcomes):
                if rollout is None:
                    earlier = f" (before: {causes[member]})" if member in causes else ""
                    causes[member] = f"EngineError: not done after {self.timeout_s:g} s{earlier}"
        rollouts = tuple(
            rollout or failed(draw, member, causes.get(member, "unknown"), started_at)
            for member, rollout in enumerate(outcomes)
        )
        return Group(group_id=draw.group_id, task=draw.task, rollouts=rollouts)

    # -- one turn: the group is one request --

    async def _play_single_turn(
        self,
        env: SingleTurnEnv,
        draw: Draw,
        outcomes: list[Rollout | None],
        causes: dict[int, str],
        started_at: float,
    ) -> None:
        missing = list(range(draw.num_members))
        for attempt in range(self.max_retries + 1):
            try:
                with boundary(EnvError, f"environment {env.name}, task {draw.task.task_id}, prompt"):
                    prompt_ids = self.renderer.render_prompt(env.prompt(draw.task))
                request = self._group_request(draw, prompt_ids, attempt, missing)
                with boundary(EngineError, f"generate {request.request_id}"):
                    completions = await self.engine.generate(request)
                check_completions(completions, len(missing))
            except StrettoError as error:
                causes.update(dict.fromkeys(missing, describe(error)))
                continue

            async def score(member: int, completion: Completion, prompt_ids: np.ndarray = prompt_ids) -> None:
                try:
                    outcomes[member] = await self._score_single_turn(
                        env, draw, member, prompt_ids, completion, started_at
                    )
                    missing.remove(member)
                except StrettoError as error:
                    causes[member] = describe(error)

            scores = [score(member, completion) for member, completion in zip(list(missing), completions)]
            if inspect.iscoroutinefunction(env.score):
                await asyncio.gather(*scores)  # whoever is asked is asked for all members at once
            else:
                for scoring in scores:
                    await scoring
            if not missing:
                return

    def _group_request(
        self, draw: Draw, prompt_ids: np.ndarray, attempt: int, missing: Sequence[int]
    ) -> GenerateRequest:
        # A first attempt asks for all members; a later one must not repeat what the first one drew.
        seed = seed_of(self.seed, draw.name, draw.group_id, attempt)
        return GenerateRequest(
            request_id=f"{self.run_id}-{draw.name}{draw.group_id}-{attempt}",
            prompt_ids=prompt_ids,
            n=len(missing),
            sampling=self.sampling_params(len(prompt_ids), seed),
            cache_salt=str(draw.version),
        )

    async def _score_single_turn(
        self,
        env: SingleTurnEnv,
        draw: Draw,
        member: int,
        prompt_ids: np.ndarray,
        completion: Completion,
        started_at: float,
    ) -> Rollout:
        if completion.finish_reason == "abort" or not len(completion.token_ids):
            raise EngineError(f"the engine gave up this sample after {len(completion.token_ids)} tokens")
        with boundary(EnvError, f"environment {env.name}, rollout {draw.rollout_id(member)}, score"):
            text = self.renderer.parse(completion.token_ids).get("content") or ""
            result = await scored(env.score(draw.task, text))
        branch = OpenBranch(self.behavior_temperature())
        branch.add_turn(prompt_ids, completion, draw.version)
        is_truncated = completion.finish_reason == "length" or result.is_truncated
        return finished(draw, member, (branch.close(),), result, is_truncated, 1, started_at)

    # -- any number of turns: every member plays on its own --

    async def _play_member(
        self,
        env: Environment,
        draw: Draw,
        member: int,
        outcomes: list[Rollout | None],
        causes: dict[int, str],
        started_at: float,
    ) -> None:
        for attempt in range(self.max_retries + 1):
            recorder = Recorder(self, draw, member, attempt)
            try:
                with boundary(EnvError, f"environment {env.name}, rollout {draw.rollout_id(member)}"):
                    result = await self._result_of(env, draw.task, recorder)
                    if not recorder.num_turns:
                        raise EnvError(f"environment {env.name}: the episode ended before any reply")
                outcomes[member] = finished(
                    draw,
                    member,
                    recorder.close(),
                    result,
                    recorder.is_truncated or result.is_truncated,
                    recorder.num_turns,
                    started_at,
                )
                return
            except StrettoError as error:
                causes[member] = describe(error)

    async def _result_of(self, env: Environment, task: Task, recorder: Recorder) -> RolloutResult:
        try:
            return await env.rollout(task, recorder)
        except OutOfContext:
            if not recorder.num_turns:
                raise
            # The policy talked until nothing more fits: an episode without success, not a failure of ours.
            return RolloutResult(reward=0.0, is_truncated=True)

    # -- sampling --

    def sampling_params(self, num_prompt_tokens: int, seed: int, **overrides: Any) -> SamplingParams:
        """The run's sampling, cut to what still fits in seq_len.

        Raises: OutOfContext when nothing fits.
        """
        room = self.seq_len - num_prompt_tokens
        if room < 1:
            raise OutOfContext(
                f"{num_prompt_tokens} prompt tokens leave no room for a reply in seq_len = {self.seq_len}"
            )
        sampling = self.sampling
        wanted = overrides.pop("max_tokens", None) or sampling.max_completion_tokens or room
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": () if sampling.ignore_eos else self.renderer.stop_ids,
            "ignore_eos": sampling.ignore_eos,
        }
        return SamplingParams(**settings | overrides, max_tokens=min(wanted, room), seed=seed)

    def behavior_temperature(self, override: float | None = None) -> float:
        """The temperature logprobs belong to; greedy ones are those of the unscaled distribution."""
        temperature = self.sampling.temperature if override is None else override
        return temperature or 1.0


class Recorder(RolloutContext):
    """The context of one multi-turn episode; see envs/base.py for what an environment may ask of it."""

    def __init__(self, player: Player, draw: Draw, member: int, attempt: int) -> None:
        self.num_turns = 0
        self.is_truncated = False  # the last reply was cut off
        self._player, self._draw, self._member, self._attempt = player, draw, member, attempt
        self._branches: list[OpenBranch] = []
        self._history: list[Message] = []
        self._turn: tuple[np.ndarray, np.ndarray] | None = None  # prompt and completion of the last chat turn
        self._is_busy = False

    async def generate(self, prompt_ids: np.ndarray, **sampling: Any) -> Reply:
        prompt_ids = np.asarray(prompt_ids, dtype=np.int32)
        player, draw = self._player, self._draw
        if self._is_busy:
            raise EnvError("two turns of one episode at once: await a reply before asking for the next")
        seed = seed_of(player.seed, draw.name, draw.group_id, self._attempt, self._member, self.num_turns)
        name = f"{player.run_id}-{draw.rollout_id(self._member)}"
        request = GenerateRequest(
            request_id=f"{name}-{self._attempt}-{self.num_turns}",
            prompt_ids=prompt_ids,
            sampling=player.sampling_params(len(prompt_ids), seed, **sampling),
            cache_salt=str(draw.version),
            session_id=name,
            routed_experts_start=self._known_routes(prompt_ids, sampling.get("temperature")),
        )
        self._is_busy = True
        try:
            with boundary(EngineError, f"generate {request.request_id}"):
                completions = await player.engine.generate(request)
        finally:
            self._is_busy = False
        check_completions(completions, 1)
        completion = completions[0]
        if completion.finish_reason == "abort" or not len(completion.token_ids):
            raise EngineError(f"the engine gave up this turn after {len(completion.token_ids)} tokens")
        self._branch_for(prompt_ids, player.behavior_temperature(sampling.get("temperature"))).add_turn(
            prompt_ids, completion, draw.version
        )
        self.num_turns += 1
        self.is_truncated = completion.finish_reason == "length"
        message = player.renderer.parse(completion.token_ids)
        return Reply(
            message=message,
            text=message.get("content") or "",
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
        )

    async def chat(self, messages: list[Message], tools: list[dict] | None = None, **sampling: Any) -> Reply:
        prompt_ids = self._extend(messages, tools)
        if prompt_ids is None:
            prompt_ids = self._player.renderer.render_prompt(messages, tools)
        reply = await self.generate(prompt_ids, **sampling)
        self._history = [*messages, reply.message]
        self._turn = (prompt_ids, reply.token_ids)
        return reply

    def close(self) -> tuple[Branch, ...]:
        """The branches of the episode."""
        return tuple(branch.close() for branch in self._branches)

    def _extend(self, messages: list[Message], tools: list[dict] | None) -> np.ndarray | None:
        """The prompt as a continuation of the tokens so far.

        None when history changed or cannot be continued.
        """
        known = len(self._history)
        if self._turn is None or len(messages) <= known or messages[:known] != self._history:
            return None
        return self._player.renderer.extend(*self._turn, messages[known:], tools)

    def _known_routes(self, prompt_ids: np.ndarray, temperature: float | None) -> int:
        """Tokens of a prompt whose expert choices need not be sent again."""
        temperature = self._player.behavior_temperature(temperature)
        if self._branches and self._branches[-1].is_extended_by(prompt_ids, temperature):
            return self._branches[-1].num_known_routes
        return 0

    def _branch_for(self, prompt_ids: np.ndarray, temperature: float) -> OpenBranch:
        if self._branches and self._branches[-1].is_extended_by(prompt_ids, temperature):
            return self._branches[-1]
        self._branches.append(OpenBranch(temperature))
        return self._branches[-1]


class OpenBranch:
    """A token sequence that grows turn by turn; what was sampled is told from what was given."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.token_ids = np.empty(0, dtype=np.int32)
        self._logprobs: list[np.ndarray] = []
        self._routes: np.ndarray | None = None
        self._sampled: list[tuple[int, int]] = []
        self._versions: list[VersionSpan] = []

    @property
    def num_known_routes(self) -> int:
        """Tokens whose expert choices are known: all but the last, from which nothing has been computed."""
        return 0 if self._routes is None else len(self._routes) - 1

    def is_extended_by(self, prompt_ids: np.ndarray, temperature: float) -> bool:
        length = len(self.token_ids)
        return temperature == self.temperature and np.array_equal(prompt_ids[:length], self.token_ids)

    def add_turn(self, prompt_ids: np.ndarray, completion: Completion, version: int) -> None:
        """Append the given tokens that are new, then the sampled ones.

        `version` where the engine names none.
        """
        start = len(prompt_ids)
        self._routes = join_routes(self._routes, completion.routed_experts, start + len(completion.token_ids))
        self._logprobs.append(np.zeros(start - len(self.token_ids), dtype=np.float32))
        self._logprobs.append(completion.logprobs)
        self.token_ids = np.concatenate((prompt_ids, completion.token_ids), dtype=np.int32)
        self._sampled.append((start, len(self.token_ids)))
        spans = completion.versions or (VersionSpan(version, 0, len(completion.token_ids)),)
        self._versions += [VersionSpan(s.version, start + s.start, start + s.end) for s in spans]

    def close(self) -> Branch:
        is_sampled = np.zeros(len(self.token_ids), dtype=bool)
        for start, end in self._sampled:
            is_sampled[start:end] = True
        return Branch(
            token_ids=self.token_ids,
            is_sampled=is_sampled,
            logprobs=np.concatenate(self._logprobs, dtype=np.float32),
            temperature=self.temperature,
            versions=tuple(self._versions),
            routed_experts=self._routes,
        )


def join_routes(known: np.ndarray | None, new: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
    """Expert choices of a branch of num_tokens after a turn, from those before it and those of its end.

    A token keeps the choices with which it was computed first: what was sampled after it was sampled with
    them. Only the last one known is replaced: nothing had been computed from it. None where choices are
    missing in between: an engine gave none in an earlier turn, or gives none now.
    """
    if new is None:
        return None
    start = num_tokens - len(new)
    if known is None:
        return new if start == 0 else None
    kept = len(known) - 1
    return np.concatenate((known[:-1], new[kept - start :])) if start <= kept else None


def finished(
    draw: Draw,
    member: int,
    branches: tuple[Branch, ...],
    result: RolloutResult,
    is_truncated: bool,
    num_turns: int,
    started_at: float,
) -> Rollout:
    """A rollout whose reward is valid.

    Raises: EnvError when the reward is not a finite number.
    """
    if not np.isfinite(result.reward):
        raise EnvError(
            f"rollout {draw.rollout_id(member)}: its reward is {result.reward}, not a finite number"
        )
    return Rollout(
        rollout_id=draw.rollout_id(member),
        group_id=draw.group_id,
        member=member,
        task=draw.task,
        status=RolloutStatus.TRUNCATED if is_truncated else RolloutStatus.FINISHED,
        branches=branches,
        reward=float(result.reward),
        agent_rewards=result.agent_rewards,
        metrics=result.metrics,
        num_turns=num_turns,
        started_at=started_at,
        finished_at=time.time(),
    )


def failed(draw: Draw, member: int, cause: str, started_at: float) -> Rollout:
    """A rollout that has a cause instead of a reward."""
    return Rollout(
        rollout_id=draw.rollout_id(member),
        group_id=draw.group_id,
        member=member,
        task=draw.task,
        status=RolloutStatus.FAILED,
        started_at=started_at,
        finished_at=time.time(),
        error=cause,
    )


def describe(error: StrettoError) -> str:
    """An error as the ledger and the last message of a run show it."""
    return f"{type(error).__name__}: {error}"


def check_completions(completions: Sequence[Completion], wanted: int) -> None:
    """Raises: EngineError, DataError when an engine's answer is not what was asked for."""
    if len(completions) != wanted:
        raise EngineError(f"the engine answered {len(completions)} samples where {wanted} were asked for")
    for completion in completions:
        if len(completion.logprobs) != len(completion.token_ids):
            raise DataError(
                f"the engine gave {len(completion.logprobs)} logprobs for {len(completion.token_ids)} tokens"
            )
