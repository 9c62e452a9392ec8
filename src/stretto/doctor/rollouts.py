"""Plays one rollout of each environment with a stub engine, to find code that would fail only in a run.

The reply is the same fixed sentence each time, so its reward means nothing. The check is that the environment is built,
that its prompt is rendered, and that the reply is parsed and scored.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.chat.render import Renderer
from stretto.config.root import OrchestratorConfig
from stretto.doctor.finding import Finding, bad, good, note, warn
from stretto.envs.base import RunInfo, tasks_of
from stretto.orchestrator.build import build_policy_renderer, open_env, run_info, system_prompts
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.generate import Completion, GenerateRequest
from stretto.records.rollout import Group, RolloutStatus

REPLY = "I am the doctor's stub."
TIMEOUT_S, SLOW_S = 60.0, 10.0


class StubEngine:
    """Answers every request with REPLY; each of its tokens has a probability of almost 1."""

    def __init__(self, renderer: Renderer) -> None:
        ids = [*renderer.encode(REPLY), *list(renderer.stop_ids)[:1]]
        self._ids = np.array(ids, dtype=np.int32)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """The same completion for each sample, cut at max_tokens."""
        ids = self._ids[: request.sampling.max_tokens]
        reason = "stop" if len(ids) == len(self._ids) else "length"
        logprobs = np.zeros(len(ids), dtype=np.float32)
        completion = Completion(token_ids=ids, logprobs=logprobs, finish_reason=reason)
        return [completion] * request.n


def check_rollouts(cfg: OrchestratorConfig) -> Iterator[Finding]:
    """A finding about the tokenizer, and one per environment."""
    if cfg.hooks.rollout_function is not None:
        yield note("rollouts", "are the user's own (hooks.rollout_function): none was played")
        return
    try:
        renderer = build_policy_renderer(cfg)
    except (ConfigError, DataError) as error:
        yield bad("tokenizer", str(error))
        return
    yield good("tokenizer", f"read; messages are rendered by {renderer.description}")
    info = run_info(cfg, renderer, cfg.train.sampling, cfg.tokenizer.name or cfg.model.name)
    for index, section in enumerate(cfg.env):
        name = f"environment {section.name or section.id}"
        start = time.perf_counter()
        try:
            group = asyncio.run(_play(cfg, index, renderer, info))
        except TimeoutError:
            yield bad(name, f"no rollout within {TIMEOUT_S:.0f} s", "py-spy dump shows where it waits")
            continue
        except StrettoError as error:
            yield bad(name, str(error))
            continue
        yield _finding(name, group, time.perf_counter() - start)


def _finding(name: str, group: Group, time_s: float) -> Finding:
    rollout = group.rollouts[0]
    if rollout.status is RolloutStatus.FAILED:
        return bad(name, f"a rollout of its first task failed: {rollout.error}")
    turns = f"{rollout.num_turns} turn{'s' * (rollout.num_turns != 1)}"
    text = f"played one rollout in {time_s:.1f} s: {turns}, reward {rollout.reward:g} for nonsense"
    if time_s > SLOW_S:
        return warn(name, f"{text}; that is slow", "num_workers in its section lets others go on")
    return good(name, text)


async def _play(cfg: OrchestratorConfig, index: int, renderer: Renderer, info: RunInfo) -> Group:
    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-doctor-")))
        env = open_env(cfg.env[index], logs, stack, info)
        player = Player(
            engine=StubEngine(renderer),
            renderer=renderer,
            sampling=cfg.train.sampling.model_copy(update={"top_p": 1.0, "top_k": None, "min_p": 0.0}),
            seq_len=cfg.seq_len,
            seed=cfg.seed,
            run_id="doctor",
            timeout_s=TIMEOUT_S,
            max_retries=0,
            system_prompts=system_prompts(cfg.env[index]),
        )
        task = tasks_of(env, "train").task(0)
        return await player.play(env, Draw(group_id=0, task=task, num_members=1, version=0))
