"""How rows travel to the rank of their expert, and back: torch's all-to-all, or DeepEP's.

Both are asked the same two things. `send`: rows sorted by expert in; the rows of this rank's experts out, each
with its expert, in the wire's own order. `back`: rows in that order in, the rows that were sent out. Gradients
go the other way by the same wire.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.config.model import ModelSection
from stretto.trainer.mesh import Mesh
from stretto.trainer.parallel.exchange import exchange


class TokenWire(Protocol):
    """Carries rows between the ranks of the axis ep."""

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        """rows [rows, dim] sorted by expert, counts [experts] of them -> [mine, dim], expert of each, the way back."""

    def back(self, rows: Tensor, way: Any) -> Tensor:
        """Rows in the order in which `send` gave them -> those that were sent, in their order."""


class TorchWire:
    """Two all-to-alls of uneven sizes."""

    def __init__(self, mesh: Mesh) -> None:
        self._degree, self._group = mesh.degrees.ep, mesh.ep_group

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        mine = torch.empty_like(counts)  # [rank it comes from, expert of mine]
        dist.all_to_all_single(mine, counts, group=self._group)
        degree = self._degree
        sent, received = torch.stack((counts.view(degree, -1).sum(1), mine.view(degree, -1).sum(1))).tolist()
        local = len(counts) // degree
        expert = torch.arange(local, device=rows.device).repeat(degree).repeat_interleave(mine)
        return exchange(rows, received, sent, self._group), expert, (sent, received)

    def back(self, rows: Tensor, way: Any) -> Tensor:
        sent, received = way
        return exchange(rows, sent, received, self._group)


class DeepEPWire:
    """DeepEP's dispatch and combine for training (its normal kernels); bfloat16 on CUDA.

    Every row is a token of one expert there. With a chunk size rows travel in parts, which bounds the buffers.

    Source: the interface of deep_ep.Buffer, github.com/deepseek-ai/DeepEP.
    """

    def __init__(self, mesh: Mesh, num_sms: int, chunk: int | None) -> None:
        self._deep_ep = _import_deep_ep()
        self._group, self._chunk = mesh.ep_group, chunk
        self._degree = mesh.degrees.ep
        self._buffer: Any = None
        self._deep_ep.Buffer.set_num_sms(num_sms)

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        num_experts = len(counts)
        expert = torch.arange(num_experts, device=rows.device).repeat_interleave(counts)
        buffer = self._open(rows)
        received, experts, ways = [], [], []
        for part in self._parts(rows, expert):
            way = _Way(buffer)
            got, local = _Dispatch.apply(part[0], part[1], num_experts, way)
            received.append(got)
            experts.append(local)
            ways.append((way, len(got)))
        return torch.cat(received), torch.cat(experts), ways

    def back(self, rows: Tensor, way: Any) -> Tensor:
        parts = rows.split([size for _, size in way])
        return torch.cat([_Combine.apply(part, each) for part, (each, _) in zip(parts, way)])

    def _parts(self, rows: Tensor, expert: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Equally many on every rank: all take part in every dispatch."""
        if self._chunk is None:
            return [(rows, expert)]
        most = torch.tensor(-(-len(rows) // self._chunk), device=rows.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        num_parts = max(int(most), 1)
        return list(zip(rows.tensor_split(num_parts), expert.tensor_split(num_parts)))

    def _open(self, rows: Tensor) -> Any:
        """The buffers, made for the first rows: their size depends on the width and the number of ranks."""
        if self._buffer is None:
            kind = self._deep_ep.Buffer
            row_bytes, nvl, rdma = rows.shape[1] * max(rows.element_size(), 2), 0, 0
            for config in (kind.get_dispatch_config(self._degree), kind.get_combine_config(self._degree)):
                nvl = max(config.get_nvl_buffer_size_hint(row_bytes, self._degree), nvl)
                rdma = max(config.get_rdma_buffer_size_hint(row_bytes, self._degree), rdma)
            self._buffer = kind(self._group, nvl, rdma)
        return self._buffer


class _Way:
    """What a dispatch leaves for its combine."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.handle = buffer, None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, expert: Tensor, num_experts: int, way: _Way) -> tuple[Tensor, Tensor]:
        ctx.way, buffer = way, way.buffer
        choice = expert[:, None].to(torch.int64)
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(choice, num_experts)
        received, local, _, _, way.handle, _ = buffer.dispatch(
            rows.contiguous(),
            topk_idx=choice,
            topk_weights=torch.ones_like(choice, dtype=torch.float32),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        local = local[:, 0]
        ctx.mark_non_differentiable(local)
        return received, local

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        combined, _, _ = ctx.way.buffer.combine(grad.contiguous(), ctx.way.handle)
        return combined, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        combined, _, _ = way.buffer.combine(rows.contiguous(), way.handle)
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received, *_ = ctx.way.buffer.dispatch(grad.contiguous(), handle=ctx.way.handle)
        return received, None


def build_token_wire(section: ModelSection, mesh: Mesh) -> TokenWire:
    """The wire of the section.

    Raises: ConfigError when DeepEP is asked for and cannot be had here.
    """
    if section.ep_comm_backend == "torch":
        return TorchWire(mesh)
    if mesh.device.type != "cuda":
        raise ConfigError(
            f'[model] ep_comm_backend = "deepep" needs GPUs, and this rank is on the {mesh.device.type}; use "torch"'
        )
    return DeepEPWire(mesh, section.deepep_num_sms, section.deepep_token_chunk_size)


def _import_deep_ep() -> Any:
    try:
        import deep_ep
    except ImportError as cause:
        raise ConfigError(
            f'[model] ep_comm_backend = "deepep": DeepEP cannot be imported ({cause}); build it for this CUDA from '
            'github.com/deepseek-ai/DeepEP (it needs NVSHMEM for several nodes), or use ep_comm_backend = "torch"'
        ) from cause
    return deep_ep
