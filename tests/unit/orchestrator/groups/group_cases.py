"""Branches and groups to estimate baselines of."""

from __future__ import annotations

import numpy as np

from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch


def branch(agent, *, is_trained=True):
    return Branch(
        token_ids=np.arange(3, dtype=np.int32),
        is_sampled=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        temperature=1.0,
        versions=(VersionSpan(0, 1, 3),),
        agent=agent,
        is_trained=is_trained,
    )
