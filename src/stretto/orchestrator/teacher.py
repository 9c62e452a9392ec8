"""A frozen teacher says how likely it finds each token of the policy's rollouts.

The answers become part of the rollout (`Branch.ref_logprobs`) before it is in the ledger, so a resumed run
asks nothing twice. What is learned from them stands in algorithms/policy_loss.py (`ref_kl`).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
import numpy as np

from stretto.base.errors import EngineError
from stretto.orchestrator.filters import failed
from stretto.orchestrator.scoring import is_counted
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.records.rollout import Branch, Group, Rollout


class Scorer(Protocol):
    """The teacher's engine client (transports/engine/client.py)."""

    async def wait_ready(self, timeout_s: float) -> None: ...

    async def generate(self, request: GenerateRequest) -> list[Completion]: ...


class Teacher:
    """Scores groups; all samples of a group at once, and groups beside each other."""

    def __init__(self, engine: Scorer, *, ready_timeout_s: float = 600.0, max_failures: int = 32) -> None:
        self._engine, self._ready_timeout_s = engine, ready_timeout_s
        self._max_failures, self._failed_in_a_row = max_failures, 0

    async def wait_ready(self) -> None:
        """Raises: EngineError when the teacher is not healthy in time."""
        try:
            await self._engine.wait_ready(self._ready_timeout_s)
        except EngineError as error:
            raise EngineError(f"[orchestrator.teacher] {error}") from error

    async def score(self, group: Group) -> Group:
        """The group with the teacher's logprobs in every branch of its counted members.

        A teacher that fails, after its retries, fails the whole group, with the cause.

        Raises: EngineError after max_failures groups in a row, so that a run of several environments does not
        go on without those that are taught.
        """
        try:
            rollouts = await asyncio.gather(*(self._score_rollout(r) for r in group.rollouts))
        except EngineError as error:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._max_failures:
                raise EngineError(
                    f"{self._failed_in_a_row} groups in a row failed; teacher: {error}"
                ) from error
            return failed(group, f"EngineError: teacher: {error}")
        self._failed_in_a_row = 0
        return msgspec.structs.replace(group, rollouts=tuple(rollouts))

    async def _score_rollout(self, rollout: Rollout) -> Rollout:
        if not is_counted(rollout):
            return rollout
        names = [f"{rollout.rollout_id}/{index}/teacher" for index in range(len(rollout.branches))]
        branches = await asyncio.gather(*map(self._score_branch, rollout.branches, names))
        metrics = {**rollout.metrics, "teacher_kl": teacher_kl(branches)}
        return msgspec.structs.replace(rollout, branches=tuple(branches), metrics=metrics)

    async def _score_branch(self, branch: Branch, name: str) -> Branch:
        request = GenerateRequest(
            request_id=name,
            prompt_ids=branch.token_ids,
            sampling=SamplingParams(max_tokens=1),
            prompt_logprobs=True,
        )
        [completion] = await self._engine.generate(request)
        scores = completion.prompt_logprobs
        if scores is None or len(scores) != len(branch.token_ids):
            raise EngineError(
                f"{name}: no log-probabilities of the {len(branch.token_ids)} tokens of a prompt"
            )
        if not np.isfinite(scores).all():
            raise EngineError(f"{name}: log-probabilities that are not finite")
        return msgspec.structs.replace(branch, ref_logprobs=scores.astype(np.float32))


def teacher_kl(branches: list[Branch]) -> float:
    """Mean of log q - log teacher over sampled tokens, nats: an estimate of the reverse KL divergence."""
    gaps = [(b.logprobs - b.ref_logprobs)[b.is_sampled] for b in branches if b.ref_logprobs is not None]
    values = np.concatenate(gaps) if gaps else np.zeros(0)
    return float(values.mean()) if len(values) else 0.0
