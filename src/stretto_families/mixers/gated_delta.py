"""The gated delta rule: linear attention whose state decays, and is corrected by key.

Per head, with a state S [key_dim, value_dim], a decay exp(g) and a rate beta per token:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  out = S^T q

Computed by chunks of tokens: within a chunk the corrections are a triangular system, from chunk to chunk only the
state is passed on (documents.py). The step-by-step form is in the tests. Everything is float32, whatever the model's
dtype, except the sums of logarithms of decays, which are float64.

Source: Gated DeltaNet, arXiv:2412.06464, equation 10 and the chunked form of section 3.3. Differs: keys and queries
have length 1 and queries are scaled by key_dim ** -0.5, as in Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.parts.norm import rms_norm
from stretto_families.mixers.carried import CarriedDocuments, CausalConvolution, LayerStates
from stretto_families.mixers.documents import Chunks, Documents, decays_since_start, documents_of, pairwise_decay

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from stretto.families.shape import ModelConfig
    from stretto_families.shapes import GatedDeltaShape

_NORM_EPS = 1e-6


def gated_delta_rule(
    q: Float[Tensor, "tokens heads key_dim"],
    k: Float[Tensor, "tokens heads key_dim"],
    v: Float[Tensor, "tokens heads value_dim"],
    log_decay: Float[Tensor, "tokens heads"],
    beta: Float[Tensor, "tokens heads"],
    chunks: Chunks,
) -> Float[Tensor, "tokens heads value_dim"]:
    """The outputs of all tokens, each document from its state; log_decay is at most 0."""
    # [chunks, heads, size, ...]; padding has k = 0 and log_decay = 0, so that it leaves the state as it is.
    q, k, v = (chunks.split(x).transpose(1, 2) for x in (q, k, v))
    log_decay, beta = (chunks.split(x).transpose(1, 2) for x in (log_decay, beta))
    since_start = decays_since_start(log_decay)
    faded = since_start.float().exp().unsqueeze(-1)
    between = pairwise_decay(since_start)
    beta = beta.unsqueeze(-1)
    system = (beta * k) @ k.mT * between
    # The diagonal of the system is 1; neither it nor the triangle above it is read.
    right = torch.cat((beta * v, beta * k * faded), -1)
    solved = right
    if right.shape[-2] > 1:
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    within, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = q @ k.mT * between
    q, until_end = q * faded, (since_start[..., -1:] - since_start).float().exp().unsqueeze(-1)
    kept, k = faded[..., -1:, :], (k * until_end).mT

    def step(at: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        corrections = within[at] - from_state[at] @ state
        out = q[at] @ state + scores[at] @ corrections
        return kept[at] * state + k[at] @ corrections, out

    shape = (q.shape[1], q.shape[-1], v.shape[-1])
    return chunks.join(chunks.scan(q, shape, step).transpose(1, 2))


class GatedNorm(nn.Module):
    """RMSNorm of each head's output, times silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(
        self, x: Float[Tensor, "tokens heads dim"], gate: Float[Tensor, "tokens heads dim"]
    ) -> Float[Tensor, "tokens heads dim"]:
        """In the dtype of the gate; the norm and the gate are computed in float32."""
        normed = self.weight * rms_norm(x.float(), None, self.eps).to(gate.dtype)
        return (normed * F.silu(gate.float())).to(gate.dtype)


class GatedDelta(nn.Module):
    """A block's mixer by the gated delta rule (`linear_attn` in checkpoints of qwen3_5)."""

    documents = staticmethod(documents_of)

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        shape: GatedDeltaShape = cfg.mixer_of(layer).shape
        self.shape = shape
        self.key_size = shape.num_key_heads * shape.key_head_dim
        self.value_size = shape.num_value_heads * shape.value_head_dim
        channels = 2 * self.key_size + self.value_size
        self.in_proj_qkv = nn.Linear(cfg.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(cfg.hidden_size, self.value_size, bias=False)
        self.in_proj_b = nn.Linear(cfg.hidden_size, shape.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(cfg.hidden_size, shape.num_value_heads, bias=False)
        self.conv1d = CausalConvolution(channels, shape.conv_width, has_bias=False)
        self.A_log = nn.Parameter(torch.zeros(shape.num_value_heads))
        self.dt_bias = nn.Parameter(torch.ones(shape.num_value_heads))
        self.norm = GatedNorm(shape.value_head_dim, cfg.rms_norm_eps)
        self.out_proj = nn.Linear(self.value_size, cfg.hidden_size, bias=False)

    def new_states(self, places: int, dtype: torch.dtype, device: torch.device) -> LayerStates:
        """Empty states of this layer for `places` sequences."""
        shape = self.shape
        state = (shape.num_value_heads, shape.key_head_dim, shape.value_head_dim)
        return self.conv1d.new_states(places, state, dtype, device)

    def forward(
        self, x: Float[Tensor, "tokens dim"], documents: Documents | CarriedDocuments, rows: Int[Tensor, " rows"] | None
    ) -> Float[Tensor, "rows dim"]:
        """The mixer's output for all tokens or `rows`; no token sees another document."""
        q, k, v, log_decay, beta = self.project(x, documents)
        mixed = documents.heads.collect(gated_delta_rule(q, k, v, log_decay, beta, documents.chunks))
        if rows is not None:
            mixed, x = mixed.index_select(0, rows), x.index_select(0, rows)
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.shape.value_head_dim))
        return self.out_proj(self.norm(mixed, gate).flatten(1))

    def project(
        self, x: Float[Tensor, "tokens dim"], documents: Documents | CarriedDocuments
    ) -> tuple[
        Float[Tensor, "all_tokens heads key_dim"],
        Float[Tensor, "all_tokens heads key_dim"],
        Float[Tensor, "all_tokens heads value_dim"],
        Float[Tensor, "all_tokens heads"],
        Float[Tensor, "all_tokens heads"],
    ]:
        """Queries, keys, values, logarithms of decays, and rates, in float32, of this rank's heads."""
        parts = (self.key_size, self.key_size, self.value_size)
        heads = documents.heads
        qkv = heads.spread(self.in_proj_qkv(x), parts)
        qkv = F.silu(self.conv1d(qkv, documents, parts)).float()
        q, k, v = qkv.split([size // heads.degree for size in parts], -1)
        q, k = (_unit(part.unflatten(-1, (-1, self.shape.key_head_dim))) for part in (q, k))
        repeats = self.shape.num_value_heads // self.shape.num_key_heads
        if repeats > 1:
            q, k = q.repeat_interleave(repeats, dim=1), k.repeat_interleave(repeats, dim=1)
        v = v.unflatten(-1, (-1, self.shape.value_head_dim))
        beta = self.in_proj_b(x).sigmoid().float()
        rate = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        rates = torch.cat((-self.A_log.float().exp() * rate, beta), -1)
        log_decay, beta = heads.spread(rates, (rate.shape[-1],) * 2).chunk(2, -1)
        return q * self.shape.key_head_dim**-0.5, k, v, log_decay, beta


def _unit(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """x divided by its length, which has a small floor."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
