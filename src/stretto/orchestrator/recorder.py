"""Writes down what an episode samples: every token, logprob and version, by agent and branch.

A `Recorder` is the context an environment is given (envs/base.py). A turn whose prompt extends the tokens so far
continues their branch; any other opens a new one, in which all earlier tokens are given ones, so that no token is
trained twice. Agents of one episode have a recorder each and share its limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.base.errors import DataError, EngineError, EnvError, boundary
from stretto.envs.base import Episode, LimitReached, Limits, Message, Reply, RolloutContext
from stretto.orchestrator.branches import OpenBranch, join_routes
from stretto.orchestrator.tasks import seed_of
from stretto.records.generate import Completion, GenerateRequest, VersionSpan
from stretto.records.partial import ABORTED, Kept, Turn, joined
from stretto.records.rollout import Branch

if TYPE_CHECKING:
    from stretto.config.orchestrator import SamplingSection
    from stretto.orchestrator.echo import Echo
    from stretto.orchestrator.interruption import Journal
    from stretto.orchestrator.rollout import Draw, Player

logger = logging.getLogger(__name__)

POLICY = "policy"
"""The agent of an episode that has one."""


@dataclass
class Budget:
    """What an episode has used of its limits, all agents together.

    Turns under way count, with all the tokens they may have: agents who speak at the same time share what is left.
    """

    limits: Limits
    started_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    num_turns: int = 0  # that were answered
    num_tokens: int = 0
    _num_speaking: int = 0
    _num_promised: int = 0  # tokens of those who speak
    _queue: asyncio.Lock = field(default_factory=asyncio.Lock)  # first come, first served
    _has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # a turn

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self.started_at

    async def begin_turn(self, wanted: int) -> int:
        """Tokens that the next reply may have: those wanted, or what is left. Every begin has an `end_turn`.

        While others speak who may leave enough, it waits for them: what a reply may have does not depend on who
        is faster.

        Raises: LimitReached when there is no next turn.
        """
        granted = wanted
        if self.limits.max_tokens is None:
            self._check_turns()
        else:
            async with self._queue:
                granted = await self._share(wanted, self.limits.max_tokens)
        self._num_speaking += 1
        self._num_promised += granted
        return granted

    def end_turn(self, granted: int, num_tokens: int | None) -> None:
        """A turn had so many tokens; None: it was not answered."""
        self._num_speaking -= 1
        self._num_promised -= granted
        if num_tokens is not None:
            self.num_turns += 1
            self.num_tokens += num_tokens
        self._has_ended.set()

    async def _share(self, wanted: int, max_tokens: int) -> int:
        while True:
            self._check_turns()
            left = max_tokens - self.num_tokens
            if left < 1:
                raise LimitReached(f"the episode has had its {max_tokens} tokens (max_tokens)")
            if wanted <= left - self._num_promised or not self._num_speaking:
                return min(wanted, left)
            self._has_ended.clear()
            await self._has_ended.wait()

    def _check_turns(self) -> None:
        limits = self.limits
        if limits.max_turns is not None and self.num_turns + self._num_speaking >= limits.max_turns:
            raise LimitReached(f"the episode has had its {limits.max_turns} turns (max_turns)")
        if limits.timeout_s is not None and self.age_s >= limits.timeout_s:
            raise LimitReached(f"the episode has had its {limits.timeout_s:g} s (timeout_s)")


class Recorder(RolloutContext):
    """The context of one agent in one episode; see envs/base.py for what an environment may ask of it."""

    def __init__(
        self,
        player: Player,
        draw: Draw,
        member: int,
        attempt: int,
        *,
        budget: Budget | None = None,
        name: str = POLICY,
        is_trained: bool = True,
        kept: Kept | None = None,
        first_seed: int | None = None,
    ) -> None:
        """kept: turns of an earlier life of the run, with which the same requests are answered again.

        first_seed: of the first turn, where it is not the rollout's own.
        """
        self.budget = budget or Budget(Limits())
        self.name, self.is_trained = name, is_trained
        self.is_cut_off = False  # the last reply was
        self._num_turns = 0
        self._player, self._draw, self._member, self._attempt = player, draw, member, attempt
        self._agents: dict[str, Recorder] = {name: self}
        self._branches: list[OpenBranch] = []
        self._history: list[Message] = []  # a copy: environments edit their messages in place
        self._tools: list[dict] | None = None  # those that the history was rendered with
        self._turn: tuple[np.ndarray, np.ndarray] | None = None  # prompt and completion of the last chat turn
        self._is_busy = False
        self._ce_weights: np.ndarray | None = None  # of the next prompt's tokens
        self._kept_only: list[tuple[int, np.ndarray]] | None = None  # branch and mask of what is trained
        self._kept, self._first_seed = kept, first_seed
        self._replay = deque(t for t in (kept.turns if kept else ()) if t.agent == name)

    @property
    def sampling(self) -> SamplingSection:
        return self._player.sampling

    @property
    def episode(self) -> Episode:
        return Episode(self._draw.rollout_id(self._member), self._draw.group_id, self._member)

    @property
    def num_turns(self) -> int:
        """Turns of the episode, all agents together."""
        return self.budget.num_turns

    @property
    def is_truncated(self) -> bool:
        """Was the last reply of any agent cut off?"""
        return any(agent.is_cut_off for agent in self._agents.values())

    def agent(self, name: str, *, is_trained: bool = True) -> Recorder:
        if name in self._agents:
            return self._agents[name]
        agent = Recorder(
            self._player,
            self._draw,
            self._member,
            self._attempt,
            budget=self.budget,
            name=name,
            is_trained=is_trained,
            kept=self._kept,
        )
        agent._agents = self._agents
        self._agents[name] = agent
        return agent

    async def generate(
        self, prompt_ids: np.ndarray, tools: list[dict] | None = None, **sampling: Any
    ) -> Reply:
        prompt_ids = np.asarray(prompt_ids, dtype=np.int32)
        player, draw = self._player, self._draw
        if self._is_busy:
            raise EnvError("two turns of one agent at once: await a reply before asking for the next")
        turn = (self._attempt, self._member, self._num_turns)
        who = () if self.name == POLICY else (self.name,)
        seed = seed_of(player.seed, draw.name, draw.group_id, *turn, *who)
        if self._first_seed is not None and self._num_turns == 0:
            seed = self._first_seed
        name = "-".join((player.run_id, draw.rollout_id(self._member), *who))
        request = GenerateRequest(
            request_id=f"{name}-{self._attempt}-{self._num_turns}",
            prompt_ids=prompt_ids,
            sampling=player.sampling_params(len(prompt_ids), seed, **sampling),
            cache_salt=str(draw.version),
            session_id=name,
            routed_experts_start=self._known_routes(prompt_ids, sampling.get("temperature")),
        )
        temperature = player.behavior_temperature(sampling.get("temperature"))
        self._is_busy = True
        try:
            completion = await self._within_limits(request, temperature)
        finally:
            self._is_busy = False
        weights, self._ce_weights = self._ce_weights, None
        self._branch_for(prompt_ids, temperature).add_turn(prompt_ids, completion, draw.version, weights)
        self._num_turns += 1
        self.is_cut_off = completion.finish_reason == "length"
        message = player.renderer.parse(completion.token_ids, prompt_ids, tools)
        return Reply(
            message=message,
            text=message.get("content") or "",
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            num_prompt_tokens=len(prompt_ids),
        )

    async def chat(self, messages: list[Message], tools: list[dict] | None = None, **sampling: Any) -> Reply:
        prompt_ids, first_new = self._extend(messages, tools), len(self._history)
        if prompt_ids is None:
            prompt_ids, first_new = self._player.renderer.render_prompt(messages, tools), 0
        if self._player.echo is not None and self._turn is not None:
            self._ce_weights = self._echo_weights(self._player.echo, messages, first_new, tools)
        # As they were rendered; what extends the history is all that has to be copied.
        history = [*self._history[:first_new], *map(copied, messages[first_new:])]
        tools_now = list(tools) if tools else None
        reply = await self.generate(prompt_ids, tools, **sampling)
        self._history = [*history, copied(reply.message)]
        self._turn, self._tools = (prompt_ids, reply.token_ids), tools_now
        return reply

    def keep(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._kept_only = [self._located(tokens, is_trained) for tokens, is_trained in sequences]

    def _located(self, tokens: np.ndarray, is_trained: np.ndarray) -> tuple[int, np.ndarray]:
        """The branch that a sequence is, and which of its tokens are trained."""
        longest = 0
        for index, branch in enumerate(self._branches):
            size = min(len(branch.token_ids), len(tokens))
            differs = np.flatnonzero(branch.token_ids[:size] != tokens[:size])
            if not len(differs) and not is_trained[size:].any():
                mask = np.zeros(len(branch.token_ids), bool)
                mask[:size] = is_trained[:size]
                return index, mask
            longest = max(longest, int(differs[0]) if len(differs) else size)
        whose = f"rollout {self._draw.rollout_id(self._member)}: a sample of {len(tokens)} tokens"
        raise EnvError(
            f"{whose} is not what the policy was given and sampled; it differs from token {longest} on. Pass token ids "
            "on as they came, never text encoded anew, and mask what the policy did not sample"
        )

    def close(self) -> tuple[Branch, ...]:
        """The branches of the episode, agent by agent, or those of them that are to be kept."""
        is_masked = self._kept is not None and self._player.masks_kept
        trained_from = self._draw.version if is_masked else None
        if self._kept_only is None:
            return tuple(
                branch.close(trained_from=trained_from)
                for agent in self._agents.values()
                for branch in agent._branches
            )
        kept = [
            (self._branches[i].close(trained_from=trained_from), is_trained)
            for i, is_trained in self._kept_only
        ]
        return tuple(msgspec.structs.replace(b, is_sampled=b.is_sampled & mask) for b, mask in kept)

    # -- one answer --

    async def _within_limits(self, request: GenerateRequest, temperature: float) -> Completion:
        """The reply to a request, with as many tokens as the episode has left.

        Raises: EngineError; LimitReached when the episode has nothing left.
        """
        sampling, num_tokens = request.sampling, None
        assert sampling.max_tokens is not None, "the player always says how many tokens fit"
        granted = await self.budget.begin_turn(sampling.max_tokens)
        if granted < sampling.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=granted)
            request = msgspec.structs.replace(request, sampling=sampling)
        try:
            completion = await self._answer(request, temperature)
            num_tokens = len(completion.token_ids)
            return completion
        finally:
            self.budget.end_turn(granted, num_tokens)

    async def _answer(self, request: GenerateRequest, temperature: float) -> Completion:
        """The reply to a request: as it was kept, or from the engine, or begun there and ended here.

        Raises: EngineError.
        """
        begun = self._recall(request, temperature)
        if begun is not None and begun.is_done:
            return begun.completion
        completion = await self._ask(request, begun, temperature)
        if completion.finish_reason == ABORTED or not len(completion.token_ids):
            raise EngineError(f"the engine gave up this turn after {len(completion.token_ids)} tokens")
        return completion

    async def _ask(self, request: GenerateRequest, begun: Turn | None, temperature: float) -> Completion:
        player = self._player
        asked = request if begun is None else _rest_of(request, begun)
        interruption, journal = player.interruption, player.journal
        with boundary(EngineError, f"generate {request.request_id}"):
            if interruption is None:
                completions = await player.engine.generate(asked)
            else:
                completions = await interruption.generate(player.engine, asked)
        check_completions(completions, 1)
        completion = completions[0]
        if not completion.versions and len(completion.token_ids):
            span = VersionSpan(self._draw.version, 0, len(completion.token_ids))
            completion = msgspec.structs.replace(completion, versions=(span,))
        if begun is not None:
            completion = _continued(begun.completion, completion, request)
        if journal is not None and len(completion.token_ids):
            self._write_down(journal, request, completion, temperature)
        if interruption is not None and interruption.is_on and completion.finish_reason == ABORTED:
            await interruption.forever()
        return completion

    def _recall(self, request: GenerateRequest, temperature: float) -> Turn | None:
        """The kept turn that answers this request, token for token the same; None: there is none.

        Where the environment asks for something else than it did, what is left of the turns is of no use.
        """
        if not self._replay:
            return None
        turn = self._replay.popleft()
        known = self._branches[-1].token_ids[: turn.num_shared] if turn.num_shared else request.prompt_ids[:0]
        prompt_ids = np.concatenate((known, turn.prompt_ids), dtype=np.int32)
        is_same = temperature == turn.temperature and np.array_equal(prompt_ids, request.prompt_ids)
        # Stop texts may span both parts of a reply, which only a whole one can be searched for.
        if is_same and (turn.is_done or not request.sampling.stop):
            return turn
        left = sum(len(each.completion.token_ids) for each in (turn, *self._replay))
        self._replay.clear()
        logger.warning(
            "rollout %s, turn %d of %s: %s; %d kept tokens are discarded and it goes on anew from here",
            self._draw.rollout_id(self._member),
            turn.index,
            self.name,
            "its stop texts need a whole reply" if is_same else "the environment asks for something else now",
            left,
        )
        return None

    def _write_down(
        self, journal: Journal, request: GenerateRequest, completion: Completion, temperature: float
    ) -> None:
        branch = self._branches[-1] if self._branches else None
        is_extended = branch is not None and branch.is_extended_by(request.prompt_ids, temperature)
        num_shared = len(branch.token_ids) if branch is not None and is_extended else 0
        assert request.sampling.seed is not None
        turn = Turn(
            agent=self.name,
            index=self._num_turns,
            attempt=self._attempt,
            seed=request.sampling.seed,
            temperature=temperature,
            num_shared=num_shared,
            prompt_ids=request.prompt_ids[num_shared:],
            completion=completion,
        )
        journal.turn_played(self._draw.group_id, self._member, turn)

    def _extend(self, messages: list[Message], tools: list[dict] | None) -> np.ndarray | None:
        """The prompt as a continuation of the tokens so far.

        None when history or tools changed, or the history cannot be continued.
        """
        known = len(self._history)
        if self._turn is None or len(messages) <= known or messages[:known] != self._history:
            return None
        if (tools or None) != self._tools:
            return None
        return self._player.renderer.extend(*self._turn, messages[known:], tools)

    def _echo_weights(
        self, echo: Echo, messages: list[Message], first_new: int, tools: list[dict] | None
    ) -> np.ndarray:
        """Weights of a prompt's tokens: what the environment has said since the last reply.

        first_new: of the messages, those from here on extend the tokens so far; 0: all are rendered anew.
        """
        after = self._turn if first_new else None
        owners = self._player.renderer.text_owners(messages[first_new:], tools, after=after)
        weights = np.zeros(len(owners), np.float32)
        last_reply = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        for index in range(max(last_reply + 1, first_new), len(messages)):
            if weight := echo.weight_of(messages[index]):
                weights[owners == index - first_new] = weight
        return weights

    def _known_routes(self, prompt_ids: np.ndarray, temperature: float | None) -> int:
        """Tokens of a prompt whose expert choices need not be sent again."""
        temperature = self._player.behavior_temperature(temperature)
        if self._branches and self._branches[-1].is_extended_by(prompt_ids, temperature):
            return self._branches[-1].num_known_routes
        return 0

    def _branch_for(self, prompt_ids: np.ndarray, temperature: float) -> OpenBranch:
        if self._branches and self._branches[-1].is_extended_by(prompt_ids, temperature):
            return self._branches[-1]
        self._branches.append(OpenBranch(temperature, self.name, is_trained=self.is_trained))
        return self._branches[-1]


def _rest_of(request: GenerateRequest, begun: Turn) -> GenerateRequest:
    """The request for what is left of a reply that was begun, drawn as if it had never been interrupted."""
    ids, sampling = begun.completion.token_ids, request.sampling
    assert sampling.max_tokens is not None, "a recorder always says how many tokens fit"
    prompt_ids = np.concatenate((request.prompt_ids, ids), dtype=np.int32)
    routes = begun.completion.routed_experts
    return msgspec.structs.replace(
        request,
        prompt_ids=prompt_ids,
        sampling=msgspec.structs.replace(
            sampling, max_tokens=max(sampling.max_tokens - len(ids), 1), seed=begun.seed
        ),
        routed_experts_start=request.routed_experts_start if routes is None else len(prompt_ids) - 1,
    )


def _continued(first: Completion, rest: Completion, request: GenerateRequest) -> Completion:
    """Both parts of a reply, with the expert choices of all its tokens where both have them."""
    whole = joined(first, rest)
    if first.routed_experts is None or rest.routed_experts is None:
        return whole
    num_tokens = len(request.prompt_ids) + len(whole.token_ids) - request.routed_experts_start
    routes = join_routes(first.routed_experts, rest.routed_experts, num_tokens)
    return msgspec.structs.replace(whole, routed_experts=routes)


def copied(value: Any) -> Any:
    """Dictionaries, lists and tuples anew, all the way down; what they hold besides is kept as it is.

    `copy.deepcopy` of a message takes three times as long, and this is done for every message of every turn.
    """
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [copied(each) for each in value]
    if isinstance(value, tuple):
        return tuple(copied(each) for each in value)
    return value


def check_completions(completions: Sequence[Completion], wanted: int) -> None:
    """Raises: EngineError, DataError when an engine's answer is not what was asked for."""
    if len(completions) != wanted:
        raise EngineError(f"the engine answered {len(completions)} samples where {wanted} were asked for")
    for completion in completions:
        if len(completion.logprobs) != len(completion.token_ids):
            raise DataError(
                f"the engine gave {len(completion.logprobs)} logprobs for {len(completion.token_ids)} tokens"
            )
