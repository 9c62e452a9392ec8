"""Sends rows to the rank of their expert and back, with torch's all-to-all or with DeepEP.

`dispatch` takes rows sorted by expert and returns the rows for this rank's experts, each with its expert, in an order
that depends on the dispatcher. `combine` takes computed rows in that order and returns them in the order before
`dispatch`. Gradients are sent in the opposite direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.trainer.parallel.collectives import all_to_all
from stretto.trainer.ranks.mesh import Mesh

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class TokenDispatcher(Protocol):
    """Carries rows between the ranks of the axis ep."""

    def dispatch(
        self, rows: Float[Tensor, "rows dim"], counts: Int[Tensor, " experts"]
    ) -> tuple[Float[Tensor, "received dim"], Int[Tensor, " received"], Any]:
        """Send rows to the ranks of their experts.

        rows are sorted by expert, counts[e] of them for expert e. Returns the rows for this rank's experts, the
        local index of each row's expert, and a handle for `combine`.
        """

    def combine(self, rows: Float[Tensor, "received dim"], handle: Any) -> Float[Tensor, "rows dim"]:
        """Send computed rows back, into the order of the rows that were dispatched."""


class TorchDispatcher:
    """Two all-to-alls of uneven sizes."""

    def __init__(self, mesh: Mesh) -> None:
        self._degree, self._group = mesh.degrees.ep, mesh.ep_group

    def dispatch(
        self, rows: Float[Tensor, "rows dim"], counts: Int[Tensor, " experts"]
    ) -> tuple[Float[Tensor, "received dim"], Int[Tensor, " received"], Any]:
        mine = torch.empty_like(counts)  # [sending rank, local expert]
        dist.all_to_all_single(mine, counts, group=self._group)
        degree = self._degree
        sent, received = torch.stack((counts.view(degree, -1).sum(1), mine.view(degree, -1).sum(1))).tolist()
        local = len(counts) // degree
        expert = torch.arange(local, device=rows.device).repeat(degree).repeat_interleave(mine)
        return all_to_all(rows, received, sent, self._group), expert, (sent, received)

    def combine(self, rows: Float[Tensor, "received dim"], handle: Any) -> Float[Tensor, "rows dim"]:
        sent, received = handle
        return all_to_all(rows, sent, received, self._group)


class DeepEPDispatcher:
    """DeepEP's dispatch and combine for training (its normal kernels); bfloat16 on CUDA.

    To DeepEP every row is a token with one expert. With a chunk size rows are sent in chunks, which bounds the buffers.

    Source: the interface of deep_ep.Buffer, github.com/deepseek-ai/DeepEP.
    """

    def __init__(self, mesh: Mesh, num_sms: int, chunk: int | None) -> None:
        self._deep_ep = _import_deep_ep()
        self._group, self._chunk = mesh.ep_group, chunk
        self._degree = mesh.degrees.ep
        self._buffer: Any = None
        self._deep_ep.Buffer.set_num_sms(num_sms)

    def dispatch(
        self, rows: Float[Tensor, "rows dim"], counts: Int[Tensor, " experts"]
    ) -> tuple[Float[Tensor, "received dim"], Int[Tensor, " received"], Any]:
        num_experts = len(counts)
        expert = torch.arange(num_experts, device=rows.device).repeat_interleave(counts)
        buffer = self._get_buffer(rows)
        received, experts, handles = [], [], []
        for chunk_rows, chunk_expert in self._chunks(rows, expert):
            handle = _DispatchHandle(buffer)
            got, local = _Dispatch.apply(chunk_rows, chunk_expert, num_experts, handle)
            received.append(got)
            experts.append(local)
            handles.append((handle, len(got)))
        return torch.cat(received), torch.cat(experts), handles

    def combine(self, rows: Float[Tensor, "received dim"], handle: Any) -> Float[Tensor, "rows dim"]:
        chunks = rows.split([size for _, size in handle])
        return torch.cat([_Combine.apply(chunk, each) for chunk, (each, _) in zip(chunks, handle)])

    def _chunks(self, rows: Tensor, expert: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Chunks of rows and their experts; as many on every rank, because a dispatch is a collective."""
        if self._chunk is None:
            return [(rows, expert)]
        most = torch.tensor(-(-len(rows) // self._chunk), device=rows.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        num_chunks = max(int(most), 1)
        return list(zip(rows.tensor_split(num_chunks), expert.tensor_split(num_chunks)))

    def _get_buffer(self, rows: Tensor) -> Any:
        """DeepEP's buffer, built at the first call, which knows the width of rows."""
        if self._buffer is None:
            buffer_type = self._deep_ep.Buffer
            row_bytes, nvl, rdma = rows.shape[1] * max(rows.element_size(), 2), 0, 0
            for config in (buffer_type.get_dispatch_config(self._degree), buffer_type.get_combine_config(self._degree)):
                nvl = max(config.get_nvl_buffer_size_hint(row_bytes, self._degree), nvl)
                rdma = max(config.get_rdma_buffer_size_hint(row_bytes, self._degree), rdma)
            self._buffer = buffer_type(self._group, nvl, rdma)
        return self._buffer


class _DispatchHandle:
    """DeepEP's buffer and the handle of a dispatch, for combine and backward passes."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.handle = buffer, None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, expert: Tensor, num_experts: int, handle: _DispatchHandle
    ) -> tuple[Tensor, Tensor]:
        ctx.handle, buffer = handle, handle.buffer
        choice = expert[:, None].to(torch.int64)
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(choice, num_experts)
        received, local, _, _, handle.handle, _ = buffer.dispatch(
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
        combined, _, _ = ctx.handle.buffer.combine(grad.contiguous(), ctx.handle.handle)
        return combined, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: _DispatchHandle) -> Tensor:
        ctx.handle = handle
        combined, _, _ = handle.buffer.combine(rows.contiguous(), handle.handle)
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received, *_ = ctx.handle.buffer.dispatch(grad.contiguous(), handle=ctx.handle.handle)
        return received, None


def build_token_dispatcher(section: ModelSection, mesh: Mesh) -> TokenDispatcher:
    """The dispatcher that [model] ep_comm_backend names.

    Raises: ConfigError if it is DeepEP, which is not available here.
    """
    if section.ep_comm_backend == "torch":
        return TorchDispatcher(mesh)
    if mesh.device.type != "cuda":
        raise ConfigError(
            f'[model] ep_comm_backend = "deepep" needs GPUs, and this rank is on the {mesh.device.type}; use "torch"'
        )
    return DeepEPDispatcher(mesh, section.deepep_num_sms, section.deepep_token_chunk_size)


def _import_deep_ep() -> Any:
    try:
        import deep_ep
    except ImportError as cause:
        raise ConfigError(
            f'[model] ep_comm_backend = "deepep": DeepEP cannot be imported ({cause}); build it for this CUDA from '
            'github.com/deepseek-ai/DeepEP (it needs NVSHMEM for several nodes), or use ep_comm_backend = "torch"'
        ) from cause
    return deep_ep
