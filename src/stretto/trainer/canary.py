"""The trainer's half of the canary: its own log-probabilities of fixed tokens under the weights it publishes.

orchestrator/policy.py compares them with an engine's after every update.
"""

from __future__ import annotations

import numpy as np

from stretto.records.sample import MicroBatch
from stretto.records.weights import Canary
from stretto.trainer.learner import Learner


def sing(learner: Learner, num_tokens: int) -> Canary:
    """Score tokens spread over the vocabulary, the same for every version of a run."""
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
    return Canary(tuple(token_ids.tolist()), tuple(logprobs.tolist()))


def fixed_tokens(vocab_size: int, num_tokens: int) -> np.ndarray:
    """int32 [num_tokens], drawn without regard to meaning."""
    return np.random.default_rng(vocab_size).integers(0, vocab_size, num_tokens, dtype=np.int32)
