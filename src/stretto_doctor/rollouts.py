"""Plays one rollout of each environment with a stub engine, and says what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.config.root import OrchestratorConfig
from stretto.orchestrator.build import build_policy_renderer, run_info
from stretto.orchestrator.first_rollout import TIMEOUT_S, open_and_play
from stretto.records.rollout import Group, RolloutStatus
from stretto_doctor.finding import Finding, bad, good, note, warn

SLOW_S = 10.0


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
    for section in cfg.env:
        name = f"environment {section.name or section.id}"
        start = time.perf_counter()
        try:
            group = asyncio.run(open_and_play(cfg, section, renderer, info))
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
