"""A stand-in for a GPU: tensors whose device is `cuda`, with their numbers in CPU memory.

Inside `pretended()` factories, `.to` and copies create and accept such tensors. Every operation is computed on the CPU,
so results can be compared with a plain run, bit for bit if both run the same code. What CUDA refuses is
refused here: an operation on tensors of two devices, except for 0-dim CPU tensors in elementwise operations and in
`x[i] = number`, and CPU tensors as indices in `x[i]`; `numpy()` of a tensor on the device; a gradient of
products without a derivative.
Not covered: kernels, streams and events, memory, NCCL. tests/gpu runs those on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten

_MIXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Operations whose indices may be on the CPU."""


class DeviceTensor(Tensor):
    """A tensor on DEVICE; `host` has its numbers. To torch itself it is a CPU tensor without memory."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        return Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CPU
        )

    def __init__(self, host: Tensor) -> None:
        assert not isinstance(host, DeviceTensor), "it is on the device already"
        self.host = host.detach()

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host!r})"

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy; copy it to host memory first")
        return self.host.numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.host.tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        _check(func, args, kwargs)
        if func._schema.name.endswith("_like") and kwargs.get("device") is not None:
            kwargs.pop("pin_memory", None)
            return func(args[0].host, *args[1:], **kwargs)
        if func is aten.copy_.default:
            args[0].copy_(_host(args[1])) if not _is_ours(args[0]) else args[0].host.copy_(_host(args[1]))
            return args[0]
        host_args, host_kwargs = tree_map(_host, (args, kwargs))
        out = _STAND_INS.get(func, func)(*host_args, **host_kwargs)
        written = _written(func, args, kwargs)
        if written is not None:
            return written
        # A view of a tensor from outside inference mode is not an inference tensor either.
        is_plain = any(r.alias_info is not None for r in func._schema.returns) and not args[0].is_inference()
        with torch.inference_mode(False) if is_plain else nullcontext():
            return tree_map(lambda x: DeviceTensor(x) if isinstance(x, Tensor) else x, out)


class _Move(torch.autograd.Function):
    """A copy on the other device, with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.host.clone() if _is_ours(x) else DeviceTensor(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Move.apply(grad)


class _Device(TorchFunctionMode):
    """Factories and moves, which torch's own binding would refuse without the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        kwargs.pop("pin_memory", None)
        if name in ("to", "cpu", "cuda", "pin_memory", "is_pinned") and args and isinstance(args[0], Tensor):
            return _moved(name, args[0], args[1:], kwargs)
        if func is Tensor.backward:  # it runs code that creates tensors too
            with self:
                seed = torch.ones_like(args[0]) if kwargs.get("gradient") is None else kwargs["gradient"]
                engine = torch.autograd.Variable._execution_engine
                return engine.run_backward(
                    (args[0],), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if name in ("numpy", "tolist", "data_ptr") and args and _is_ours(args[0]):
            return getattr(args[0], name)(*args[1:], **kwargs)
        device = kwargs.get("device")
        source = args[0] if args and _is_ours(args[0]) else None
        if device is None and source is not None and name.startswith("new_"):
            device = DEVICE
        if device is None:
            return func(*args, **kwargs)
        kwargs["device"] = CPU if _is_cuda(device) else device
        if source is not None:
            args = (source.host, *args[1:])
        out = func(*args, **kwargs)
        if not _is_cuda(device):
            return out
        return DeviceTensor(out).requires_grad_(bool(kwargs.get("requires_grad")))


def _moved(name: str, x: Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
    if name in ("pin_memory", "is_pinned"):
        assert not _is_ours(x) or name == "is_pinned", "only CPU tensors can be pinned"
        return x if name == "pin_memory" else False
    device, dtype, copy = None, None, bool(kwargs.pop("copy", False))
    if name != "to":
        device = CPU if name == "cpu" else DEVICE
    elif args and isinstance(args[0], Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
    target = x.device if device is None else torch.device(device)
    dtype = dtype or x.dtype
    if target.type == "meta":
        return _host(x).to("meta", dtype)
    is_copied = target.type != x.device.type
    moved = _Move.apply(x) if is_copied else x
    if dtype is not moved.dtype:
        return torch.ops.aten._to_copy.default(moved, dtype=dtype)
    return moved.clone() if copy and not is_copied else moved


def _check(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises what CUDA raises for tensors of two devices."""
    if func is aten.copy_.default:
        return
    name = func._schema.name.removeprefix("aten::")
    looked = (args, kwargs)
    if name in _MIXES:
        looked = ((args[0], *args[2:]), kwargs)
    tensors = [x for x in tree_leaves(looked) if isinstance(x, Tensor)]
    others = [x for x in tensors if not _is_ours(x)]
    # Torch creates zeros for missing gradients on the device that it sees.
    if torch._C._current_autograd_node() is not None:
        others = [x for x in others if x.any()]
    if not others:
        return
    takes_numbers = torch.Tag.pointwise in func.tags and not name.startswith("_foreach")
    if name == "where":
        takes_numbers = _is_ours(args[0])
    is_number = all(x.dim() == 0 for x in others) and not (
        func._schema.is_mutable and any(x is args[0] for x in others)
    )
    takes_numbers = takes_numbers or name in ("masked_fill", "fill_") or name.startswith("index_put")
    if len(others) < len(tensors) and takes_numbers and is_number:
        return
    shapes = [f"{x.device}{tuple(x.shape)}" for x in tensors]
    raise RuntimeError(
        f"{func}: Expected all tensors to be on the same device, but found at least two devices: {shapes}"
    )


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results of an operation that writes into its arguments; None for other operations."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    if not found or not func._schema.returns:
        return None
    return found[0] if len(func._schema.returns) == 1 else tuple(found)


def _mm_wide(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    assert a.dtype in (torch.bfloat16, torch.float16) and out_dtype is torch.float32, "CUDA takes no others"
    return a.float() @ b.float()


def _flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    """Causal attention within documents, one after the other, and the tensors for the backward pass."""
    assert torch.equal(bounds, key_bounds)
    out = torch.empty_like(q)
    for start, end in itertools.pairwise(bounds.tolist()):
        rows = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        out[start:end] = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(0, 1)
    return out, out.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2)


def _flash_varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5
    for start, end in itertools.pairwise(bounds.tolist()):
        rows = [x[start:end].transpose(0, 1).float() for x in (q, k, v, grad)]
        query, key, value, pushed = rows
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        probs = (query @ key.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        slope = pushed @ value.mT
        slope = probs * (slope - (slope * probs).sum(-1, keepdim=True)) * scale
        for whole, part in zip(grads, (slope @ key, slope.mT @ query, probs.mT @ pushed)):
            whole[start:end] = part.transpose(0, 1)
    return grads[0], *(x.unflatten(1, (-1, repeats)).sum(2) for x in grads[1:])


_STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: _mm_wide,
    torch.ops.torch_attn._varlen_attn.default: _flash_varlen,
    torch.ops.torch_attn._varlen_attn_backward.default: _flash_varlen_backward,
}
"""Operations that only CUDA has."""


def _is_ours(x: object) -> bool:
    return isinstance(x, DeviceTensor)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


def _host(x: Any) -> Any:
    return x.host if isinstance(x, DeviceTensor) else x


class _Stream:
    """A stream or event whose work is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = nothing

    def query(self) -> bool:
        return True


@contextmanager
def pretended() -> Iterator[torch.device]:
    """A context in which there is a GPU; its device."""
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "mem_get_info": lambda *_: (1 << 26, 1 << 26),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        # As with a real GPU, where a module's parameters cannot stay the objects that they were on the CPU.
        stack.enter_context(mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True))
        stack.enter_context(_Device())
        yield DEVICE
