"""Expert parallelism: each rank of the axis ep computes some of the experts, for the tokens of all.

Tokens travel to the rank of their expert and back by two all-to-alls of uneven sizes a layer, and their
gradients the same way. Routers are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.models.moe import Experts, Routing, mixtures
from stretto.trainer.mesh import Mesh
from stretto.trainer.parallel.exchange import exchange


def cut_experts(policy: nn.Module, mesh: Mesh) -> dict[str, int]:
    """Keep this rank's experts of every mixture; the dim along which each parameter was cut."""
    cuts = {}
    for name, mixture in mixtures(policy).items():
        experts = mixture.experts
        for key, parameter in list(experts.named_parameters()):
            part = parameter.detach().chunk(mesh.degrees.ep)[mesh.ep_rank].clone()
            setattr(experts, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
            cuts[f"{name}.experts.{key}"] = 0
        experts.forward = _forward(experts, mesh.degrees.ep, mesh.ep_group)
    return cuts


def _forward(experts: Experts, degree: int, group: Any) -> Any:
    """Experts.forward over the group: rows sorted by expert in, the same rows out."""
    compute = experts.forward

    def forward(x: Tensor, counts: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
        mine = torch.empty_like(counts)  # [rank it comes from, expert of mine]
        dist.all_to_all_single(mine, counts, group=group)
        by_rank = torch.stack((counts.view(degree, -1).sum(1), mine.view(degree, -1).sum(1))).tolist()
        sent, received = by_rank
        rows = exchange(x, received, sent, group)
        local = len(counts) // degree
        expert = torch.arange(local, device=x.device).repeat(degree).repeat_interleave(mine)
        order = expert.argsort(stable=True)
        totals = mine.view(degree, local).sum(0)
        if len(rows):
            computed = compute(rows.index_select(0, order), totals, routing, order)
        else:
            # A row of zeros, so that the backward pass comes by here too: the others wait for this rank in it.
            totals[0] = 1
            padded = torch.cat((rows, x.new_zeros(1, x.shape[1])))
            computed = compute(padded, totals, routing, order)[:0]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return exchange(computed.index_select(0, back), sent, received, group)

    return forward
