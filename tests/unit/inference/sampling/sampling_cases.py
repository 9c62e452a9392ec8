"""Sampling settings, rows with these settings, and a slow reference of the processed distribution."""

from __future__ import annotations

import math

import numpy as np

from stretto.inference.embedded.sampler import SamplingRows


def build_rows(num: int, *, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0) -> SamplingRows:
    is_greedy = temperature == 0
    full = lambda value, dtype: np.full(num, value, dtype)
    return SamplingRows(
        inv_temperature=full(1.0 if is_greedy else 1 / temperature, np.float32),
        is_greedy=full(is_greedy, np.bool_),
        top_k=full(top_k or np.iinfo(np.int64).max, np.int64),
        top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32),
        is_filtered=full(not is_greedy and (top_k is not None or top_p < 1 or min_p > 0), np.bool_),
    )


def slow_distribution(logits: list[float], temperature, top_k, top_p, min_p) -> list[float]:
    """The processed distribution in plain Python, one row."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    keep = [w >= min_p for w in weights]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    for rank, i in enumerate(order):
        keep[i] &= top_k is None or rank < top_k
    left = sum(w for w, k in zip(weights, keep) if k)
    mass = 0.0
    for rank, i in enumerate(order):
        if keep[i]:
            keep[i] = rank == 0 or mass < top_p
            mass += weights[i] / left
    left = sum(w for w, k in zip(weights, keep) if k)
    return [w / left if k else 0.0 for w, k in zip(weights, keep)]


SETTINGS = [
    dict(temperature=1.0, top_k=None, top_p=1.0, min_p=0.0),
    dict(temperature=0.7, top_k=None, top_p=1.0, min_p=0.0),
    dict(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0),
    dict(temperature=1.3, top_k=None, top_p=0.8, min_p=0.0),
    dict(temperature=1.0, top_k=None, top_p=1.0, min_p=0.2),
    dict(temperature=0.9, top_k=9, top_p=0.9, min_p=0.05),
    dict(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0),
]
