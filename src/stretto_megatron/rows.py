"""A packed row as Megatron takes it: documents one behind the other, split over the ranks of cp.

Ranks of cp have two chunks of every document, the r-th from its beginning and the r-th from its end, so that causal
attention is balanced; documents are padded for that. With tp > 1 the tokens of a rank are padded to a multiple of tp,
because outside of attention and MLPs each rank of tp has some of them (sequence parallelism). Padding stands at the end
of documents: no token sees it, and it is not scored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from stretto.trainer.batch.pass_inputs import PassInputs

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass
class PackedRow(PackedSeqParams):
    """The documents of a row, for Megatron's layers and for those of model.py.

    bounds: 0, end of the first document, ..., number of tokens, padding included. places: for each rank of cp, which
    tokens of the row it has. chunks: for each chunk of this rank, where it lies among the rank's tokens, and which
    tokens of the row its last token sees.
    """

    bounds: tuple[int, ...] = ()
    places: list[Int[Tensor, " own"]] = field(default_factory=list)
    chunks: tuple[tuple[slice, slice], ...] = ()


@dataclass(frozen=True)
class Row:
    """One pass of this rank.

    token_ids, positions: int [1, own tokens]. scored: which scored tokens of the pass each rank of cp scores.
    predictors: for each of this rank's, the token that predicts it, among those of the rank.
    """

    token_ids: Int[Tensor, "1 own"]
    positions: Int[Tensor, "1 own"]
    packed: PackedRow
    scored: list[Int[Tensor, " _"]]
    predictors: Int[Tensor, " _"]


def build_row(inputs: PassInputs, *, cp: int, cp_rank: int, tp: int, least: int = 0) -> Row:
    """The row of a pass, whose inputs share no tokens between documents.

    tp: what a rank's number of tokens is a multiple of. least: the fewest tokens of the row, with padding.
    """
    assert not inputs.layout.has_parents and inputs.images is None
    device = inputs.token_ids.device
    sources, bounds, positions = _pad(
        inputs.layout.cu_seqlens, multiple=2 * cp if cp > 1 else 1, total=cp * tp, least=least
    )
    shares = [_share(bounds, cp, rank) for rank in range(cp)]
    places = [np.concatenate([np.arange(low, high) for low, high in share]) for share in shares]
    mine = places[cp_rank]
    source = sources[mine]
    token_ids = inputs.token_ids[torch.from_numpy(np.maximum(source, 0)).to(device)]
    token_ids[torch.from_numpy(source < 0).to(device)] = 0
    owner, index = np.empty(len(inputs.token_ids), np.int64), np.empty(len(inputs.token_ids), np.int64)
    for rank, place in enumerate(places):
        own = sources[place]
        owner[own[own >= 0]], index[own[own >= 0]] = rank, np.flatnonzero(own >= 0)
    before = inputs.rows[inputs.predictors].cpu().numpy()
    scored = [np.flatnonzero(owner[before] == rank) for rank in range(cp)]
    to_device = lambda values: torch.from_numpy(values).to(device)
    starts = {low: start for (start, _), low in _starts(bounds, shares[cp_rank])}
    ends = np.cumsum([high - low for low, high in shares[cp_rank]])
    ends_tensor = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in pairwise(bounds))
    packed = PackedRow(
        qkv_format="thd",
        cu_seqlens_q=ends_tensor,
        cu_seqlens_kv=ends_tensor,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        bounds=bounds,
        places=[to_device(place) for place in places],
        chunks=tuple(
            (slice(int(end) - (high - low), int(end)), slice(starts[low], high))
            for (low, high), end in zip(shares[cp_rank], ends)
        ),
    )
    return Row(
        token_ids=token_ids[None],
        positions=to_device(positions[mine])[None],
        packed=packed,
        scored=[to_device(each) for each in scored],
        predictors=to_device(index[before[scored[cp_rank]]]),
    )


def _pad(
    cu_seqlens: tuple[int, ...], *, multiple: int, total: int, least: int
) -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """Documents of multiples of `multiple`, which together have a multiple of `total` tokens, and at least `least`.

    Returns: for each token its index in the pass, -1 for padding; the bounds of documents; positions in documents.
    """
    lengths = np.diff(cu_seqlens)
    starts, lengths = np.asarray(cu_seqlens[:-1])[lengths > 0], lengths[lengths > 0]
    padded = -(-lengths // multiple) * multiple
    together = math.lcm(multiple, total)
    padded[-1] += -(-max(int(padded.sum()), least) // together) * together - padded.sum()
    sources = [np.arange(n) + start if n == m else np.r_[np.arange(n) + start, np.full(m - n, -1)]
               for start, n, m in zip(starts, lengths, padded)]  # fmt: skip
    bounds = tuple(np.concatenate(([0], np.cumsum(padded))).tolist())
    return np.concatenate(sources), bounds, np.concatenate([np.arange(m) for m in padded])


def _share(bounds: tuple[int, ...], cp: int, rank: int) -> list[tuple[int, int]]:
    """The chunks of a rank, as bounds in the row."""
    if cp == 1:
        return [(low, high) for low, high in pairwise(bounds)]
    chunks = []
    for low, high in pairwise(bounds):
        size = (high - low) // (2 * cp)
        chunks += [(low + at * size, low + (at + 1) * size) for at in (rank, 2 * cp - 1 - rank)]
    return chunks


def _starts(bounds: tuple[int, ...], share: list[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    """Each chunk's document and its own beginning."""
    documents = list(pairwise(bounds))
    ends = np.asarray(bounds[1:])
    return [(documents[int(np.searchsorted(ends, low, side="right"))], low) for low, _ in share]
