"""What the trainer learns from: samples, packed into micro batches, one list per rank and step.

Alignment used everywhere: index t of every per-token array belongs to token t, and `logprobs[t]` is
log p(token t | tokens before it in the same document). The first token of a document is never trained.
"""

from __future__ import annotations

import msgspec
import numpy as np


class TrainSample(msgspec.Struct, frozen=True, kw_only=True):
    """One document. A stream that is None has its default: rl weight 1 on loss_mask, ce and ref_kl weight 0."""

    sample_id: str  # "<rollout id>/<branch>"
    env: str
    token_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # bool [tokens]
    logprobs: np.ndarray  # float32 [tokens], of the policy that sampled; 0 where not sampled
    advantages: np.ndarray  # float32 [tokens], reward units
    temperature: float = 1.0
    first_version: int = 0
    rl_weights: np.ndarray | None = None  # float32 [tokens]
    ce_weights: np.ndarray | None = None
    ref_kl_weights: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, top_k]


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Several documents in one row. Document d is tokens cu_seqlens[d]:cu_seqlens[d+1]; padding is a last document
    with an all-False loss_mask. A micro batch without samples (num_samples = 0) keeps ranks in step."""

    token_ids: np.ndarray  # int32 [tokens]
    cu_seqlens: np.ndarray  # int32 [documents + 1]
    loss_mask: np.ndarray  # bool [tokens]
    logprobs: np.ndarray  # float32 [tokens]
    advantages: np.ndarray  # float32 [tokens]
    temperatures: np.ndarray  # float32 [tokens]
    sample_ids: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()  # per document (without padding)
    rl_weights: np.ndarray | None = None
    ce_weights: np.ndarray | None = None
    ref_kl_weights: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, top_k]
    # The trainer's own, never on a wire: float32 [tokens], all as the step began.
    old_logprobs: np.ndarray | None = None  # of the policy
    values: np.ndarray | None = None  # the critic's, of the text before the token
    returns: np.ndarray | None = None  # what the critic learns

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.cu_seqlens[self.num_samples])


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one rank trains on in one step. Every rank has the same number of micro batches."""

    step: int  # from 1; trains version step-1 into version step
    rank: int
    world_size: int
    micro_batches: tuple[MicroBatch, ...]
