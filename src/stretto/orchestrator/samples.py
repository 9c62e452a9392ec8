"""Scored rollouts become training samples: one a trained branch, its agent's advantage on every sampled token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from stretto.algorithms.credit import whiten
from stretto.orchestrator.scoring import is_counted
from stretto.records.rollout import Branch, Group, Rollout
from stretto.records.sample import TrainSample


def to_samples(groups: Iterable[Group], whitened: Collection[str] = ()) -> list[TrainSample]:
    """Samples of all counted rollouts, in group and member order.

    The advantages of environments that are `whitened` are so over the trained tokens of all of them.
    """
    samples = [
        sample
        for group in groups
        for member, (rollout, advantage) in enumerate(zip(group.rollouts, group.advantages, strict=True))
        if is_counted(rollout)
        for sample in samples_of(rollout, advantage, group.advantages_of(member))
    ]
    return whiten_samples(samples, whitened) if whitened else samples


def whiten_samples(samples: list[TrainSample], envs: Collection[str]) -> list[TrainSample]:
    """The same samples, with the advantages of these environments whitened together."""
    mine = [sample for sample in samples if sample.env in envs]
    if not mine:
        return samples
    values = whiten(np.concatenate([sample.advantages[sample.loss_mask] for sample in mine]))
    parts = iter(np.split(values, np.cumsum([sample.loss_mask.sum() for sample in mine])[:-1]))
    return [_with_advantages(s, next(parts)) if s.env in envs else s for s in samples]


def _with_advantages(sample: TrainSample, values: np.ndarray) -> TrainSample:
    advantages = np.zeros(len(sample.token_ids), dtype=np.float32)
    advantages[sample.loss_mask] = values
    return msgspec.structs.replace(sample, advantages=advantages)


def samples_of(
    rollout: Rollout, advantage: float, by_agent: Mapping[str, float] = MappingProxyType({})
) -> list[TrainSample]:
    """One sample a branch of an agent that is trained, with the agent's advantage where it has its own.

    The first token of a document has nothing before it and is never trained.
    """
    samples = []
    for index, branch in enumerate(rollout.branches):
        if not branch.is_trained:
            continue
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
                advantages=loss_mask * np.float32(by_agent.get(branch.agent, advantage)),
                temperature=branch.temperature,
                first_version=branch.versions[0].version,
                routed_experts=branch.routed_experts,
                **distilled(branch, loss_mask),
            )
        )
    return samples


def distilled(branch: Branch, loss_mask: np.ndarray) -> dict[str, np.ndarray]:
    """Streams of a branch that a teacher scored: all its trained tokens leave rl for ref_kl."""
    if branch.ref_logprobs is None:
        return {}
    return {
        "rl_weights": np.zeros(len(loss_mask), np.float32),
        "ref_kl_weights": loss_mask.astype(np.float32),
        "ref_logprobs": branch.ref_logprobs,
    }
