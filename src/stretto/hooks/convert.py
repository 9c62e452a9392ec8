"""Rollouts as hooks see them, and samples as the run keeps them."""

from __future__ import annotations

import numpy as np

from stretto.base.errors import EnvError
from stretto.hooks.sample import Sample, Status
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Rollout, RolloutStatus, Task

STATUS_OF = {
    RolloutStatus.FINISHED: Status.COMPLETED,
    RolloutStatus.TRUNCATED: Status.TRUNCATED,
    RolloutStatus.FAILED: Status.FAILED,
    RolloutStatus.DROPPED: Status.ABORTED,
}


def sample_of(rollout: Rollout, text: str, branch: int = 0) -> Sample:
    """One branch of a rollout, with the whole episode's reward; `text` is what was said in it."""
    data = rollout.task.data
    sample = Sample(
        group_index=rollout.group_id,
        index=rollout.member,
        rollout_id=rollout.rollout_id,
        prompt=data.get("prompt", ""),
        response=text,
        label=data.get("label"),
        reward=rollout.reward,
        status=STATUS_OF.get(rollout.status, Status.PENDING),
        metadata=dict(data.get("metadata") or {}),
    )
    if branch < len(rollout.branches):
        tokens = rollout.branches[branch]
        start = response_start(tokens)
        sample.tokens = tokens.token_ids.tolist()
        sample.response_length = len(sample.tokens) - start
        sample.loss_mask = tokens.is_sampled[start:].astype(int).tolist()
        sample.rollout_log_probs = tokens.logprobs[start:].tolist()
        sample.weight_versions = [span.version for span in tokens.versions]
    return sample


def response_start(branch: Branch) -> int:
    """Where the first prompt ends."""
    sampled = np.flatnonzero(branch.is_sampled)
    return int(sampled[0]) if len(sampled) else len(branch.token_ids)


def trained_tokens(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """int32 tokens of a sample, and which of them are trained."""
    tokens = np.asarray(sample.tokens, np.int32)
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    is_trained = np.zeros(len(tokens), bool)
    if not sample.remove_sample and sample.response_length:
        is_trained[-sample.response_length :] = np.asarray(mask, bool)
    return tokens, is_trained


def branch_of(sample: Sample, version: int, temperature: float) -> Branch:
    """A sample that a function brought along with everything it takes to train it.

    version: what the engines had when it was asked for, where the sample names none.

    Raises: EnvError when trained tokens have no finite log-probabilities, or its parts do not fit together.
    """
    sample.check()
    tokens, is_trained = trained_tokens(sample)
    logprobs = np.zeros(len(tokens), np.float32)
    if sample.rollout_log_probs is not None and sample.response_length:
        logprobs[-sample.response_length :] = sample.rollout_log_probs
    elif is_trained.any():
        raise EnvError(
            "a sample without rollout_log_probs cannot be trained; ask the engine for them (logprobs = 1)"
        )
    if not np.isfinite(logprobs[is_trained]).all():
        raise EnvError("rollout_log_probs has nan or inf for a token that is trained; give a number")
    first = int(sample.weight_versions[0]) if sample.weight_versions else version
    sampled = np.flatnonzero(is_trained)
    spans = (VersionSpan(first, int(sampled[0]), int(sampled[-1]) + 1),) if len(sampled) else ()
    return Branch(
        token_ids=tokens,
        is_sampled=is_trained,
        logprobs=np.where(is_trained, logprobs, 0.0).astype(np.float32),
        temperature=temperature,
        versions=spans,
    )


def rollout_of(
    sample: Sample, task: Task, *, group_id: int, member: int, version: int, temperature: float, reward: float
) -> Rollout:
    """A rollout that a function played by itself.

    Raises: EnvError as `branch_of`.
    """
    has_failed = sample.status in (Status.FAILED, Status.ABORTED)
    is_cut = sample.status is Status.TRUNCATED
    return Rollout(
        rollout_id=f"g{group_id}.{member}",
        group_id=group_id,
        member=member,
        task=task,
        status=RolloutStatus.FAILED
        if has_failed
        else RolloutStatus.TRUNCATED
        if is_cut
        else RolloutStatus.FINISHED,
        branches=() if has_failed else (branch_of(sample, version, temperature),),
        reward=0.0 if has_failed else reward,
        num_turns=1,
        error=f"the sample's status is {sample.status.name}" if has_failed else None,
    )
