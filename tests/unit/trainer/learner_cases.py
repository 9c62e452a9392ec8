"""Batches for tests of learners: streams of weights, mixtures of experts, scored samples."""

from __future__ import annotations

import numpy as np
from engine_runs import ask, build_core, run
from msgspec.structs import replace
from tiny import VOCAB, build_policy, documents

from stretto.orchestrator.batch import samples_of, to_micro_batch
from stretto.orchestrator.rollout.branch import OpenBranch
from stretto.records.alternatives import Alternatives
from stretto.records.rollout import Rollout, RolloutStatus, Task


def with_streams(mb, seed=0):
    """Per-token weights of all three components, also outside the loss mask."""
    rng = np.random.default_rng(seed)
    firsts = np.zeros(len(mb.token_ids), dtype=bool)
    firsts[mb.cu_seqlens[:-1]] = True
    sparse = lambda: np.where(firsts | (rng.random(len(firsts)) < 0.5), 0, rng.random(len(firsts))).astype(np.float32)
    ref_kl = sparse()
    return replace(
        mb,
        rl_weights=sparse(),
        ce_weights=sparse(),
        ref_kl_weights=ref_kl,
        ref_logprobs=-rng.random(len(firsts)).astype(np.float32),
        alternatives=some_alternatives(np.flatnonzero(ref_kl)[::2], rng),
    )


def some_alternatives(positions, rng, vocab=VOCAB, teachers=2, most=3):
    """Two teachers' likeliest tokens at these positions; some have fewer."""
    shape = (len(positions), teachers, most)
    ids = np.stack([rng.permutation(vocab)[: teachers * most] for _ in positions]).reshape(shape).astype(np.int32)
    ids[:, :, -1][rng.random(shape[:2]) < 0.3] = -1
    shares = rng.random(shape) / most
    return Alternatives(
        positions=positions.astype(np.int32),
        ids=ids,
        logprobs=np.where(ids < 0, 0, np.log(shares)).astype(np.float32),
        weights=np.tile(np.array([0.25, 0.75], np.float32), (len(positions), 1)),
        is_forward=rng.random(len(positions)) < 0.5,
    )


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


def scored(seed=0, **shape):
    """Documents whose tokens all have the score of their document, as the orchestrator sends them."""
    docs = documents(seed, **shape)
    for doc in docs:
        doc["advantages"][:] = doc["loss_mask"] * doc["advantages"].sum()
    return docs
