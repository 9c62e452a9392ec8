"""Has engines read finished rollouts again, and compares what they compute then with what they sampled them by.

Decoding and reading are different programs of an engine: graphs that were captured, drafts, a cache that is filled
token by token. A canary compares them on a few tokens after random ones; this does on what is trained. After each check
by a canary one rollout is read, which the version that is loaded has sampled alone: of others the cache held what
older weights had computed, and nothing gives that again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stretto.base.errors import EngineError
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.records.rollout import Branch, Group
from stretto.transports.engine.client import EngineClient

if TYPE_CHECKING:
    from jaxtyping import Bool, Float32, Int32

logger = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Tokens of a rollout that are read, from its first one: vLLM holds the logits of all of them at once."""


@dataclass(frozen=True)
class Reading:
    """The beginning of a finished rollout, up to MAX_TOKENS."""

    rollout_id: str
    version: int
    token_ids: Int32[np.ndarray, " tokens"]
    is_sampled: Bool[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"]  # nats, when they were sampled


class ReadCheck:
    """One rollout of a run at a time is read again."""

    def __init__(self, versions: VersionLoader, engines: EngineClient) -> None:
        self._versions, self._engines = versions, engines
        self.task: asyncio.Task[None] | None = None
        """What reads, or has read last."""

    def offer(self, group: Group, version: int, tasks: asyncio.TaskGroup) -> None:
        """Read a rollout of a group that has ended, which began with `version`, if one is to be read and can be."""
        is_reading = self.task is not None and not self.task.done()
        if is_reading or not self._versions.wants_reading or version != self._versions.loaded:
            return
        if (chosen := _first_reading(group, version)) is not None:
            self.task = tasks.create_task(self._read(chosen), name=f"read {chosen.rollout_id}")

    async def _read(self, chosen: Reading) -> None:
        """Read it and note the difference, unless the engine has another version by now: then another one is read."""
        versions, num_checked = self._versions, self._versions.num_checked
        try:
            answer = await self._engines.read(chosen.token_ids, f"read-{chosen.rollout_id}-{chosen.version}")
            if {span.version for span in answer.versions} != {chosen.version}:
                return
            scores = answer.prompt_logprobs
            assert scores is not None, "`read` raises without"
            versions.rollout_error = float(np.abs(scores - chosen.logprobs)[chosen.is_sampled].mean())
            logger.debug("rollout %s, read again: %.2g nats", chosen.rollout_id, versions.rollout_error)
        except EngineError as error:  # one that is really down fails its next request
            logger.info("rollout %s was not read again: %s", chosen.rollout_id, error)
        versions.wants_reading = versions.num_checked > num_checked


def _first_reading(group: Group, version: int) -> Reading | None:
    """The first rollout of a group that can be compared; None if there is none."""
    for rollout in group.rollouts:
        for branch in rollout.branches if rollout.is_counted else ():
            if (is_sampled := branch.is_sampled[:MAX_TOKENS]).any() and _can_be_read(branch, version):
                parts = branch.token_ids[:MAX_TOKENS], is_sampled, branch.logprobs[:MAX_TOKENS]
                return Reading(rollout.rollout_id, version, *parts)
    return None


def _can_be_read(branch: Branch, version: int) -> bool:
    """Whether the policy of this version alone has sampled a branch, from its whole distribution, and text alone."""
    is_whole = branch.temperature == 1 and branch.support is None and branch.is_greedy is None
    is_own = branch.is_trained and not branch.is_frozen and {span.version for span in branch.versions} == {version}
    return is_own and is_whole and not branch.images
