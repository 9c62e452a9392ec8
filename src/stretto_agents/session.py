"""The requests of one rollout's program as turns of the policy.

A request whose messages begin with all of an earlier conversation continues it, so that its tokens extend those that
the policy saw and sampled. Any other request (a side call, a compacted history) begins a conversation of its own. An
assistant message that comes back is recognised by its text and its calls, and the recorder gets the one that it knows:
no token is made again from text. A request that is sent twice has one turn.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import StrettoError
from stretto.envs.base import LimitReached, Message, OutOfContext, Reply, RolloutContext


@dataclass(frozen=True)
class Request:
    """A request of any dialect: messages and tools in the form of chat completions."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Settings of the reply that replace those of the run."""
    is_streamed: bool = False
    wants_usage: bool = True
    """The stream ends with the numbers of tokens."""


@dataclass(frozen=True)
class Answer:
    """A reply of the policy, with an id for each of its calls."""

    name: str
    reply: Reply

    @property
    def text(self) -> str:
        """Its text, with calls that nobody can read: a program sees them as the model wrote them."""
        message = self.reply.message
        return "\n".join(filter(None, (message.get("content"), *message.get("unparsed_tool_calls", ()))))

    @property
    def thought(self) -> str:
        return self.reply.message.get("reasoning_content") or ""

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Id, name and JSON of the arguments of each call."""
        calls = self.reply.message.get("tool_calls") or ()
        return [
            (f"call_{self.name}_{number}", call["function"]["name"], as_json(call["function"].get("arguments")))
            for number, call in enumerate(calls)
        ]

    @property
    def is_cut_off(self) -> bool:
        return self.reply.finish_reason == "length"


@dataclass
class Conversation:
    """Messages that extend each other."""

    ctx: RolloutContext
    tools: list[dict[str, Any]] | None
    seen: list[str] = field(default_factory=list)  # its messages as a program sends them
    messages: list[Message] = field(default_factory=list)  # the same as the recorder knows them
    is_open: bool = False  # a turn of it is being played


class Session:
    """The requests of one rollout."""

    def __init__(self, ctx: RolloutContext, *, answers_repeats: bool = True) -> None:
        """answers_repeats: False if each request is a turn, because another server answers those that are repeated."""
        self._ctx, self._answers_repeats = ctx, answers_repeats
        self._conversations: list[Conversation] = []
        self._turns: dict[str, asyncio.Task[Answer]] = {}  # by request
        self.error: StrettoError | None = None  # the first that is no limit
        self.limit: LimitReached | None = None  # that refused the last request
        self.num_refused = 0  # requests beyond a limit that no shorter request can avoid
        self.num_repeated = 0
        self.answers: list[Answer] = []

    @property
    def num_conversations(self) -> int:
        return len(self._conversations)

    @property
    def is_limited(self) -> bool:
        """Was the last request refused by a limit?"""
        return self.limit is not None

    @property
    def last_text(self) -> str:
        """The text of the last reply."""
        return self.answers[-1].text if self.answers else ""

    @property
    def replies(self) -> list[str]:
        """The texts of all replies, in the order of the requests."""
        return [answer.text for answer in sorted(self.answers, key=lambda each: each.reply.turn)]

    async def answer(self, request: Request) -> Answer:
        """The reply to a request. It is played to its end, even if the program does not wait for it.

        Raises: LimitReached, EngineError, EnvError.
        """
        seen = [_form(message) for message in request.messages]
        place = None if self._answers_repeats else len(self._turns)
        key = json.dumps([seen, request.tools, request.sampling, place], sort_keys=True)
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = asyncio.create_task(self._play(request, seen))
        else:
            self.num_repeated += 1
        try:
            return await asyncio.shield(turn)
        except LimitReached as error:
            self.num_refused += not isinstance(error, OutOfContext)
            raise

    async def close(self) -> None:
        """End the turns that are still being played."""
        turns = list(self._turns.values())
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)

    async def _play(self, request: Request, seen: list[str]) -> Answer:
        line = self._continued(request, seen)
        known = len(line.seen)
        messages = [*line.messages, *request.messages[known:]]
        line.is_open = True
        try:
            reply = await line.ctx.chat(messages, request.tools, **request.sampling)
        except LimitReached as error:
            self.limit = error
            raise
        except StrettoError as error:
            self.error = self.error or error
            raise
        finally:
            line.is_open = False
        self.limit = None
        answer = Answer(str(len(self.answers)), reply)
        line.messages = [*messages, reply.message]
        line.seen = [*seen, _form(returned_message(answer))]
        self.answers.append(answer)
        return answer

    def _continued(self, request: Request, seen: list[str]) -> Conversation:
        """The longest conversation that a request continues, or a new one."""
        fitting = [
            each
            for each in self._conversations
            if not each.is_open
            and each.seen
            and len(each.seen) < len(seen)
            and each.seen == seen[: len(each.seen)]
            and each.tools == request.tools
        ]
        if fitting:
            return max(fitting, key=lambda each: len(each.seen))
        line = Conversation(self._ctx.conversation(len(self._conversations)), request.tools)
        self._conversations.append(line)
        return line


def returned_message(answer: Answer) -> Message:
    """The assistant message of chat completions, as a program gets it and sends it back."""
    message: Message = {"role": "assistant", "content": answer.text or None}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    if calls := answer.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return message


def as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _form(message: Message) -> str:
    """What identifies a message. Programs may leave out thoughts, and write JSON and empty texts in several ways."""
    content: Any = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    calls = [
        [call.get("id"), call["function"]["name"], _parsed(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message["role"], content or "", calls, message.get("tool_call_id")], sort_keys=True)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        return arguments
