"""A mixture of experts: a router (parts/router.py) chooses top_k experts per token.

The experts are computed in one of three ways, with equal results up to rounding: one grouped product over tokens sorted
by expert (default), a loop over experts (the slow reference), and a loop over padded groups, in which the bits of a
token do not depend on its batch (the embedded engine in float32 on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.parts.mlp import MLP, PlainMLP
from stretto.models.parts.router import Router, Routing, count

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from stretto.families.shape import ModelConfig, MoEShape


EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""The stacked matrices of `Experts`."""


class Experts(nn.Module):
    """Gated MLPs of all experts, stacked.

    gate_up_proj: [experts, 2 * inter, dim], gate first or rows of gate and up in turn (without gates: up only).
    down_proj: [experts, dim, inter]. If they are stored transposed, the last two dims are swapped.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, hidden_size: int, shape: MoEShape) -> None:
        super().__init__()
        num, inter, self.shape = shape.num_experts, shape.intermediate_size, shape
        both = inter if shape.is_plain else 2 * inter
        sizes = {"gate_up_proj": (both, hidden_size), "down_proj": (hidden_size, inter)}
        for name, (rows, columns) in sizes.items():
            size = (num, columns, rows) if shape.is_transposed else (num, rows, columns)
            setattr(self, name, nn.Parameter(torch.empty(size)))
            if shape.has_product_biases:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(num, rows)))
        self.use_grouped_mm = True
        self.round_input: Callable[[Tensor], Tensor] | None = None
        """Rounds the inputs of products if the matrices were in 8 bits (fp8/checkpoint.py); None: not rounded."""

    def share_weights_of(self, base: Experts) -> None:
        """Initialise with the weights and settings of other experts."""
        nn.Module.__init__(self)
        self.shape, self.use_grouped_mm, self.round_input = base.shape, base.use_grouped_mm, base.round_input
        for name, parameter in base.named_parameters(recurse=False):
            setattr(self, name, parameter)

    def matrix(self, name: str) -> Float[Tensor, "experts out in"]:
        """gate_up_proj or down_proj as [experts, out, in], however they are stored."""
        weight = getattr(self, name)
        return weight.mT if self.shape.is_transposed else weight

    def bias(self, name: str) -> Float[Tensor, "experts out"] | None:
        return getattr(self, f"{name}_bias") if self.shape.has_product_biases else None

    def gated(self, gate_up: Float[Tensor, "rows both"]) -> Float[Tensor, "rows inter"]:
        """silu(gate) * up, or the family's activation, from the products with both."""
        if self.shape.is_plain:
            return F.relu(gate_up).square()
        if self.shape.is_interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        if (clamped := self.shape.clamped) is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
        return (up + 1) * gate * torch.sigmoid(clamped.alpha * gate)

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
        # torch's grouped product has no gradient of no rows, which a rank of cp or ep may have.
        if self.use_grouped_mm and len(x) and self._is_aligned(x.dtype) and self.round_input is None:
            return self._grouped(x, counts)
        return self._loop(x, counts.tolist())

    def add_biases(
        self, out: Float[Tensor, "rows out"], name: str, counts: Int[Tensor, " experts"]
    ) -> Float[Tensor, "rows out"]:
        """The products of rows sorted by expert plus the experts' biases, if there are any."""
        bias = self.bias(name)
        if bias is None:
            return out
        experts = torch.arange(len(counts), device=out.device)
        return out + bias.index_select(0, experts.repeat_interleave(counts, output_size=len(out)))

    def _gated_mlp(
        self, x: Float[Tensor, "rows dim"], counts: Int[Tensor, " experts"], times: Callable[[Tensor, str], Tensor]
    ) -> Float[Tensor, "rows dim"]:
        """The gated MLPs of rows sorted by expert; times: (rows, name of a matrix) -> products."""
        hidden = self.add_biases(times(x, "gate_up_proj"), "gate_up_proj", counts)
        return self.add_biases(times(self.gated(hidden), "down_proj"), "down_proj", counts)

    def _grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        offsets = counts.cumsum(0, dtype=torch.int32)
        times = lambda rows, name: F.grouped_mm(rows, self.matrix(name).transpose(1, 2), offs=offsets)
        return self._gated_mlp(x, counts, times)

    def _loop(self, x: Tensor, counts: list[int]) -> Tensor:
        experts = self._unbind()
        if not len(x):
            return self._mlp(x, *experts[0])  # zero gradients for a rank that has no token
        return torch.cat([self._mlp(rows, *e) for rows, e in zip(x.split(counts), experts) if len(rows)])

    def _padded(self, x: Tensor, counts: list[int], multiple: int, *, is_tiled: bool) -> Tensor:
        out = []
        for rows, expert in zip(x.split(counts), self._unbind()):
            if len(rows):
                padded = F.pad(rows, (0, 0, 0, -len(rows) % multiple))
                tiles = padded.split(multiple) if is_tiled else (padded,)
                out.append(torch.cat([self._mlp(tile, *expert) for tile in tiles])[: len(rows)])
        return torch.cat(out)

    def _unbind(self) -> list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
        """By expert: both weights [out, in], both biases.

        They are unbound, because the gradient of a weight[e] would be as large as the whole stack.
        """
        gate_up, down = (self.matrix(name).unbind() for name in EXPERT_PARAMETERS)
        both = (self.bias(name) for name in EXPERT_PARAMETERS)
        gate_up_bias, down_bias = ([None] * len(down) if bias is None else bias.unbind() for bias in both)
        return list(zip(gate_up, down, gate_up_bias, down_bias))

    def _mlp(
        self, rows: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
    ) -> Tensor:
        """The gated MLP of one expert."""
        hidden = F.linear(rows if self.round_input is None else self.round_input(rows), gate_up)
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias
        inner = self.gated(hidden)
        out = F.linear(inner if self.round_input is None else self.round_input(inner), down)
        return out if down_bias is None else out + down_bias

    def _is_aligned(self, dtype: torch.dtype) -> bool:
        """True if rows are multiples of 16 bytes, which grouped_mm needs; other sizes use the loop."""
        return all(size * dtype.itemsize % 16 == 0 for size in self.down_proj.shape[1:])


