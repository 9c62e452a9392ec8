"""A mixture of experts: a router chooses top_k experts a token, grouped products compute them.

The router works in float32. What a forward pass wants of all its routers, and what it learns from them, is
one `Routing`: choices to replay, choices made, how many tokens each expert got. Replayed choices replace the
selection only: gates are this router's own scores at the given experts, so they still get gradients.

Three ways to compute the experts, with equal results up to rounding: one grouped product over tokens sorted
by expert (default), a loop over experts (the slow reference), and a loop over padded groups, which gives a
token the same bits in whatever batch it stands (the embedded engine in float32 on a CPU).
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

    from jaxtyping import Float, Int

    from stretto.models.config import ModelConfig


@dataclass(frozen=True)
class MoEShape:
    """The mixture of a model; `sparse_layers` are the blocks that have one, all others are dense."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[int, ...]
    has_expert_bias: bool = False
    """A bias on the scores by which experts are chosen (not on the gates), moved to balance their loads."""


@dataclass
class Routing:
    """One forward pass's view of its routers; a new one for every pass.

    replay: [tokens, layers, top_k] of experts to use, rows of NO_EXPERT (255 or 65535) where the router
    itself shall choose. row_multiple: compute experts bit-exactly for any batch, on groups padded to this
    many rows; is_tiled: on groups of exactly so many. After the pass: `choices` by layer, if is_recording;
    `loads` (tokens by expert) and `confidence` (score mass of the chosen, summed over tokens) by layer.
    A layer that is computed again for the backward pass takes the choices of the first time, `remembered`.
    """

    replay: Int[Tensor, "tokens layers top_k"] | None = None
    is_recording: bool = False
    is_measuring: bool = False
    row_multiple: int | None = None
    is_tiled: bool = False
    choices: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)
    confidence: dict[int, Tensor] = field(default_factory=dict)
    remembered: dict[int, Int[Tensor, "tokens top_k"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replay is not None:  # here, so that a device is waited for once and not in every layer
            missing = is_missing(self.replay)
            has_missing = missing.any(dim=0).tolist()
            self._missing = [missing[:, layer] if some else None for layer, some in enumerate(has_missing)]

    def given(self, layer: int, rows: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """The choices to replay in a layer, [rows, top_k], and which rows have none (None: all have)."""
        if self.replay is None:
            return None
        given, missing = self.replay[:, layer].long(), self._missing[layer]
        if rows is None:
            return given, missing
        return given.index_select(0, rows), None if missing is None else missing.index_select(0, rows)

    def saw(self, layer: int, scores: Tensor, chosen: Tensor) -> None:
        if self.is_recording:
            self.choices[layer] = chosen
        if self.is_measuring:
            with torch.no_grad():
                self.loads[layer] = count(chosen.flatten(), scores.shape[1])
                self.confidence[layer] = scores.gather(1, chosen).sum()
        if torch.is_grad_enabled():
            self.remembered[layer] = chosen.to(torch.int16)


class Router(nn.Module):
    """Scores of all experts in float32, and the chosen ones with their gates."""

    def __init__(self, hidden_size: int, shape: MoEShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.num_experts, hidden_size))
        if shape.has_expert_bias:
            self.expert_bias = nn.Parameter(
                torch.zeros(shape.num_experts, dtype=torch.float32), requires_grad=False
            )

    def forward(
        self, x: Float[Tensor, "tokens dim"], layer: int, routing: Routing, rows: Tensor | None
    ) -> tuple[Int[Tensor, "tokens top_k"], Float[Tensor, "tokens top_k"]]:
        """Chosen experts and their gates (in the dtype of x)."""
        scores = F.linear(x.float(), self.weight.float()).softmax(dim=-1)
        if layer in routing.remembered:
            chosen = routing.remembered[layer].long()
        else:
            chosen = self.choose(scores, routing.given(layer, rows))
            routing.saw(layer, scores, chosen)
        gates = scores.gather(1, chosen)
        if self.shape.norm_topk_prob:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        return chosen, gates.to(x.dtype)

    @torch.no_grad()
    def choose(
        self, scores: Float[Tensor, "tokens experts"], given: tuple[Tensor, Tensor | None] | None
    ) -> Int[Tensor, "tokens top_k"]:
        """The given experts, and where none are given those of the highest scores."""
        if given is not None and given[1] is None:
            return given[0]
        biased = scores + self.expert_bias if self.shape.has_expert_bias else scores
        own = biased.topk(self.shape.top_k, dim=-1).indices
        return own if given is None else torch.where(given[1][:, None], own, given[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """The bias stays in float32 whatever the model's dtype: its steps are smaller than bfloat16's."""
        super()._apply(fn, recurse)
        if self.shape.has_expert_bias:
            self.expert_bias.data = self.expert_bias.data.float()
        return self


class Experts(nn.Module):
    """Gated MLPs of all experts, stacked: [experts, 2 * inter, dim] (gate above up) and [experts, dim, inter]."""

    def __init__(self, hidden_size: int, shape: MoEShape) -> None:
        super().__init__()
        inter = shape.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(shape.num_experts, 2 * inter, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(shape.num_experts, hidden_size, inter))
        self.use_grouped_mm = True

    @staticmethod
    def gated(gate_up: Float[Tensor, "rows both"]) -> Float[Tensor, "rows inter"]:
        """Of the products with gate and up: silu(gate) * up."""
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
        # unbind, because the gradient of weight[e] would be as large as the whole stack, once for every e.
        weights = list(zip(self.gate_up_proj.unbind(), self.down_proj.unbind()))
        if not len(x):
            return _mlp(x, *weights[0])  # gradients of zeros: a rank of several may have no token here
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
        """grouped_mm wants rows of a multiple of 16 bytes; a model of odd sizes takes the loop."""
        return all(size * dtype.itemsize % 16 == 0 for size in self.down_proj.shape[1:])


class MoE(nn.Module):
    """Router and experts, in the place of a block's MLP."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        assert cfg.moe is not None
        self.gate = Router(cfg.hidden_size, cfg.moe)
        self.experts = Experts(cfg.hidden_size, cfg.moe)

    def forward(
        self, x: Float[Tensor, "tokens dim"], layer: int, routing: Routing, rows: Tensor | None
    ) -> Float[Tensor, "tokens dim"]:
        """`rows` says which of the pass's tokens x holds (None: all), for choices that are replayed."""
        chosen, gates = self.gate(x, layer, routing, rows)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = count(experts, self.gate.shape.num_experts)
        tokens = order // chosen.shape[1]
        computed = self.experts(x.index_select(0, tokens), counts, routing, tokens)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        by_choice = computed.index_select(0, back).view(*chosen.shape, x.shape[-1])
        return (by_choice * gates.unsqueeze(-1)).sum(dim=1)


def count(experts: Int[Tensor, " choices"], num_experts: int) -> Int[Tensor, " experts"]:
    """How often each expert was chosen; unlike bincount without waiting for the device."""
    return experts.new_zeros(num_experts).index_add_(0, experts, torch.ones_like(experts))


def is_missing(choices: Int[Tensor, "*rows top_k"]) -> Tensor:
    """Rows for which no choice is given: all their entries are the largest value of uint8 or uint16."""
    return torch.stack([(choices == value).all(dim=-1) for value in NO_EXPERT]).any(dim=0)


def mixtures(model: nn.Module) -> dict[str, MoE]:
    """The mixtures of a model by module name, in order of their layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


@torch.no_grad()
def update_expert_bias(model: nn.Module, loads: Float[Tensor, "mixtures experts"], rate: float) -> None:
    """Raise the bias of experts that got fewer tokens than the mean, lower that of the others.

    Source: auxiliary-loss-free load balancing, arXiv:2408.15664, algorithm 1. Differs: the steps are
    centred, so that the mean bias stays 0.
    """
    for mixture, load in zip(mixtures(model).values(), loads, strict=True):
        step = torch.sign(load.mean() - load).to(mixture.gate.expert_bias)
        mixture.gate.expert_bias += rate * (step - step.mean())


def _mlp(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert."""
    return F.linear(gated(F.linear(rows, gate_up)), down)


def gated(gate_up: Float[Tensor, "rows both"]) -> Float[Tensor, "rows inter"]:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
