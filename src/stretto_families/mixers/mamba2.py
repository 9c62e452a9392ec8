"""Mamba 2: a recurrent mixer whose state of each head fades at a rate that the token sets.

Per head, with a state S [state_dim, head_dim], a step size dt > 0 per token and a rate A < 0:

    S = exp(A dt) S + B (dt x)^T;  out = S^T C + D x

B and C are shared by the heads of a group. Computed by chunks, as the gated delta rule is (gated_delta.py), in float32.

Source: Mamba-2, arXiv:2405.21060, section 6 (the chunked form). Differs: the state starts anew in each document of a
packed row.
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
    from stretto_families.shapes import MambaShape


def mamba2_scan(
    x: Float[Tensor, "tokens heads head_dim"],
    b: Float[Tensor, "tokens groups state_dim"],
    c: Float[Tensor, "tokens groups state_dim"],
    log_decay: Float[Tensor, "tokens heads"],
    chunks: Chunks,
) -> Float[Tensor, "tokens heads head_dim"]:
    """S^T C of all tokens, each document from its state; x includes dt, log_decay is A dt."""
    groups = b.shape[1]
    # [chunks, groups, heads of the group, size, ...]; padding has x = 0 and log_decay = 0.
    x = chunks.split(x).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    log_decay = chunks.split(log_decay).unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
    since_start = decays_since_start(log_decay)
    b, c = (chunks.split(part).transpose(1, 2).unsqueeze(2) for part in (b, c))
    within = (c @ b.mT * pairwise_decay(since_start)) @ x
    until_end = (since_start[..., -1:] - since_start).float().exp().unsqueeze(-1)
    added = b.mT @ (until_end * x)
    faded = since_start.float().exp().unsqueeze(-1)
    kept = faded[..., -1:, :]

    def step(at: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        return kept[at] * state + added[at], faded[at] * (c[at] @ state) + within[at]

    out = chunks.scan(x, tuple(added.shape[1:]), step)
    return chunks.join(out.permute(0, 3, 1, 2, 4).flatten(2, 3))


class GroupedGatedNorm(nn.Module):
    """RMSNorm over each group of x * silu(gate)."""

    def __init__(self, dim: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.groups, self.eps = groups, eps

    def forward(self, x: Float[Tensor, "tokens dim"], gate: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """In the dtype of the gate; computed in float32."""
        gated = (x.float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        return self.weight * rms_norm(gated, None, self.eps).flatten(-2).to(gate.dtype)


class Mamba2(nn.Module):
    """A block's mixer by Mamba 2, with the parameters of Hugging Face checkpoints."""

    documents = staticmethod(documents_of)

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        shape: MambaShape = cfg.mixer_of(layer).shape
        self.shape = shape
        self.size, self.state_size = shape.num_heads * shape.head_dim, shape.num_groups * shape.state_dim
        channels = self.size + 2 * self.state_size
        out = self.size + channels + shape.num_heads
        self.in_proj = nn.Linear(cfg.hidden_size, out, bias=shape.has_bias)
        self.conv1d = CausalConvolution(channels, shape.conv_width, has_bias=shape.has_conv_bias)
        self.A_log = nn.Parameter(torch.zeros(shape.num_heads))
        self.D = nn.Parameter(torch.ones(shape.num_heads))
        self.dt_bias = nn.Parameter(torch.ones(shape.num_heads))
        self.norm = GroupedGatedNorm(self.size, shape.num_groups, cfg.rms_norm_eps)
        self.out_proj = nn.Linear(self.size, cfg.hidden_size, bias=shape.has_bias)

    def new_states(self, places: int, dtype: torch.dtype, device: torch.device) -> LayerStates:
        """Empty states of this layer for `places` sequences."""
        shape = self.shape
        by_group = shape.num_heads // shape.num_groups
        state = (shape.num_groups, by_group, shape.state_dim, shape.head_dim)
        return self.conv1d.new_states(places, state, dtype, device)

    def forward(
        self, x: Float[Tensor, "tokens dim"], documents: Documents | CarriedDocuments, rows: Int[Tensor, " rows"] | None
    ) -> Float[Tensor, "rows dim"]:
        """The mixer's output for all tokens or `rows`; no token sees another document."""
        gate, values, b, c, dt = self.project(x, documents)
        log_decay = -self.A_log.float().exp() * dt
        mixed = mamba2_scan(values * dt.unsqueeze(-1), b, c, log_decay, documents.chunks)
        mixed = (mixed + self.D.float().unsqueeze(-1) * values).flatten(1)
        if rows is not None:
            mixed, gate = mixed.index_select(0, rows), gate.index_select(0, rows)
        return self.out_proj(self.norm(mixed, gate))

    def project(
        self, x: Float[Tensor, "tokens dim"], documents: Documents | CarriedDocuments
    ) -> tuple[
        Float[Tensor, "tokens size"],
        Float[Tensor, "tokens heads head_dim"],
        Float[Tensor, "tokens groups state_dim"],
        Float[Tensor, "tokens groups state_dim"],
        Float[Tensor, "tokens heads"],
    ]:
        """The gate in the dtype of x; values, B, C and step sizes in float32."""
        shape = self.shape
        channels = self.size + 2 * self.state_size
        gate, mixed, dt = self.in_proj(x).split((self.size, channels, shape.num_heads), -1)
        mixed = F.silu(self.conv1d(mixed, documents)).float()
        values, b, c = mixed.split((self.size, self.state_size, self.state_size), -1)
        b, c = (part.unflatten(-1, (-1, shape.state_dim)) for part in (b, c))
        dt = F.softplus(dt.float() + self.dt_bias.float()).clamp(min=shape.min_step)
        return gate, values.unflatten(-1, (-1, shape.head_dim)), b, c, dt
