"""Collectives between ranks, most of them differentiable, and groups of items for them.

Each differentiable collective is an autograd function whose backward pass is the opposite collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

T = TypeVar("T")


class _AllToAll(torch.autograd.Function):
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


def all_to_all(
    x: Shaped[Tensor, "sent ..."], received: list[int], sent: list[int], group: Any
) -> Shaped[Tensor, "received ..."]:
    """All-to-all of rows: sent[r] rows go to rank r, received[r] rows come from it.

    Rows are sorted by rank.
    """
    return _AllToAll.apply(x, received, sent, group)


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradients(x: Float[Tensor, "*shape"], group: Any) -> Float[Tensor, "*shape"]:
    """Return x unchanged; in the backward pass its gradient is summed over the group."""
    return _SumGradients.apply(x, group)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def all_reduce(x: Float[Tensor, "*shape"], group: Any) -> Float[Tensor, "*shape"]:
    """Sum x over the group; the gradient, equal on every rank, passes through unchanged."""
    return _AllReduce.apply(x, group)


def _gather_at(x: Tensor, places: list[Tensor], group: Any) -> Tensor:
    """The rows of all ranks, rank r's at indices places[r]."""
    sizes = [len(place) for place in places]
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in places]
    dist.all_gather(parts, padded, group=group)
    out = x.new_empty(sum(sizes), *x.shape[1:])
    for part, place in zip(parts, places):
        out[place] = part[: len(place)]
    return out


class _AllGatherAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: list[Tensor], rank: int, group: Any) -> Tensor:
        ctx.place = places[rank]
        return _gather_at(x, places, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.place), None, None, None


def all_gather_at(
    x: Float[Tensor, "own ..."], places: list[Int[Tensor, " _"]], rank: int, group: Any
) -> Float[Tensor, "all ..."]:
    """All-gather x into one tensor that holds rank r's values at indices places[r] of its first dim.

    The backward pass keeps only this rank's slice of the gradient, since all ranks compute the same loss.
    """
    return _AllGatherAt.apply(x, places, rank, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: list[Tensor], rank: int, group: Any) -> Tensor:
        ctx.places, ctx.rank, ctx.group = places, rank, group
        return _gather_at(x, places, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places, num_own = ctx.places, len(ctx.places[ctx.rank])
        by_rank = grad.index_select(0, torch.cat(places))
        received = grad.new_empty(num_own * len(places), *grad.shape[1:])
        sent = [len(place) for place in places]
        dist.all_to_all_single(received, by_rank, [num_own] * len(places), sent, group=ctx.group)
        return received.unflatten(0, (len(places), num_own)).sum(0), None, None, None


def gather_rows(
    x: Shaped[Tensor, "own ..."], places: list[Int[Tensor, " _"]], rank: int, group: Any
) -> Shaped[Tensor, "all ..."]:
    """All rows of the group, rank r's at indices places[r]; the backward pass sums what every rank makes of a row."""
    return _GatherRows.apply(x, places, rank, group)


@torch.no_grad()
def all_gather(part: Shaped[Tensor, "*part"], dim: int, group: Any) -> Shaped[Tensor, "*whole"]:
    """Concatenate the parts of all ranks of the group along a dim."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def group_by_size(items: Iterable[T], size_of: Callable[[T], int], limit: int, multiple: int = 1) -> Iterator[list[T]]:
    """Split items, in their order, into lists of a total size of at most `limit`.

    A single item may be larger than the limit. The number of items in every list but the last is a multiple of
    `multiple`; a list exceeds the limit if that needs it.
    """
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + size_of(item) > limit and len(group) % multiple == 0:
            yield group
            group, size = [], 0
        group.append(item)
        size += size_of(item)
    if group:
        yield group
