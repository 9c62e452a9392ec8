"""Expert parallelism: each rank of ep computes some of the experts for the tokens of all ranks.

Tokens and their gradients are sent to the rank of their expert and back (token_dispatcher.py). Every rank has the whole
routers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.moe import Experts, mixtures
from stretto.models.parts.router import Routing
from stretto.trainer.parallel.token_dispatcher import TokenDispatcher
from stretto.trainer.ranks.mesh import Mesh


def cut_experts(policy: nn.Module, mesh: Mesh, dispatcher: TokenDispatcher) -> dict[str, int]:
    """Keep only this rank's experts; the dim along which each parameter is cut, by name."""
    cuts = {}
    for name, mixture in mixtures(policy).items():
        experts = mixture.experts
        for key, parameter in list(experts.named_parameters()):
            part = parameter.detach().chunk(mesh.degrees.ep)[mesh.ep_rank].clone()
            setattr(experts, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
            cuts[f"{name}.experts.{key}"] = 0
        forward = _forward(experts, mesh.degrees.ep, dispatcher)
        experts.forward = forward  # type: ignore[method-assign]  # of these experts alone
    return cuts


def _forward(experts: Experts, degree: int, dispatcher: TokenDispatcher) -> Any:
    """`Experts.forward` over all ranks of ep: rows sorted by expert in, the same rows out."""
    compute = experts.forward

    def forward(x: Tensor, counts: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
        rows, expert, handle = dispatcher.dispatch(x, counts)
        order = expert.argsort(stable=True)
        totals = torch.bincount(expert, minlength=len(counts) // degree).to(counts.dtype)
        if len(rows):
            computed = compute(rows.index_select(0, order), totals, routing, order)
        else:
            # A row of zeros keeps the experts in the graph: other ranks wait for collectives of their backward pass.
            totals[0] = 1
            padded = torch.cat((rows, x.new_zeros(1, x.shape[1])))
            computed = compute(padded, totals, routing, order.new_zeros(1))[:0]
        original = torch.empty_like(order)
        original[order] = torch.arange(len(order), device=order.device)
        return dispatcher.combine(computed.index_select(0, original), handle)

    return forward
