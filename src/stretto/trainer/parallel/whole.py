"""Compute with whole matrices that are cut over ranks: each rank gets some of them whole, and cuts are dealt back.

A stack of experts counts as so many matrices: it is cut by experts, which leaves them whole, or by rows of every
one. Matrices cut by features (tp) too are joined by all ranks of that axis, which then compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ROUND_ELEMENTS = 1 << 26
"""A round of exchanges ends when every rank has about so many elements of whole matrices."""

Compute = Callable[[str, Tensor], Tensor]
"""(name, [matrices, rows, cols]) -> the same shape."""


@dataclass(frozen=True)
class Cuts:
    """How a matrix lies over ranks: rows over `group` as torch.chunk cuts them, then `features` over `tp_group`.

    group: None where every rank has whole matrices."""

    group: Any
    rank: int
    degree: int
    features: int | None
    tp_group: Any
    tp_rank: int
    tp_degree: int


@dataclass
class _Task:
    """One matrix: this rank's rows of it, and how many it has in all."""

    name: str
    part: Tensor
    num_rows: int
    result: Tensor | None = None


def cuts_of(parameter: nn.Parameter, features: int | None, tp_group: Any) -> Cuts:
    """How the shards of a parameter lie."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    is_cut = parameter.placements[axis].is_shard(parameter.dim() - 2)
    return Cuts(
        group=mesh.get_group(axis) if is_cut else None,
        rank=mesh.get_local_rank(axis) if is_cut else 0,
        degree=mesh.size(axis) if is_cut else 1,
        features=features,
        tp_group=tp_group,
        tp_rank=dist.get_rank(tp_group) if features is not None else 0,
        tp_degree=dist.get_world_size(tp_group) if features is not None else 1,
    )


@torch.no_grad()
def on_whole(
    parts: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    cuts: Mapping[str, Cuts],
    compute: Compute,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """`compute` of whole matrices, of which every rank gives its parts and gets its parts of the results.

    parts: by name, [rows, cols] or [experts, rows, cols]; shapes: whole but for experts and features. dtype is
    what travels. Every rank of a group must give the same names.
    """
    by_group: dict[Any, list[_Task]] = {}
    for name, part in parts.items():
        tasks = by_group.setdefault(cuts[name].group, [])
        stack = part if part.dim() == 3 else part[None]
        tasks += [_Task(name, one.to(dtype), shapes[name][-2]) for one in stack]
    for tasks in by_group.values():
        for some in _rounds(tasks, cuts[tasks[0].name].degree):
            _exchange(some, cuts, compute)
    found: dict[str, list[Tensor]] = {}
    for tasks in by_group.values():
        for task in tasks:
            assert task.result is not None
            found.setdefault(task.name, []).append(task.result)
    return {
        name: torch.stack(found[name]).view_as(part).to(part.dtype) if name in found else part
        for name, part in parts.items()
    }


def _rounds(tasks: list[_Task], degree: int) -> Iterator[list[_Task]]:
    some: list[_Task] = []
    size = 0
    for task in tasks:
        some.append(task)
        size += task.num_rows * task.part.shape[1]
        if size >= degree * ROUND_ELEMENTS and len(some) % degree == 0:
            yield some
            some, size = [], 0
    if some:
        yield some


def _exchange(tasks: list[_Task], cuts: Mapping[str, Cuts], compute: Compute) -> None:
    """One round: task i is computed by rank i % degree."""
    cut = cuts[tasks[0].name]
    degree, me = cut.degree, cut.rank
    mine = tasks[me::degree]
    by_owner = [tasks[owner::degree] for owner in range(degree)]
    rows = [[_num_rows(task.num_rows, degree, rank) for task in mine] for rank in range(degree)]
    sent = [sum(task.part.numel() for task in owned) for owned in by_owner]
    received = [sum(n * task.part.shape[1] for n, task in zip(of_rank, mine)) for of_rank in rows]
    flat = torch.cat([task.part.flatten() for owned in by_owner for task in owned])
    buffer = _all_to_all(flat, received, sent, cut)
    sizes = [n * task.part.shape[1] for of_rank in rows for n, task in zip(of_rank, mine)]
    pieces = list(buffer.split(sizes))
    wholes = []
    for i, task in enumerate(mine):
        own = [pieces[rank * len(mine) + i].view(-1, task.part.shape[1]) for rank in range(degree)]
        wholes.append(_joined(torch.cat(own), cuts[task.name]))
    computed = [_cut(x, cuts[t.name]) for t, x in zip(mine, _computed(mine, wholes, compute))]
    back = [x.split([of_rank[i] for of_rank in rows]) for i, x in enumerate(computed)]
    flat = torch.cat([x[rank].flatten() for rank in range(degree) for x in back] or [buffer])
    pieces = list(_all_to_all(flat, sent, received, cut).split([t.part.numel() for o in by_owner for t in o]))
    for task, piece in zip((task for owned in by_owner for task in owned), pieces):
        task.result = piece.view_as(task.part)


def _computed(tasks: list[_Task], wholes: list[Tensor], compute: Compute) -> list[Tensor]:
    """Matrices of one stack go through in one call."""
    by_name: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        by_name.setdefault(task.name, []).append(i)
    out: list[Tensor] = list(wholes)
    for name, places in by_name.items():
        for i, result in zip(places, compute(name, torch.stack([wholes[i] for i in places]))):
            out[i] = result
    return out


def _num_rows(total: int, degree: int, rank: int) -> int:
    size = -(-total // degree)
    return max(0, min(total - rank * size, size))


def _all_to_all(flat: Tensor, received: list[int], sent: list[int], cut: Cuts) -> Tensor:
    if cut.degree == 1:
        return flat
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(out, flat, received, sent, group=cut.group)
    return out


def _joined(part: Tensor, cut: Cuts) -> Tensor:
    if cut.features is None:
        return part
    parts = [torch.empty_like(part) for _ in range(cut.tp_degree)]
    dist.all_gather(parts, part.contiguous(), group=cut.tp_group)
    return torch.cat(parts, dim=cut.features)


def _cut(whole: Tensor, cut: Cuts) -> Tensor:
    return whole if cut.features is None else whole.chunk(cut.tp_degree, dim=cut.features)[cut.tp_rank]
