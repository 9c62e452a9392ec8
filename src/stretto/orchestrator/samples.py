"""Scored rollouts become training samples: one a branch, the advantage on every token the policy sampled."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stretto.orchestrator.scoring import is_counted
from stretto.records.rollout import Group, Rollout
from stretto.records.sample import TrainSample


def to_samples(groups: Iterable[Group]) -> list[TrainSample]:
    """Samples of all counted rollouts, in group and member order."""
    return [
        sample
        for group in groups
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
        if is_counted(rollout)
        for sample in samples_of(rollout, advantage)
    ]


def samples_of(rollout: Rollout, advantage: float) -> list[TrainSample]:
    """One sample a branch. The first token of a document has nothing before it and is never trained."""
    samples = []
    for index, branch in enumerate(rollout.branches):
        loss_mask = branch.is_sampled
        if len(loss_mask) and loss_mask[0]:
            loss_mask = loss_mask.copy()
            loss_mask[0] = False
        if not loss_mask.any():
            continue
        samples.append(
            TrainSample(
                sample_id=f"{rollout.rollout_id}/{index}",
                env=rollout.task.env,
                token_ids=branch.token_ids,
                loss_mask=loss_mask,
                logprobs=branch.logprobs,
                advantages=loss_mask * np.float32(advantage),
                temperature=branch.temperature,
                first_version=branch.versions[0].version,
            )
        )
    return samples
