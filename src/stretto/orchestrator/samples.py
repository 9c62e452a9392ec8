"""Scored rollouts become training samples: one a trained branch, its agent's advantage on every sampled token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

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
        loss_mask = trained_tokens(branch)
        if not loss_mask.any():
            continue
        mine = by_agent.get(branch.agent, advantage)
        streams = {
            "loss_mask": loss_mask,
            "logprobs": branch.logprobs,
            "advantages": loss_mask * np.float32(mine),
            "temperature": branch.temperature,
            "routed_experts": branch.routed_experts,
        }
        samples.append(
            TrainSample(
                sample_id=f"{rollout.rollout_id}/{index}",
                env=rollout.task.env,
                token_ids=branch.token_ids,
                first_version=branch.versions[0].version if branch.versions else 0,
                **streams | distilled(branch, loss_mask, mine),
            )
        )
    return samples


def trained_tokens(branch: Branch) -> np.ndarray:
    """Sampled tokens, bool: not the first, and of a rollout that was continued perhaps only the newer ones."""
    is_trained = branch.is_sampled.copy()
    is_trained[:1] = False
    if branch.trained_from is not None:
        for span in branch.versions:
            if span.version < branch.trained_from:
                is_trained[span.start : span.end] = False
    return is_trained


def distilled(branch: Branch, loss_mask: np.ndarray, advantage: float) -> dict[str, Any]:
    """Streams of a branch that is learned from otherwise than by its reward, or besides.

    What a teacher played is no sample of the policy: its tokens leave loss_mask and rl for ce, at temperature 1.
    What a teacher scored leaves rl for ref_kl. Given tokens of some weight are in ce; where there is no
    advantage, they alone are learned.
    """
    if branch.is_frozen:
        nothing = np.zeros(len(loss_mask), np.float32)
        return {
            "loss_mask": np.zeros_like(loss_mask),
            "logprobs": nothing,
            "advantages": nothing,
            "temperature": 1.0,
            "routed_experts": None,
            "ce_weights": loss_mask.astype(np.float32),
        }
    if branch.ref_logprobs is None and branch.ce_weights is not None:
        streams = {"ce_weights": branch.ce_weights}
        return streams if advantage else streams | {"rl_weights": np.zeros(len(loss_mask), np.float32)}
    if branch.ref_logprobs is None:
        return {}
    return {
        "rl_weights": np.zeros(len(loss_mask), np.float32),
        "ref_kl_weights": loss_mask.astype(np.float32),
        "ref_logprobs": branch.ref_logprobs,
    }
