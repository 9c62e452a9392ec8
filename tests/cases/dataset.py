"""The environment `dataset` over files of a test, and a run with it."""

from __future__ import annotations

import json
import textwrap

import numpy as np
from fakes import CharRenderer, FakeEngine, parrot, run_virtual

from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import RunInfo, load_environment
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player

RENDERER = CharRenderer()


def write_rows(folder):
    """Five records whose label is their prompt."""
    rows = [{"prompt": f"word{i}", "label": f"word{i}", "metadata": {"n": i}} for i in range(5)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def module_writer(folder, monkeypatch):
    """A function that writes a module of hooks and returns its name."""
    names = iter(f"hooks_{folder.name}_{i}".replace("-", "_") for i in range(9))

    def write(code):
        name = next(names)
        (folder / f"{name}.py").write_text(textwrap.dedent(code))
        monkeypatch.syspath_prepend(str(folder))
        return name

    return write


def encode(text):
    return np.array([ord(c) for c in text], np.int32)


RUN = RunInfo(
    tokenizer="/models/tiny",
    engine_urls=("http://127.0.0.1:8000/v1",),
    encode=encode,
    prompt_ids=lambda messages, tools: RENDERER.render_prompt(messages),
    render=lambda messages, tools: RENDERER.decode(RENDERER.render_prompt(messages)),
    max_completion_tokens=9,
    group_size=4,
)


def dataset(file, **args):
    args = {"path": str(file)} | args
    return load_environment("dataset", {k: v for k, v in args.items() if v is not None}, "mine", RUN)


def play(env, *, answer=None, members=4, index=0, max_retries=0, sampling=None):
    engine = FakeEngine(answer or parrot(0.5))
    player = Player(
        engine=engine,
        renderer=RENDERER,
        sampling=sampling or SamplingSection(max_completion_tokens=9),
        seq_len=200,
        max_retries=max_retries,
    )
    group = run_virtual(player.play(env, Draw(index, env.tasks("train").task(index), members, version=0)))
    return group, engine


def sampled_text(branch):
    return "".join(chr(i) for i, s in zip(branch.token_ids, branch.is_sampled) if s)
