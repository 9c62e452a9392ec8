"""The policy as verifiers calls it, and what an episode was worth.

Every run of an agent (a trace) has a `Seat`: the context of the rollout it plays with. A request of its harness
becomes a turn of that context; the reply that a program gives back as history is recognised, so that the next
turn extends the tokens so far.
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
class Seat:
    """One run of one agent: whose context it plays with, and how that went."""

    trace: vf.Trace
    ctx: RolloutContext
    name: str
    num_turns: int = 0
    error: StrettoError | None = None  # the first one
    is_limited: bool = False
    replies: dict[str, Message] = field(default_factory=dict)  # as returned -> as the recorder knows it
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def turn(self, messages: list[Message], tools: list[dict] | None, **sampling: Any) -> Reply:
        """A reply; turns that a program asks for at once come one after the other."""
        known = [self.replies.get(_key(m), m) if m["role"] == "assistant" else m for m in messages]
        async with self.lock:
            try:
                reply = await self.ctx.chat(known, tools, **sampling)
            except LimitReached as error:
                self.is_limited = True
                self.error = self.error or (None if self.num_turns else error)
                self.trace.stop("limit")
                raise
            except StrettoError as error:
                self.error = self.error or error
                raise
        self.num_turns += 1
        return reply


SEATS: dict[str, Seat] = {}
"""Runs under way, by the id of their trace."""


class Seats:
    """The runs of one episode, and what it is worth."""

    def __init__(self, ctx: RolloutContext, *, is_one: bool) -> None:
        self._ctx, self._is_one = ctx, is_one
        self._seats: list[Seat] = []

    def add(self, trace: vf.Trace) -> None:
        """A run begins. The first of a role bears its name, the next ones a number too."""
        role, is_trained = trace.agent.name, trace.agent.trainable
        earlier = sum(seat.trace.agent.name == role for seat in self._seats)
        name = f"{role}.{earlier + 1}" if earlier else role
        ctx = self._ctx
        if self._is_one and not earlier and is_trained:
            name = "policy"  # the agent that a context itself is
        else:
            ctx = ctx.agent(name, is_trained=is_trained)
        seat = SEATS[trace.id] = Seat(trace, ctx, name)
        self._seats.append(seat)

    def leave(self) -> None:
        for seat in self._seats:
            SEATS.pop(seat.trace.id, None)

    def result(self, episode: vf.Episode) -> RolloutResult:
        """Reward and metrics.

        Raises: what a turn raised; EnvError for an episode that has no valid reward.
        """
        for seat in self._seats:
            if seat.error is not None:
                raise seat.error
        for trace in episode.traces:
            if not trace.ok:
                raise EnvError(
                    _say(trace.last_error) or f"{trace.agent.name}: stopped by {trace.stop_condition}"
                )
            if trace.stop_condition in _NO_REWARD:
                raise EnvError(f"{trace.agent.name}: {trace.stop_condition}: there is no reward")
        if not episode.ok:
            raise EnvError(_say(episode.last_error) or "the episode failed")
        played = [seat for seat in self._seats if seat.trace.agent.trainable and seat.num_turns]
        if not played:
            stops = ", ".join(str(trace.stop_condition) for trace in episode.traces)
            raise EnvError(f"the episode ended before any reply ({stops})")
        rewards = {seat.name: float(seat.trace.reward) for seat in played}
        metrics: dict[str, float] = {}
        for seat in self._seats:
            prefix = "" if len(self._seats) == 1 else f"{seat.name}/"
            scores = {name: reward and reward.score for name, reward in seat.trace.rewards.items()}
            for name, value in itertools.chain(scores.items(), seat.trace.metrics.items()):
                if isinstance(value, int | float) and math.isfinite(value):
                    metrics[prefix + name] = float(value)
        return RolloutResult(
            reward=sum(rewards.values()) / len(rewards),
            agent_rewards={} if list(rewards) == ["policy"] else rewards,
            metrics=metrics,
            is_truncated=any(
                seat.is_limited or seat.trace.is_truncated or seat.trace.is_timeout for seat in self._seats
            ),
        )


def _say(error: Any) -> str | None:
    """An error of verifiers, without the trace that its text may hold."""
    if error is None:
        return None
    lines = [line for line in error.message.strip().splitlines() if line.strip()] or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{error.type}: {text}"


class PolicyConfig(vf.TrainClientConfig):
    """An endpoint that is the context of the rollout."""


class Policy(vf.Client):
    """Answers the requests of harnesses with turns of the policy."""

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
            text = f"the policy is asked by chat completions, not by {type(dialect).__name__}; choose another harness"
            seat = SEATS.get(session_id or "")
            if seat is not None:
                seat.error = seat.error or EnvError(text)
            raise ProviderError(text, status_code=400)
        seat = SEATS.get(session_id or "")
        if seat is None:
            raise ProviderError("this rollout is over", status_code=400)
        request = turn if turn is not None else dialect.parse_request(body)
        prompt = request.prompt if turn is not None else request.messages
        messages = [message_to_wire(message) for message in prompt]
        tools = [tool_to_wire(tool) for tool in request.tools] if request.tools else None
        wanted = {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
        try:
            reply = await seat.turn(messages, tools, **wanted)
        except StrettoError as error:
            raise ProviderError(str(error), status_code=400) from error
        response = _response(reply, seat)
        seat.replies[_key(message_to_wire(response.message))] = reply.message
        response.raw = serialize_completion(response, body.get("model") or "policy")
        return response


def _response(reply: Reply, seat: Seat) -> Response:
    calls = [
        ToolCall(
            id=call.get("id") or f"call_{seat.num_turns}_{number}",
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
    name = f"{seat.trace.id}-{seat.num_turns}"
    return Response(id=name, created=0, model="policy", message=message, finish_reason=finish, usage=usage)


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def _key(message: Message) -> str:
    """An assistant message, by what a program can give back of it."""
    return json.dumps(
        [message.get("content") or "", message.get("reasoning_content"), message.get("tool_calls")],
        sort_keys=True,
    )
