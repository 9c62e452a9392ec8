"""Plays one group: render, generate, score. Failures become data in the resulting Group.

All replies of a single-turn group are one request with one rendered prompt. Any other environment plays its
members concurrently, each with a `Recorder` as its context, which records every token, logprob and version. A
member that fails is tried again with a new request id and seed, at most max_retries times and before the group's
timeout; then it is FAILED with its cause.

What a member samples depends on (seed, group_id, member, attempt) only.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.base.errors import ConfigError, DataError, EngineError, EnvError, StrettoError, boundary
from stretto.base.foreign import call_async
from stretto.data.values import with_whole_text
from stretto.envs.base import (
    Environment,
    EpisodeLimits,
    LimitReached,
    OutOfContext,
    RolloutResult,
    Score,
    SingleTurnEnv,
    play_episode,
    prompt_of,
    score_replies,
)
from stretto.envs.result import checked_group_rewards
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.orchestrator.rollout.continuation import build_turn
from stretto.orchestrator.rollout.play import POLICY, Draw, PlaySettings, load_images, with_system_prompt
from stretto.orchestrator.rollout.recorder import Budget, Recorder
from stretto.orchestrator.tasks.order import seed_of
from stretto.records.generate import Completion, GenerateRequest, member_seed
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task


@dataclass
class MemberResults:
    """Results so far of the members of a draw."""

    draw: Draw
    failures: list[Exception] | None = None
    """Gets the errors of failed attempts, if it is there."""
    started_at: float = field(default_factory=time.time)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)  # of the latest failed attempt, by member

    @property
    def missing(self) -> list[int]:
        """Members without a rollout."""
        return [member for member in range(self.draw.num_members) if member not in self.rollouts]

    def add_rollout(
        self,
        member: int,
        branches: tuple[Branch, ...],
        result: RolloutResult,
        *,
        rollout_id: str,
        is_truncated: bool,
        num_turns: int,
        env_s: float,
    ) -> None:
        """Store the rollout of a member; its result has been checked."""
        self.rollouts[member] = Rollout(
            rollout_id=rollout_id,
            group_id=self.draw.group_id,
            member=member,
            task=self.draw.task,
            status=RolloutStatus.TRUNCATED if is_truncated else RolloutStatus.FINISHED,
            branches=branches,
            reward=result.reward,
            agent_rewards=result.agent_rewards,
            metrics=result.metrics,
            num_turns=num_turns,
            started_at=self.started_at,
            finished_at=time.time(),
            env_s=round(max(env_s, 0.0), 3),  # agents may wait for replies side by side
        )

    def add_failure(self, members: Iterable[int], error: Exception, where: str = "") -> None:
        """Store why an attempt of these members failed; `where` explains an error that is not a StrettoError."""
        if not isinstance(error, StrettoError):
            error = EnvError(f"{where}: {type(error).__name__}: {error}")
        self.causes.update(dict.fromkeys(members, describe(error)))
        if self.failures is not None:
            self.failures.append(error)

    def build_group(self) -> Group:
        """Build the group; members without a rollout have failed."""
        rollouts = tuple(
            self.rollouts.get(member)
            or failed_rollout(self.draw, member, self.causes.get(member, "unknown"), self.started_at)
            for member in range(self.draw.num_members)
        )
        return Group(group_id=self.draw.group_id, task=self.draw.task, rollouts=rollouts)


@dataclass(frozen=True)
class Answer:
    """A reply of a group of one turn: what the environment scores, and what is trained."""

    member: int
    rollout_id: str
    text: str
    branch: Branch
    is_cut_off: bool


@dataclass(frozen=True)
class Player(PlaySettings):
    """Plays groups: the settings of their turns, with timeout and number of retries."""

    timeout_s: float | None = None
    max_retries: int = 2
    saves_single_turns: bool = False  # because a teacher scores them before the group is done
    failures: list[Exception] | None = None  # gets the errors of failed attempts, for a look at their types

    async def play(self, env: Environment, draw: Draw) -> Group:
        """Play all members of a draw; errors of environments and engines become failed members."""
        members = MemberResults(draw, self.failures)
        try:
            async with asyncio.timeout(self.timeout_s):
                if isinstance(env, SingleTurnEnv) and not draw.partials:
                    await self._play_single_turn(env, members)
                else:
                    plays = (self._play_member(env, members, member) for member in members.missing)
                    await asyncio.gather(*plays)
        except TimeoutError as error:
            if self.failures is not None:
                self.failures.append(error)
            for member in members.missing:
                before = members.causes.get(member)
                earlier = f" (before: {before})" if before else ""
                members.causes[member] = f"EngineError: not done after {self.timeout_s:g} s{earlier}"
        group = members.build_group()
        score = getattr(env, "score_group", None)
        return group if score is None else await self._score_group(env, score, draw, group)

    async def _score_group(
        self, env: Environment, score: Callable[[Group, list[Any]], Any], draw: Draw, group: Group
    ) -> Group:
        """The group with the rewards that the environment gives all members at once."""
        members = [m for m, r in enumerate(group.rollouts) if r.status is not RolloutStatus.FAILED]
        if not members:
            return group
        scored_group = msgspec.structs.replace(group, rollouts=tuple(group.rollouts[m] for m in members))
        rollouts = list(group.rollouts)
        try:
            where = f"environment {env.name}, group {group.group_id}, score_group"
            notes = [draw.notes.get(m) for m in members]
            rewards = await call_async(lambda: score(scored_group, notes), where)
            if rewards is None:
                return group
            for member, (reward, by_branch) in zip(members, checked_group_rewards(rewards, len(members), where)):
                branches = with_rewards(rollouts[member].branches, by_branch, where)
                rollouts[member] = msgspec.structs.replace(rollouts[member], reward=reward, branches=branches)
        except StrettoError as error:
            if self.failures is not None:
                self.failures.append(error)
            for member in members:
                rollouts[member] = msgspec.structs.replace(
                    rollouts[member], status=RolloutStatus.FAILED, error=describe(error)
                )
        return msgspec.structs.replace(group, rollouts=tuple(rollouts))

    # -- one turn: the group is one request --

    async def _play_single_turn(self, env: SingleTurnEnv, members: MemberResults) -> None:
        draw = members.draw
        for attempt in range(self.max_retries + 1):
            missing = members.missing
            try:
                where = f"environment {env.name}, task {draw.task.task_id}, prompt"
                # Another seed per attempt: a retry must not sample the same replies again.
                seed = seed_of(self.seed, draw.name, draw.group_id, attempt)
                messages = await prompt_of(env, draw.task, where)
                with boundary(EnvError, where):
                    messages = with_system_prompt(messages, self.system_prompts.get(env.name))
                    await load_images(self.renderer, messages)
                    prompt_ids, images = self.renderer.render_prompt(messages), self.renderer.images_of(messages)
                request = self.build_request(
                    f"{self.run_id}-{draw.name}{draw.group_id}-{attempt}",
                    prompt_ids,
                    images,
                    seed,
                    draw.version,
                    is_learned=self.is_learned,
                    num_completions=len(missing),
                )
                completions = await self.request_completions(request, draw.version, is_learned=self.is_learned)
                replies = dict(zip(missing, completions))
                await self._save_replies(env, draw, attempt, request, replies)
            except StrettoError as error:
                members.add_failure(missing, error)
                continue
            await self._score_replies(env, members, request, replies)
            if len(members.rollouts) == draw.num_members:
                return

    async def _save_replies(
        self, env: SingleTurnEnv, draw: Draw, attempt: int, request: GenerateRequest, replies: dict[int, Completion]
    ) -> None:
        """Save replies that may be lost before they are scored."""
        is_slow = self.saves_single_turns or inspect.iscoroutinefunction(env.score) or hasattr(env, "score_group")
        if self.interruption is None or not (self.interruption.has_begun or is_slow):
            return
        temperature = self.behavior_temperature()
        turns = {
            member: build_turn(
                request, completion, agent=POLICY, index=0, attempt=attempt, temperature=temperature, number=number
            )
            for number, (member, completion) in enumerate(replies.items())
        }
        await self.interruption.save_turns(draw.group_id, turns)

    async def _score_replies(
        self, env: SingleTurnEnv, members: MemberResults, request: GenerateRequest, replies: dict[int, Completion]
    ) -> None:
        """Make rollouts of the replies: read all, make their branches, then have the environment score them."""
        draw, texts = members.draw, {}
        ids = {member: draw.rollout_id(member) for member in replies}
        for member, completion in replies.items():
            try:
                texts[member] = self.read_reply(request, completion)
            except Exception as error:  # the boundary of a rollout: it fails alone
                members.add_failure([member], error, f"environment {env.name}, rollout {ids[member]}, score")
        temperature, answers = self.behavior_temperature(), []
        for member, text in texts.items():
            branch = OpenBranch(temperature)
            branch.add_turn(request.prompt_ids, replies[member], draw.version, images=request.images)
            is_cut_off = replies[member].finish_reason == "length"
            answers.append(Answer(member, ids[member], text, branch.close(), is_cut_off))
        if inspect.iscoroutinefunction(env.score):
            await asyncio.gather(*(self._score(env, members, [answer]) for answer in answers))  # all concurrently
        else:
            await self._score(env, members, answers)

    async def _score(self, env: SingleTurnEnv, members: MemberResults, answers: Sequence[Answer]) -> None:
        """Have the environment score answers, one after the other; if time runs out, those so far count."""
        scores: dict[str, Score] = {}
        try:
            await score_replies(env, members.draw.task, {each.rollout_id: each.text for each in answers}, scores)
        finally:
            for answer, score in zip(answers, scores.values()):
                if isinstance(score.result, StrettoError):
                    members.add_failure([answer.member], score.result)
                    continue
                members.add_rollout(
                    answer.member,
                    (answer.branch,),
                    score.result,
                    rollout_id=answer.rollout_id,
                    is_truncated=answer.is_cut_off or score.result.is_truncated,
                    num_turns=1,
                    env_s=score.time_s,
                )

    # -- any number of turns: each member is played by itself --

    async def _play_member(self, env: Environment, members: MemberResults, member: int) -> None:
        draw = members.draw
        partial = draw.partials.get(member)
        first = partial.turns[0].attempt if partial else 0
        for attempt in range(first, max(first, self.max_retries) + 1):
            budget = Budget(getattr(env, "limits", None) or EpisodeLimits())
            seed = None
            if isinstance(env, SingleTurnEnv):  # the seed of this member in the group's one request
                seed = member_seed(seed_of(self.seed, draw.name, draw.group_id, attempt), member)
            recorder = Recorder(self, draw, member, attempt, budget=budget, partial=partial, first_seed=seed)
            partial = None  # a retry starts from the beginning
            try:
                where = f"environment {env.name}, rollout {draw.rollout_id(member)}"
                result = await self._play_episode(env, draw.task, recorder, where)
                if not recorder.num_turns:
                    raise EnvError(f"environment {env.name}: the episode ended before any reply")
                with boundary(EnvError, where):
                    branches = with_rewards(recorder.close(), result.branch_rewards, where)
                    check_learnable(branches)
                draw.notes[member] = result.note
                members.add_rollout(
                    member,
                    branches,
                    result,
                    rollout_id=draw.rollout_id(member),
                    is_truncated=recorder.is_truncated or result.is_truncated,
                    num_turns=recorder.num_turns,
                    env_s=budget.age_s - budget.engine_s,
                )
                return
            except StrettoError as error:
                members.add_failure([member], error)

    async def _play_episode(self, env: Environment, task: Task, recorder: Recorder, where: str) -> RolloutResult:
        try:
            return await play_episode(env, task, recorder, where)
        except LimitReached:
            if not recorder.num_turns:
                raise
            # The policy reached a limit: an unsuccessful episode, not a failed one.
            return RolloutResult(reward=0.0, is_truncated=True)


def with_rewards(branches: tuple[Branch, ...], rewards: Sequence[float], where: str) -> tuple[Branch, ...]:
    """The branches with these rewards, one per branch; unchanged if there are none.

    Raises: EnvError if there is not one for each.
    """
    if not rewards:
        return branches
    if len(rewards) != len(branches):
        raise EnvError(
            f"{where}: {len(rewards)} branch_rewards for {len(branches)} branches; give one per sequence of `keep`"
        )
    return tuple(msgspec.structs.replace(b, reward=reward) for b, reward in zip(branches, rewards))


def check_learnable(branches: Sequence[Branch]) -> None:
    """Check that a trained branch has a reply that was not sampled greedily.

    Raises: EnvError if all of them are greedy.
    """
    trained = [branch for branch in branches if branch.is_trained]
    masks = [b.is_sampled if b.is_greedy is None else b.is_sampled & ~b.is_greedy for b in trained]
    if any(branch.is_greedy is not None for branch in trained) and not any(mask.any() for mask in masks):
        raise EnvError(
            "all its replies are greedy (temperature = 0): they are no samples of the policy, so nothing can be "
            "trained; sample some of them, or let an agent with is_trained = false reply"
        )


def failed_group(group: Group, cause: str) -> Group:
    """The group with all members failed for one cause; their tokens stay in the ledger."""
    rollouts = tuple(
        msgspec.structs.replace(r, status=RolloutStatus.FAILED, error=r.error or cause) for r in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=rollouts, advantages=(0.0,) * len(rollouts))


def failed_rollout(draw: Draw, member: int, cause: str, started_at: float) -> Rollout:
    """A failed rollout, with its cause instead of a reward."""
    return Rollout(
        rollout_id=draw.rollout_id(member),
        group_id=draw.group_id,
        member=member,
        task=draw.task,
        status=RolloutStatus.FAILED,
        started_at=started_at,
        finished_at=time.time(),
        error=with_whole_text(cause),
    )


def describe(error: StrettoError) -> str:
    """An error as the ledger and a run's last message show it."""
    return with_whole_text(f"{type(error).__name__}: {error}")


def error_type_of(cause: str) -> type[StrettoError]:
    """The class of an error that `describe` wrote; EngineError if it is none of the known ones."""
    name = cause.partition(":")[0]
    if name in (LimitReached.__name__, OutOfContext.__name__):
        return EnvError
    return next((each for each in (EnvError, ConfigError, DataError) if each.__name__ == name), EngineError)
