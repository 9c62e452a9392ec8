"""Has engines read finished rollouts again, and compares what they compute then with what they sampled them by.

Decoding and reading are different programs of an engine: graphs that were captured, drafts, a cache that is filled
token by token. A canary compares them on a few tokens after random ones; this does on what is trained. After each check
by a canary one rollout is read, or a few short ones, which the version that is loaded has sampled alone: of others the
cache held what older weights had computed, and nothing gives that again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stretto.base.errors import StrettoError
from stretto.orchestrator.versions.loader import VersionLoader
from stretto.records.rollout import Branch, Group
from stretto.transports.engine.client import EngineClient

if TYPE_CHECKING:
    from jaxtyping import Bool, Float32, Int32

logger = logging.getLogger(__name__)

MAX_TOKENS = 512
"""Tokens of a rollout that are read, from its first one: vLLM holds the logits of all of them at once."""
MIN_SAMPLED = 16
"""Sampled tokens that are compared: rounding to 16 bits may move a single one by more than the bound of their mean."""


@dataclass(frozen=True)
class Reading:
    """The beginning of a finished rollout, up to MAX_TOKENS."""

    rollout_id: str
    version: int
    token_ids: Int32[np.ndarray, " tokens"]
    is_sampled: Bool[np.ndarray, " tokens"]
    logprobs: Float32[np.ndarray, " tokens"]  # nats, when they were sampled


class ReadCheck:
    """One rollout of a run at a time is read again, and further ones until there are MIN_SAMPLED tokens."""

    def __init__(self, versions: VersionLoader, engines: EngineClient, seq_len: int) -> None:
        self._versions, self._engines = versions, engines
        self._most = min(MAX_TOKENS, seq_len - 1)  # an engine samples one more
        self._gaps: list[Float32[np.ndarray, " sampled"]] = []  # of the rollouts that were read, nats
        self.task: asyncio.Task[None] | None = None
        """What reads, or has read last."""

    def offer(self, group: Group, version: int, tasks: asyncio.TaskGroup) -> None:
        """Read a rollout of a group that has ended, which began with `version`, if one is to be read and can be."""
        is_reading = self.task is not None and not self.task.done()
        if is_reading or not self._versions.wants_reading or version != self._versions.loaded:
            return
        if (chosen := _first_reading(group, version, self._most)) is not None:
            self.task = tasks.create_task(self._read(chosen), name=f"read {chosen.rollout_id}")

    async def _read(self, chosen: Reading) -> None:
        """Read it and note the differences, unless the engine has another version by now: then another one is read."""
        versions, num_checked = self._versions, self._versions.num_checked
        try:
            answer = await self._engines.read(chosen.token_ids, f"read-{chosen.rollout_id}-{chosen.version}")
        except StrettoError as error:  # an engine that is really down fails its next request
            logger.info("rollout %s was not read again: %s", chosen.rollout_id, error)
            versions.wants_reading = versions.num_checked > num_checked
            return
        if {span.version for span in answer.versions} != {chosen.version}:
            return
        assert answer.prompt_logprobs is not None, "`read` raises without"
        self._gaps.append(np.abs(answer.prompt_logprobs - chosen.logprobs)[chosen.is_sampled])
        if sum(map(len, self._gaps)) >= MIN_SAMPLED:
            versions.rollout_error = float(np.concatenate(self._gaps).mean())
            versions.wants_reading = versions.num_checked > num_checked
            self._gaps.clear()


def _first_reading(group: Group, version: int, most: int) -> Reading | None:
    """The first rollout of a group that can be compared, up to `most` tokens; None if there is none."""
    for rollout in group.rollouts:
        for branch in rollout.branches if rollout.is_counted else ():
            if (is_sampled := branch.is_sampled[:most]).any() and _can_be_read(branch, version):
                return Reading(rollout.rollout_id, version, branch.token_ids[:most], is_sampled, branch.logprobs[:most])
    return None


def _can_be_read(branch: Branch, version: int) -> bool:
    """Whether the policy of this version alone has sampled a branch, from its whole distribution, and text alone."""
    is_whole = branch.temperature == 1 and branch.support is None and branch.is_greedy is None
    is_own = branch.is_trained and not branch.is_frozen and {span.version for span in branch.versions} == {version}
    return is_own and is_whole and not branch.images
