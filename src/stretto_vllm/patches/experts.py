"""Mixtures of experts over several CPU processes, which vLLM 0.32 does not support by itself.

Data-parallel ranks gather their tokens before the experts and sum the results after them. vLLM's CPU communicator
lacks both exchanges, so the engine ends at its first step. With expert parallelism a rank has some of the experts, and
the CPU kernel reads out of bounds for the weights of the others.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Shaped


def enable_experts_on_cpus() -> None:
    """Add both exchanges to vLLM's CPU communicator, and skip other ranks' experts in the kernel."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CPUUnquantizedExperts.apply = _skip_remote_experts(CPUUnquantizedExperts.apply)


def all_gatherv(
    self: Any,
    input_: Shaped[Tensor, "rows ..."] | list[Shaped[Tensor, "_ ..."]],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> Shaped[Tensor, "all_rows ..."] | list[Shaped[Tensor, "_ ..."]]:
    """Concatenate the rows of all ranks; rank r has sizes[r] rows, or as many as this one if sizes is None."""
    assert dim == 0, dim
    if isinstance(input_, list):
        return [_gather(self, tensor, sizes) for tensor in input_]
    return _gather(self, input_, sizes)


def _gather(self: Any, local: Tensor, sizes: list[int] | None) -> Tensor:
    counts = [len(local)] * self.world_size if sizes is None else sizes
    # gloo gathers parts of equal size: shorter ones are padded.
    padded = local.new_zeros(max(counts), *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])


def reduce_scatterv(
    self: Any, input_: Shaped[Tensor, "all_rows ..."], dim: int = -1, sizes: list[int] | None = None
) -> Shaped[Tensor, " rows ..."]:
    """Sum input_, which has the rows of all ranks, over the ranks; returns this rank's rows."""
    assert dim == 0, dim
    total = input_.contiguous()
    dist.all_reduce(total, group=self.device_group)
    counts = [len(total) // self.world_size] * self.world_size if sizes is None else sizes
    first = sum(counts[: self.rank_in_group])
    return total[first : first + counts[self.rank_in_group]].clone()


def _skip_remote_experts(apply: Any) -> Any:
    """Wrap the kernel: experts of other ranks get weight 0, and local ones their local index."""

    @functools.wraps(apply)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if (places := kwargs.get("expert_map")) is not None:
            ids = places[kwargs["topk_ids"].long()].to(kwargs["topk_ids"].dtype)
            is_here = ids >= 0
            kwargs["topk_ids"] = ids.clamp(min=0)
            kwargs["topk_weights"] = kwargs["topk_weights"] * is_here
        apply(self, *args, **kwargs)

    return wrapped
