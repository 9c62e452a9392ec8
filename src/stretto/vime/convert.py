"""The run's rollouts as the samples that functions read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stretto.data.pictures import image_parts
from stretto.records.rollout import Branch, Rollout, RolloutStatus
from stretto.vime.sample import Message, Sample, Status

Render = Callable[[list[Message], "list[dict] | None"], str]
"""Messages and tools -> the text of a prompt, up to where the reply begins."""

STATUS_OF = {
    RolloutStatus.FINISHED: Status.COMPLETED,
    RolloutStatus.TRUNCATED: Status.TRUNCATED,
    RolloutStatus.FAILED: Status.FAILED,
    RolloutStatus.DROPPED: Status.ABORTED,
}


def sample_number(group_id: int, member: int, group_size: int) -> int:
    """vime's number of a rollout, counted over all groups of the run, each of `group_size` rollouts."""
    return group_id * group_size + member


def prompt_of(data: Mapping[str, Any], render: Render | None) -> tuple[str | list[Message], dict[str, Any]]:
    """A task's prompt as text and its metadata, which then has the messages.

    render: None if the tokenizer is not known here; then a prompt of messages stays one, as do those with images.
    """
    prompt, metadata, tools = data.get("prompt", ""), dict(data.get("metadata") or {}), data.get("tools")
    if tools:
        metadata["tools"] = tools
    if not isinstance(prompt, str) and render is not None and not any(image_parts(prompt)):
        metadata.setdefault("messages", prompt)
        prompt = render(prompt, tools)
    return prompt, metadata


def sample_of(
    rollout: Rollout, text: str, branch: int = 0, *, group_size: int = 1, render: Render | None = None
) -> Sample:
    """One branch of a rollout as a sample, with the branch's reward or else the rollout's; `text` is its response."""
    prompt, metadata = prompt_of(rollout.task.data, render)
    number = sample_number(rollout.group_id, rollout.member, group_size)
    sample = Sample(
        group_index=rollout.group_id,
        index=number,
        rollout_id=number,
        prompt=prompt,
        response=text,
        label=rollout.task.data.get("label"),
        reward=rollout.reward,
        status=Status.ABORTED if rollout.dropped_by else STATUS_OF.get(rollout.status, Status.PENDING),
        metadata=metadata,
    )
    if branch < len(rollout.branches):
        tokens = rollout.branches[branch]
        start = response_start(tokens)
        sample.tokens = tokens.token_ids.tolist()
        sample.response_length = len(sample.tokens) - start
        is_trained = tokens.is_sampled if tokens.is_greedy is None else tokens.is_sampled & ~tokens.is_greedy
        sample.loss_mask = is_trained[start:].astype(int).tolist()
        sample.temperature = tokens.temperature
        if tokens.support is not None:
            support = tokens.support.part(start, len(sample.tokens))
            sample.rollout_top_p_token_ids = support.ids.tolist()
            sample.rollout_top_p_token_lengths = support.sizes.tolist()
        if tokens.reward is not None:
            sample.reward = tokens.reward
        if not np.isnan(tokens.logprobs).any():
            sample.rollout_log_probs = tokens.logprobs[start:].tolist()
        sample.weight_versions = [span.version for span in tokens.versions]
    return sample


def response_start(branch: Branch) -> int:
    """Index of the first sampled token, where the first prompt ends."""
    sampled = np.flatnonzero(branch.is_sampled)
    return int(sampled[0]) if len(sampled) else len(branch.token_ids)
