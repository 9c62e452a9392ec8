"""Layers with one frozen weight and the adapters of many tenants beside it.

The rows of a pass are ordered tenant by tenant, so that each tenant has a range of them (`Turn`). The product with the
weight is computed once for all rows. The products with adapters are one grouped product on a GPU, and a few batched
ones elsewhere, or if torch's grouped product does not support the sizes (grouped.py). If a pass has one tenant, the
operations are those of models/lora.py, so that its bits are those of a run with [model.lora]. Gradients of a range
reach only the adapter of its tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.decoder import Decoder
from stretto.models.fp8.reference import product
from stretto.models.hf import Policy
from stretto.models.lora import LoRAExperts, Times, adapted_rows, dropped
from stretto.models.moe import Experts
from stretto.models.parts.router import Routing
from stretto_service.tenants.grouped import add_products, scale_dtype

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Pair:
    """One tenant's matrices beside one weight, in the layouts of models/lora.py."""

    a: Float[Tensor, "*experts rank in"]
    b: Float[Tensor, "*experts out rank"]
    scaling: float
    dropout: float


@dataclass
class Turn:
    """Which tenants have which rows of the current pass; all layers of a backbone share one, and every pass sets it.

    tenants: in the order of their rows; () for the backbone alone. rows: how many inputs of the pass each tenant has.
    last_rows: how many rows each has in the last block, which computes only what the losses need.
    """

    tenants: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    last_rows: tuple[int, ...] = ()

    def set(self, tenants: Sequence[str] = (), rows: Sequence[int] = (), last_rows: Sequence[int] = ()) -> None:
        """Set the tenants of the next pass."""
        self.tenants, self.rows, self.last_rows = tuple(tenants), tuple(rows), tuple(last_rows)

    def counts(self, num_rows: int) -> tuple[int, ...]:
        """How many of a layer's rows each tenant has."""
        # Rows of the last block are a subset, so that equal sums have equal parts.
        counts = self.rows if num_rows == sum(self.rows) else self.last_rows
        assert num_rows == sum(counts), f"{num_rows} rows, but the pass has {self.rows} or {self.last_rows}"
        return counts


class TenantLinear(nn.Linear):
    """A frozen linear layer; `pairs` has an adapter for each tenant that adapts it."""

    def __init__(self, base: nn.Linear, turn: Turn) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.kernels = base.weight, base.bias, getattr(base, "kernels", None)
        self.turn = turn
        # Not parameters of the module: sharding, checkpoints and names of the backbone must not include them.
        self.pairs: dict[str, Pair] = {}

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        pairs = [self.pairs.get(tenant) for tenant in self.turn.tenants]
        if not any(pairs) and self.kernels is None:
            return F.linear(x, self.weight, self.bias)
        out = product(x, self) if self.bias is None else product(x, self) + self.bias
        if not any(pairs):
            return out
        if len(pairs) == 1:
            pair = pairs[0]
            assert pair is not None
            return out + adapted_rows(x, pair.a, pair.b, pair.scaling, pair.dropout)
        if x.dim() == 2:
            return add_rows(out, x, pairs, self.turn.counts(len(x)))
        rows = x.reshape(-1, x.shape[-1])
        return add_rows(out.flatten(0, -2), rows, pairs, self.turn.counts(len(rows))).view(out.shape)


