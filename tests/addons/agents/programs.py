"""Rollouts that a program plays, with a scripted policy as its model."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from fakes import FakeEngine
from turns import CallRenderer, scripted

from stretto.config.sections.orchestrator import EnvSection, SamplingSection
from stretto.orchestrator.build import build_env
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player

PROGRAM = str(Path(__file__).parents[3] / "examples/agent/program.py")
CALL, RESULT = '!calculate{"expression": "47*86"}', "4042"
CALCULATES = scripted(CALL, RESULT)
CLIENT = """
import json, os, sys, urllib.request
def ask(messages, timeout=600, **more):
    body = json.dumps({"model": "any", "messages": messages} | more).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=timeout) as http:
        return json.load(http)["choices"][0]["message"]
user = lambda text: {"role": "user", "content": text}
"""


class ThoughtRenderer(CallRenderer):
    """What stands before `~` in a reply is a thought."""

    def parse(self, completion_ids, prompt_ids=None, tools=None):
        message = super().parse(completion_ids, prompt_ids, tools)
        thought, mark, text = message["content"].partition("~")
        return message | {"content": text, "reasoning_content": thought} if mark else message


def write_records(folder):
    path = folder / "records.jsonl"
    path.write_text(json.dumps({"prompt": "47*86=", "label": RESULT}))
    return str(path)


def player_of(engine, seq_len=2000):
    settings = {"sampling": SamplingSection(), "seq_len": seq_len, "seed": 1, "max_retries": 0}
    return Player(engine=engine, renderer=ThoughtRenderer(), **settings)


def play(command, records, policy=CALCULATES, members=1, seq_len=2000, num_workers=None, **args):
    async def run():
        env = build_env(
            EnvSection(id="agent", args={"command": command, "path": records, **args}, num_workers=num_workers)
        )
        try:
            draw = Draw(3, env.tasks("train").task(0), members, version=0)
            return await player_of(FakeEngine(policy), seq_len).play(env, draw)
        finally:
            await env.close()

    return asyncio.run(run())


def script(text):
    return [sys.executable, "-c", CLIENT + text, "{prompt}"]
