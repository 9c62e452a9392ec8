"""Expert parallelism: each rank of the axis ep computes some of the experts, for the tokens of all.

Tokens travel to the rank of their expert and back (token_wire.py), and their gradients the same way. Routers are
whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.moe import Experts, Routing, mixtures
from stretto.trainer.mesh import Mesh
from stretto.trainer.parallel.token_wire import TokenWire


def cut_experts(policy: nn.Module, mesh: Mesh, wire: TokenWire) -> dict[str, int]:
    """Keep this rank's experts of every mixture; the dim along which each parameter was cut."""
    cuts = {}
    for name, mixture in mixtures(policy).items():
        experts = mixture.experts
        for key, parameter in list(experts.named_parameters()):
            part = parameter.detach().chunk(mesh.degrees.ep)[mesh.ep_rank].clone()
            setattr(experts, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
            cuts[f"{name}.experts.{key}"] = 0
        experts.forward = _forward(experts, mesh.degrees.ep, wire)
    return cuts


def _forward(experts: Experts, degree: int, wire: TokenWire) -> Any:
    """Experts.forward over the group: rows sorted by expert in, the same rows out."""
    compute = experts.forward

    def forward(x: Tensor, counts: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
        rows, expert, way = wire.send(x, counts)
        order = expert.argsort(stable=True)
        totals = torch.bincount(expert, minlength=len(counts) // degree).to(counts.dtype)
        if len(rows):
            computed = compute(rows.index_select(0, order), totals, routing, order)
        else:
            # A row of zeros, so that the backward pass comes by here too: the others wait for this rank in it.
            totals[0] = 1
            padded = torch.cat((rows, x.new_zeros(1, x.shape[1])))
            computed = compute(padded, totals, routing, order)[:0]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return wire.back(computed.index_select(0, back), way)

    return forward
