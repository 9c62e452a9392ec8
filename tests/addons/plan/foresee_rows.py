"""Rows of a made-up batch."""

from __future__ import annotations

import numpy as np

from stretto.records.sample import MicroBatch


def rows_of(num_tokens: int, length: int, vocab: int) -> list[MicroBatch]:
    """One row of documents of `length` tokens, all of them trained."""
    bounds = np.arange(0, num_tokens + 1, length, dtype=np.int32)
    weights, zeros = np.ones(num_tokens, np.float32), np.zeros(num_tokens, np.float32)
    weights[bounds[:-1]] = 0
    names = tuple(map(str, range(len(bounds) - 1)))
    return [
        MicroBatch(
            token_ids=np.random.default_rng(1).integers(0, vocab, num_tokens).astype(np.int32),
            cu_seqlens=bounds,
            loss_mask=np.zeros(num_tokens, bool),
            logprobs=zeros,
            advantages=zeros,
            temperatures=np.ones(num_tokens, np.float32),
            ce_weights=weights,
            sample_ids=names,
            envs=("sft",) * len(names),
        )
    ]
