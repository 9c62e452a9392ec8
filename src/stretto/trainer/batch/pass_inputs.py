"""Builds the tensors of one forward pass from a micro batch.

Attention is causal and a loss is a sum over tokens, so some work can be saved without changing the result:
documents are cut after their last trained token; documents that begin alike share what they begin with and continue it
as segments: samples of a group share their prompt, and with shared_prefixes = "tree" all that any of them have in
common; segments are sorted by length, so that equal ones share an attention call; log-probabilities and the last block
are computed for trained tokens only. All of it is numpy, with one copy to the device per stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms.losses import TokenStreams
from stretto.algorithms.policy_loss import AlternativeTokens
from stretto.algorithms.sample_index import SampleIndex
from stretto.base.errors import DataError
from stretto.config.sections.model import SharedPrefixes
from stretto.families.shape import VisionShape
from stretto.models.attention import PackedLayout
from stretto.models.parts.vision import ImageBatch
from stretto.records.alternatives import Alternatives
from stretto.records.row_packing import PrefixTree
from stretto.records.sample import MicroBatch
from stretto.records.support import Support
from stretto.records.token_counts import ComponentWeights, find_documents
from stretto.trainer.batch.images import RowImages

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Repeats(NamedTuple):
    """Trained tokens that are one token of the pass, because their documents are equal up to there."""

    firsts: Int[Tensor, " distinct"]  # the trained tokens that are scored
    places: Int[Tensor, " trained"]  # which of these each trained token is


@dataclass(frozen=True)
class PassInputs:
    """The inputs of one forward pass, and the data of its trained tokens."""

    token_ids: Int[Tensor, " inputs"]
    layout: PackedLayout
    rows: Int[Tensor, " rows"]  # inputs that predict a trained token
    predictors: Int[Tensor, " trained"]  # index in `rows` of the input that predicts the token
    targets: Int[Tensor, " trained"]
    temperatures: Float[Tensor, " trained"]
    streams: TokenStreams
    sources: Int[np.ndarray, " trained"]  # index of the token in the micro batch
    documents: Int[np.ndarray, " trained"]  # index of its document in the micro batch
    routes: Int[Tensor, "inputs layers top_k"] | None = None  # experts to replay (with_routes)
    support: Support | None = None  # tokens that each one was sampled from; None: all
    images: ImageBatch | None = None  # the layout then has the positions of their tokens
    repeats: Repeats | None = None  # trained tokens that several documents share; None: each is scored by itself

    @property
    def options(self) -> dict[str, ImageBatch]:
        """Arguments of a forward pass that passes without images leave out."""
        return {} if self.images is None else {"images": self.images}


IDLE_MICRO_BATCH = MicroBatch(
    token_ids=np.zeros(2, np.int32),
    cu_seqlens=np.array([0, 2], np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
    temperatures=np.ones(2, np.float32),
    sample_ids=("idle",),
    envs=("idle",),
)
"""Two tokens, for a pass whose result is not used."""


def has_trained_tokens(mb: MicroBatch) -> bool:
    """True if a micro batch has a trained token, so that it needs a forward pass."""
    is_trained = ComponentWeights.of(mb).is_trained
    return is_trained is not None and bool(is_trained.any())


def count_inputs(mb: MicroBatch) -> int:
    """Tokens of the pass for a micro batch's trained tokens, if documents share none; 0 without a pass."""
    is_trained = ComponentWeights.of(mb).is_trained
    if is_trained is None:
        return 0
    bounds, tokens = np.asarray(mb.cu_seqlens, np.int64), np.flatnonzero(is_trained)
    lengths = np.zeros(len(bounds) - 1, np.int64)
    documents = find_documents(tokens, bounds)
    lengths[documents] = tokens - bounds[documents]  # in order: the last one of a document overwrites the others
    return int(lengths.sum())


