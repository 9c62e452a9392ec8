"""A micro batch as the tensors of one forward pass.

Work is saved where the result stays the same, because attention is causal and a loss is a sum over tokens:
documents are cut behind their last trained token (the last token of a document predicts nothing, padding
trains nothing); documents that begin with the same prompt, as the samples of a group do, share it and
continue it as segments; segments are sorted by length, so that equal ones share an attention call;
log-probabilities, and the last block's work, are asked for trained tokens only. All of it is numpy, with
one copy to the device a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms.losses import TokenCounts, TokenStreams
from stretto.algorithms.segments import Segments
from stretto.base.errors import DataError
from stretto.models.attention import PackedLayout
from stretto.records.sample import MicroBatch


@dataclass(frozen=True)
class Rows:
    """One forward pass: packed inputs, and for each trained token what it is and what predicts it."""

    token_ids: Tensor  # int64 [inputs]
    layout: PackedLayout
    rows: Tensor  # int64 [rows]: the inputs that predict something
    predictors: Tensor  # int64 [trained]: which of these rows predicts the token
    targets: Tensor  # int64 [trained]
    temperatures: Tensor  # float32 [trained]
    streams: TokenStreams
    sources: np.ndarray  # int64 [trained]: index of the token in the micro batch
    documents: np.ndarray  # int64 [trained]: its document there
    routes: Tensor | None = None  # int32 [inputs, layers, top_k]: experts to use (with_routes)


IDLE = MicroBatch(
    token_ids=np.zeros(2, np.int32),
    cu_seqlens=np.array([0, 2], np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
    temperatures=np.ones(2, np.float32),
    sample_ids=("idle",),
    envs=("idle",),
)
"""Two tokens, for a pass whose result nobody takes."""


@dataclass(frozen=True)
class Membership:
    """Weights of each component for every token of a micro batch; None: no token of it is a member."""

    rl: np.ndarray | None
    ce: np.ndarray | None
    ref_kl: np.ndarray | None

    @classmethod
    def of(cls, mb: MicroBatch) -> Membership:
        """rl: loss_mask and weight not 0 (default 1); ce and ref_kl: weight not 0 (default 0)."""
        rl = mb.loss_mask.astype(np.float32) if mb.rl_weights is None else mb.rl_weights * mb.loss_mask
        return cls(
            *(w if w is not None and np.any(w) else None for w in (rl, mb.ce_weights, mb.ref_kl_weights))
        )

    @property
    def is_trained(self) -> np.ndarray | None:
        """Tokens of any component."""
        present = [w != 0 for w in (self.rl, self.ce, self.ref_kl) if w is not None]
        return np.logical_or.reduce(present) if present else None


def trains(mb: MicroBatch) -> bool:
    """Does a micro batch have a trained token, so that `build_rows` gives a pass for it?"""
    is_trained = Membership.of(mb).is_trained
    return is_trained is not None and bool(is_trained.any())


def count_tokens(micro_batches: Sequence[MicroBatch], *, by_sample: bool = False) -> TokenCounts:
    """Members of each component on this rank; samples are counted only `by_sample`."""
    counts = np.zeros(4)
    for mb in micro_batches:
        members = Membership.of(mb)
        streams = (members.rl, members.ce, members.ref_kl)
        samples = 0
        if by_sample and members.rl is not None:
            samples = len(np.unique(_documents_of(np.flatnonzero(members.rl), np.asarray(mb.cu_seqlens))))
        counts += [*(0 if w is None else np.count_nonzero(w) for w in streams), samples]
    return TokenCounts(*counts.tolist())


def _documents_of(tokens: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    return np.searchsorted(bounds, tokens, side="right") - 1


def build_rows(
    mb: MicroBatch,
    vocab_size: int,
    device: torch.device,
    *,
    is_scored: np.ndarray | None = None,
    share_prefixes: bool = False,
    with_samples: bool = False,
    with_routes: bool = False,
) -> Rows | None:
    """The forward pass for the trained tokens of a micro batch (or those of `is_scored`); None: no such.

    with_samples: also say which tokens are one sample. with_routes: bring the experts of its tokens along;
    prompts are then shared only where these are equal too.

    Raises: DataError for a token outside the vocabulary, or a trained token that nothing precedes.
    """
    members = Membership.of(mb)
    wanted = members.is_trained if is_scored is None else is_scored
    if wanted is None or not wanted.any():
        return None
    bounds = np.asarray(mb.cu_seqlens, dtype=np.int64)
    _check(mb, bounds, wanted, vocab_size)
    tokens = np.flatnonzero(wanted)
    documents = _documents_of(tokens, bounds)
    routes = mb.routed_experts if with_routes else None
    segments = _segments(
        mb.token_ids, bounds[:-1], tokens, documents, share_prefixes=share_prefixes, routes=routes
    )
    rows, predictors = np.unique(segments.row_before(tokens, documents), return_inverse=True)

    def picked(stream: np.ndarray | None, dtype: type = np.float32) -> Tensor | None:
        return None if stream is None else torch.from_numpy(stream[tokens].astype(dtype)).to(device)

    def moved(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return Rows(
        token_ids=moved(mb.token_ids[segments.inputs]),
        layout=PackedLayout(segments.cu_seqlens, device, segments.parents),
        rows=moved(rows),
        predictors=moved(predictors),
        targets=moved(mb.token_ids[tokens]),
        temperatures=picked(mb.temperatures),
        streams=TokenStreams(
            is_sampled=picked(mb.loss_mask, np.bool_),
            behavior_logprobs=picked(mb.logprobs),
            advantages=picked(mb.advantages),
            rl_weights=picked(members.rl),
            ce_weights=picked(members.ce),
            ref_kl_weights=picked(members.ref_kl),
            ref_logprobs=picked(mb.ref_logprobs),
            old_logprobs=picked(mb.old_logprobs),
            segments=(
                Segments(moved(np.bincount(documents, minlength=len(bounds) - 1)), moved(documents))
                if with_samples
                else None
            ),
        ),
        sources=tokens,
        documents=documents,
        routes=None
        if routes is None
        else torch.from_numpy(routes[segments.inputs].astype(np.int32)).to(device),
    )


@dataclass(frozen=True)
class _Segments:
    """How a micro batch's tokens are laid out anew: roots by length, then continuations by shape."""

    inputs: np.ndarray  # index in the micro batch of every input
    cu_seqlens: tuple[int, ...]
    parents: tuple[int, ...] | None
    starts: np.ndarray  # [documents] where the document begins in the micro batch
    cuts: np.ndarray  # [documents] tokens of the document that lie in its root
    root_rows: np.ndarray  # [documents] where its root begins in the new row
    rest_rows: np.ndarray  # [documents] where its continuation begins there

    def row_before(self, tokens: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """New row of the token before each of these."""
        before = tokens - 1 - self.starts[documents]
        cuts = self.cuts[documents]
        return np.where(
            before < cuts, self.root_rows[documents] + before, self.rest_rows[documents] + before - cuts
        )


def _segments(
    token_ids: np.ndarray,
    starts: np.ndarray,
    tokens: np.ndarray,
    documents: np.ndarray,
    *,
    share_prefixes: bool,
    routes: np.ndarray | None = None,
) -> _Segments:
    """Lay out the inputs of the wanted `tokens`: all tokens of a document before the last wanted one."""
    lengths = np.zeros(len(starts), dtype=np.int64)
    lengths[documents] = tokens - starts[documents]  # tokens rise, so the last one of a document stays
    roots = np.arange(len(starts))  # the document whose root this one uses
    cuts = lengths.copy()
    if share_prefixes:
        firsts = np.zeros_like(lengths)
        firsts[documents[::-1]] = (tokens - starts[documents])[::-1]
        _share(token_ids, starts, firsts, roots, cuts, routes)
    is_root = (roots == np.arange(len(starts))) & (cuts > 0)
    root_order = np.flatnonzero(is_root)
    root_order = root_order[np.argsort(cuts[root_order], kind="stable")]
    rest = np.flatnonzero(lengths > cuts)
    root_place = np.zeros(len(starts), dtype=np.int64)
    root_place[root_order] = np.arange(len(root_order))
    rest = rest[np.lexsort((root_place[roots[rest]], cuts[rest], lengths[rest] - cuts[rest]))]

    begins = np.concatenate((starts[root_order], starts[rest] + cuts[rest]))
    sizes = np.concatenate((cuts[root_order], lengths[rest] - cuts[rest]))
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    inputs = np.arange(bounds[-1]) + np.repeat(begins - bounds[:-1], sizes)
    rest_rows = np.zeros(len(starts), dtype=np.int64)
    rest_rows[rest] = bounds[len(root_order) : -1]
    parents = np.concatenate((np.full(len(root_order), -1), root_place[roots[rest]]))
    return _Segments(
        inputs=inputs,
        cu_seqlens=tuple(bounds.tolist()),
        parents=tuple(parents.tolist()) if len(rest) else None,
        starts=starts,
        cuts=cuts,
        root_rows=bounds[root_place[roots]],
        rest_rows=rest_rows,
    )


def _share(
    token_ids: np.ndarray,
    starts: np.ndarray,
    firsts: np.ndarray,
    roots: np.ndarray,
    cuts: np.ndarray,
    routes: np.ndarray | None,
) -> None:
    """Let documents with equal tokens before their first wanted one use the first one's, in place."""
    prompts: dict[tuple[bytes, ...], list[int]] = {}
    for document in np.flatnonzero(firsts).tolist():
        prompt = slice(starts[document], starts[document] + firsts[document])
        key = tuple(a[prompt].tobytes() for a in (token_ids, routes) if a is not None)
        prompts.setdefault(key, []).append(document)
    for sharing in prompts.values():
        if len(sharing) > 1:
            roots[sharing] = sharing[0]
            cuts[sharing] = firsts[sharing]


def _check(mb: MicroBatch, bounds: np.ndarray, wanted: np.ndarray, vocab_size: int) -> None:
    if bounds[0] != 0 or bounds[-1] != len(mb.token_ids) or np.any(np.diff(bounds) < 0):
        raise DataError(
            f"micro batch: cu_seqlens {bounds.tolist()} do not divide its {len(mb.token_ids)} tokens"
        )
    firsts = bounds[:-1][np.diff(bounds) > 0]
    if wanted[firsts].any():
        document = int(np.searchsorted(bounds, firsts[wanted[firsts]][0], side="right") - 1)
        raise DataError(
            f"micro batch: the first token of {_sample(mb, document)} is trained; nothing predicts it"
        )
    largest, smallest = int(mb.token_ids.max()), int(mb.token_ids.min())
    if largest >= vocab_size or smallest < 0:
        bad = largest if largest >= vocab_size else smallest
        where = int(np.flatnonzero(mb.token_ids == bad)[0])
        document = int(np.searchsorted(bounds, where, side="right") - 1)
        raise DataError(
            f"micro batch: token id {bad} in {_sample(mb, document)}, but the model knows "
            f"0..{vocab_size - 1}; is the tokenizer another model's?"
        )


def _sample(mb: MicroBatch, document: int) -> str:
    return f"sample {mb.sample_ids[document]}" if document < mb.num_samples else f"document {document}"
