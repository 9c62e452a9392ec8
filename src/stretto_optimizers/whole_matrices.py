"""Computes on whole matrices, which may be sharded over ranks (for Muon).

Each rank receives some of the matrices whole, computes on them, and sends every rank its rows of the results. A stack
of experts counts as one matrix per expert: it is sharded by experts, which leaves each matrix whole, or by the rows of
every matrix. Matrices that are also cut by features (tp) are gathered by all ranks of that axis, which then compute
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.trainer.optim.build import TrainedWeights
from stretto.trainer.parallel.collectives import all_gather, all_to_all, group_by_size
from stretto.trainer.parallel.shard import ShardedWeights

ROUND_ELEMENTS = 1 << 26
"""Approximately the most elements of whole matrices that a rank holds in one round of exchanges."""

Compute = Callable[[str, Tensor], Tensor]
"""(name, [matrices, rows, cols]) -> the same shape."""


@dataclass(frozen=True)
class MatrixSharding:
    """How a matrix is sharded: rows over `group`, and dim `features` over `tp_group`.

    Rows are divided as torch.chunk does it.

    group: None if every rank has all rows. features: None if the matrix is not cut by features.
    """

    group: Any
    rank: int
    degree: int
    features: int | None
    tp_group: Any
    tp_rank: int
    tp_degree: int


@dataclass
class _Matrix:
    """One matrix: this rank's rows of it, and how many rows it has in all."""

    name: str
    rows: Tensor
    num_rows: int
    result: Tensor | None = None


def find_sharding(parameter: nn.Parameter, features: int | None, tp_group: Any) -> MatrixSharding:
    """How a parameter is sharded."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    is_cut = parameter.placements[axis].is_shard(parameter.dim() - 2)
    return MatrixSharding(
        group=mesh.get_group(axis) if is_cut else None,
        rank=mesh.get_local_rank(axis) if is_cut else 0,
        degree=mesh.size(axis) if is_cut else 1,
        features=features,
        tp_group=tp_group,
        tp_rank=dist.get_rank(tp_group) if features is not None else 0,
        tp_degree=dist.get_world_size(tp_group) if features is not None else 1,
    )


def apply_to_whole(weights: TrainedWeights, parts: Mapping[str, Tensor], compute: Compute) -> dict[str, Tensor]:
    """Apply `compute` to whole matrices, each on one rank; this rank's parts of the results.

    parts: by the names of the weights that they have the shapes of.
    """
    if not isinstance(weights, ShardedWeights):
        return {name: compute(name, part) for name, part in parts.items()}
    mesh, named = weights.mesh, {name: weights.all_parameters[name] for name in parts}
    cuts = {name: find_sharding(p, weights.features.get(name), mesh.tp_group) for name, p in named.items()}
    shapes = {name: p.shape for name, p in named.items()}
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    return apply_to_shards(parts, shapes, cuts, compute, dtype)


@torch.no_grad()
def apply_to_shards(
    parts: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    shardings: Mapping[str, MatrixSharding],
    compute: Compute,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Apply `compute` to whole matrices; every rank gives and gets its parts.

    parts: by name, [rows, cols] or [experts, rows, cols]. shapes: of the weights before their rows are
    sharded; dims that tp or ep cut have their size on this rank. dtype: in which matrices are sent and computed. Every
    rank of a group must give the same names.
    """
    by_group: dict[Any, list[_Matrix]] = {}
    for name, part in parts.items():
        matrices = by_group.setdefault(shardings[name].group, [])
        stack = part if part.dim() == 3 else part[None]
        matrices += [_Matrix(name, one.to(dtype), shapes[name][-2]) for one in stack]
    for matrices in by_group.values():
        degree = shardings[matrices[0].name].degree
        for round_matrices in group_by_size(matrices, _num_elements, degree * ROUND_ELEMENTS, degree):
            _run_round(round_matrices, shardings, compute)
    results: dict[str, list[Tensor]] = {}
    for matrices in by_group.values():
        for matrix in matrices:
            assert matrix.result is not None
            results.setdefault(matrix.name, []).append(matrix.result)
    return {
        name: torch.stack(results[name]).view_as(part).to(part.dtype) if name in results else part
        for name, part in parts.items()
    }


def _run_round(matrices: list[_Matrix], shardings: Mapping[str, MatrixSharding], compute: Compute) -> None:
    """One round of exchanges: rank i % degree computes matrix i."""
    sharding = shardings[matrices[0].name]
    degree, me = sharding.degree, sharding.rank
    mine = matrices[me::degree]
    by_owner = [matrices[owner::degree] for owner in range(degree)]
    rows = [[_num_rows(matrix.num_rows, degree, rank) for matrix in mine] for rank in range(degree)]
    sent = [sum(matrix.rows.numel() for matrix in owned) for owned in by_owner]
    received = [sum(n * matrix.rows.shape[1] for n, matrix in zip(of_rank, mine)) for of_rank in rows]
    flat = torch.cat([matrix.rows.flatten() for owned in by_owner for matrix in owned])
    buffer = flat if degree == 1 else all_to_all(flat, received, sent, sharding.group)
    sizes = [n * matrix.rows.shape[1] for of_rank in rows for n, matrix in zip(of_rank, mine)]
    pieces = list(buffer.split(sizes))
    wholes = []
    for i, matrix in enumerate(mine):
        rows_of_matrix = [pieces[rank * len(mine) + i].view(-1, matrix.rows.shape[1]) for rank in range(degree)]
        wholes.append(_gather_features(torch.cat(rows_of_matrix), shardings[matrix.name]))
    computed = [_cut_features(x, shardings[m.name]) for m, x in zip(mine, _compute_stacks(mine, wholes, compute))]
    back = [x.split([of_rank[i] for of_rank in rows]) for i, x in enumerate(computed)]
    flat = torch.cat([x[rank].flatten() for rank in range(degree) for x in back] or [buffer])
    flat = flat if degree == 1 else all_to_all(flat, sent, received, sharding.group)
    pieces = list(flat.split([m.rows.numel() for o in by_owner for m in o]))
    for matrix, piece in zip((matrix for owned in by_owner for matrix in owned), pieces):
        matrix.result = piece.view_as(matrix.rows)


def _compute_stacks(matrices: list[_Matrix], wholes: list[Tensor], compute: Compute) -> list[Tensor]:
    """The results, with one call of `compute` for the matrices of one stack."""
    by_name: dict[str, list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_name.setdefault(matrix.name, []).append(i)
    out: list[Tensor] = list(wholes)
    for name, places in by_name.items():
        for i, result in zip(places, compute(name, torch.stack([wholes[i] for i in places]))):
            out[i] = result
    return out


def _num_elements(matrix: _Matrix) -> int:
    return matrix.num_rows * matrix.rows.shape[1]


def _num_rows(total: int, degree: int, rank: int) -> int:
    size = -(-total // degree)
    return max(0, min(total - rank * size, size))


def _gather_features(part: Tensor, sharding: MatrixSharding) -> Tensor:
    return part if sharding.features is None else all_gather(part, sharding.features, sharding.tp_group)


def _cut_features(whole: Tensor, sharding: MatrixSharding) -> Tensor:
    return (
        whole if sharding.features is None else whole.chunk(sharding.tp_degree, dim=sharding.features)[sharding.tp_rank]
    )
