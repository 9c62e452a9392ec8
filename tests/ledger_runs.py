"""A small run written to a ledger, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.base.paths import RunDir
from stretto.ledger import Ledger
from stretto.ledger.reader import LedgerReader
from stretto.records.generate import Completion, VersionSpan
from stretto.records.partial import Turn
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task

MEMBERS = 4


def task(draw: int) -> Task:
    return Task(env="letters", task_id=f"t{draw}", data={"letters": "cab", "draw": draw})


def branch(draw: int, member: int, *versions: int) -> Branch:
    """Tokens that tell whose they are; one span of 3 tokens per version."""
    num = 3 * len(versions)
    spans = tuple(VersionSpan(version, 3 * i, 3 * i + 3) for i, version in enumerate(versions))
    return Branch(
        token_ids=np.arange(num, dtype=np.int32) + 1000 * draw + 10 * member,
        is_sampled=np.ones(num, bool),
        logprobs=np.full(num, -0.5, np.float32),
        temperature=1.0,
        versions=spans,
    )


def group(
    draw: int, *versions: int, status: RolloutStatus = RolloutStatus.FINISHED, failed: tuple[int, ...] = ()
) -> Group:
    members = tuple(
        Rollout(
            rollout_id=f"g{draw}.{member}",
            group_id=draw,
            member=member,
            task=task(draw),
            status=RolloutStatus.FAILED if member in failed else status,
            branches=() if member in failed else (branch(draw, member, *versions),),
            reward=member / 2,
            metrics={"length": 3.0},
            num_turns=1,
            started_at=1.0,
            finished_at=2.0,
            error="EnvError: no" if member in failed else None,
        )
        for member in range(MEMBERS)
    )
    return Group(group_id=draw, task=task(draw), rollouts=members, advantages=(-0.5, 0.0, 0.0, 0.5))


class Run:
    """A run in miniature: what the orchestrator would tell its ledger."""

    def __init__(self, run_dir: RunDir, *, resumed_step: int | None = None, **settings: Any) -> None:
        self.ledger = Ledger(run_dir, **settings)
        self.version = resumed_step or 0

    def begin(self, resumed_step: int | None = None) -> Run:
        self.ledger.run_started({"max_off_policy_steps": 2}, resumed_step=resumed_step)
        self.publish(self.version)
        return self

    def start(self, draw: int, *, is_new: bool = True) -> None:
        with self.ledger.transaction():
            if is_new:
                self.ledger.task_drawn(draw, task(draw))
            self.ledger.rollouts_started(draw, range(MEMBERS), self.version)

    def roll(self, draw: int, *, is_new: bool = True) -> None:
        self.start(draw, is_new=is_new)
        self.ledger.groups_finished([group(draw, self.version)])

    def publish(self, version: int) -> None:
        self.ledger.version_published(version)
        self.ledger.version_loaded(version)
        self.version = version

    def train(self, step: int, draws: list[int]) -> None:
        self.ledger.batch_shipped(step, draws)
        self.ledger.step_trained(step, {"loss": 1.0})
        self.publish(step)

    def close(self) -> None:
        self.ledger.close()


def steps(run_dir: RunDir, num: int) -> Run:
    """`num` steps of two groups each, draws 0, 1, 2, ..."""
    run = Run(run_dir).begin()
    for step in range(1, num + 1):
        draws = [2 * step - 2, 2 * step - 1]
        for draw in draws:
            run.roll(draw)
        run.train(step, draws)
    return run


def turn(index, *, agent="policy", attempt=0, spans=((0, 0, 4),), reason="stop"):
    n = spans[-1][2]
    return Turn(
        agent=agent, index=index, attempt=attempt, seed=1, temperature=1.0, num_shared=0,
        prompt_ids=np.arange(3, dtype=np.int32),
        completion=Completion(
            token_ids=np.arange(n, dtype=np.int32), logprobs=-np.ones(n, np.float32), finish_reason=reason,
            versions=tuple(VersionSpan(*span) for span in spans),
        ),
    )  # fmt: skip


def num_reused(reader: LedgerReader) -> int:
    """Rollouts trained in a later incarnation than the one that sampled them."""
    condition = "batch_state = 'trained' AND incarnation < shipped_in"
    return len(reader.rows(f"SELECT row FROM live_rollouts WHERE {condition}"))
