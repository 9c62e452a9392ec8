"""Plays one group: render, generate, score. Failures become data in the resulting Group.

All replies of a single-turn group are one request with one rendered prompt. Any other environment plays its
members concurrently, each with a `Recorder` as its context, which records every token, logprob and version. A
member that fails is tried again with a new request id and seed, at most max_retries times and before the group's
timeout; then it is FAILED with its cause. One that has lost its worker, its sandbox or an engine's reply after some
turns is continued first: its environment plays it again, with the turns that it had.

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

from stretto.base.aio import Deadline
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
from stretto.orchestrator.rollout.play import POLICY, Draw, PlaySettings, render_messages
from stretto.orchestrator.rollout.recorder import Budget, Recorder
from stretto.orchestrator.tasks.order import seed_of
from stretto.records.generate import Completion, GenerateRequest, member_seed
from stretto.records.outcomes import OUTCOMES, Cause, Reason, TimeoutIs, Treatment, reason_of, treatment_of
from stretto.records.partial import PartialRollout
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, ScoredTurn, Task, TurnSpan

LOSSES = (Reason.WORKER_LOST, Reason.SANDBOX_LOST, Reason.ENGINE_ERROR)
"""Ends that are no doing of the episode's own: it is continued, not begun again."""
TURN_COLUMNS = ("turn_rewards", "state_values", "states")
SCORING_SHARE = 0.1
"""After rollout_timeout_s, this share of it is left to score what is there."""


