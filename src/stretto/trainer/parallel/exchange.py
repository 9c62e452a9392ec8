"""Collectives that gradients pass through; each is one autograd function whose backward is the opposite one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.sizes = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.sizes
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=group)
        return out, None, None, None


def exchange(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """All-to-all of rows: the first sent[0] go to rank 0 of the group, and so on; received in rank order."""
    return _Exchange.apply(x, received, sent, group)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def copied(x: Tensor, group: Any) -> Tensor:
    """x itself, on every rank; its gradients are summed over the group."""
    return _Copied.apply(x, group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum over the group; its gradient, equal on every rank, goes back as it is."""
    return _Summed.apply(x, group)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: list[Tensor], rank: int, group: Any) -> Tensor:
        ctx.place = places[rank]
        longest = max(len(place) for place in places)
        padded = x.new_zeros(longest)
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in places]
        dist.all_gather(parts, padded, group=group)
        out = x.new_empty(sum(len(place) for place in places))
        for part, place in zip(parts, places):
            out[place] = part[: len(place)]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.place), None, None, None


def joined(x: Tensor, places: list[Tensor], rank: int, group: Any) -> Tensor:
    """The values of all ranks as one vector, rank r's at places[r]; whoever computes with it computes alike.

    Every rank derives the same loss from it, so each one's own share of the gradient is all that goes back.
    """
    return _Joined.apply(x, places, rank, group)
