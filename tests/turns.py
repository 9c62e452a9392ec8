"""Episodes of several turns with a scripted policy."""

from __future__ import annotations

import json

import msgspec
import numpy as np
from fakes import CharRenderer, EchoEnv, FakeEngine, parrot, run_virtual

from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import Reply, RolloutResult, TaskSource
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import Task
from stretto.records.support import Support


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


class TellingEngine(FakeEngine):
    """Reports for each token of a restricted reply that it was drawn from itself and the full stop."""

    requests: list[GenerateRequest]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        completions = await super().generate(request)
        if not request.sampling.is_truncated:
            return completions
        supports = [Support.of([[int(token), 46] for token in c.token_ids]) for c in completions]
        return [msgspec.structs.replace(c, support=s) for c, s in zip(completions, supports)]


class Turns:
    """Plays one turn with each of these settings; the setting `agent` names its agent."""

    name = "turns"
    limits = None

    def __init__(self, *turns: dict) -> None:
        self.turns = turns

    def tasks(self, split: str) -> TaskSource:
        return EchoEnv().tasks(split)

    async def rollout(self, task, ctx) -> RolloutResult:
        messages = [{"role": "user", "content": "abc"}]
        for turn in self.turns:
            settings = dict(turn)
            who = ctx.agent("other", is_trained=False) if settings.pop("other", False) else ctx
            reply = await who.chat(messages, **settings)
            messages = [*messages, reply.message, {"role": "user", "content": "def"}]
        return RolloutResult(reward=1.0)


def play_turns(env, engine=None, *, members=1, **settings):
    engine = engine or TellingEngine(parrot(1.0))
    settings = {"sampling": SamplingSection(), "seq_len": 200, "is_learned": True, "max_retries": 0} | settings
    player = Player(engine=engine, renderer=CharRenderer(), **settings)
    draw = Draw(0, env.tasks("train").task(7), members, version=0)
    return run_virtual(player.play(env, draw)).rollouts