@dataclass
class MemberResults:
    """Results so far of the members of a draw."""

    draw: Draw
    failures: list[Exception] | None = None
    """Gets the errors of failed attempts, if it is there."""
    started_at: float = field(default_factory=time.time)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)  # of the latest failed attempt, by member
    reasons: dict[int, Reason] = field(default_factory=dict)  # of the same
    num_lost_tokens: dict[int, int] = field(default_factory=dict)  # sampled in the same
    budgets: dict[int, Budget] = field(default_factory=dict)  # of the latest attempt, by member
    given_up: set[int] = field(default_factory=set)  # members that are not tried again
    has_replies: bool = False  # the replies of a group of one turn are there

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
        reason: Reason | None,
        num_turns: int,
        env_s: float,
        turns: tuple[ScoredTurn, ...] = (),
    ) -> None:
        """Store the rollout of a member; its result has been checked."""
        self.rollouts[member] = Rollout(
            rollout_id=rollout_id,
            group_id=self.draw.group_id,
            member=member,
            task=self.draw.task,
            status=RolloutStatus.FINISHED if reason is None else RolloutStatus.TRUNCATED,
            reason=reason,
            branches=branches,
            reward=result.reward,
            agent_rewards=result.agent_rewards,
            metrics=result.metrics,
            num_turns=num_turns,
            turns=turns,
            started_at=self.started_at,
            finished_at=time.time(),
            env_s=round(max(env_s, 0.0), 3),  # agents may wait for replies side by side
        )

    def add_failure(self, members: Iterable[int], error: Exception, where: str = "") -> None:
        """Store why an attempt of these members failed; `where` explains an error that is not a StrettoError."""
        if not isinstance(error, StrettoError):
            error = EnvError(f"{where}: {type(error).__name__}: {error}")
        for member in members:
            self.causes[member] = describe(error)
            self.reasons[member] = Reason.NO_REPLY if isinstance(error, LimitReached) else reason_of(error)
            if member in self.budgets:
                self.num_lost_tokens[member] = self.budgets[member].num_tokens
        if self.failures is not None:
            self.failures.append(error)

    def add_late(self, timeout_s: float) -> None:
        """Store that the members without a rollout were not done in time: who held them is their reason."""
        for member in set(self.missing) - self.given_up:
            before, budget = self.causes.get(member), self.budgets.get(member)
            earlier = f" (before: {before})" if before else ""
            self.causes[member] = f"EngineError: not done after {timeout_s:g} s{earlier}"
            is_held = self.has_replies if budget is None else budget.num_turns and not budget.is_in_turn
            self.reasons[member] = Reason.ENV_HUNG if is_held else Reason.ENGINE_LATE
            if budget is not None:
                self.num_lost_tokens[member] = budget.num_tokens

    def build_group(self) -> Group:
        """Build the group; members without a rollout have failed."""
        rollouts = tuple(self.rollouts.get(member) or self._failed(member) for member in range(self.draw.num_members))
        return Group(group_id=self.draw.group_id, task=self.draw.task, rollouts=rollouts)

    def _failed(self, member: int) -> Rollout:
        rollout = failed_rollout(self.draw, member, self.causes.get(member, "unknown"), self.started_at)
        num_lost = self.num_lost_tokens.get(member, 0)
        return msgspec.structs.replace(rollout, reason=self.reasons.get(member), num_lost_tokens=num_lost)


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
    timeout_is: TimeoutIs = "score"  # what a rollout is worth whose time is over
    saves_single_turns: bool = False  # because a teacher scores them before the group is done
    failures: list[Exception] | None = None  # gets the errors of failed attempts, for a look at their types

    async def play(self, env: Environment, draw: Draw) -> Group:
        """Play all members of a draw; errors of environments and engines become failed members."""
        members = MemberResults(draw, self.failures)
        try:
            if isinstance(env, SingleTurnEnv) and not draw.partials:
                async with asyncio.timeout(self.timeout_s):
                    await self._play_single_turn(env, members)
            else:
                await self._play_members(env, members)
        except TimeoutError as error:
            if self.failures is not None:
                self.failures.append(error)
            assert self.timeout_s is not None, "there was a deadline"
            members.add_late(self.timeout_s)
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
            for member, given in zip(members, checked_group_rewards(rewards, len(members), where)):
                reward, by_branch = given.reward, given.branch_rewards
                reason = rollouts[member].reason
                if reason is not None and treatment_of(reason, self.timeout_is) is Treatment.ZERO:
                    reward, by_branch = 0.0, (0.0,) * len(by_branch)
                branches = with_rewards(rollouts[member].branches, by_branch, where)
                metrics = rollouts[member].metrics | given.metrics
                rollouts[member] = msgspec.structs.replace(
                    rollouts[member], reward=reward, branches=branches, metrics=metrics
                )
        except StrettoError as error:
            if self.failures is not None:
                self.failures.append(error)
            for member in members:
                rollouts[member] = msgspec.structs.replace(
                    rollouts[member], status=RolloutStatus.FAILED, error=describe(error), reason=reason_of(error)
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
                prompt = self.system_prompts.get(env.name)
                prompt_ids, images = await render_messages(self.renderer, messages, prompt, where)
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
            members.has_replies = True
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
                try:
                    self._add_answer(env, members, answer, score)
                except StrettoError as error:
                    members.add_failure([answer.member], error)
                    members.num_lost_tokens[answer.member] = int(answer.branch.is_sampled.sum())

    def _add_answer(self, env: SingleTurnEnv, members: MemberResults, answer: Answer, score: Score) -> None:
        """Store the rollout of a reply.

        Raises: the error of its score; EnvError if its time was over and that fails it, or for turns it does not have.
        """
        if isinstance(score.result, StrettoError):
            raise score.result
        result, reason = score.result, reason_after(score.result, None, is_cut_off=answer.is_cut_off)
        treatment = Treatment.SCORE if reason is None else treatment_of(reason, self.timeout_is)
        if treatment is Treatment.FAIL:
            raise time_is_over(reason)
        branch = answer.branch
        turns: tuple[ScoredTurn, ...] = ()
        if has_turns(result):
            turns = scored_turns(result, (POLICY,), f"environment {env.name}, rollout {answer.rollout_id}, score")
            length = len(branch.token_ids)
            reply = TurnSpan(0, length - int(branch.is_sampled.sum()), length)
            branch = msgspec.structs.replace(branch, turns=(reply,))
        members.add_rollout(
            answer.member,
            (branch,),
            without_reward(result) if treatment is Treatment.ZERO else result,
            rollout_id=answer.rollout_id,
            reason=reason,
            num_turns=1,
            turns=turns,
            env_s=score.time_s,
        )

    # -- any number of turns: each member is played by itself --

    async def _play_members(self, env: Environment, members: MemberResults) -> None:
        """Play all members side by side. Raises: TimeoutError."""
        timeout_s = self.timeout_s
        deadline = None if timeout_s is None else Deadline(asyncio.get_running_loop().time() + timeout_s)
        try:
            # Turns end at the deadline; the rest of the time is the environment's, to score what is there.
            async with asyncio.timeout(None if timeout_s is None else timeout_s * (1 + SCORING_SHARE)):
                await asyncio.gather(*(self._play_member(env, members, each, deadline) for each in members.missing))
        finally:
            if deadline is not None:
                deadline.close()

    async def _play_member(
        self, env: Environment, members: MemberResults, member: int, deadline: Deadline | None
    ) -> None:
        draw = members.draw
        partial = draw.partials.get(member)
        attempt = partial.turns[0].attempt if partial else 0
        last, num_continued, life = max(attempt, self.max_retries), 0, 0
        while attempt <= last:
            budget = Budget(getattr(env, "limits", None) or EpisodeLimits(), deadline=deadline)
            members.budgets[member] = budget
            seed = None
            if isinstance(env, SingleTurnEnv):  # the seed of this member in the group's one request
                seed = member_seed(seed_of(self.seed, draw.name, draw.group_id, attempt), member)
            recorder = Recorder(self, draw, member, attempt, budget=budget, partial=partial, first_seed=seed, life=life)
            try:
                where = f"environment {env.name}, rollout {draw.rollout_id(member)}"
                result = await self._play_episode(env, draw.task, recorder, where)
                if not recorder.num_turns:
                    raise EnvError(f"environment {env.name}: the episode ended before any reply")
                reason = reason_after(result, budget.limit, is_cut_off=recorder.is_truncated)
                treatment = Treatment.SCORE if reason is None else treatment_of(reason, self.timeout_is)
                if treatment is Treatment.FAIL:
                    raise time_is_over(reason)
                if treatment is Treatment.ZERO:
                    result = without_reward(result)
                with boundary(EnvError, where):
                    turns = scored_turns(result, budget.owners, where) if has_turns(result) else ()
                    branches = with_rewards(recorder.close(is_scored=bool(turns)), result.branch_rewards, where)
                    check_learnable(branches)
                draw.notes[member] = result.note
                members.add_rollout(
                    member,
                    branches,
                    result,
                    rollout_id=draw.rollout_id(member),
                    reason=reason,
                    num_turns=recorder.num_turns,
                    turns=turns,
                    env_s=budget.age_s - budget.engine_s,
                )
                return
            except StrettoError as error:
                members.add_failure([member], error)
                reason = members.reasons[member]
                if not OUTCOMES[reason].is_retried:
                    break
                if reason in LOSSES and self.max_retries and len(budget.turns) > num_continued:
                    # It goes on from its last whole turn. If it is lost there again, it starts from the beginning.
                    partial, num_continued = PartialRollout(turns=tuple(budget.turns)), len(budget.turns)
                    life += 1
                    continue
                partial, num_continued, attempt = None, 0, attempt + 1
        members.given_up.add(member)

    async def _play_episode(self, env: Environment, task: Task, recorder: Recorder, where: str) -> RolloutResult:
        try:
            return await play_episode(env, task, recorder, where)
        except LimitReached:
            if not recorder.num_turns:
                raise
            # The policy reached a limit: an unsuccessful episode, not a failed one.
            return RolloutResult(reward=0.0, is_truncated=True)


def reason_after(result: RolloutResult, limit: Reason | None, *, is_cut_off: bool) -> Reason | None:
    """Why a rollout with a result ended; None: by itself. `limit`: the one that its episode has reached.

    An environment may catch a limit and end the episode well; running out of time is a reason all the same.
    """
    if result.is_timeout:
        return Reason.TIME_LIMIT
    if limit is not None and (result.is_truncated or OUTCOMES[limit].cause is Cause.TIMEOUT):
        return limit
    if is_cut_off:
        return Reason.REPLY_CUT
    return Reason.ENV_LIMIT if result.is_truncated else None


def without_reward(result: RolloutResult) -> RolloutResult:
    """The result with all rewards 0."""
    return msgspec.structs.replace(
        result,
        reward=0.0,
        agent_rewards=dict.fromkeys(result.agent_rewards, 0.0),
        branch_rewards=(0.0,) * len(result.branch_rewards),
        turn_rewards=(0.0,) * len(result.turn_rewards),
        parts=tuple(msgspec.structs.replace(part, result=without_reward(part.result)) for part in result.parts),
    )


def has_turns(result: RolloutResult) -> bool:
    """Does the result say something of the single turns?"""
    is_given = bool(result.turn_rewards or result.state_values or result.states)
    return is_given or any(has_turns(part.result) for part in result.parts)


def scored_turns(result: RolloutResult, agents: Sequence[str], where: str) -> tuple[ScoredTurn, ...]:
    """What the result says of each turn; agents: those of all turns.

    Raises: EnvError if it has not one entry for each.
    """
    columns: list[list[Any]] = [[None] * len(agents) for _ in TURN_COLUMNS]
    _fill_turns(columns, result, range(len(agents)), where)
    return tuple(
        ScoredTurn(agent=agent, reward=reward, value=value, state=state)
        for agent, reward, value, state in zip(agents, *columns)
    )


def _fill_turns(columns: list[list[Any]], result: RolloutResult, turns: Sequence[int], where: str) -> None:
    """Write what a result says of its turns, whose numbers are given, then what its parts say of theirs."""
    for column, name in zip(columns, TURN_COLUMNS):
        given = getattr(result, name)
        if given and len(given) != len(turns):
            raise EnvError(
                f"{where}: {name} has {len(given)} entries for {len(turns)} turns; give one per reply, None where a "
                "turn has no reward or no state"
            )
        for turn, value in zip(turns, given):
            column[turn] = value
    for part in result.parts:
        _fill_turns(columns, part.result, part.turns, f"{where}, part {part.name!r}")


def time_is_over(reason: Reason | None) -> EnvError:
    """The error of a rollout that fails because its time is over."""
    assert reason is not None, "only rollouts with a reason fail"
    return EnvError(f'{OUTCOMES[reason].meaning} (timeout_is = "fail")', reason=reason)


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
        r
        if r.status is RolloutStatus.FAILED
        else msgspec.structs.replace(r, status=RolloutStatus.FAILED, error=r.error or cause, reason=Reason.CREDIT_ERROR)
        for r in group.rollouts
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
