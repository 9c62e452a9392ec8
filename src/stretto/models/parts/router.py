"""The router of a mixture: float32 scores of all experts, the choice of top_k, gates.

Families differ in (`MoEShape`): softmax or sigmoid scores; a bias on the choice that is not in the gates; a choice from
the best groups of experts only; gates that sum to 1, times a factor; a soft cap on the logits.

A `Routing` has the options and results of one forward pass for all its routers: choices to replay, recorded choices,
tokens per expert. Replay changes the selection only: gates are this router's scores of the replayed experts, so they
still get gradients.
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

    from stretto.families.shape import MoEShape

_LEAST_SUM = 1e-20
"""Floor of the gates' sum: a bias or a replay may choose experts whose scores are all 0 in float32."""


@dataclass
class Routing:
    """Options and results of one forward pass for all its routers; a new object for every pass."""

    replay: Int[Tensor, "tokens layers top_k"] | None = None
    """The experts to use; NO_EXPERT (255 or 65535) in all entries of a token if the router chooses."""
    is_recording: bool = False
    """The pass stores `choices`."""
    is_measuring: bool = False
    """The pass stores `loads` and `confidence`."""
    row_multiple: int | None = None
    """The rows of each expert are padded to a multiple of this, so that results do not depend on the batch."""
    is_tiled: bool = False
    """Experts compute tiles of exactly `row_multiple` rows."""
    choices: dict[int, Tensor] = field(default_factory=dict)
    """By layer: the chosen experts."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """By layer: tokens per expert."""
    confidence: dict[int, Tensor] = field(default_factory=dict)
    """By layer: the scores of the chosen experts, summed over tokens."""
    first_choices: dict[int, Int[Tensor, "tokens top_k"]] = field(default_factory=dict)
    """By layer: the choices that a layer uses again when it is recomputed for the backward pass."""
    key_choices: dict[int, Int[Tensor, "tokens chosen"]] = field(default_factory=dict)
    """By layer: the keys that queries attend to, where a layer chooses them."""
    index_loss_scale: float | None = None
    """Factor on the loss that trains indexers; None: there is no such loss."""
    index_losses: dict[int, Tensor] = field(default_factory=dict)
    """By layer: that loss without the factor."""

    def __post_init__(self) -> None:
        # Computed here, so that the pass waits for the device once and not in every layer.
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

    def record(self, layer: int, scores: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens top_k"]) -> None:
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
        if shape.has_router_bias:
            self.bias = nn.Parameter(torch.empty(shape.num_experts))
        if shape.has_expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(shape.num_experts, dtype=torch.float32), requires_grad=False)

    def forward(
        self, x: Float[Tensor, "tokens dim"], layer: int, routing: Routing, rows: Int[Tensor, " tokens"] | None
    ) -> tuple[Int[Tensor, "tokens top_k"], Float[Tensor, "tokens top_k"]]:
        """Chosen experts and their gates (in the dtype of x)."""
        scores = self.score(x)
        if layer in routing.first_choices:
            chosen = routing.first_choices[layer].long()
        else:
            chosen = self.choose(scores, routing.replayed(layer, rows))
            routing.record(layer, scores, chosen)
        gates = scores.gather(1, chosen)
        if self.shape.norm_topk_prob:
            gates = gates / gates.sum(dim=-1, keepdim=True).clamp_min(_LEAST_SUM)
        if self.shape.gate_scale != 1.0:
            gates = gates * self.shape.gate_scale
        return chosen, gates.to(x.dtype)

    def score(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens experts"]:
        """Scores between 0 and 1, float32."""
        bias = self.bias.float() if self.shape.has_router_bias else None
        logits = F.linear(x.float(), self.weight.float(), bias)
        if (cap := self.shape.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits.sigmoid() if self.shape.is_sigmoid else logits.softmax(dim=-1)

    @torch.no_grad()
    def choose(
        self,
        scores: Float[Tensor, "tokens experts"],
        replayed: tuple[Int64[Tensor, "tokens top_k"], Bool[Tensor, " tokens"] | None] | None,
    ) -> Int[Tensor, "tokens top_k"]:
        """The experts to replay; for rows without any, those with the highest scores."""
        choices, is_missing = replayed or (None, None)
        if choices is not None and is_missing is None:
            return choices
        biased = scores + self.expert_bias if self.shape.has_expert_bias else scores
        if self.shape.num_groups > self.shape.top_groups:
            biased = self._hide_groups(biased)
        best = biased.topk(self.shape.top_k, dim=-1).indices
        if choices is None or is_missing is None:
            return best
        return torch.where(is_missing[:, None], best, choices)

    def _hide_groups(self, scores: Float[Tensor, "tokens experts"]) -> Float[Tensor, "tokens experts"]:
        """-inf outside the top_groups groups with the largest sums of their two best scores.

        Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (node-limited routing).
        """
        grouped = scores.unflatten(1, (self.shape.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.shape.top_groups, dim=-1).indices
        is_hidden = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(is_hidden.unsqueeze(-1), float("-inf")).flatten(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Keep the bias in float32 for every dtype: its updates are too small for bfloat16."""
        super()._apply(fn, recurse)
        if self.shape.has_expert_bias:
            self.expert_bias.data = self.expert_bias.data.float()
        return self


def count(experts: Int[Tensor, " choices"], num_experts: int) -> Int[Tensor, " experts"]:
    """How often each expert was chosen; unlike bincount it does not wait for the device."""
    return experts.new_zeros(num_experts).index_add_(0, experts, torch.ones_like(experts))


def is_missing(choices: Shaped[Tensor, "*rows top_k"]) -> Bool[Tensor, "*rows"]:
    """True for rows without a choice to replay: all entries are NO_EXPERT of uint8 or uint16."""
    return torch.stack([(choices == value).all(dim=-1) for value in NO_EXPERT]).any(dim=0)
