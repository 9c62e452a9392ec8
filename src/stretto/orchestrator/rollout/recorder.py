"""Records what an episode samples: every token, logprob and version, by agent and branch.

A `Recorder` is the context that an environment gets (envs/base.py). A turn whose prompt extends the tokens so far
continues their branch. Any other turn opens a new branch, in which all earlier tokens are prompt tokens, so that no
token is trained twice. Each agent of an episode has a recorder; all share the episode's `Budget`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.base.aio import Deadline, Limit
from stretto.base.errors import EnvError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.data.messages import checked_messages
from stretto.envs.base import EpisodeInfo, EpisodeLimits, LimitReached, Message, OutOfContext, Reply, RolloutContext
from stretto.envs.models import ChatModel, model_of
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.orchestrator.rollout.continuation import build_turn, continuation_request, match_saved_turn
from stretto.orchestrator.rollout.play import (
    POLICY,
    Draw,
    Echo,
    PlaySettings,
    load_images,
    text_to_stop,
    with_system_prompt,
)
from stretto.orchestrator.tasks.order import seed_of
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.images import Image
from stretto.records.outcomes import Reason
from stretto.records.partial import PartialRollout, Turn, merge_completions
from stretto.records.rollout import Branch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float32, Int, Int32


@dataclass
class Budget:
    """Turns and tokens that an episode has used, all agents together.

    Open turns reserve the tokens granted to them, so that agents with open turns share what is left.
    """

    limits: EpisodeLimits
    now: Callable[[], float] = field(default_factory=lambda: asyncio.get_running_loop().time)  # seconds
    started_at: float = field(init=False)
    num_turns: int = 0  # completed
    num_tokens: int = 0
    engine_s: float = 0.0  # waited for replies
    deadline: Deadline | None = None  # of the group: turns end at it, from the second one on
    limit: Reason | None = None  # which limit has ended the episode, if one has
    owners: list[str] = field(default_factory=list)  # agent of each reply, in the order of the requests
    turns: list[Turn] = field(default_factory=list)  # whole ones, of all agents: with them the episode is played again
    _num_open_turns: int = 0
    _num_reserved_tokens: int = 0  # of open turns

    def __post_init__(self) -> None:
        self.started_at = self.now()

    @cached_property
    def _queue(self) -> asyncio.Lock:
        """First come, first served."""
        return asyncio.Lock()

    @cached_property
    def _turn_ended(self) -> asyncio.Event:
        return asyncio.Event()

    @property
    def age_s(self) -> float:
        return self.now() - self.started_at

    @property
    def is_in_turn(self) -> bool:
        """Is a reply under way?"""
        return self._num_open_turns > 0

    def reach(self, reason: Reason, text: str) -> LimitReached:
        """Note which limit was reached, and build the error to raise."""
        self.limit = self.limit or reason
        return LimitReached(text, reason=reason)

    def number_turn(self, agent: str) -> int:
        """The number of a turn that is requested now."""
        self.owners.append(agent)
        return len(self.owners) - 1

    def take_back(self, turn: int) -> None:
        """A turn got no reply: the next one has its number, unless another has begun meanwhile."""
        if turn == len(self.owners) - 1:
            self.owners.pop()

    async def begin_turn(self, num_requested: int) -> int:
        """Open a turn and return how many tokens it may have; `end_turn` must follow.

        If open turns may leave enough tokens, it waits for them, so that the grant does not depend on which agent is
        faster.

        Raises: LimitReached if the episode has no turn or token left.
        """
        granted = num_requested
        if self.limits.max_tokens is None:
            self._check_limits()
        else:
            async with self._queue:
                granted = await self._grant(num_requested, self.limits.max_tokens)
        self._num_open_turns += 1
        self._num_reserved_tokens += granted
        return granted

    def end_turn(self, granted: int, num_tokens: int | None) -> None:
        """Close a turn that used num_tokens; None if it failed."""
        self._num_open_turns -= 1
        self._num_reserved_tokens -= granted
        if num_tokens is not None:
            self.num_turns += 1
            self.num_tokens += num_tokens
        if self.limits.max_tokens is not None:  # else nobody waits for it
            self._turn_ended.set()

    async def _grant(self, num_requested: int, max_tokens: int) -> int:
        while True:
            self._check_limits()
            left = max_tokens - self.num_tokens
            if left < 1:
                raise self.reach(Reason.TOKEN_LIMIT, f"the episode has had its {max_tokens} tokens (max_tokens)")
            if num_requested <= left - self._num_reserved_tokens or not self._num_open_turns:
                return min(num_requested, left)
            self._turn_ended.clear()
            await self._turn_ended.wait()

    def _check_limits(self) -> None:
        limits = self.limits
        if limits.max_turns is not None and self.num_turns + self._num_open_turns >= limits.max_turns:
            raise self.reach(Reason.TURN_LIMIT, f"the episode has had its {limits.max_turns} turns (max_turns)")
        if limits.timeout_s is not None and self.age_s >= limits.timeout_s:
            raise self.reach(Reason.TIME_LIMIT, f"the episode has had its {limits.timeout_s:g} s (timeout_s)")


class Recorder(RolloutContext):
    """The context of one agent in one episode; envs/base.py documents its public methods."""

    def __init__(
        self,
        play: PlaySettings,
        draw: Draw,
        member: int,
        attempt: int,
        *,
        budget: Budget,
        name: str = POLICY,
        is_trained: bool = True,
        partial: PartialRollout | None = None,
        first_seed: int | None = None,
        lane: int = 0,
        life: int = 0,
    ) -> None:
        """partial: saved turns of an earlier incarnation, which answer the same requests again.

        life: how often this attempt was continued: an engine may still have a request of its last life.

        first_seed: of the first turn, if it is not derived from the rollout. lane: 0, or the number of this recorder
        among those for requests of the same agent that run side by side.
        """
        self.budget = budget
        self.name, self.is_trained = name, is_trained
        self._stream = f"{name}#{lane}" if lane else name  # the name of these turns, unique in the episode
        self._lanes: list[Recorder] = [self]  # for requests of this agent that run side by side
        self.is_cut_off = False  # whether the last reply was
        self._num_turns = 0
        self._play, self._draw, self._member, self._attempt, self._life = play, draw, member, attempt, life
        self._agents: dict[str, Recorder] = {name: self}
        self._branches: list[OpenBranch] = []
        self._history: list[Message] = []  # a copy: environments edit their messages in place
        self._has_system_prompt = False  # whether the first message of the history is the run's, not the environment's
        self._tools: list[dict[str, Any]] | None = None  # with which the history was rendered
        self._turn: tuple[np.ndarray, np.ndarray] | None = None  # prompt and completion of the last chat turn
        self._images: tuple[Image, ...] = ()  # of the history
        self._is_busy = False
        self._ce_weights: np.ndarray | None = None  # of the tokens of the next prompt
        self._chosen: list[tuple[int, np.ndarray]] | None = None  # branch index, mask of trained tokens
        self._partial, self._first_seed = partial, first_seed
        self._replay = deque(t for t in (partial.turns if partial else ()) if t.agent == self._stream)

    @property
    def sampling(self) -> SamplingSection:
        return self._play.sampling

    @property
    def _is_learned(self) -> bool:
        """Are this agent's replies trained by their log-probabilities?"""
        return self._play.is_learned and self.is_trained

    @property
    def episode(self) -> EpisodeInfo:
        return EpisodeInfo(self._draw.rollout_id(self._member), self._draw.group_id, self._member)

    @property
    def num_turns(self) -> int:
        """Turns of the episode, all agents together."""
        return self.budget.num_turns

    @property
    def is_truncated(self) -> bool:
        """Was the last reply of any agent cut off?"""
        return any(lane.is_cut_off for agent in self._agents.values() for lane in agent._lanes)

    def agent(self, name: str, *, is_trained: bool = True) -> Recorder:
        if name in self._agents:
            return self._agents[name]
        agent = self._build_sibling(name, is_trained=is_trained)
        agent._agents = self._agents
        self._agents[name] = agent
        return agent

    def conversation(self, number: int) -> Recorder:
        while len(self._lanes) <= number:
            self._lanes.append(self._build_sibling(self.name, is_trained=self.is_trained, lane=len(self._lanes)))
        return self._lanes[number]

    def _build_sibling(self, name: str, *, is_trained: bool, lane: int = 0) -> Recorder:
        """Build a recorder of the same episode, for another agent or another lane."""
        return Recorder(
            self._play,
            self._draw,
            self._member,
            self._attempt,
            budget=self.budget,
            name=name,
            is_trained=is_trained,
            partial=self._partial,
            lane=lane,
            life=self._life,
        )

    def model(self, name: str) -> ChatModel:
        names = self._play.model_names.get(self._draw.task.env, {})
        return model_of(self._play.models, names.get(name, name), EnvError)

    async def generate(
        self, prompt_ids: Int[np.ndarray, " prompt"], tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> Reply:
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        return await self._lane_for(prompt)._reply(prompt, (), tools, **sampling)

    def _lane_for(self, prompt_ids: Int32[np.ndarray, " prompt"]) -> Recorder:
        """The idle lane whose tokens a prompt extends, else the first idle one, else a new one."""
        idle = [lane for lane in self._lanes if not lane._is_busy]
        for lane in idle:
            if lane._branches and lane._branches[-1].is_extended_by(prompt_ids, lane._branches[-1].temperature):
                return lane
        if idle:
            return idle[0]
        lane = self._build_sibling(self.name, is_trained=self.is_trained, lane=len(self._lanes))
        self._lanes.append(lane)
        return lane

    async def _reply(
        self,
        prompt_ids: Int32[np.ndarray, " prompt"],
        images: tuple[Image, ...],
        tools: list[dict[str, Any]] | None,
        **sampling: Any,
    ) -> Reply:
        play, draw = self._play, self._draw
        if self._is_busy:
            raise EnvError("two turns of one agent at once: await a reply before you request the next")
        play.renderer.check_images(prompt_ids, images)
        stream = () if self._stream == POLICY else (self._stream,)
        name = "-".join((play.run_id, draw.rollout_id(self._member), *stream))
        temperature = play.behavior_temperature(sampling.get("temperature"))
        branch = self._extended_branch(prompt_ids, temperature, images)
        try:
            request = play.build_request(
                f"{name}-{self._attempt}{f'.{self._life}' if self._life else ''}-{self._num_turns}",
                prompt_ids,
                images,
                self._seed_of_turn(stream),
                draw.version,
                is_learned=self._is_learned,
                session_id=name,
                routed_experts_start=0 if branch is None else branch.num_known_routes,
                overrides=sampling,
            )
        except OutOfContext:
            self.budget.limit = self.budget.limit or Reason.CONTEXT_FULL
            raise
        self._is_busy = True
        turn = self.budget.number_turn(self.name)
        try:
            completion = await self._within_limits(request, temperature, branch)
        except BaseException:
            self.budget.take_back(turn)
            raise
        finally:
            self._is_busy = False
        weights, self._ce_weights = self._ce_weights, None
        if branch is None:
            branch = OpenBranch(temperature, self.name, is_trained=self.is_trained)
            self._branches.append(branch)
        is_greedy = play.is_unlearnable(sampling.get("temperature"))
        branch.add_turn(prompt_ids, completion, draw.version, weights, images=images, is_greedy=is_greedy, turn=turn)
        self._num_turns += 1
        self.is_cut_off = completion.finish_reason == "length"
        message = play.renderer.parse(completion.token_ids, prompt_ids, tools)
        return Reply(
            message=message,
            text=text_to_stop(message.get("content") or "", completion, request.sampling.min_tokens),
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            num_prompt_tokens=len(prompt_ids),
            logprobs=completion.logprobs,
            versions=completion.versions,
            support=completion.support,
            turn=turn,
        )

    async def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **sampling: Any) -> Reply:
        task = self._draw.task
        messages = self._checked(messages, f"environment {task.env}, task {task.task_id}: messages of ctx.chat")
        renderer, first_new, images = self._play.renderer, len(self._history), self._images
        await load_images(renderer, messages[first_new:])
        prompt_ids = self._extend(messages, tools)
        if prompt_ids is None:
            prompt_ids, first_new, images = renderer.render_prompt(messages, tools), 0, ()
        images = (*images, *renderer.images_of(messages[first_new:]))
        if self._play.echo is not None and self._turn is not None:
            self._ce_weights = self._echo_weights(self._play.echo, messages, first_new, tools)
        # A copy of the messages as rendered; only the new ones have to be copied.
        history = [*self._history[:first_new], *map(deep_copy, messages[first_new:])]
        tools_now = list(tools) if tools else None
        reply = await self._reply(prompt_ids, images, tools, **sampling)
        self._history = [*history, deep_copy(reply.message)]
        self._turn, self._tools, self._images = (prompt_ids, reply.token_ids), tools_now, images
        return reply

    def _checked(self, messages: Sequence[Message], where: str) -> list[Message]:
        """The messages behind a system prompt; those that are in the history as they stand were checked before."""
        messages, known = list(messages), self._history[int(self._has_system_prompt) :]
        num_same = len(known) if messages[: len(known)] == known else 0
        messages = [*known[:num_same], *checked_messages(messages[num_same:], where, first=num_same)]
        whole = with_system_prompt(messages, self._play.system_prompts.get(self._draw.task.env))
        self._has_system_prompt = len(whole) > len(messages)
        return whole

    def keep(self, sequences: Sequence[tuple[Int[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]]) -> None:
        self._chosen = [self._locate(tokens, is_trained) for tokens, is_trained in sequences]

    def _locate(
        self, tokens: Int[np.ndarray, " tokens"], is_trained: Bool[np.ndarray, " tokens"]
    ) -> tuple[int, Bool[np.ndarray, " branch"]]:
        """The index of the branch that begins with a sequence, and the mask of its trained tokens."""
        longest = 0
        for index, branch in enumerate(self._own_branches):
            size = min(len(branch.token_ids), len(tokens))
            differs = np.flatnonzero(branch.token_ids[:size] != tokens[:size])
            if not len(differs) and not is_trained[size:].any():
                mask = np.zeros(len(branch.token_ids), bool)
                mask[:size] = is_trained[:size]
                return index, mask
            longest = max(longest, int(differs[0]) if len(differs) else size)
        raise EnvError(
            f"rollout {self._draw.rollout_id(self._member)}: a sample of {len(tokens)} tokens differs from token "
            f"{longest} on from what the policy was given and sampled. Pass token ids on unchanged, never encode text "
            "again, and mask what the policy did not sample"
        )

    def close(self, *, is_scored: bool = False) -> tuple[Branch, ...]:
        """The branches of the episode, agent by agent, or those that `keep` has chosen. is_scored: they name turns."""
        is_masked = self._partial is not None and self._play.masks_older_versions
        trained_from = self._draw.version if is_masked else None
        if self._chosen is None:
            return tuple(
                branch.close(trained_from=trained_from, is_scored=is_scored)
                for agent in self._agents.values()
                for branch in agent._own_branches
            )
        branches = self._own_branches
        chosen = [
            (branches[index].close(trained_from=trained_from, is_scored=is_scored), mask)
            for index, mask in self._chosen
        ]
        return tuple(msgspec.structs.replace(b, is_sampled=b.is_sampled & mask) for b, mask in chosen)

    @property
    def _own_branches(self) -> list[OpenBranch]:
        """The branches of this agent."""
        return [branch for lane in self._lanes for branch in lane._branches]

    # -- one turn --

    def _seed_of_turn(self, stream: tuple[str, ...]) -> int:
        """The seed of the next turn."""
        if self._first_seed is not None and self._num_turns == 0:
            return self._first_seed
        turn = (self._attempt, self._member, self._num_turns, *stream)
        return seed_of(self._play.seed, self._draw.name, self._draw.group_id, *turn)

    async def _within_limits(
        self, request: GenerateRequest, temperature: float, branch: OpenBranch | None
    ) -> Completion:
        """The reply to a request, with at most the tokens that the episode has left; the first one has no deadline.

        branch: the tokens that the request's prompt extends.

        Raises: EngineError; LimitReached if the episode has no turn or token left, and at its deadline.
        """
        sampling, num_tokens = request.sampling, None
        assert sampling.max_tokens is not None, "build_request always sets max_tokens"
        limit = Limit(self.budget.deadline if self.num_turns else None)
        try:
            with limit:
                granted = await self.budget.begin_turn(sampling.max_tokens)
                if granted < sampling.max_tokens:
                    sampling = msgspec.structs.replace(sampling, max_tokens=granted)
                    request = msgspec.structs.replace(request, sampling=sampling)
                try:
                    completion = await self._replay_or_request(request, temperature, branch)
                    num_tokens = len(completion.token_ids)
                    return completion
                finally:
                    self.budget.end_turn(granted, num_tokens)
        except TimeoutError:
            if not limit.is_over:
                raise
            raise self.budget.reach(Reason.DEADLINE, "the episode has had its time (rollout_timeout_s)") from None

    async def _replay_or_request(
        self, request: GenerateRequest, temperature: float, branch: OpenBranch | None
    ) -> Completion:
        """The reply to a request, from a saved turn, from the engine, or from both.

        Raises: EngineError.
        """
        play, draw = self._play, self._draw
        begun = None
        if self._replay:
            known = self._branches[-1] if self._branches else OpenBranch(temperature)
            begun = match_saved_turn(
                self._replay, request, temperature, known.token_ids, known.images, draw.rollout_id(self._member)
            )
        if begun is not None and begun.is_done:
            if begun.completion.routed_experts is None:
                self.budget.turns.append(begun)
            return begun.completion
        rest = request if begun is None else continuation_request(request, begun)
        requested_at = self.budget.now()
        [completion] = await play.request_completions(rest, draw.version, is_learned=self._is_learned)
        self.budget.engine_s += self.budget.now() - requested_at
        if begun is not None:
            completion = merge_completions(begun.completion, completion, request)
        turn = build_turn(
            request,
            completion,
            agent=self._stream,
            index=self._num_turns,
            attempt=self._attempt,
            temperature=temperature,
            branch=branch,
        )
        if play.interruption is not None:
            await play.interruption.save_turns(draw.group_id, {self._member: turn})
        play.check_reply(completion)
        if completion.routed_experts is None:  # they are large, and the branch has them already
            self.budget.turns.append(turn)
        return completion

    def _extend(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> Int32[np.ndarray, " prompt"] | None:
        """The prompt as an extension of the tokens so far.

        None if history or tools changed, or if the renderer cannot extend the history.
        """
        known = len(self._history)
        if self._turn is None or len(messages) <= known or messages[:known] != self._history:
            return None
        if (tools or None) != self._tools:
            return None
        return self._play.renderer.extend(*self._turn, self._history, messages[known:], tools)

    def _echo_weights(
        self, echo: Echo, messages: list[Message], first_new: int, tools: list[dict[str, Any]] | None
    ) -> Float32[np.ndarray, " prompt"]:
        """Weights of a prompt's tokens: those of the messages since the last reply are not 0.

        first_new: index of the first message that extends the tokens so far; 0 if all are rendered again.
        """
        after = (*self._turn, self._history) if first_new and self._turn is not None else None
        owners = self._play.renderer.text_owners(messages[first_new:], tools, after=after)
        weights = np.zeros(len(owners), np.float32)
        last_reply = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        for index in range(max(last_reply + 1, first_new), len(messages)):
            if weight := echo.weight_of(messages[index]):
                weights[owners == index - first_new] = weight
        return weights

    def _extended_branch(
        self, prompt_ids: Int32[np.ndarray, " prompt"], temperature: float, images: tuple[Image, ...]
    ) -> OpenBranch | None:
        """The newest branch if a prompt extends it; None otherwise."""
        newest = self._branches[-1] if self._branches else None
        is_extended = newest is not None and newest.is_extended_by(prompt_ids, temperature, images)
        return newest if is_extended else None


def deep_copy(value: Any) -> Any:
    """Copy nested dictionaries, lists and tuples; other values are shared.

    Called for every message of every turn; `copy.deepcopy` takes three times as long.
    """
    if isinstance(value, dict):
        return {key: each if isinstance(each, str) else deep_copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [deep_copy(each) for each in value]
    if isinstance(value, tuple):
        return tuple(deep_copy(each) for each in value)
    return value
