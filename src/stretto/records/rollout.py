"""A task, what a policy made of it (rollout), and the rollouts of one task that are compared (group)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from stretto.records.generate import VersionSpan


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do in one environment. `data` is the environment's own and JSON-able."""

    env: str  # the environment's name in this run
    task_id: str  # stable within the environment
    data: dict[str, Any]


class RolloutStatus(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"  # reward is valid
    TRUNCATED = "truncated"  # hit a token, turn or time limit; reward is valid
    FAILED = "failed"  # environment or engine failed; excluded from baselines and training
    DROPPED = "dropped"  # finished but never trained: stale, zero signal, cancelled


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence of a rollout exactly as the engine saw it; a rollout has one unless its history was rewritten.

    Index t of every array belongs to token t. Tokens with is_sampled=False are prompt, tool or environment text.
    """

    token_ids: np.ndarray  # int32 [tokens]
    is_sampled: np.ndarray  # bool  [tokens]
    logprobs: np.ndarray  # float32 [tokens], nats under the sampling policy; 0 where not sampled
    temperature: float
    versions: tuple[VersionSpan, ...]  # spans over token indices of this branch that the policy sampled
    agent: str = "policy"  # whose stream this is; an episode of one policy has one agent
    is_trained: bool = True  # False: an agent that plays along and is not learned from
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, top_k]
    ref_logprobs: np.ndarray | None = None  # float32 [tokens], nats, of a teacher; such a branch is distilled
    ce_weights: np.ndarray | None = None  # float32 [tokens], of given tokens in the cross-entropy; None: 0
    trained_from: int | None = None  # tokens of older versions are not trained: the rollout was continued
    is_frozen: bool = (
        False  # sampled by a teacher, not by the policy: learned by cross-entropy, has no versions
    )


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One whole episode. Ids are `g<draw>.<member>`; a draw is the n-th task drawn in this run."""

    rollout_id: str
    group_id: int  # the draw number
    member: int
    task: Task
    status: RolloutStatus
    branches: tuple[Branch, ...] = ()
    reward: float = 0.0
    agent_rewards: dict[str, float] = {}  # by agent, where agents are paid differently; others get `reward`
    metrics: dict[str, float] = {}
    num_turns: int = 0
    started_at: float = 0.0  # unix seconds
    finished_at: float = 0.0
    error: str | None = None

    @property
    def is_frozen(self) -> bool:
        """Did a teacher play it? It is then never too old."""
        return any(branch.is_frozen for branch in self.branches)

    @property
    def first_version(self) -> int | None:
        """Version of the first token that the policy sampled: what staleness is measured from."""
        versions = [b.versions[0].version for b in self.branches if b.versions]
        return min(versions) if versions else None

    def reward_of(self, agent: str) -> float:
        """What this agent was paid."""
        return self.agent_rewards.get(agent, self.reward)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(np.count_nonzero(b.is_sampled)) for b in self.branches)

    @property
    def num_tokens(self) -> int:
        return sum(len(b.token_ids) for b in self.branches)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one drawn task, in member order, and their advantages once credit was assigned."""

    group_id: int
    task: Task
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...] = ()  # one per rollout; 0 for failed ones; of several agents the largest
    agent_advantages: dict[
        str, tuple[float, ...]
    ] = {}  # where several agents are trained: one per rollout each

    def advantages_of(self, member: int) -> dict[str, float]:
        """The advantage of each agent that has one of its own."""
        return {agent: values[member] for agent, values in self.agent_advantages.items()}
