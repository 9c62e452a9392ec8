"""Batches for tests of learners: streams of weights, mixtures of experts."""

from __future__ import annotations

import numpy as np
from engine_runs import ask, build_core, run
from tiny import build_policy

from stretto.orchestrator.batch import samples_of, to_micro_batch
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.records.rollout import Rollout, RolloutStatus, Task

PROMPT = np.arange(2, 14, dtype=np.int32)


def build_moe(seed: int = 0, **shape):
    return build_policy(seed, family="qwen3_moe", num_experts=8, num_experts_per_tok=2, **shape)


def sampled(engine_policy, num: int = 6, **settings):
    """A micro batch of samples that an engine with these weights drew, packed by the orchestrator."""
    core = build_core(engine_policy, enable_return_routed_experts=True, **settings)
    completions = run(core, ask("a", PROMPT, n=num, max_tokens=20))[0]
    samples = []
    for member, completion in enumerate(completions):
        branch = OpenBranch(1.0)
        branch.add_turn(PROMPT, completion, 0)
        rollout = Rollout(
            rollout_id=f"g0.{member}", group_id=0, member=member, status=RolloutStatus.FINISHED,
            task=Task(env="env", task_id="0", data={}), branches=(branch.close(),),
        )  # fmt: skip
        samples += samples_of(rollout, 1.0 if member % 2 else -1.0)
    return to_micro_batch(samples)
