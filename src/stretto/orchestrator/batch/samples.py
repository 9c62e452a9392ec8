"""Builds one training sample per trained branch, with its agent's advantage on its tokens."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stretto.algorithms.credit import whiten
from stretto.records.rollout import Branch, Group, Rollout
from stretto.records.sample import TrainSample

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def build_samples(groups: Iterable[Group]) -> Generator[None, None, list[TrainSample]]:
    """Samples of all counted rollouts, in group and member order; yields after each group, so that other tasks run."""
    samples: list[TrainSample] = []
    for group in groups:
        samples += to_samples([group])
        yield
    return samples


def to_samples(groups: Iterable[Group]) -> list[TrainSample]:
    """Samples of all counted rollouts, in group and member order, at once."""
    samples: list[TrainSample] = []
    for group in groups:
        counted = [member for member, rollout in enumerate(group.rollouts) if rollout.is_counted]
        by_agent = (
            [group.advantages_of(member) for member in counted] if group.agent_advantages else [{}] * len(counted)
        )
        for member, agents in zip(counted, by_agent):
            branches = group.branch_advantages[member] if group.branch_advantages else ()
            samples += samples_of(group.rollouts[member], group.advantages[member], agents, branches)
    return samples


def whiten_samples(samples: list[TrainSample], envs: Collection[str]) -> list[TrainSample]:
    """Whiten the advantages of these environments over all their trained tokens together."""
    whitened = [sample for sample in samples if sample.env in envs]
    if not whitened:
        return samples
    values = whiten(np.concatenate([sample.advantages[sample.loss_mask] for sample in whitened]))
    parts = iter(np.split(values, np.cumsum([sample.loss_mask.sum() for sample in whitened])[:-1]))
    return [_with_advantages(s, next(parts)) if s.env in envs else s for s in samples]


def _with_advantages(sample: TrainSample, values: Float[np.ndarray, " trained"]) -> TrainSample:
    advantages = np.zeros(len(sample.token_ids), dtype=np.float32)
    advantages[sample.loss_mask] = values
    return msgspec.structs.replace(sample, advantages=advantages)


def samples_of(
    rollout: Rollout,
    advantage: float,
    by_agent: Mapping[str, float] = MappingProxyType({}),
    by_branch: Sequence[float] = (),
) -> list[TrainSample]:
    """One sample per trained branch of a rollout.

    by_agent: advantages of agents that have their own; the others get `advantage`. by_branch: one advantage per branch
    if branches have rewards of their own, else (). The first token of a document is not predicted and never trained.
    """
    samples = []
    for index, branch in enumerate(rollout.branches):
        if not branch.is_trained:
            continue
        loss_mask = trained_tokens(branch)
        if not loss_mask.any():
            continue
        branch_advantage = by_branch[index] if by_branch else by_agent.get(branch.agent, advantage)
        sample = TrainSample(
            sample_id=f"{rollout.rollout_id}/{index}",
            env=rollout.task.env,
            token_ids=branch.token_ids,
            first_version=branch.versions[0].version if branch.versions else 0,
            loss_mask=loss_mask,
            logprobs=branch.logprobs,
            advantages=loss_mask * np.float32(branch_advantage),
            temperature=branch.temperature,
            routed_experts=branch.routed_experts,
            support=branch.support,
            images=branch.images,
        )
        if branch.is_frozen or branch.ref_logprobs is not None or branch.ce_weights is not None:
            distilled = distillation_streams(branch, loss_mask, branch_advantage)
            sample = msgspec.structs.replace(sample, **distilled)
        samples.append(sample)
    return samples


def trained_tokens(branch: Branch) -> Bool[np.ndarray, " tokens"]:
    """Sampled tokens that are trained: not the first, none before trained_from, no greedy ones; bool [tokens]."""
    is_trained = branch.is_sampled.copy()
    if branch.is_greedy is not None and not branch.is_frozen:
        is_trained &= ~branch.is_greedy
    is_trained[:1] = False
    if branch.trained_from is not None:
        for span in branch.versions:
            if span.version < branch.trained_from:
                is_trained[span.start : span.end] = False
    return is_trained


def distillation_streams(branch: Branch, loss_mask: Bool[np.ndarray, " tokens"], advantage: float) -> dict[str, Any]:
    """Streams of a branch for the ce and ref_kl components.

    Tokens that a teacher played are no samples of the policy: they are in ce at temperature 1, not in loss_mask or
    rl. Tokens that a teacher scored are in ref_kl, not in rl. Echoed prompt tokens are in ce; without an advantage,
    only they are trained.
    """
    zeros = np.zeros(len(loss_mask), np.float32)
    if branch.is_frozen:
        return {
            "loss_mask": np.zeros_like(loss_mask),
            "logprobs": zeros,
            "advantages": zeros,
            "temperature": 1.0,
            "routed_experts": None,
            "support": None,
            "ce_weights": loss_mask.astype(np.float32),
        }
    if branch.ref_logprobs is not None:
        return {
            "rl_weights": zeros,
            "ref_kl_weights": loss_mask.astype(np.float32),
            "ref_logprobs": branch.ref_logprobs,
        }
    streams = {"ce_weights": branch.ce_weights}
    return streams if advantage else streams | {"rl_weights": zeros}
