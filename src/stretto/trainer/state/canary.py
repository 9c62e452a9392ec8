"""The trainer's part of the canary: log-probabilities of fixed tokens per version.

orchestrator/versions.py compares them with an engine's after the update. Faults in loading weights appear at the start
or after a change, so the first versions are all checked, later ones at an interval or when the orchestrator asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from stretto.base.errors import EngineError
from stretto.models.fp8.checkpoint import BlockLayout, round_inputs, stop_rounding
from stretto.records.sample import MicroBatch
from stretto.records.weights import Canary
from stretto.trainer.learner import Learner

if TYPE_CHECKING:
    from jaxtyping import Int

NUM_ALWAYS_CHECKED = 10
"""The first versions that a process publishes, which are all checked."""


def is_canary_due(version: int, num_published: int, interval: int | None, *, is_wanted: bool) -> bool:
    """True if this version is to be checked.

    num_published: versions that this process published before it.
    """
    if interval is None:
        return False
    return is_wanted or num_published < NUM_ALWAYS_CHECKED or version % interval == 0


def score_canary(learner: Learner, num_tokens: int, layout: BlockLayout | None = None) -> Canary:
    """The log-probabilities of fixed tokens, which are the same for every version of a run.

    layout: that of engines in 8 bits. An engine rounds weights and the rows that they are multiplied with. Both have
    the same relative error, and are independent, so the error of both is sqrt(2) times that of rounded rows alone, with
    which the tokens are scored once more.

    Raises: EngineError when they are not finite: no engine could agree with them.
    """
    canary = _score(learner, num_tokens)
    if layout is None:
        return canary
    policy = learner.policy
    table = getattr(policy, "tensor_map", None)
    hooks = round_inputs(policy, layout.names, table)
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled blocks would not see the hooks
            other = _score(learner, num_tokens)
    finally:
        stop_rounding(policy, hooks)
    error = np.abs(np.subtract(canary.logprobs, other.logprobs))[1:].mean()
    return msgspec.structs.replace(canary, rounding=float(error) * 2**0.5)


def _score(learner: Learner, num_tokens: int) -> Canary:
    token_ids = fixed_tokens(learner.policy.output_weight.shape[0], num_tokens)
    ones, length = np.ones(num_tokens, np.float32), np.array([0, num_tokens], np.int32)
    zeros = np.zeros(num_tokens, np.float32)
    logprobs, _ = learner.logprobs(
        MicroBatch(
            token_ids=token_ids,
            cu_seqlens=length,
            loss_mask=np.ones(num_tokens, bool),
            logprobs=zeros,
            advantages=zeros,
            temperatures=ones,
            sample_ids=("canary",),
            envs=("canary",),
        )
    )
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"weights of version {learner.step} give log-probabilities that are not finite: training has diverged. "
            "Lower [optim] lr, and continue from the last checkpoint with --resume."
        )
    return Canary(tuple(token_ids.tolist()), tuple(logprobs.tolist()))


def fixed_tokens(vocab_size: int, num_tokens: int) -> Int[np.ndarray, " tokens"]:
    """Random token ids, int32; the same for the same vocabulary size."""
    return np.random.default_rng(vocab_size).integers(0, vocab_size, num_tokens, dtype=np.int32)