class TenantExperts(LoRAExperts):
    """Frozen experts; `pairs` has, by tenant, an adapter for each of the two stacked matrices."""

    def __init__(self, base: Experts, turn: Turn) -> None:
        self.share_weights_of(base)
        self.kernels = getattr(base, "kernels", None)
        self.turn = turn
        self.pairs: dict[str, dict[str, Pair]] = {}
        self._groups: Tensor | None = None

    def forward(
        self,
        x: Float[Tensor, "rows dim"],
        counts: Int[Tensor, " experts"],
        routing: Routing,
        tokens: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows dim"]:
        self._groups = None
        if len(self.turn.tenants) > 1:
            self._groups = self._count_groups(counts, tokens)
        return super().forward(x, counts, routing, tokens)

    def _count_groups(self, counts: Tensor, tokens: Tensor) -> Tensor:
        """Rows of every (expert, tenant): an expert's rows are in the order of tokens, so a tenant's are a range."""
        num_tenants = len(self.turn.tenants)
        of_token = torch.tensor(self.turn.counts(len(tokens) // self.shape.top_k), device=tokens.device)
        ends = of_token.cumsum(0)
        tenants = torch.searchsorted(ends, tokens, right=True)
        experts = torch.arange(len(counts), device=tokens.device)
        experts = experts.repeat_interleave(counts, output_size=len(tokens))
        return torch.bincount(experts * num_tenants + tenants, minlength=len(counts) * num_tenants)

    def _adapted(self, x: Tensor, name: str, base: Times, times: Times) -> Tensor:
        out = base(x, self.matrix(name))
        pairs = [self.pairs[tenant][name] if tenant in self.pairs else None for tenant in self.turn.tenants]
        if not any(pairs):
            return out
        if len(pairs) == 1:
            pair = pairs[0]
            assert pair is not None
            first, second = self._oriented(pair)
            return out + pair.scaling * times(times(dropped(x, pair.dropout), first), second)
        groups = [None if pair is None else self._oriented(pair) for pair in pairs]
        return self._mixed(out, x, groups, [pair.scaling if pair else 0.0 for pair in pairs])

    def _oriented(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """[experts, rank, in] and [experts, out, rank], however the experts are stored."""
        return (pair.b.mT, pair.a.mT) if self.shape.is_transposed else (pair.a, pair.b)

    def _mixed(
        self, out: Tensor, x: Tensor, groups: list[tuple[Tensor, Tensor] | None], scalings: list[float]
    ) -> Tensor:
        """`out` with the adapters' part of rows that are sorted by expert, then by tenant."""
        assert self._groups is not None
        num_experts = self.gate_up_proj.shape[0]
        if not (_use_grouped_mm(x, out.shape[1]) and self.use_grouped_mm):
            return add_products(out, x, groups, scalings, self._groups.tolist())
        first, second = _stacked(groups, x, out.shape[1], num_experts)
        scales = torch.tensor(scalings, device=x.device, dtype=scale_dtype(x.dtype)).repeat(num_experts)
        return out + _scaled_products(x, first.flatten(0, 1), second.flatten(0, 1), scales, self._groups)

    def _is_aligned(self, dtype: torch.dtype) -> bool:
        ranks = [pair.a.shape[1] for t in self.turn.tenants for pair in self.pairs.get(t, {}).values()]
        if len(self.turn.tenants) == 1 and any(rank * dtype.itemsize % 16 for rank in ranks):
            return False
        return Experts._is_aligned(self, dtype)


def add_rows(
    out: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"], pairs: Sequence[Pair | None], counts: Sequence[int]
) -> Float[Tensor, "rows out"]:
    """`out`, which may change, plus the adapters' products with rows that are sorted by tenant; None: no adapter."""
    scalings = [pair.scaling if pair else 0.0 for pair in pairs]
    if not _use_grouped_mm(x, out.shape[1]):
        halves = [None if pair is None else (pair.a, pair.b) for pair in pairs]
        return add_products(out, x, halves, scalings, counts)
    groups = [None if pair is None else (pair.a[None], pair.b[None]) for pair in pairs]
    first, second = _stacked(groups, x, out.shape[1], 1)
    scales = torch.tensor(scalings, device=x.device, dtype=scale_dtype(x.dtype))
    return out + _scaled_products(x, first[0], second[0], scales, torch.tensor(counts, device=x.device))


def _use_grouped_mm(x: Tensor, num_out: int) -> bool:
    """Whether torch's grouped product takes rows of these sizes: multiples of 16 bytes."""
    return x.is_cuda and all(size * x.itemsize % 16 == 0 for size in (x.shape[1], num_out))


def _stacked(
    groups: Sequence[tuple[Tensor, Tensor] | None], x: Tensor, num_out: int, num_experts: int
) -> tuple[Tensor, Tensor]:
    """[experts, tenants, rank, in] and [experts, tenants, out, rank] of the same rank: padded with zeros."""
    multiple = max(16 // x.itemsize, 1)
    rank = max(pair[0].shape[1] for pair in groups if pair is not None)
    rank += -rank % multiple
    firsts, seconds = [], []
    for pair in groups:
        if pair is None:
            firsts.append(x.new_zeros(num_experts, rank, x.shape[1]))
            seconds.append(x.new_zeros(num_experts, num_out, rank))
        else:
            missing = rank - pair[0].shape[1]
            firsts.append(F.pad(pair[0], (0, 0, 0, missing)))
            seconds.append(F.pad(pair[1], (0, missing)))
    return torch.stack(firsts, 1), torch.stack(seconds, 1)


def _scaled_products(x: Tensor, first: Tensor, second: Tensor, scales: Tensor, sizes: Tensor) -> Tensor:
    """Rows of group g, sizes[g] of them, times first[g] and second[g] and scales[g]."""
    offsets = sizes.cumsum(0, dtype=torch.int32)
    low = F.grouped_mm(x, first.transpose(1, 2), offs=offsets)
    low = (low * scales.repeat_interleave(sizes, output_size=len(x)).unsqueeze(1)).to(x.dtype)
    return F.grouped_mm(low, second.transpose(1, 2), offs=offsets)


@dataclass(frozen=True)
class AdaptableLayers:
    """The layers of a backbone that tenants can adapt, by module path, in the order of its modules."""

    turn: Turn
    by_path: dict[str, TenantLinear | TenantExperts] = field(default_factory=dict)


def prepare_layers(policy: Policy) -> AdaptableLayers:
    """Freeze a policy, and let its linear layers and experts have adapters; names of weights stay.

    The output head and a vision tower have none.
    """
    # Built now, because it must not depend on the new layers.
    _ = getattr(policy, "tensor_map", None)
    policy.requires_grad_(False)
    layers = AdaptableLayers(Turn())
    tower = policy.model.visual if isinstance(policy, Decoder) and policy.config.vision is not None else None
    skipped = set() if tower is None else set(tower.modules())
    for path, module in list(policy.named_modules()):
        if module in skipped or not isinstance(module, nn.Linear | Experts):
            continue
        if isinstance(module, nn.Linear) and module.weight is policy.output_weight:
            continue
        layer: TenantLinear | TenantExperts
        if isinstance(module, nn.Linear):
            layer = TenantLinear(module, layers.turn)
        else:
            layer = TenantExperts(module, layers.turn)
        layers.by_path[path] = layer
        parent, _, name = path.rpartition(".")
        policy.get_submodule(parent).add_module(name, layer)
    return layers