class MoE(nn.Module):
    """A mixture instead of a block's MLP: router, experts, and perhaps an MLP for all tokens."""

    shared_experts: MLP | PlainMLP | None

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        assert cfg.moe is not None
        moe, width = cfg.moe, cfg.hidden_size
        self.gate = Router(width, moe)
        self.experts = Experts(moe.latent_size or width, moe)
        self.shared_experts = None
        if moe.shared_size is not None:
            self.shared_experts = (PlainMLP if moe.is_plain else MLP)(width, moe.shared_size, has_bias=cfg.mlp_bias)
        if moe.has_shared_gate:
            self.shared_expert_gate = nn.Linear(width, 1, bias=False)
        if moe.latent_size is not None:
            self.fc1_latent_proj = nn.Linear(width, moe.latent_size, bias=cfg.mlp_bias)
            self.fc2_latent_proj = nn.Linear(moe.latent_size, width, bias=cfg.mlp_bias)

    def forward(
        self, x: Float[Tensor, "tokens dim"], layer: int, routing: Routing, rows: Int[Tensor, " tokens"] | None
    ) -> Float[Tensor, "tokens dim"]:
        """rows: which tokens of the pass x has (None: all); needed to replay choices."""
        routed = self.route(x, layer, routing, rows)
        return routed if self.shared_experts is None else routed + self.share(x)

    def share(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The output of the MLP that every token uses."""
        assert self.shared_experts is not None
        shared = self.shared_experts(x)
        if self.gate.shape.has_shared_gate:
            # In two columns, so that 16 rows are 32 numbers: torch rounds the rest of a vector of 32 in another way.
            shared = self.shared_expert_gate(x).repeat(1, 2).sigmoid()[:, :1] * shared
        return shared

    def route(
        self, x: Float[Tensor, "tokens dim"], layer: int, routing: Routing, rows: Int[Tensor, " tokens"] | None
    ) -> Float[Tensor, "tokens dim"]:
        """The gated sum of the chosen experts' outputs."""
        chosen, gates = self.gate(x, layer, routing, rows)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = count(experts, self.gate.shape.num_experts)
        tokens = order // chosen.shape[1]
        is_latent = self.gate.shape.latent_size is not None
        if is_latent:
            x = self.fc1_latent_proj(x)
        computed = self.experts(x.index_select(0, tokens), counts, routing, tokens)
        original = torch.empty_like(order)
        original[order] = torch.arange(len(order), device=order.device)
        by_choice = computed.index_select(0, original).view(*chosen.shape, x.shape[-1])
        routed = (by_choice * gates.unsqueeze(-1)).sum(dim=1)
        return self.fc2_latent_proj(routed) if is_latent else routed


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
        mixture.gate.expert_bias.add_(rate * (step - step.mean()))
