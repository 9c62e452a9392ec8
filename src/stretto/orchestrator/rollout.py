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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from stretto.base.errors import ConfigError, DataError, EngineError, EnvError, StrettoError, boundary
from stretto.chat.render import Renderer
from stretto.config.orchestrator import SamplingSection
from stretto.envs.base import (
    Environment,
    LimitReached,
    Limits,
    OutOfContext,
    RolloutResult,
    SingleTurnEnv,
    scored,
)
from stretto.orchestrator.branches import OpenBranch
from stretto.orchestrator.echo import Echo
from stretto.orchestrator.interruption import Interruption, Journal
from stretto.orchestrator.recorder import POLICY, Budget, Recorder, check_completions
from stretto.orchestrator.tasks import seed_of
from stretto.records.generate import (
    Completion,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
    member_seed,
)
from stretto.records.partial import Kept, Turn
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
    kept: Mapping[int, Kept] = field(
        default_factory=dict
    )  # by member: what was played before the run resumed
    name: str = "g"  # first letter of its rollout ids: `g12.3`; evals have names of their own
    notes: dict[int, Any] = field(default_factory=dict)  # by member: of its result, for `score_group`

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
    journal: Journal | None = None  # keeps the turns of rollouts that are not done
    interruption: Interruption | None = None  # ends them
    echo: Echo | None = None  # what of the environment's words is learned
    keeps_replies: bool = False  # of one turn too: somebody is asked about them before the group is done
    masks_kept: bool = False  # of a rollout that goes on, what older weights sampled is not trained

    async def play(self, env: Environment, draw: Draw) -> Group:
        """Play all members of a draw. Never raises for what an environment or an engine does."""
        started_at = time.time()
        outcomes: list[Rollout | None] = [None] * draw.num_members
        causes: dict[int, str] = {}
        try:
            async with asyncio.timeout(self.timeout_s):
                if isinstance(env, SingleTurnEnv) and not draw.kept:
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
        group = Group(group_id=draw.group_id, task=draw.task, rollouts=rollouts)
        return await self._scored_together(env, draw, group) if hasattr(env, "score_group") else group

    async def _scored_together(self, env: Environment, draw: Draw, group: Group) -> Group:
        """The group with the rewards of an environment that looks at all members at once."""
        members = [m for m, r in enumerate(group.rollouts) if r.status is not RolloutStatus.FAILED]
        if not members:
            return group
        played = msgspec.structs.replace(group, rollouts=tuple(group.rollouts[m] for m in members))
        rollouts = list(group.rollouts)
        try:
            with boundary(EnvError, f"environment {env.name}, group {group.group_id}"):
                rewards = await env.score_group(played, [draw.notes.get(m) for m in members])
            if rewards is None:
                return group
            for member, reward in zip(members, rewards, strict=True):
                if not np.isfinite(reward):
                    raise EnvError(f"rollout {rollouts[member].rollout_id}: its reward is {reward}")
                rollouts[member] = msgspec.structs.replace(rollouts[member], reward=float(reward))
        except StrettoError as error:
            for member in members:
                rollouts[member] = msgspec.structs.replace(
                    rollouts[member], status=RolloutStatus.FAILED, error=describe(error)
                )
        return msgspec.structs.replace(group, rollouts=tuple(rollouts))

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
                    messages = env.prompt(draw.task)
                    if inspect.isawaitable(messages):
                        messages = await messages
                    prompt_ids = self.renderer.render_prompt(messages)
                request = self._group_request(draw, prompt_ids, attempt, missing)
                with boundary(EngineError, f"generate {request.request_id}"):
                    completions = await self._generate(request)
                check_completions(completions, len(missing))
                await self._keep(env, draw, attempt, missing, request, completions)
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

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        if self.interruption is None:
            return await self.engine.generate(request)
        return await self.interruption.generate(self.engine, request)

    async def _keep(
        self,
        env: SingleTurnEnv,
        draw: Draw,
        attempt: int,
        members: Sequence[int],
        request: GenerateRequest,
        completions: Sequence[Completion],
    ) -> None:
        """Write down replies that may not live to be scored; where they were interrupted, wait for the end."""
        is_ending = self.interruption is not None and self.interruption.is_on
        is_slow = self.keeps_replies or inspect.iscoroutinefunction(env.score) or hasattr(env, "score_group")
        if self.journal is None or not (is_ending or is_slow):
            return
        assert request.sampling.seed is not None
        for index, (member, completion) in enumerate(zip(members, completions)):
            if not (num_tokens := len(completion.token_ids)):
                continue
            spans = completion.versions or (VersionSpan(draw.version, 0, num_tokens),)
            turn = Turn(
                agent=POLICY,
                index=0,
                attempt=attempt,
                seed=member_seed(request.sampling.seed, index),
                temperature=self.behavior_temperature(),
                num_shared=0,
                prompt_ids=request.prompt_ids,
                completion=msgspec.structs.replace(completion, versions=spans),
            )
            self.journal.turn_played(draw.group_id, member, turn)
        if self.interruption is not None and is_ending:
            await self.interruption.forever()

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
        kept = draw.kept.get(member)
        first = kept.turns[0].attempt if kept else 0
        for attempt in range(first, max(first, self.max_retries) + 1):
            budget = Budget(getattr(env, "limits", None) or Limits())
            seed = None
            if isinstance(env, SingleTurnEnv):  # what the group's one request would have drawn
                seed = member_seed(seed_of(self.seed, draw.name, draw.group_id, attempt), member)
            recorder = Recorder(self, draw, member, attempt, budget=budget, kept=kept, first_seed=seed)
            kept = None  # a second try begins anew
            try:
                with boundary(EnvError, f"environment {env.name}, rollout {draw.rollout_id(member)}"):
                    result = await self._result_of(env, draw.task, recorder)
                    if not recorder.num_turns:
                        raise EnvError(f"environment {env.name}: the episode ended before any reply")
                draw.notes[member] = result.note
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
        except LimitReached:
            if not recorder.num_turns:
                raise
            # The policy went on until a limit: an episode without success, not a failure of ours.
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
    for agent, reward in ({"": result.reward} | result.agent_rewards).items():
        if not np.isfinite(reward):
            whose = f"the reward of {agent}" if agent else "its reward"
            raise EnvError(f"rollout {draw.rollout_id(member)}: {whose} is {reward}, not a finite number")
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


def kind_of(cause: str) -> type[StrettoError]:
    """Who must act, of an error that was described: infrastructure, where it was no other's."""
    name = cause.partition(":")[0]
    if name in (LimitReached.__name__, OutOfContext.__name__):
        return EnvError
    return next((each for each in (EnvError, ConfigError, DataError) if each.__name__ == name), EngineError)
