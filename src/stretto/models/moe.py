"""A mixture of experts: a router (parts/router.py) chooses top_k experts per token.

The experts are computed in one of three ways, with equal results up to rounding: one grouped product over tokens sorted
by expert (default), a loop over experts (the slow reference), and a loop over padded groups, in which the bits of a
token do not depend on its batch (the embedded engine in float32 on a CPU).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.parts.mlp import MLP
from stretto.models.parts.router import Router, Routing, count

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from stretto.models.shape import ModelConfig, MoEShape


class Experts(nn.Module):
    """Gated MLPs of all experts, stacked.

    gate_up_proj: [experts, 2 * inter, dim], gate first; down_proj: [experts, dim, inter].
    """

    def __init__(self, hidden_size: int, shape: MoEShape) -> None:
        super().__init__()
        inter = shape.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(shape.num_experts, 2 * inter, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(shape.num_experts, hidden_size, inter))
        self.use_grouped_mm = True

    @staticmethod
    def gated(gate_up: Float[Tensor, "rows both"]) -> Float[Tensor, "rows inter"]:
        """silu(gate) * up, from the products with both."""
        return gated(gate_up)

    def forward(
        self,
        x: Float[Tensor, "rows dim"],
        counts: Int[Tensor, " experts"],
        routing: Routing,
        tokens: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows dim"]:
        """Rows sorted by expert, counts[e] of them for expert e; row i is a copy of token tokens[i]."""
        if routing.row_multiple is not None:
            return self._padded(x, counts.tolist(), routing.row_multiple, is_tiled=routing.is_tiled)
        if self.use_grouped_mm and self._is_aligned(x.dtype):
            return self._grouped(x, counts)
        return self._loop(x, counts.tolist())

    def _grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        offsets = counts.cumsum(0, dtype=torch.int32)
        hidden = self.gated(F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=offsets))
        return F.grouped_mm(hidden, self.down_proj.transpose(1, 2), offs=offsets)

    def _loop(self, x: Tensor, counts: list[int]) -> Tensor:
        # unbind, because the gradient of each weight[e] would be as large as the whole stack.
        weights = list(zip(self.gate_up_proj.unbind(), self.down_proj.unbind()))
        if not len(x):
            return _mlp(x, *weights[0])  # zero gradients for a rank that has no token
        return torch.cat([_mlp(rows, *w) for rows, w in zip(x.split(counts), weights) if len(rows)])

    def _padded(self, x: Tensor, counts: list[int], multiple: int, *, is_tiled: bool) -> Tensor:
        out = []
        for rows, gate_up, down in zip(x.split(counts), self.gate_up_proj, self.down_proj):
            if len(rows):
                padded = F.pad(rows, (0, 0, 0, -len(rows) % multiple))
                tiles = padded.split(multiple) if is_tiled else (padded,)
                out.append(torch.cat([_mlp(tile, gate_up, down) for tile in tiles])[: len(rows)])
        return torch.cat(out)

    def _is_aligned(self, dtype: torch.dtype) -> bool:
        """True if rows are multiples of 16 bytes, which grouped_mm needs; other sizes use the loop."""
        return all(size * dtype.itemsize % 16 == 0 for size in self.down_proj.shape[1:])


class MoE(nn.Module):
    """A mixture of experts instead of a block's MLP: router, experts, and an MLP for all tokens if there is one."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        assert cfg.moe is not None
        self.gate = Router(cfg.hidden_size, cfg.moe)
        self.experts = Experts(cfg.hidden_size, cfg.moe)
        self.shared_experts = (
            None if cfg.moe.shared_size is None else MLP(cfg.hidden_size, cfg.moe.shared_size)
        )

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        layer: int,
        routing: Routing,
        rows: Int[Tensor, " tokens"] | None,
    ) -> Float[Tensor, "tokens dim"]:
        """rows: which tokens of the pass x has (None: all); needed to replay choices."""
        routed = self.route(x, layer, routing, rows)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)

    def route(
        self,
        x: Float[Tensor, "tokens dim"],
        layer: int,
        routing: Routing,
        rows: Int[Tensor, " tokens"] | None,
    ) -> Float[Tensor, "tokens dim"]:
        """The part of the chosen experts."""
        chosen, gates = self.gate(x, layer, routing, rows)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = count(experts, self.gate.shape.num_experts)
        tokens = order // chosen.shape[1]
        computed = self.experts(x.index_select(0, tokens), counts, routing, tokens)
        original = torch.empty_like(order)
        original[order] = torch.arange(len(order), device=order.device)
        by_choice = computed.index_select(0, original).view(*chosen.shape, x.shape[-1])
        return (by_choice * gates.unsqueeze(-1)).sum(dim=1)


def mixtures(model: nn.Module) -> dict[str, MoE]:
    """The mixtures of experts of a model by module name, in the order of layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


@torch.no_grad()
def update_expert_bias(model: nn.Module, loads: Float[Tensor, "mixtures experts"], rate: float) -> None:
    """Raise the biases of experts that got fewer tokens than the mean, and lower the others.

    Source: auxiliary-loss-free load balancing, arXiv:2408.15664, algorithm 1. Differs: the steps are
    centred, so that the mean bias stays 0.
    """
    for mixture, load in zip(mixtures(model).values(), loads, strict=True):
        step = torch.sign(load.mean() - load).to(mixture.gate.expert_bias)
        mixture.gate.expert_bias += rate * (step - step.mean())


def _mlp(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The gated MLP of one expert."""
    return F.linear(gated(F.linear(rows, gate_up)), down)


def gated(gate_up: Float[Tensor, "rows both"]) -> Float[Tensor, "rows inter"]:
    """silu(gate) * up, from both stacked in the last dim."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
