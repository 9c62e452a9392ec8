"""Sample tokens from logits: temperature, min-p, top-k, top-p; all rows at once.

A token is sampled by the inverse distribution function from one uniform number, which is a hash of (seed, sample,
position). So what a request samples depends on its own logits only, not on the batch, on preemption, or on how its
prompt was cut into chunks. Every operation here treats each row by itself, so equal logits give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.models.device.kernels import PassKernels
from stretto.records.generate import GenerateRequest, member_seed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt64

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingRows:
    """How each row of logits is sampled."""

    inv_temperature: Float[np.ndarray, " rows"]
    is_greedy: Bool[np.ndarray, " rows"]
    top_k: Int[np.ndarray, " rows"]
    top_p: Float[np.ndarray, " rows"]
    min_p: Float[np.ndarray, " rows"]
    is_filtered: Bool[np.ndarray, " rows"]

    @cached_property
    def is_plain(self) -> bool:
        """Whether every row is sampled from the model's own distribution."""
        is_changed = (self.inv_temperature != 1.0) | self.is_greedy | self.is_filtered
        return not is_changed.any()


def stream_key(seed: int, member: int) -> int:
    """The random key of sample `member` of a request with this seed."""
    return _mix_int(_mix_int(member_seed(seed, member) & _MASK) + _GOLDEN)


def uniforms(keys: UInt64[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
    """One uniform float64 in [0, 1) per (key, position), from a counter-based generator.

    Source: splitmix64 finaliser, Steele, Lea, Flood 2014 ("Fast splittable pseudorandom number generators").
    """
    x = keys + positions.astype(np.uint64) * np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Float[Tensor, "rows vocab"],
    rows: SamplingRows,
    u: Float[np.ndarray, " rows"],
    supports: dict[int, Int[np.ndarray, " kept"]] | None = None,
    kernels: PassKernels | None = None,
) -> tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
    """Sample tokens; returns them with their logprobs (nats) under the processed distribution.

    logits (float32) are overwritten. supports: filled with the token ids that each filtered row was sampled from; the
    ids are empty if the filter removed nothing.
    """
    device = logits.device
    if not rows.is_plain and (rows.inv_temperature != 1.0).any():
        logits *= torch.from_numpy(rows.inv_temperature).to(device).unsqueeze(1)
    if not rows.is_plain and rows.is_filtered.any():
        index = torch.from_numpy(np.flatnonzero(rows.is_filtered))
        logits[index], order, sizes = _filter(logits[index], rows, index)
        if supports is not None:
            supports.update(zip(index.tolist(), _support_ids(order, sizes)))
    if kernels is not None:
        has_greedy = not rows.is_plain and rows.is_greedy.any()
        return kernels.sample(logits.contiguous(), u, rows.is_greedy if has_greedy else None)
    probs = torch.softmax(logits, dim=-1)
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    # The target is strictly below the total, so the first entry above it has a positive probability.
    total = cdf[:, -1]
    target = torch.minimum(torch.from_numpy(u).to(device) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target.unsqueeze(1), right=True)
    if not rows.is_plain and rows.is_greedy.any():
        best = logits.argmax(dim=-1, keepdim=True)
        tokens = torch.where(torch.from_numpy(rows.is_greedy).to(device).unsqueeze(1), best, tokens)
    tokens = tokens.clamp_(max=logits.shape[1] - 1)  # a row of NaN (broken weights) must give a valid id, too
    logprobs = probs.gather(1, tokens).log()
    return tokens.squeeze(1).cpu().numpy(), logprobs.squeeze(1).cpu().numpy()


class PromptScores:
    """Logprobs of a prompt's tokens, filled position by position; its arrays become fields of a Completion."""

    def __init__(self, spec: GenerateRequest) -> None:
        size, top = len(spec.prompt_ids), spec.top_prompt_logprobs
        self.logprobs = np.zeros(size, np.float32)
        self.top_ids = np.zeros((size, top), np.int32) if top else None
        self.top_logprobs = np.zeros((size, top), np.float32) if top else None
        self._targets = None if spec.prompt_targets is None else spec.prompt_targets.astype(np.int64)
        self.target_logprobs = None if self._targets is None else np.full(self._targets.shape, np.nan, np.float32)

    def fill(self, first: int, logits: Float[Tensor, "rows vocab"], tokens: Int[np.ndarray, " rows"]) -> None:
        """Score the prompt's tokens from position `first` on under the unprocessed distribution."""
        scores, stop = torch.log_softmax(logits, dim=-1), first + len(tokens)
        self.logprobs[first:stop] = _scores_of(scores, tokens[:, None])[:, 0]
        if self.top_ids is not None and self.top_logprobs is not None:
            values, ids = scores.topk(self.top_ids.shape[1], dim=-1)
            self.top_ids[first:stop] = ids.cpu().numpy()
            self.top_logprobs[first:stop] = values.cpu().numpy()
        if self._targets is not None and self.target_logprobs is not None:
            targets = self._targets[first - 1 : stop - 1]
            logprobs = _scores_of(scores, targets.clip(0))
            self.target_logprobs[first - 1 : stop - 1] = np.where(targets < 0, np.nan, logprobs)


def _scores_of(scores: Float[Tensor, "rows vocab"], ids: Int[np.ndarray, "rows n"]) -> Float[np.ndarray, "rows n"]:
    index = torch.from_numpy(ids.astype(np.int64)).to(scores.device)
    return scores.gather(1, index).cpu().numpy()


def _filter(logits: Float[Tensor, "rows vocab"], rows: SamplingRows, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Set tokens removed by min-p, then top-k, then top-p to -inf; the likeliest token is always kept.

    Also returns the tokens of each row, likeliest first, and how many of them are kept.
    """

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[index.numpy()]).to(logits.device).unsqueeze(1)

    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    is_cut = ranked < ranked[:, :1] + column(rows.min_p).log()
    is_cut |= torch.arange(logits.shape[1], device=logits.device) >= column(rows.top_k)
    is_cut |= ranked == -torch.inf  # tokens that the request bans
    probs = torch.softmax(ranked.masked_fill(is_cut, -torch.inf), dim=-1)
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    top_p = column(rows.top_p)
    is_cut |= (before >= top_p) & (top_p < 1)
    is_cut[:, 0] = False
    filtered = torch.empty_like(logits).scatter_(1, order, ranked.masked_fill(is_cut, -torch.inf))
    return filtered, order, (~is_cut).sum(dim=-1)


def _support_ids(order: Int[Tensor, "rows vocab"], sizes: Int[Tensor, " rows"]) -> list[Int[np.ndarray, " kept"]]:
    """The first sizes[i] tokens of each row i; an empty array for a row that keeps all tokens."""
    sizes = torch.where(sizes < order.shape[1], sizes, 0)
    kept = order[:, : int(sizes.max())].to("cpu", torch.int32).numpy()
    return [row[:size].copy() for row, size in zip(kept, sizes.tolist())]


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
