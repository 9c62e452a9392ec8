"""Gates and filters: only they keep a played group or rollout from training.

A gate rejects whole groups; a rejected group is replaced by another draw. A filter flags single rollouts. If
enforced, it drops them from the batch (their rewards stay in the baseline of the others), and a group with no
rollout left is rejected. If not enforced, it only counts. The ledger has what was dropped and why: the reason of
a dropped draw, `dropped_by` of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stretto.base.errors import StrettoError
from stretto.config.sections.curriculum import Filter, Gate, GibberishFilter, RepetitionFilter, TruncatedFilter
from stretto.config.sections.distill import SftAlgo
from stretto.config.sections.orchestrator import OrchestratorSection
from stretto.orchestrator.groups.advantages import assign_advantages, is_distilled
from stretto.orchestrator.groups.hooks import BatchHooks
from stretto.orchestrator.groups.turns import credit_turns
from stretto.orchestrator.rollout.player import describe, failed_group
from stretto.records.rollout import Group, Rollout, RolloutStatus

if TYPE_CHECKING:
    from jaxtyping import Bool


@dataclass(frozen=True)
class Verdict:
    """An assessed group: its advantages, its dropped members, and why it is not trained, if so."""

    group: Group
    rejected: str | None = None  # why the whole group is not trained
    flags: Mapping[str, int] = field(default_factory=dict)  # number of flagged rollouts by filter
    has_signal: bool = False
    has_failed: bool = False  # no member succeeded


def apply_filters(
    group: Group, gates: Mapping[str, Gate], filters: Sequence[Filter], vocab_size: int | None = None
) -> Verdict:
    """Apply gates and filters to a group that has advantages and at least one counted member."""
    for name, gate in gates.items():
        if GATES[gate.type](group, gate):
            return Verdict(group, f"gate {name}")
    flags: dict[str, int] = {}
    dropped: dict[int, str] = {}
    for section in filters:
        flagged = [
            member
            for member, rollout in enumerate(group.rollouts)
            if rollout.is_counted and is_flagged(group, member, section, vocab_size)
        ]
        flags[section.type] = flags.get(section.type, 0) + len(flagged)
        if section.enforce:
            dropped = dict.fromkeys(flagged, section.type) | dropped
    if not dropped:
        return Verdict(group, None, flags)
    if not any(r.is_counted and m not in dropped for m, r in enumerate(group.rollouts)):
        return Verdict(group, f"filter {min(dropped.values())}", flags)
    return Verdict(drop_members(group, dropped), None, flags)


def assess_group(
    group: Group, cfg: OrchestratorSection, vocab_size: int | None = None, hooks: BatchHooks | None = None
) -> Verdict:
    """Assign advantages to a played group, then apply gates, filters and the user's hook.

    A resumed run calls it again for finished groups. If the estimator or the hook raises, the group fails, with the
    cause as its members' error.
    """
    env = group.task.env
    algo, path, gates, filters = cfg.algo_of(env), cfg.algo_path(env), cfg.gates_of(env), cfg.all_filters
    if any(rollout.dropped_by is not None for rollout in group.rollouts):
        group = undo_filters(group)
    try:
        group, has_signal = assign_advantages(group, algo, path)
        turns = getattr(algo, "turns", None)
        if turns is not None or any(rollout.turns for rollout in group.rollouts):
            group = credit_turns(group, algo, path)
            if turns is not None:
                is_credited = (has_signal and turns.rollout_weight > 0) or is_distilled(group)
                has_signal = is_credited or any(map(any, group.turn_advantages))
        if not any(rollout.is_counted for rollout in group.rollouts):
            return Verdict(group, has_failed=True)
        verdict = apply_filters(group, gates, filters, vocab_size)
        verdict = replace(verdict, has_signal=has_signal)
        if isinstance(algo, SftAlgo) and not has_signal:
            verdict = replace(verdict, rejected=verdict.rejected or "min_reward")
        if verdict.group is not group:
            members = [member for member, rollout in enumerate(verdict.group.rollouts) if rollout.is_counted]
            has_remaining_signal = any(
                verdict.group.has_advantage(m) or verdict.group.rollouts[m].is_distilled for m in members
            )
            verdict = replace(verdict, has_signal=has_signal and has_remaining_signal)
        if hooks is None or verdict.rejected is not None:
            return verdict
        answer = hooks.filter_group(verdict.group)
    except StrettoError as error:
        return Verdict(failed_group(group, describe(error)), has_failed=True)
    if answer.keep:
        return verdict
    if answer.keep_when_insufficient:
        return replace(verdict, has_signal=False)
    reason = f": {answer.reason}" if answer.reason else ""
    return replace(verdict, rejected=f"hook dynamic_sampling_filter{reason}")


# -- gates --


def in_advantage_range(group: Group, gate: Gate) -> bool:
    """Do all advantages of counted members lie in the range?"""
    values = [a for r, a in zip(group.rollouts, group.advantages, strict=True) if r.is_counted]
    return all(gate.reject_min <= value <= gate.reject_max for value in values)


def in_reward_range(group: Group, gate: Gate) -> bool:
    """Does the mean reward of counted members lie in the range?"""
    return gate.reject_min <= mean_reward(group) <= gate.reject_max


GATES: dict[str, Callable[[Group, Gate], bool]] = {
    "advantage_range": in_advantage_range,
    "reward_range": in_reward_range,
}


def mean_reward(group: Group) -> float:
    """Mean reward of the counted members, including those that a filter dropped."""
    rewards = [r.reward for r in group.rollouts if r.is_counted or r.dropped_by is not None]
    return sum(rewards) / len(rewards) if rewards else math.nan


# -- filters --


def is_flagged(group: Group, member: int, section: Filter, vocab_size: int | None = None) -> bool:
    """Does one filter flag one rollout? The gibberish filter needs `vocab_size`."""
    rollout = group.rollouts[member]
    match section:
        case GibberishFilter():
            assert vocab_size, "the gibberish filter needs the size of the vocabulary"
            return is_gibberish(rollout, section, vocab_size)
        case RepetitionFilter():
            return is_repetitive(rollout, section)
        case TruncatedFilter():
            return rollout.status is RolloutStatus.TRUNCATED
    return not group.has_advantage(member) and not rollout.is_distilled


def is_gibberish(rollout: Rollout, section: GibberishFilter, vocab_size: int) -> bool:
    """Is there a sampled token with id > threshold and logprob < -log(vocab) - offset?

    Source: arXiv:2510.02387, section 5.2.
    """
    limit = -math.log(vocab_size) - section.logprob_offset
    return any(
        bool((b.is_sampled & (b.token_ids > section.token_id_threshold) & (b.logprobs < limit)).any())
        for b in rollout.branches
    )


def is_repetitive(rollout: Rollout, section: RepetitionFilter) -> bool:
    """Do `window` sampled tokens in a row each have a probability above the threshold?

    Tokens that were not sampled (a tool's answer) are skipped. Source: arXiv:2506.13585, section 3.2.
    """
    limit = math.log(section.prob_threshold)
    return any(longest_run(b.logprobs[b.is_sampled] > limit) >= section.window for b in rollout.branches)


def longest_run(is_set: Bool[np.ndarray, " tokens"]) -> int:
    """Length of the longest run of True."""
    breaks = np.flatnonzero(np.concatenate(([True], ~is_set, [True])))
    return int(np.diff(breaks).max()) - 1


# -- dropped rollouts --


def drop_members(group: Group, dropped: Mapping[int, str]) -> Group:
    """The group with these members marked as dropped; `dropped` maps them to the filter's name."""
    rollouts = list(group.rollouts)
    for member, name in dropped.items():
        rollouts[member] = msgspec.structs.replace(rollouts[member], dropped_by=name)
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def undo_filters(group: Group) -> Group:
    """The group as it was before filters, so that it can be assessed again."""
    rollouts = tuple(msgspec.structs.replace(rollout, dropped_by=None) for rollout in group.rollouts)
    return msgspec.structs.replace(group, rollouts=rollouts)
