"""A mixture of experts: a router chooses top_k experts per token.

The router computes in float32. A `Routing` has the options and results of one forward pass for all its routers:
choices to replay, choices made, tokens per expert. Replayed choices replace the selection only: gates are this
router's own scores of the replayed experts, so they still get gradients.

The experts are computed in one of three ways, with equal results up to rounding: one grouped product over tokens sorted
by expert (default), a loop over experts (the slow reference), and a loop over padded groups, in which the bits of a
token do not depend on its batch (the embedded engine in float32 on a CPU).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.records.generate import NO_EXPERT

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float, Int, Int64, Shaped

    from stretto.models.shape import ModelConfig, MoEShape


@dataclass
class Routing:
    """Options and results of one forward pass for all its routers; a new object for every pass.

    replay: [tokens, layers, top_k], the experts to use, or NO_EXPERT (255 or 65535) in all entries if the router
    is to choose. row_multiple: pad the rows of each expert to a multiple of this, so that results do not depend on the
    batch; is_tiled: compute tiles of exactly this many rows. After the pass: `choices` by layer, if is_recording;
    `loads` (tokens per expert) and `confidence` (scores of the chosen experts, summed over tokens) by layer, if
    is_measuring. A layer that is computed again for the backward pass uses its `first_choices`.
    """

    replay: Int[Tensor, "tokens layers top_k"] | None = None
    is_recording: bool = False
    is_measuring: bool = False
    row_multiple: int | None = None
    is_tiled: bool = False
    choices: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)
    confidence: dict[int, Tensor] = field(default_factory=dict)
    first_choices: dict[int, Int[Tensor, "tokens top_k"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Computed here, so that the device is waited for once and not in every layer.
        if self.replay is not None:
            missing = is_missing(self.replay)
            has_missing = missing.any(dim=0).tolist()
            self._missing = [missing[:, layer] if some else None for layer, some in enumerate(has_missing)]

    def replayed(
        self, layer: int, rows: Int[Tensor, " rows"] | None
    ) -> tuple[Int64[Tensor, "chosen top_k"], Bool[Tensor, " chosen"] | None] | None:
        """The choices to replay in a layer, [rows, top_k], and which rows have none."""
        if self.replay is None:
            return None
        replayed, missing = self.replay[:, layer].long(), self._missing[layer]
        if rows is None:
            return replayed, missing
        return replayed.index_select(0, rows), None if missing is None else missing.index_select(0, rows)

    def record(
        self, layer: int, scores: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens top_k"]
    ) -> None:
        """Store the results of a layer's router."""
        if self.is_recording:
            self.choices[layer] = chosen
        if self.is_measuring:
            with torch.no_grad():
                self.loads[layer] = count(chosen.flatten(), scores.shape[1])
                self.confidence[layer] = scores.gather(1, chosen).sum()
        if torch.is_grad_enabled():
            self.first_choices[layer] = chosen.to(torch.int16)


class Router(nn.Module):
    """Scores all experts in float32, and chooses top_k of them with their gates."""

    def __init__(self, hidden_size: int, shape: MoEShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.num_experts, hidden_size))
        if shape.has_expert_bias:
            self.expert_bias = nn.Parameter(
                torch.zeros(shape.num_experts, dtype=torch.float32), requires_grad=False
            )

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        layer: int,
        routing: Routing,
        rows: Int[Tensor, " tokens"] | None,
    ) -> tuple[Int[Tensor, "tokens top_k"], Float[Tensor, "tokens top_k"]]:
        """Chosen experts and their gates (in the dtype of x)."""
        scores = F.linear(x.float(), self.weight.float()).softmax(dim=-1)
        if layer in routing.first_choices:
            chosen = routing.first_choices[layer].long()
        else:
            chosen = self.choose(scores, routing.replayed(layer, rows))
            routing.record(layer, scores, chosen)
        gates = scores.gather(1, chosen)
        if self.shape.norm_topk_prob:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        return chosen, gates.to(x.dtype)

    @torch.no_grad()
    def choose(
        self,
        scores: Float[Tensor, "tokens experts"],
        replayed: tuple[Int64[Tensor, "tokens top_k"], Bool[Tensor, " tokens"] | None] | None,
    ) -> Int[Tensor, "tokens top_k"]:
        """The experts to replay; for rows without any, those with the highest scores."""
        if replayed is not None and replayed[1] is None:
            return replayed[0]
        biased = scores + self.expert_bias if self.shape.has_expert_bias else scores
        own = biased.topk(self.shape.top_k, dim=-1).indices
        return own if replayed is None else torch.where(replayed[1][:, None], own, replayed[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Keep the bias in float32 for every dtype: its updates are too small for bfloat16."""
        super()._apply(fn, recurse)
        if self.shape.has_expert_bias:
            self.expert_bias.data = self.expert_bias.data.float()
        return self


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
    """A mixture of experts, router and experts, instead of a block's MLP."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        assert cfg.moe is not None
        self.gate = Router(cfg.hidden_size, cfg.moe)
        self.experts = Experts(cfg.hidden_size, cfg.moe)

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        layer: int,
        routing: Routing,
        rows: Int[Tensor, " tokens"] | None,
    ) -> Float[Tensor, "tokens dim"]:
        """rows: which tokens of the pass x has (None: all); needed to replay choices."""
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


def count(experts: Int[Tensor, " choices"], num_experts: int) -> Int[Tensor, " experts"]:
    """How often each expert was chosen; unlike bincount it does not wait for the device."""
    return experts.new_zeros(num_experts).index_add_(0, experts, torch.ones_like(experts))


def is_missing(choices: Shaped[Tensor, "*rows top_k"]) -> Bool[Tensor, "*rows"]:
    """True for rows without a choice to replay: all entries are NO_EXPERT of uint8 or uint16."""
    return torch.stack([(choices == value).all(dim=-1) for value in NO_EXPERT]).any(dim=0)


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
