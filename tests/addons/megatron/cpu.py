"""What lets Megatron-Core run on a CPU over gloo: stand-ins for the parts of torch.cuda that it calls.

Only tests use this (on_cpu/sitecustomize.py), before anything of Megatron is imported.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_gather_equal = dist.all_gather


class _Stream:
    """A stream, an event, or what either returns: on a CPU all is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Stream()


class _OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU, or in pinned memory, are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def stand_in_for_cuda() -> None:
    """Let code that asks for the GPU get the CPU."""
    cuda: Any = torch.cuda
    torch.compile = lambda function=None, **_: function or (lambda it: it)  # compiling takes longer than the tests
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed"):
        setattr(cuda, name, lambda *_, **__: None)  # each its own: torch keeps a table by function
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
        setattr(cuda, name, _Stream)
    cuda.current_device = lambda: CPU
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    names = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
    torch.Tensor.type = lambda self, to=None: names[self.dtype] if to is None else self.to(to)  # type: ignore
    _OnCpu().__enter__()
    dist.all_gather = _all_gather


def stand_in_for_megatron() -> None:
    """Let Megatron-Core, which this imports, run without a GPU's random numbers, streams and kernels."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    moe_utils.te_general_gemm = None
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _Stream()
    dispatcher.maybe_move_tensor_to_cpu = _counts


def _all_gather(parts: list[torch.Tensor], part: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
    """`all_gather` of parts that may differ in length, which NCCL can and gloo cannot."""
    assert not async_op
    padded = part.new_zeros(max(map(len, parts)), *part.shape[1:])
    padded[: len(part)] = part
    out = [torch.empty_like(padded) for _ in parts]
    _gather_equal(out, padded, group=group)
    for each, found in zip(parts, out):
        each.copy_(found[: len(each)])


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