def build_pass_inputs(
    mb: MicroBatch,
    vocab_size: int,
    device: torch.device,
    *,
    is_scored: Bool[np.ndarray, " tokens"] | None = None,
    sharing: SharedPrefixes = "off",
    with_samples: bool = False,
    with_routes: bool = False,
    vision: VisionShape | None = None,
    with_unused_image: bool = False,
) -> PassInputs | None:
    """The forward pass for a micro batch's trained tokens (or `is_scored`); None without any.

    sharing: which equal tokens of documents are computed once. with_samples: include which tokens belong to one sample.
    with_routes: include the expert choices; tokens are then shared only if these are equal too. vision: the model's
    tower. with_unused_image: if the row has no image, encode one that no token shows, because other ranks encode images
    in this pass.

    Raises: DataError for a token outside the vocabulary, a trained token at the start of a document or in an image, or
    images of another model.
    """
    weights = ComponentWeights.of(mb)
    is_target = weights.is_trained if is_scored is None else is_scored
    if is_target is None or not is_target.any():
        return None
    bounds = np.asarray(mb.cu_seqlens, dtype=np.int64)
    _check_micro_batch(mb, bounds, is_target, vocab_size)
    row_images = _find_images(mb, is_target, vision)
    tokens = np.flatnonzero(is_target)
    documents = find_documents(tokens, bounds)
    routes = mb.routed_experts if with_routes else None
    equal = [mb.token_ids, routes, None if row_images is None else row_images.identity]
    segments = _lay_out_segments(
        [stream for stream in equal if stream is not None], bounds[:-1], tokens, documents, sharing=sharing
    )
    images = positions = None
    if row_images is not None:
        images, positions = row_images.select(segments.inputs, device)
    if images is None and vision is not None and with_unused_image:
        images = ImageBatch.unused(vision, device)
    rows, predictors = np.unique(segments.rows_of(tokens - 1), return_inverse=True)
    repeats = None
    if sharing == "tree" and mb.support is None and mb.alternatives is None:
        repeats = _find_repeats(predictors, mb.token_ids[tokens], mb.temperatures[tokens], device)

    return PassInputs(
        token_ids=_to_device(mb.token_ids[segments.inputs], device),
        layout=PackedLayout(segments.cu_seqlens, device, segments.parents, positions),
        images=images,
        repeats=repeats,
        rows=_to_device(rows, device),
        predictors=_to_device(predictors, device),
        targets=_to_device(mb.token_ids[tokens], device),
        temperatures=_to_device(mb.temperatures[tokens], device, np.float32),
        streams=_build_streams(mb, weights, tokens, documents, device, with_samples=with_samples),
        sources=tokens,
        documents=documents,
        support=None if mb.support is None else mb.support.at(tokens),
        routes=None if routes is None else _to_device(routes[segments.inputs], device, np.int32),
    )


def _build_streams(
    mb: MicroBatch,
    weights: ComponentWeights,
    tokens: np.ndarray,
    documents: np.ndarray,
    device: torch.device,
    *,
    with_samples: bool,
) -> TokenStreams:
    """The streams that the loss needs of these tokens; documents: the index of each token's document."""

    def pick(stream: np.ndarray, dtype: type = np.float32) -> Tensor:
        return _to_device(stream[tokens], device, dtype)

    def pick_some(stream: np.ndarray | None) -> Tensor | None:
        return None if stream is None else pick(stream)

    samples = None
    if with_samples:
        counts = np.bincount(documents, minlength=len(mb.cu_seqlens) - 1)
        samples = SampleIndex(_to_device(counts, device), _to_device(documents, device))
    return TokenStreams(
        is_sampled=pick(mb.loss_mask, np.bool_),
        behavior_logprobs=pick(mb.logprobs),
        advantages=pick(mb.advantages),
        rl_weights=pick_some(weights.rl),
        ce_weights=pick_some(weights.ce),
        ref_kl_weights=pick_some(weights.ref_kl),
        ref_logprobs=pick_some(mb.ref_logprobs),
        old_logprobs=pick_some(mb.old_logprobs),
        alternatives=None if mb.alternatives is None else _to_tensors(mb.alternatives.at(tokens), device),
        sample_index=samples,
    )


def _to_tensors(rows: Alternatives, device: torch.device) -> AlternativeTokens:
    return AlternativeTokens(
        ids=_to_device(rows.ids, device),
        logprobs=_to_device(rows.logprobs, device, np.float32),
        weights=_to_device(rows.weights, device, np.float32),
        is_forward=_to_device(rows.is_forward, device, np.bool_),
    )


