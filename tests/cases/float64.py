"""What a network computes without float32's rounding: the reference of two networks that both round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Code that asks for float32 gets float64; products of experts, which torch has for less only, go one by one."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.view and torch.int32 in args[1:]:  # order by bits, in the indexers' choice
            return args[0].to(torch.float32).view(torch.int32)
        if func is torch._grouped_mm and args[0].dtype is torch.float64:
            return _grouped_mm(*args[:2], kwargs["offs"].tolist())
        wider = lambda x: torch.float64 if x is torch.float32 else x
        return func(*map(wider, args), **{name: wider(value) for name, value in kwargs.items()})


def _grouped_mm(rows: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
    parts = [rows[a:b] @ weight for a, b, weight in zip([0, *ends], ends, weights)]
    return torch.cat((*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])))


def errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """By name: how far each tensor is from the exact one, relative to the norm of that."""
    assert found.keys() == exact.keys()
    return {
        name: float((found[name].double() - tensor).norm() / tensor.norm().clamp(min=1e-300))
        for name, tensor in exact.items()
    }


def assert_gradients_as_exact_as_theirs(
    ours: Mapping[torch.dtype, Mapping[str, Tensor]],
    theirs: Mapping[torch.dtype, Mapping[str, Tensor]],
    tolerance: float,
) -> None:
    """Gradients by dtype: equal in float64, and in float32 not farther from that than transformers' or `tolerance`.

    In float32 each network rounds in its own order, so that neither is the measure of the other.
    """
    exact = theirs[torch.float64]
    in_float64 = errors(ours[torch.float64], exact)
    assert max(in_float64.values()) < 1e-6, max(in_float64, key=in_float64.__getitem__)
    our_errors, their_errors = (errors(each[torch.float32], exact) for each in (ours, theirs))
    worst = max(our_errors, key=our_errors.__getitem__)
    assert our_errors[worst] <= tolerance, (worst, our_errors[worst], their_errors[worst])
    assert our_errors[worst] <= max(1e-5, 2 * max(their_errors.values())), (worst, our_errors[worst])
