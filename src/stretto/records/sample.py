"""Training data: samples, packed into micro batches; one TrainBatch per rank and step.

In all arrays index t belongs to token t, and `logprobs[t]` is log p(token t | earlier tokens of the same document).
The first token of a document is never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import msgspec
import numpy as np

from stretto.records.alternatives import Alternatives
from stretto.records.images import Image
from stretto.records.support import Support


class TrainSample(msgspec.Struct, frozen=True, kw_only=True):
    """One document.

    Weights that are None have their default: rl 1 where loss_mask is true, ce and ref_kl 0.
    """

    sample_id: str  # "<rollout id>/<branch>"
    env: str
    token_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # bool [tokens]
    # float32 [tokens], nats under the policy that sampled; 0 where not sampled, nan where unknown.
    logprobs: np.ndarray
    advantages: np.ndarray  # float32 [tokens], reward units
    # float32 [tokens], beside the score: rewards of turns, for advantages that the trainer makes.
    token_rewards: np.ndarray | None = None
    temperature: float = 1.0
    first_version: int = 0
    rl_weights: np.ndarray | None = None  # float32 [tokens]
    ce_weights: np.ndarray | None = None
    ref_kl_weights: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    alternatives: Alternatives | None = None  # what teachers hold for likeliest, at tokens with ref_kl_weights
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, top_k]
    support: Support | None = None  # the tokens that each token was drawn from; None: all tokens
    images: tuple[Image, ...] = ()  # in the order of their placeholders


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Several documents in one row.

    Document d is tokens cu_seqlens[d]:cu_seqlens[d+1]; padding is a last document with an all-False loss_mask. A
    micro batch without samples (num_samples = 0) gives every rank the same number of micro batches.
    """

    token_ids: np.ndarray  # int32 [tokens]
    cu_seqlens: np.ndarray  # int32 [documents + 1]
    loss_mask: np.ndarray  # bool [tokens]
    logprobs: np.ndarray  # float32 [tokens]
    advantages: np.ndarray  # float32 [tokens]
    temperatures: np.ndarray  # float32 [tokens]
    sample_ids: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()  # per document (without padding)
    first_versions: tuple[int, ...] = ()  # per document: that of its first sampled token; () if not known
    token_rewards: np.ndarray | None = None  # as in a sample
    rollout_tokens: tuple[int, ...] = ()  # per document: rl tokens of all samples of its rollout in the batch
    rl_weights: np.ndarray | None = None
    ce_weights: np.ndarray | None = None
    ref_kl_weights: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    alternatives: Alternatives | None = None  # what teachers hold for likeliest, at tokens with ref_kl_weights
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, top_k]
    support: Support | None = None  # the tokens that each token was drawn from; None: all tokens
    images: tuple[Image, ...] = ()  # in the order of their placeholders; equal ones share their patches
    num_images: tuple[int, ...] = ()  # images per document; () if the row has none
    # Filled in by the trainer at the beginning of a step and never sent; float32 [tokens].
    old_logprobs: np.ndarray | None = None  # under the policy
    values: np.ndarray | None = None  # the critic's value of the text before the token
    returns: np.ndarray | None = None  # the critic's targets

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.cu_seqlens[self.num_samples])

    def images_of(self, document: int) -> tuple[Image, ...]:
        """The images of one document."""
        start = sum(self.num_images[:document])
        return self.images[start : start + sum(self.num_images[document : document + 1])]


class ImageFields(TypedDict):
    """The fields of a row that hold its images."""

    images: tuple[Image, ...]
    num_images: tuple[int, ...]


def images_by_document(documents: Sequence[tuple[Image, ...]]) -> ImageFields:
    """The fields `images` and `num_images` of a row with these documents."""
    images = tuple(image for document in documents for image in document)
    return {"images": images, "num_images": tuple(map(len, documents)) if images else ()}


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank trains on in one step; every rank has the same number of micro batches."""

    step: int  # from 1; trains version step-1 into version step
    rank: int
    world_size: int
    micro_batches: tuple[MicroBatch, ...]
    is_sent: bool = True  # do engines get version `step`
