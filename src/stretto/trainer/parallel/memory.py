"""What is done to the blocks of a policy before they are sharded: compile, compute again, keep in CPU memory.

`prepare_blocks` replaces methods of the blocks in place; modules and names of weights stay as they are, so that
nothing else has to know. From the inside out: a part (norm, projection, MLP, experts) is compiled; it, or its
whole block, keeps only its input and is computed again in the backward pass; what the block still saves is
copied to CPU memory. Loss and gradients are those of the plain blocks, bit for bit but for compiled parts.

A mixture that is computed again takes the experts it took the first time (moe.py's Routing).
"""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from stretto.base.errors import ConfigError
from stretto.config.model import ACTIVATION_TARGETS, ActivationCheckpointSection, ModelSection
from stretto.models.decoder import MLP, Block, Decoder
from stretto.models.fp8 import Fp8Linear
from stretto.models.moe import MoE
from stretto.trainer.mesh import training_device

logger = logging.getLogger(__name__)

Method = tuple[nn.Module, str]
"""A module and the name of one of its methods."""

MIN_OFFLOAD_BYTES = 1 << 16
"""Smaller tensors stay on the GPU: their copies would cost more than they free."""


def prepare_blocks(policy: nn.Module, section: ModelSection) -> None:
    """Apply [model.compile], [model.ac] and [model.ac_offloading] to a policy that will be trained.

    Raises: ConfigError for what this policy or this machine cannot do.
    """
    device = next(policy.parameters()).device
    device = training_device() if device.type == "meta" else device
    blocks = find_blocks(policy)
    ac = section.ac
    if section.ac_offloading is not None:
        if device.type != "cuda":
            raise ConfigError("[model.ac_offloading] needs a GPU to offload from; leave it out")
        ac = ac or ActivationCheckpointSection()
    if section.compile is not None:
        _require_compiler(device)
        is_whole = section.compile.fullgraph
        for block in blocks:
            for layer in block.modules():
                if isinstance(layer, Fp8Linear):
                    _replace((layer, "forward"), torch.compiler.disable)
            for method in _compiled(block):
                _replace(method, lambda inner: torch.compile(inner, fullgraph=is_whole, dynamic=True))
    if ac is not None:
        keeps_rng = section.lora is not None and section.lora.dropout > 0
        for method in _recomputed(blocks, ac):
            _replace(method, lambda inner: _again(inner, keeps_rng))
    if section.ac_offloading is not None:
        settings = section.ac_offloading
        offload = Offload(settings.max_inflight_activations, pin_memory=settings.pin_memory, device=device)
        for block in blocks:
            _replace((block, "forward"), lambda inner: _offloaded(inner, offload))


def find_blocks(policy: nn.Module) -> list[nn.Module]:
    """The blocks of a policy in order, also of one of transformers'."""
    if isinstance(policy, Decoder):
        return list(policy.model.layers)
    num = policy.model.config.get_text_config().num_hidden_layers
    lists = [m for m in policy.model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == num]
    if not lists:
        kind = policy.config.family
        raise ConfigError(
            f"[model] ac and compile work on blocks, and transformers' {kind} shows none; leave them out"
        )
    return list(lists[0])


def _parts(block: Block) -> dict[str, list[Method]]:
    """What of a block can be computed again by itself, by the names of ACTIVATION_TARGETS."""
    parts: dict[str, list[Method]] = {
        "norm": [(block.input_layernorm, "forward"), (block.post_attention_layernorm, "forward")],
        "attn_proj": [(block.self_attn, "project")],
    }
    if isinstance(block.mlp, MLP):
        parts["mlp"] = [(block.mlp, "forward")]
    elif isinstance(block.mlp, MoE):
        parts["routed_experts"] = [(block.mlp.experts, "forward")]
    return parts


def _compiled(block: nn.Module) -> list[Method]:
    """What is compiled: all but attention kernels, exchanges between ranks and products of experts."""
    if not isinstance(block, Block):
        return [(block, "forward")]
    parts = _parts(block)
    methods = [*parts["norm"], *parts["attn_proj"], *parts.get("mlp", [])]
    return [*methods, (block.mlp.experts, "gated")] if isinstance(block.mlp, MoE) else methods