def _to_device(values: np.ndarray, device: torch.device, dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(values.astype(dtype)).to(device)


def _find_repeats(
    predictors: np.ndarray, targets: np.ndarray, temperatures: np.ndarray, device: torch.device
) -> Repeats | None:
    """The tokens that have predictor, target and temperature in common; None if none have."""
    kinds, by_temperature = np.unique(temperatures, return_inverse=True)
    codes = predictors * (int(targets.max()) + 1) + targets
    _, firsts, places = np.unique(codes * len(kinds) + by_temperature, return_index=True, return_inverse=True)
    if len(firsts) == len(targets):
        return None
    return Repeats(_to_device(firsts, device), _to_device(places, device))


@dataclass(frozen=True)
class _SegmentLayout:
    """The order of tokens in a pass: segment by segment, each behind the one that it continues."""

    inputs: np.ndarray  # index in the micro batch of every input
    cu_seqlens: tuple[int, ...]
    parents: tuple[int, ...] | None
    # Documents in pieces, one per segment, in the order of the micro batch:
    piece_starts: np.ndarray  # where each begins in the micro batch
    piece_rows: np.ndarray  # the input that has its first token

    def rows_of(self, tokens: np.ndarray) -> np.ndarray:
        """The inputs that have these tokens of the micro batch."""
        pieces = np.searchsorted(self.piece_starts, tokens, side="right") - 1
        return self.piece_rows[pieces] + tokens - self.piece_starts[pieces]


def _lay_out_segments(
    equal: Sequence[np.ndarray],
    starts: np.ndarray,
    tokens: np.ndarray,
    documents: np.ndarray,
    *,
    sharing: SharedPrefixes,
) -> _SegmentLayout:
    """Lay out the inputs for `tokens`: all tokens of a document before the last of them.

    equal: streams in which tokens must be equal to be shared, token ids and others.
    """
    lengths = np.zeros(len(starts), dtype=np.int64)
    # Tokens are in order, so the last one of a document overwrites the others.
    lengths[documents] = tokens - starts[documents]
    if sharing == "tree":
        ends = starts + lengths
        spans = [slice(start, end) for start, end in zip(starts.tolist(), ends.tolist())]
        tree = PrefixTree.of([[stream[span] for stream in equal] for span in spans])
    elif sharing == "prompts":
        first_wanted = np.zeros_like(lengths)
        first_wanted[documents[::-1]] = (tokens - starts[documents])[::-1]
        tree = _share_prompts(equal, starts, first_wanted, lengths)
    else:
        tree = PrefixTree.flat(lengths)
    order = _order_of_nodes(tree)
    sizes = (tree.ends - tree.starts)[order]
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    begins = (starts[tree.documents] + tree.starts)[order]
    inputs = np.arange(bounds[-1]) + np.repeat(begins - bounds[:-1], sizes)
    numbers = np.empty(len(order) + 1, np.int64)
    numbers[order], numbers[-1] = np.arange(len(order)), -1
    parents = numbers[tree.parents[order]]
    piece_documents, piece_nodes = _pieces_of(tree)
    return _SegmentLayout(
        inputs=inputs,
        cu_seqlens=tuple(bounds.tolist()),
        parents=tuple(parents.tolist()) if (parents >= 0).any() else None,
        piece_starts=starts[piece_documents] + tree.starts[piece_nodes],
        piece_rows=bounds[numbers[piece_nodes]],
    )


def _order_of_nodes(tree: PrefixTree) -> np.ndarray:
    """The nodes level by level, roots first; on a level those of equal shape beside each other."""
    levels = np.zeros(len(tree.parents), np.int64)
    for node in np.flatnonzero(tree.parents >= 0).tolist():
        levels[node] = levels[tree.parents[node]] + 1
    numbers, order = np.zeros(len(levels) + 1, np.int64), np.zeros(0, np.int64)
    for level in range(int(levels.max(initial=-1)) + 1):
        nodes = np.flatnonzero(levels == level)
        starts = tree.starts[nodes]
        nodes = nodes[np.lexsort((numbers[tree.parents[nodes]], starts, tree.ends[nodes] - starts))]
        numbers[nodes] = np.arange(len(nodes)) + len(order)
        order = np.concatenate((order, nodes))
    return order


def _pieces_of(tree: PrefixTree) -> tuple[np.ndarray, np.ndarray]:
    """Document and node of every piece, in the order of documents and of their tokens."""
    if (tree.parents < 0).all():
        documents = np.flatnonzero(tree.lasts >= 0)
        return documents, tree.lasts[documents]
    paths = [tree.path(document) for document in range(len(tree.lasts))]
    documents = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    return documents, np.array([node for path in paths for node in path], np.int64)


def _share_prompts(
    equal: Sequence[np.ndarray], starts: np.ndarray, first_wanted: np.ndarray, lengths: np.ndarray
) -> PrefixTree:
    """The tree of documents that share a root if they have equal tokens before their first wanted one."""
    prompts: dict[tuple[bytes, ...], list[int]] = {}
    for document in np.flatnonzero(first_wanted).tolist():
        prompt = slice(starts[document], starts[document] + first_wanted[document])
        key = tuple(stream[prompt].tobytes() for stream in equal)
        prompts.setdefault(key, []).append(document)
    roots, cuts = np.arange(len(starts)), lengths.copy()
    for sharing in prompts.values():
        if len(sharing) > 1:
            roots[sharing] = sharing[0]
            cuts[sharing] = first_wanted[sharing]
    own = np.flatnonzero((roots == np.arange(len(starts))) & (lengths > 0))
    rest = np.flatnonzero(lengths > cuts)
    numbers = np.zeros(len(starts), np.int64)
    numbers[own] = np.arange(len(own))
    lasts = np.where(lengths > 0, numbers[roots], -1)
    lasts[rest] = len(own) + np.arange(len(rest))
    return PrefixTree(
        documents=np.concatenate((own, rest)),
        starts=np.concatenate((np.zeros_like(own), cuts[rest])),
        ends=np.concatenate((cuts[own], lengths[rest])),
        parents=np.concatenate((np.full(len(own), -1), numbers[roots[rest]])),
        lasts=lasts,
    )


def _find_images(mb: MicroBatch, is_target: np.ndarray, vision: VisionShape | None) -> RowImages | None:
    """The images of a row; None if it has none."""
    if vision is None:
        if mb.images:
            raise DataError(
                f"micro batch: {len(mb.images)} images for a model of text; train a model with a vision tower"
            )
        return None
    is_image = mb.token_ids == vision.image_token_id
    if not mb.images and not is_image.any():
        return None
    if (wrong := np.flatnonzero(is_image & is_target)).size:
        document = int(find_documents(wrong[:1], np.asarray(mb.cu_seqlens))[0])
        raise DataError(
            f"micro batch: a token of an image in {_sample_name(mb, document)} is trained; images are never predicted"
        )
    return RowImages(mb, vision)


def _check_micro_batch(mb: MicroBatch, bounds: np.ndarray, is_target: np.ndarray, vocab_size: int) -> None:
    if bounds[0] != 0 or bounds[-1] != len(mb.token_ids) or np.any(np.diff(bounds) < 0):
        raise DataError(f"micro batch: cu_seqlens {bounds.tolist()} do not divide its {len(mb.token_ids)} tokens")
    first_tokens = bounds[:-1][np.diff(bounds) > 0]
    if is_target[first_tokens].any():
        document = int(np.searchsorted(bounds, first_tokens[is_target[first_tokens]][0], side="right") - 1)
        raise DataError(
            f"micro batch: the first token of {_sample_name(mb, document)} is trained, but nothing predicts it"
        )
    if mb.support is not None:
        _check_support(mb.support, len(mb.token_ids), vocab_size)
    if mb.alternatives is not None and (most := int(mb.alternatives.ids.max(initial=-1))) >= vocab_size:
        raise DataError(
            f"micro batch: a teacher's token has id {most}, but the model knows 0..{vocab_size - 1}; "
            "does the teacher have another tokenizer?"
        )
    largest, smallest = int(mb.token_ids.max()), int(mb.token_ids.min())
    if largest >= vocab_size or smallest < 0:
        bad = largest if largest >= vocab_size else smallest
        where = int(np.flatnonzero(mb.token_ids == bad)[0])
        document = int(np.searchsorted(bounds, where, side="right") - 1)
        raise DataError(
            f"micro batch: token id {bad} in {_sample_name(mb, document)}, but the model knows "
            f"0..{vocab_size - 1}; does the tokenizer belong to another model?"
        )


def _check_support(support: Support, num_tokens: int, vocab_size: int) -> None:
    if len(support) != num_tokens or int(support.sizes.sum()) != len(support.ids):
        raise DataError(
            f"micro batch: the support has {len(support)} tokens and sizes that sum to {support.sizes.sum()}; "
            f"there are {num_tokens} tokens and {len(support.ids)} ids"
        )
    if len(support.ids) and not 0 <= support.ids.min() <= support.ids.max() < vocab_size:
        bad = next(i for i in support.ids.tolist() if not 0 <= i < vocab_size)
        raise DataError(
            f"micro batch: a token was drawn from a set with token id {bad}, but the model knows "
            f"0..{vocab_size - 1}; does the engine serve the same model?"
        )


def _sample_name(mb: MicroBatch, document: int) -> str:
    return f"sample {mb.sample_ids[document]}" if document < mb.num_samples else f"document {document}"
