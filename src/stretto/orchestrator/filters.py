"""What of a scored group may be trained on: the one place where groups and rollouts are turned away.

A gate judges the whole group: rejected by any, it is replaced by another draw. A filter flags single
rollouts; enforced, it leaves them out of the batch (their rewards stay in the baseline of the others), and
a group that has nothing left is rejected as a whole. Not enforced, it counts. What was turned away, and by
what, stands in the ledger: the reason of a draw that was dropped, the error of a rollout with status dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from stretto.base.errors import StrettoError
from stretto.config.curriculum import Filter, Gate, GibberishFilter, RepetitionFilter
from stretto.config.distill import SftAlgo
from stretto.config.orchestrator import OrchestratorSection
from stretto.orchestrator.batch_hooks import BatchHooks
from stretto.orchestrator.scoring import is_counted, is_distilled, score
from stretto.records.rollout import Group, Rollout, RolloutStatus

FLAG = "filter "
"""How the error of a rollout begins that a filter left out."""
CUT = ", truncated"
"""How it ends where the rollout was that: what it is again when a resumed run judges it anew."""


@dataclass(frozen=True)
class Verdict:
    """A group as it may be trained on, and what was found."""

    group: Group
    rejected: str | None = None  # why the whole group is not trained on
    flags: Mapping[str, int] = field(default_factory=dict)  # rollouts that each filter flagged


@dataclass(frozen=True)
class Settled:
    """A group with its advantages, what may be trained of it, and whether it teaches anything."""

    verdict: Verdict
    has_signal: bool

    @property
    def group(self) -> Group:
        return self.verdict.group

    @property
    def has_failed(self) -> bool:
        """Has no member succeeded?"""
        return not any(map(is_counted, self.group.rollouts))


def judge(
    group: Group, gates: Mapping[str, Gate], filters: Sequence[Filter], vocab_size: int | None = None
) -> Verdict:
    """What gates and filters say about a scored group with at least one counted member."""
    for name, gate in gates.items():
        if GATES[gate.type](group, gate):
            return Verdict(group, f"gate {name}")
    flags: dict[str, int] = {}
    dropped: dict[int, str] = {}
    for section in filters:
        flagged = [
            member
            for member, rollout in enumerate(group.rollouts)
            if is_counted(rollout) and is_flagged(group, member, section, vocab_size)
        ]
        flags[section.type] = flags.get(section.type, 0) + len(flagged)
        if section.enforce:
            dropped |= {member: section.type for member in flagged if member not in dropped}
    left = [m for m, r in enumerate(group.rollouts) if is_counted(r) and m not in dropped]
    if not left and dropped:
        return Verdict(group, f"filter {min(dropped.values())}", flags)
    return Verdict(without(group, dropped), None, flags)


def settle(
    group: Group, cfg: OrchestratorSection, vocab_size: int | None = None, hooks: BatchHooks | None = None
) -> Settled:
    """Credit, gates and filters of a group that was played, or that a resumed run takes over.

    Credit or a hook that raises fails the group, with the cause as the error of its members.
    """
    group = unfiltered(group)
    try:
        group, has_signal = score(group, cfg.algo_of(group.task.env), cfg.algo_path(group.task.env))
    except StrettoError as error:
        return Settled(Verdict(failed(group, f"{type(error).__name__}: {error}")), False)
    if not any(map(is_counted, group.rollouts)):
        return Settled(Verdict(group), False)
    verdict = judge(group, cfg.gates_of(group.task.env), cfg.filters, vocab_size)
    if isinstance(cfg.algo_of(group.task.env), SftAlgo) and not has_signal:
        verdict = Verdict(verdict.group, verdict.rejected or "min_reward", verdict.flags)
    if verdict.group is not group:
        left = zip(verdict.group.rollouts, verdict.group.advantages, strict=True)
        has_signal = has_signal and any(a or is_distilled(r) for r, a in left if is_counted(r))
    if hooks is None or verdict.rejected is not None:
        return Settled(verdict, has_signal)
    try:
        said = hooks.admits(verdict.group)
    except StrettoError as error:
        return Settled(Verdict(failed(group, f"{type(error).__name__}: {error}")), False)
    if said.keep:
        return Settled(verdict, has_signal)
    if said.keep_when_insufficient:
        return Settled(verdict, False)
    reason = "hook dynamic_sampling_filter" + (f": {said.reason}" if said.reason else "")
    return Settled(Verdict(verdict.group, reason, verdict.flags), has_signal)


def failed(group: Group, cause: str) -> Group:
    """The group with all members failed for one cause; what was sampled stays to be read."""
    rollouts = tuple(
        msgspec.structs.replace(r, status=RolloutStatus.FAILED, error=r.error or cause)
        for r in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=rollouts, advantages=(0.0,) * len(rollouts))


# -- gates --


def in_advantage_range(group: Group, gate: Gate) -> bool:
    """Do all advantages of counted members lie in the range?"""
    values = [a for r, a in zip(group.rollouts, group.advantages, strict=True) if is_counted(r)]
    return all(gate.reject_min <= value <= gate.reject_max for value in values)


def in_reward_range(group: Group, gate: Gate) -> bool:
    """Does the mean reward of counted members lie in the range?"""
    return gate.reject_min <= mean_reward(group) <= gate.reject_max


GATES: dict[str, Callable[[Group, Gate], bool]] = {
    "advantage_range": in_advantage_range,
    "reward_range": in_reward_range,
}


def mean_reward(group: Group) -> float:
    """Mean reward of the members that were counted when the group was scored, left out since or not."""
    rewards = [r.reward for r in group.rollouts if is_counted(r) or is_filtered(r)]
    return sum(rewards) / len(rewards) if rewards else math.nan


# -- filters --


def is_flagged(group: Group, member: int, section: Filter, vocab_size: int | None = None) -> bool:
    """Does one filter flag one rollout? `vocab_size` is what gibberish is measured against."""
    rollout = group.rollouts[member]
    match section:
        case GibberishFilter():
            assert vocab_size, "the gibberish filter needs the size of the vocabulary"
            return is_gibberish(rollout, section, vocab_size)
        case RepetitionFilter():
            return is_repetitive(rollout, section)
    return group.advantages[member] == 0.0 and not is_distilled(rollout)


def is_gibberish(rollout: Rollout, section: GibberishFilter, vocab_size: int) -> bool:
    """Any sampled token with id > threshold and logprob < -log(vocab) - offset?

    Source: arXiv:2510.02387, section 5.2.
    """
    limit = -math.log(vocab_size) - section.logprob_offset
    return any(
        bool((b.is_sampled & (b.token_ids > section.token_id_threshold) & (b.logprobs < limit)).any())
        for b in rollout.branches
    )


def is_repetitive(rollout: Rollout, section: RepetitionFilter) -> bool:
    """Do `window` sampled tokens in a row each have a probability above the threshold?

    Tokens that were given (a tool's answer) neither count nor end a run. Source: arXiv:2506.13585, section 3.2.
    """
    limit = math.log(section.prob_threshold)
    return any(longest_run(b.logprobs[b.is_sampled] > limit) >= section.window for b in rollout.branches)


def longest_run(is_set: np.ndarray) -> int:
    """Length of the longest run of True."""
    breaks = np.flatnonzero(np.concatenate(([True], ~is_set, [True])))
    return int(np.diff(breaks).max()) - 1


# -- rollouts that are left out --


def without(group: Group, dropped: Mapping[int, str]) -> Group:
    """The group with these members recorded and not trained, by the filter that flagged them."""
    if not dropped:
        return group
    rollouts = tuple(
        msgspec.structs.replace(
            r,
            status=RolloutStatus.DROPPED,
            error=FLAG + dropped[m] + (CUT if r.status is RolloutStatus.TRUNCATED else ""),
        )
        if m in dropped
        else r
        for m, r in enumerate(group.rollouts)
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def is_filtered(rollout: Rollout) -> bool:
    """Was this rollout left out by a filter?"""
    return rollout.status is RolloutStatus.DROPPED and (rollout.error or "").startswith(FLAG)


def unfiltered(group: Group) -> Group:
    """The group as it was before filters, to be scored and judged again."""
    if not any(map(is_filtered, group.rollouts)):
        return group
    rollouts = tuple(
        msgspec.structs.replace(r, status=_status_before(r), error=None) if is_filtered(r) else r
        for r in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def _status_before(rollout: Rollout) -> RolloutStatus:
    return RolloutStatus.TRUNCATED if (rollout.error or "").endswith(CUT) else RolloutStatus.FINISHED
