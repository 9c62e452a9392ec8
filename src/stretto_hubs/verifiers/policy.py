"""The policy as a client of verifiers, and the reward of an episode.

Every run of an agent (a trace) has an `AgentSession`. The requests of its harness become turns as those of any program
do (gateway/session.py), in any dialect.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.dialects import Dialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import Response, SamplingConfig

from stretto.base.errors import EnvError, StrettoError
from stretto.envs.base import LimitReached, RolloutContext, RolloutResult
from stretto_agents import dialects as gateway
from stretto_agents.dialects import framed
from stretto_agents.session import Answer, Request, Session

_NO_REWARD = ("setup_timeout", "finalize_timeout", "scoring_timeout")
_SAMPLING = ("temperature", "top_p")


@dataclass
class AgentSession:
    """One run of one agent: its trace, its requests, and its first error."""

    trace: vf.Trace
    name: str
    requests: Session
    error: StrettoError | None = None

    @property
    def turns(self) -> list[int]:
        """The number in the episode of each reply."""
        return [answer.reply.turn for answer in self.requests.answers]

    @property
    def is_limited(self) -> bool:
        """Has a limit of the episode ended it?"""
        return self.requests.is_limited

    async def answer(self, request: Request) -> Answer:
        try:
            return await self.requests.answer(request)
        except LimitReached as error:
            self.error = self.error or (None if self.turns else error)
            self.trace.stop("limit")
            raise
        except StrettoError as error:
            self.error = self.error or error
            raise


SESSIONS: dict[str, AgentSession] = {}
"""Open sessions, by the id of their trace."""


class EpisodeSessions:
    """The agents' sessions of one episode, and its result."""

    def __init__(self, ctx: RolloutContext, *, is_one: bool) -> None:
        self._ctx, self._is_one = ctx, is_one
        self._sessions: list[AgentSession] = []

    def add(self, trace: vf.Trace) -> None:
        """Open a session for a trace. The first of an agent bears its name, later ones a number too."""
        agent, is_trained = trace.agent.name, trace.agent.trainable
        earlier = sum(session.trace.agent.name == agent for session in self._sessions)
        name = f"{agent}.{earlier + 1}" if earlier else agent
        ctx = self._ctx
        if self._is_one and not earlier and is_trained:
            name = "policy"  # the context itself, without an agent of it
        else:
            ctx = ctx.agent(name, is_trained=is_trained)
        session = SESSIONS[trace.id] = AgentSession(trace, name, Session(ctx, answers_repeats=False))
        self._sessions.append(session)

    def close(self) -> None:
        for session in self._sessions:
            SESSIONS.pop(session.trace.id, None)

    def result(self, episode: vf.Episode) -> RolloutResult:
        """Reward and metrics of the episode.

        Raises: the first error of a turn; EnvError if the episode has no valid reward.
        """
        for session in self._sessions:
            if session.error is not None:
                raise session.error
        for trace in episode.traces:
            if not trace.ok:
                raise EnvError(
                    _describe_error(trace.last_error) or f"{trace.agent.name}: stopped by {trace.stop_condition}"
                )
            if trace.stop_condition in _NO_REWARD:
                raise EnvError(f"{trace.agent.name}: {trace.stop_condition}: there is no reward")
        if not episode.ok:
            raise EnvError(_describe_error(episode.last_error) or "the episode failed")
        trained = [session for session in self._sessions if session.trace.agent.trainable and session.turns]
        if not trained:
            stops = ", ".join(str(trace.stop_condition) for trace in episode.traces)
            raise EnvError(f"the episode ended before any reply ({stops})")
        rewards = {session.name: float(session.trace.reward) for session in trained}
        metrics: dict[str, float] = {}
        for session in self._sessions:
            prefix = "" if len(self._sessions) == 1 else f"{session.name}/"
            scores = {name: reward and reward.score for name, reward in session.trace.rewards.items()}
            for name, value in itertools.chain(scores.items(), session.trace.metrics.items()):
                if isinstance(value, int | float) and math.isfinite(value):
                    metrics[prefix + name] = float(value)
        return RolloutResult(
            reward=sum(rewards.values()) / len(rewards),
            agent_rewards={} if list(rewards) == ["policy"] else rewards,
            metrics=metrics,
            is_truncated=any(
                session.is_limited or session.trace.is_truncated or session.trace.is_timeout
                for session in self._sessions
            ),
            is_timeout=any(session.trace.is_timeout for session in self._sessions),
            **{name: self._per_turn(name) for name in ("turn_rewards", "state_values", "states")},
        )

    def _per_turn(self, name: str) -> tuple[Any, ...]:
        """What the tasks have written of this name into `info` of their traces, an entry per reply of a trace.

        Raises: EnvError for a trace with more or fewer entries than replies.
        """
        if not any(name in session.trace.info for session in self._sessions):
            return ()
        entries = dict.fromkeys(turn for session in self._sessions for turn in session.turns)
        for session in self._sessions:
            given = session.trace.info.get(name)
            if given is not None and len(given) != len(session.turns):
                count = f"{len(given)} entries for {len(session.turns)} replies"
                raise EnvError(f"{session.name}: trace.info[{name!r}] has {count}; give one for each")
            entries |= dict(zip(session.turns, given or ()))
        return tuple(entries.get(turn) for turn in range(max(entries) + 1))


def _describe_error(error: Any) -> str | None:
    """The first and last line of an error of verifiers, whose text may hold a whole traceback."""
    if error is None:
        return None
    lines = [line for line in error.message.strip().splitlines() if line.strip()] or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{error.type}: {text}"


class RolloutClientConfig(vf.EvalClientConfig):
    """Config by which verifiers chooses `RolloutClient`."""


class RolloutClient(vf.Client):
    """Answers requests of harnesses with turns of the policy."""

    async def get_response(
        self,
        dialect: Dialect,
        body: dict,
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        answer, _ = await _answered(dialect, body, session_id)
        raw = _ours(dialect).write(answer, body["model"])
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response

    async def relay(
        self, dialect: Dialect, body: dict, session_id: str | None = None, headers: Mapping[str, str] | None = None
    ) -> RelayReply:
        answer, request = await _answered(dialect, body, session_id)

        async def chunks() -> AsyncIterator[bytes]:
            for event in _ours(dialect).stream(answer, body["model"], request):
                yield framed(event)

        async def close() -> None:
            pass

        return RelayReply("text/event-stream", chunks(), close)


def _ours(dialect: Dialect) -> gateway.Dialect:
    return gateway.DIALECTS[dialect.upstream_path.removeprefix("/v1")]


async def _answered(dialect: Dialect, body: dict, session_id: str | None) -> tuple[Answer, Request]:
    """The policy's answer to a request, whose settings verifiers has replaced by those of the agent's config."""
    session = SESSIONS.get(session_id or "")
    if session is None:
        raise ProviderError("this rollout is over", status_code=400)
    wanted = {name: value for name in _SAMPLING if (value := body.get(name)) is not None}
    try:
        request = _ours(dialect).request(body)
        return await session.answer(replace(request, sampling=request.sampling | wanted)), request
    except StrettoError as error:
        raise ProviderError(str(error), status_code=400) from error
