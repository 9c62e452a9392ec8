"""Episodes of several turns with a scripted policy."""

from __future__ import annotations

import json

import numpy as np
from fakes import CharRenderer

from stretto.envs.base import Reply, TaskSource
from stretto.records.rollout import Task


class CallRenderer(CharRenderer):
    """In a reply, `!name{json}` is a tool call; `!` followed by anything else is a call that cannot be parsed."""

    def parse(self, completion_ids, prompt_ids=None, tools=None):
        text, *calls = "".join(chr(i) for i in completion_ids if i != self.END).split("!")
        message = {"role": "assistant", "content": text}
        for number, call in enumerate(calls):
            name, brace, arguments = call.partition("{")
            if not brace:
                message.setdefault("unparsed_tool_calls", []).append(call)
                continue
            function = {"name": name, "arguments": json.loads(brace + arguments)}
            message.setdefault("tool_calls", []).append({"id": f"call{number}", "function": function})
        return message


class OneTask:
    def __init__(self):
        self.name = "one"

    def tasks(self, split):
        return TaskSource(lambda index: Task(env=self.name, task_id=str(index), data={}))


def text_of(branch, is_sampled):
    return "".join(chr(i) for i, s in zip(branch.token_ids, branch.is_sampled) if s == is_sampled)


def scripted(*lines):
    """An answer function: line n for the n-th turn of the prompt (an `A` begins each turn)."""
    return lambda prompt, rng, version: lines[prompt.count("A") - 1]


def called(name, arguments, **more):
    return {"function": {"name": name, "arguments": arguments}, **more}


def number(prompt, rng, version):
    return str(rng.randrange(10**9))


class Script:
    """A context whose policy gives scripted replies; checks that every turn extends the history."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.received = []
        self.history = []

    async def chat(self, messages, tools=None, **sampling):
        assert messages[: len(self.history)] == self.history and len(messages) > len(self.history)
        self.received.append(messages[-1]["content"])
        words = self.replies.pop(0)
        finish_reason = "stop"
        if isinstance(words, str) and words.endswith("..."):
            words, finish_reason = words[:-3], "length"
        message = {"role": "assistant", "content": words} if isinstance(words, str) else words
        self.history = [*messages, message]
        return Reply(
            message=message, text=message["content"], token_ids=np.zeros(1, dtype=np.int32), finish_reason=finish_reason
        )


async def play(env, data, *replies):
    ctx = Script(*replies)
    result = await env.rollout(Task(env=env.name, task_id="t", data=data), ctx)
    assert not ctx.replies, "the episode ended early"
    return result, ctx


async def replay(env, data, row):
    """The reward of an SFT row, played as an episode."""
    replies = [message for message in row["messages"] if message["role"] == "assistant"]
    result, ctx = await play(env, data, *replies)
    assert ctx.history == row["messages"]
    return result.reward
