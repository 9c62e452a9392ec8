"""The policy as a client of verifiers, and the reward of an episode.

Every run of an agent (a trace) has an `AgentSession`, which holds the context it plays with. A request of its harness
becomes a turn of that context. When a harness sends a reply back as history, the session recognises it, so that the
next turn extends the tokens so far.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, ToolCall, Usage

from stretto.base.errors import EnvError, StrettoError
from stretto.envs.base import LimitReached, Message, Reply, RolloutContext, RolloutResult

_NO_REWARD = ("setup_timeout", "finalize_timeout", "scoring_timeout")
_SAMPLING = ("temperature", "top_p", "max_tokens")


@dataclass
class AgentSession:
    """One run of one agent: the context it plays with, its turns, and its first error."""

    trace: vf.Trace
    ctx: RolloutContext
    name: str
    turns: list[int] = field(default_factory=list)  # number of each in the episode
    error: StrettoError | None = None  # the first one
    is_limited: bool = False  # a limit of the episode ended it
    replies: dict[str, Message] = field(
        default_factory=dict
    )  # reply as a harness returns it -> reply as the recorder knows it
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def turn(self, messages: list[Message], tools: list[dict] | None, **sampling: Any) -> Reply:
        """Take a turn. Turns that a harness requests at the same time are taken one after the other."""
        known = [self.replies.get(_key(m), m) if m["role"] == "assistant" else m for m in messages]
        async with self.lock:
            try:
                reply = await self.ctx.chat(known, tools, **sampling)
            except LimitReached as error:
                self.is_limited = True
                self.error = self.error or (None if self.turns else error)
                self.trace.stop("limit")
                raise
            except StrettoError as error:
                self.error = self.error or error
                raise
        self.turns.append(reply.turn)
        return reply


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
        session = SESSIONS[trace.id] = AgentSession(trace, ctx, name)
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


class RolloutClientConfig(vf.TrainClientConfig):
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
        if not isinstance(dialect, ChatDialect):
            text = f"the policy answers chat completions only, not {type(dialect).__name__}; choose another harness"
            session = SESSIONS.get(session_id or "")
            if session is not None:
                session.error = session.error or EnvError(text)
            raise ProviderError(text, status_code=400)
        session = SESSIONS.get(session_id or "")
        if session is None:
            raise ProviderError("this rollout is over", status_code=400)
        request = turn if turn is not None else dialect.parse_request(body)
        prompt = request.prompt if turn is not None else request.messages
        messages = [message_to_wire(message) for message in prompt]
        tools = [tool_to_wire(tool) for tool in request.tools] if request.tools else None
        wanted = {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
        try:
            reply = await session.turn(messages, tools, **wanted)
        except StrettoError as error:
            raise ProviderError(str(error), status_code=400) from error
        response = _response(reply, session)
        session.replies[_key(message_to_wire(response.message))] = reply.message
        response.raw = serialize_completion(response, body.get("model") or "policy")
        return response


def _response(reply: Reply, session: AgentSession) -> Response:
    calls = [
        ToolCall(
            id=call.get("id") or f"call_{len(session.turns)}_{number}",
            name=call["function"]["name"],
            arguments=_text(call["function"]["arguments"]),
        )
        for number, call in enumerate(reply.message.get("tool_calls") or ())
    ]
    message = AssistantMessage(
        content=reply.message.get("content") or None,
        reasoning_content=reply.message.get("reasoning_content"),
        tool_calls=calls or None,
    )
    finish = "length" if reply.finish_reason == "length" else "tool_calls" if calls else "stop"
    usage = Usage(prompt_tokens=reply.num_prompt_tokens, completion_tokens=len(reply.token_ids))
    name = f"{session.trace.id}-{len(session.turns)}"
    return Response(id=name, created=0, model="policy", message=message, finish_reason=finish, usage=usage)


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def _key(message: Message) -> str:
    """Identifies an assistant message by the fields that a harness sends back."""
    return json.dumps(
        [message.get("content") or "", message.get("reasoning_content"), message.get("tool_calls")], sort_keys=True
    )
