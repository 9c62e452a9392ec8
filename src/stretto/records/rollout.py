"""A task, a policy's rollout of it, and the group of rollouts of one task that are compared."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from stretto.records.alternatives import Alternatives
from stretto.records.generate import VersionSpan
from stretto.records.images import Image
from stretto.records.outcomes import Reason
from stretto.records.support import Support


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do in one environment."""

    env: str  # the environment's name in this run
    task_id: str  # stable within the environment
    data: dict[str, Any]  # the environment's own; it can be written as JSON


class RolloutStatus(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"  # reward is valid
    TRUNCATED = "truncated"  # hit a token, turn or time limit; reward is valid
    FAILED = "failed"  # environment or engine failed; excluded from baselines and training
    DROPPED = "dropped"  # finished but never trained: stale, zero signal, cancelled


class TurnSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens start:end of a branch are the reply of this turn of its rollout."""

    turn: int
    start: int
    end: int


class ScoredTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment said of one turn of a rollout; None: nothing."""

    agent: str
    reward: float | None = None  # beside the rollout's reward
    value: float | None = None  # of the state before it, in units of the rollout's reward
    state: str | None = None  # a name of that state


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence of a rollout, exactly as the engine saw it.

    A rollout has one branch unless its history was rewritten. Index t of every array belongs to token t. Tokens with
    is_sampled=False are prompt, tool or environment text.
    """

    token_ids: np.ndarray  # int32 [tokens]
    is_sampled: np.ndarray  # bool  [tokens]
    # float32 [tokens], nats under the sampling policy; 0 where not sampled, nan where a user's function gave none (the
    # trainer then uses its own).
    logprobs: np.ndarray
    temperature: float
    versions: tuple[VersionSpan, ...]  # versions that sampled the tokens; indices are those of this branch
    agent: str = "policy"  # agent whose tokens these are; most rollouts have one agent
    is_trained: bool = True  # False for an agent that takes part but is not trained
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, top_k]
    support: Support | None = None  # tokens that each sampled token was drawn from; None = all
    # bool [tokens], tokens that were sampled at temperature 0 and are not trained; None if there are none.
    is_greedy: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None  # float32 [tokens], nats, of a teacher; such a branch is distilled
    # What teachers hold for likeliest at sampled tokens, for an algo with `top_k`.
    alternatives: Alternatives | None = None
    ce_weights: np.ndarray | None = None  # float32 [tokens], cross-entropy weights; None = all 0
    trained_from: int | None = None  # oldest version whose tokens are trained, if the rollout was continued
    images: tuple[Image, ...] = ()  # those of the tokens, in the order of their placeholders
    is_frozen: bool = False  # sampled by a teacher: trained by cross-entropy, has no versions
    reward: float | None = None  # of this branch alone; None: its agent's reward applies
    turns: tuple[TurnSpan, ...] = ()  # its replies, if the turns of the rollout are scored


COUNTED = (RolloutStatus.FINISHED, RolloutStatus.TRUNCATED)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One whole rollout."""

    rollout_id: str  # g<draw number>.<member>
    group_id: int  # the draw number: n for the n-th task drawn in this run, from 0
    member: int  # its number in the group, from 0
    task: Task
    status: RolloutStatus
    branches: tuple[Branch, ...] = ()
    reward: float = 0.0
    agent_rewards: dict[str, float] = {}  # rewards of agents that do not get `reward`
    metrics: dict[str, float] = {}
    num_turns: int = 0
    turns: tuple[ScoredTurn, ...] = ()  # all of them, in the order of the requests; () if none is scored
    started_at: float = 0.0  # unix seconds
    finished_at: float = 0.0
    env_s: float = 0.0  # seconds in which it ran and waited for no engine: its environment's turns and reward
    error: str | None = None
    dropped_by: str | None = None  # the filter that keeps it from training, whatever its status
    reason: Reason | None = None  # why it ended, of records/outcomes.py; None: by itself
    num_lost_tokens: int = 0  # sampled ones of a failed rollout, whose branches are not kept

    @property
    def is_counted(self) -> bool:
        """Whether it belongs to its group's baseline and to the batch."""
        return self.status in COUNTED and self.dropped_by is None

    @property
    def is_distilled(self) -> bool:
        """Whether it is trained even if its advantage is 0: by distillation or cross-entropy."""
        return any(
            branch.ref_logprobs is not None or branch.is_frozen or branch.ce_weights is not None
            for branch in self.branches
            if branch.is_trained
        )

    @property
    def is_frozen(self) -> bool:
        """Whether a teacher played it; it is then never too old to train on."""
        return any(branch.is_frozen for branch in self.branches)

    @property
    def first_version(self) -> int | None:
        """Version that sampled the rollout's first token; staleness is measured from it."""
        versions = [b.versions[0].version for b in self.branches if b.versions]
        return min(versions) if versions else None

    def reward_of(self, agent: str) -> float:
        """The reward of this agent."""
        return self.agent_rewards.get(agent, self.reward)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(np.count_nonzero(b.is_sampled)) for b in self.branches)

    @property
    def num_tokens(self) -> int:
        return sum(len(b.token_ids) for b in self.branches)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one drawn task, in member order, and their advantages."""

    group_id: int
    task: Task
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...] = ()  # one per rollout; 0 if it failed; the largest of its agents'
    # By agent, if several agents are trained: one advantage per rollout.
    agent_advantages: dict[str, tuple[float, ...]] = {}
    # By member, if branches have rewards of their own: one advantage per branch.
    branch_advantages: tuple[tuple[float, ...], ...] = ()
    # By member, if the algo credits turns: what each turn's tokens get beside the advantage of their rollout.
    turn_advantages: tuple[tuple[float, ...], ...] = ()
    # By member, if the trainer makes advantages of rewards: the reward of each turn.
    turn_rewards: tuple[tuple[float, ...], ...] = ()

    def has_advantage(self, member: int) -> bool:
        """Has the member, or one of its turns, an advantage other than 0?"""
        return self.advantages[member] != 0.0 or bool(self.turn_advantages and any(self.turn_advantages[member]))

    def advantages_of(self, member: int) -> dict[str, float]:
        """The member's advantage by agent; empty unless several agents are trained."""
        return {agent: values[member] for agent, values in self.agent_advantages.items()}
