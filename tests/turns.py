"""Episodes of several turns with a scripted policy."""

from __future__ import annotations

import json

from fakes import CharRenderer

from stretto.envs.base import TaskSource
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