def _recomputed(blocks: list[nn.Module], ac: ActivationCheckpointSection) -> Iterator[Method]:
    """The methods that [model.ac] asks to compute again."""
    if ac.mode == "full":
        for block in blocks[:: ac.freq]:
            yield block, "forward"
        return
    if not isinstance(blocks[0], Block):
        raise ConfigError('[model.ac] mode = "selective" needs impl = "custom"; use mode = "full"')
    known = {name for block in blocks for name in _parts(block)}
    if absent := [name for name in ac.targets if name not in known]:
        valid = ", ".join(name for name in ACTIVATION_TARGETS if name in known)
        raise ConfigError(f'[model.ac] targets: this model has no "{absent[0]}"; use some of {valid}')
    for block in blocks[:: ac.freq]:
        for name in ac.targets:
            yield from _parts(block).get(name, [])


def _replace(method: Method, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, name = method
    setattr(module, name, wrap(getattr(module, name)))


def _again(inner: Callable[..., Any], keeps_rng: bool) -> Callable[..., Any]:
    """The same function; of its first argument alone it saves, and it runs again in the backward pass."""

    def forward(x: Tensor, *rest: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(x, *rest, **named)
        # The rest (angles, layouts) is shared by all blocks: saving it here would offload it once for each.
        return checkpoint(
            lambda x: inner(x, *rest, **named), x, use_reentrant=False, preserve_rng_state=keeps_rng
        )

    return forward


def _offloaded(inner: Callable[..., Any], offload: Offload) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        with offload.hooks():
            return inner(*args, **named)

    return forward


@dataclass(eq=False)
class _Copy:
    """A saved tensor in CPU memory, and on its way back."""

    host: Tensor
    ready: torch.cuda.Event | None
    device: Tensor | None = None


class Offload:
    """Saved tensors go to CPU memory as they are saved, and come back one before they are needed.

    Copies run on a stream of their own. On a CPU (tests) they are copies all the same.
    """

    def __init__(self, max_inflight: int, *, pin_memory: bool, device: torch.device) -> None:
        self._max_inflight, self._pin, self._device = max_inflight, pin_memory, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._order: list[weakref.ref[_Copy]] = []
        self.num_bytes = 0
        """Copied to CPU memory so far."""

    def hooks(self) -> AbstractContextManager[Any]:
        """Saved tensors are copied while this is open."""
        return saved_tensors_hooks(self._pack, self._unpack) if torch.is_grad_enabled() else nullcontext()

    def _is_worth_it(self, tensor: Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base
        return (
            tensor.device == self._device
            and not isinstance(base, nn.Parameter)
            and tensor.is_floating_point()
            and tensor.numel() * tensor.element_size() >= MIN_OFFLOAD_BYTES
        )

    def _pack(self, tensor: Tensor) -> Tensor | _Copy:
        if not self._is_worth_it(tensor):
            return tensor
        tensor = tensor.detach()
        pins = self._pin and self._stream is not None
        host = torch.empty_like(tensor, device="cpu", pin_memory=pins)
        with self._on_stream():
            host.copy_(tensor, non_blocking=True)
        saved = _Copy(host, None if self._stream is None else self._stream.record_event())
        self._leaving.append((tensor, saved.ready))
        while len(self._leaving) > self._max_inflight:
            self._free_oldest()
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(saved))
        self.num_bytes += host.numel() * host.element_size()
        return saved

    def _unpack(self, saved: Tensor | _Copy) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        while self._leaving:
            self._free_oldest()
        self._bring(saved)
        place = next((i for i, ref in enumerate(self._order) if ref() is saved), 0)
        before = self._order[place - 1]() if place else None
        if before is not None:
            self._bring(before)
        tensor, saved.device = saved.device, None
        assert tensor is not None
        if self._stream is not None:
            assert saved.ready is not None
            current = torch.cuda.current_stream(self._device)
            current.wait_event(saved.ready)
            tensor.record_stream(current)
        return tensor

    def _bring(self, saved: _Copy) -> None:
        if saved.device is None:
            with self._on_stream():
                saved.device = saved.host.to(self._device, non_blocking=True, copy=True)
            if self._stream is not None:
                saved.ready = self._stream.record_event()

    def _free_oldest(self) -> None:
        """Computation waits for the oldest copy, so that the memory it came from can be used again."""
        _, ready = self._leaving.popleft()
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def _require_compiler(device: torch.device) -> None:
    """Raises: ConfigError where torch.compile has nothing to compile with."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401 (what torch.compile writes GPU kernels in)
        except ImportError as cause:
            raise ConfigError(
                "[model.compile] needs triton on a GPU; pip install triton, or leave it out"
            ) from cause
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"[model.compile] needs a C++ compiler on a CPU and {compiler} is not installed; install it, "
            "set CXX, or leave it out"
        )
