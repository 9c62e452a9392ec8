"""Prepares blocks before sharding: compile, activation checkpointing, activation offload.

`prepare_blocks` replaces methods of the blocks in place; modules and names of weights stay as they are, so that other
code does not depend on it. From the inside out: parts of a block (norm, projection, MLP, experts) are compiled; a part
or a whole block saves only its input and is computed again in the backward pass; what the block still saves is copied
to CPU memory. Loss and gradients are those of the plain blocks, bit for bit except for compiled parts.

A mixture that is computed again uses the experts that it chose the first time (moe.py's Routing).
"""

from __future__ import annotations

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
from stretto.config.sections.model import ACTIVATION_TARGETS, ActivationCheckpointSection, ModelSection
from stretto.models.decoder import Block, Decoder
from stretto.models.fp8.reference import Fp8Linear
from stretto.models.hf import Policy
from stretto.models.moe import MoE
from stretto.models.parts.mlp import MLP, PlainMLP
from stretto.trainer.ranks.mesh import training_device

Method = tuple[nn.Module, str]
"""A module and the name of one of its methods."""

MIN_OFFLOAD_BYTES = 1 << 16
"""Smaller tensors stay on the GPU: their copies would cost more than they free."""


def prepare_blocks(policy: Policy, section: ModelSection) -> None:
    """Apply [model.compile], [model.ac] and [model.ac_offloading] to a policy to be trained.

    Raises: ConfigError if this policy or this machine does not support a setting.
    """
    device = next(policy.parameters()).device
    device = training_device() if device.type == "meta" else device
    blocks = find_blocks(policy)
    ac = section.ac
    if section.ac_offloading is not None:
        if device.type != "cuda":
            raise ConfigError("[model.ac_offloading] needs a GPU to offload from; remove it")
        ac = ac or ActivationCheckpointSection()
    if section.compile is not None:
        _require_compiler(device)
        is_whole = section.compile.fullgraph
        for block in blocks:
            for layer in block.modules():
                if isinstance(layer, Fp8Linear):
                    _wrap_method((layer, "forward"), torch.compiler.disable)
            for method in _methods_to_compile(block):
                _wrap_method(method, lambda inner: torch.compile(inner, fullgraph=is_whole, dynamic=True))
    if ac is not None:
        preserves_rng = section.lora is not None and section.lora.dropout > 0
        trained = [block for block in find_vision_blocks(policy) if next(block.parameters()).requires_grad]
        whole = [(block, "forward") for block in trained] if ac.mode == "full" else []
        for method in (*_methods_to_recompute(blocks, ac), *whole):
            _wrap_method(method, lambda inner: _with_recompute(inner, preserves_rng))
        if ac.group_size > 1:
            _recompute_groups(policy, ac, preserves_rng)
    if section.ac_offloading is not None:
        settings = section.ac_offloading
        offload = ActivationOffload(settings.max_inflight_activations, pin_memory=settings.pin_memory, device=device)
        for block in blocks:
            _wrap_method((block, "forward"), lambda inner: _with_offload(inner, offload))


def find_blocks(policy: Policy) -> list[nn.Module]:
    """The blocks of a policy in order, whether it is a Decoder or a transformers model."""
    if isinstance(policy, Decoder):
        return list(policy.model.layers)
    num = policy.model.config.get_text_config().num_hidden_layers
    lists = [m for m in policy.model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == num]
    if not lists:
        family = policy.config.family
        raise ConfigError(
            f"[model] ac and compile need a list of blocks, and transformers' {family} has none; remove them"
        )
    return list(lists[0])


def find_vision_blocks(policy: Policy) -> list[nn.Module]:
    """The blocks of our own vision tower; none for a model of text."""
    if not isinstance(policy, Decoder) or policy.config.vision is None:
        return []
    return list(policy.model.visual.blocks)


def recomputed_blocks(section: ModelSection, num_blocks: int) -> set[int]:
    """The blocks that [model.ac] computes again as a whole."""
    ac = section.ac or (ActivationCheckpointSection() if section.ac_offloading is not None else None)
    return set() if ac is None or ac.mode != "full" else {block for group in ac.groups(num_blocks) for block in group}


def _recompute_groups(policy: Policy, ac: ActivationCheckpointSection, preserves_rng: bool) -> None:
    """Compute each group of blocks again as a whole; the blocks after the last group keep everything."""
    if not isinstance(policy, Decoder):
        raise ConfigError('[model.ac] group_size needs impl = "custom"; leave it out')
    num_blocks = policy.config.num_layers
    groups = ac.groups(num_blocks)
    policy.groups = [*groups, *(range(block, block + 1) for block in range(groups[-1].stop, num_blocks))]
    plain, again = policy.run, _with_recompute(policy.run, preserves_rng)

    def run(x: Tensor, layers: range, *rest: Any) -> Tensor:
        return (again if layers in groups else plain)(x, layers, *rest)

    policy.run = run  # type: ignore[assignment, method-assign]  # of this policy alone


def _recomputable_methods(block: Block) -> dict[str, list[Method]]:
    """The methods of a block that can be recomputed alone, by names of ACTIVATION_TARGETS."""
    parts: dict[str, list[Method]] = {"norm": [(norm, "forward") for norm in block.norms]}
    if block.mixer is not None:
        parts["attn_proj"] = [(block.mixer, "project")]
    dense = block.mlp.shared_experts if isinstance(block.mlp, MoE) else block.mlp
    if isinstance(dense, MLP | PlainMLP):
        parts["mlp"] = [(dense, "forward")]
    if isinstance(block.mlp, MoE):
        parts["routed_experts"] = [(block.mlp.experts, "forward")]
    return parts


def _methods_to_compile(block: nn.Module) -> list[Method]:
    """The methods to compile: not attention kernels, collectives and the products of experts."""
    if not isinstance(block, Block):
        return [(block, "forward")]
    parts = _recomputable_methods(block)
    methods = [*parts["norm"], *parts.get("mlp", [])]
    if not block.is_recurrent:  # their convolutions depend on the documents of the row
        methods += parts.get("attn_proj", [])
    return [*methods, (block.mlp.experts, "gated")] if isinstance(block.mlp, MoE) else methods


def _methods_to_recompute(blocks: list[nn.Module], ac: ActivationCheckpointSection) -> Iterator[Method]:
    """The methods of blocks whose results [model.ac] computes again in the backward pass."""
    blocks = [blocks[index] for group in ac.groups(len(blocks)) for index in group]
    if ac.mode == "full":
        for block in blocks if ac.group_size == 1 else ():
            yield block, "forward"
        return
    ours = [block for block in blocks if isinstance(block, Block)]
    if not ours:
        raise ConfigError('[model.ac] mode = "selective" needs impl = "custom"; use mode = "full"')
    known = {name for block in ours for name in _recomputable_methods(block)}
    if absent := [name for name in ac.targets if name not in known]:
        valid = ", ".join(name for name in ACTIVATION_TARGETS if name in known)
        raise ConfigError(f'[model.ac] targets: this model has no "{absent[0]}"; use some of {valid}')
    for block in ours:
        for name in ac.targets:
            yield from _recomputable_methods(block).get(name, [])


def _wrap_method(method: Method, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, name = method
    setattr(module, name, wrap(getattr(module, name)))


def _with_recompute(inner: Callable[..., Any], preserves_rng: bool) -> Callable[..., Any]:
    """The same function, which saves only its first argument and is computed again in the backward pass."""

    def forward(x: Tensor, *rest: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(x, *rest, **named)
        # All blocks share the other arguments (angles, layouts): saving them here would offload them once per block.
        return checkpoint(lambda x: inner(x, *rest, **named), x, use_reentrant=False, preserve_rng_state=preserves_rng)

    return forward


def _with_offload(inner: Callable[..., Any], offload: ActivationOffload) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        with offload.hooks():
            return inner(*args, **named)

    return forward


@dataclass(eq=False)
class _OffloadedTensor:
    """A saved tensor in CPU memory, and its copy on the GPU once it is fetched back."""

    host: Tensor
    ready: torch.cuda.Event | None
    device: Tensor | None = None


class ActivationOffload:
    """Copies saved tensors to CPU memory, and back while the tensor before them is in use.

    Copies run on a stream of their own. On a CPU (in tests) tensors are copied too.
    """

    def __init__(self, max_inflight: int, *, pin_memory: bool, device: torch.device) -> None:
        self._max_inflight, self._pin, self._device = max_inflight, pin_memory, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._outgoing: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._order: list[weakref.ref[_OffloadedTensor]] = []
        self.num_bytes = 0
        """Bytes copied to CPU memory so far."""

    def hooks(self) -> AbstractContextManager[Any]:
        """A context in which saved tensors are offloaded."""
        return saved_tensors_hooks(self._pack, self._unpack) if torch.is_grad_enabled() else nullcontext()

    def _should_offload(self, tensor: Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base
        return (
            tensor.device == self._device
            and not isinstance(base, nn.Parameter)
            and tensor.is_floating_point()
            and tensor.numel() * tensor.element_size() >= MIN_OFFLOAD_BYTES
        )

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        if not self._should_offload(tensor):
            return tensor
        tensor = tensor.detach()
        should_pin = self._pin and self._stream is not None
        host = torch.empty_like(tensor, device="cpu", pin_memory=should_pin)
        with self._on_stream():
            host.copy_(tensor, non_blocking=True)
        saved = _OffloadedTensor(host, None if self._stream is None else self._stream.record_event())
        self._outgoing.append((tensor, saved.ready))
        while len(self._outgoing) > self._max_inflight:
            self._free_oldest()
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(saved))
        self.num_bytes += host.numel() * host.element_size()
        return saved

    def _unpack(self, saved: Tensor | _OffloadedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        while self._outgoing:
            self._free_oldest()
        self._fetch(saved)
        place = next((i for i, ref in enumerate(self._order) if ref() is saved), 0)
        before = self._order[place - 1]() if place else None
        if before is not None:
            self._fetch(before)
        tensor, saved.device = saved.device, None
        assert tensor is not None
        if self._stream is not None:
            assert saved.ready is not None
            current = torch.cuda.current_stream(self._device)
            current.wait_event(saved.ready)
            tensor.record_stream(current)
        return tensor

    def _fetch(self, saved: _OffloadedTensor) -> None:
        if saved.device is None:
            with self._on_stream():
                saved.device = saved.host.to(self._device, non_blocking=True, copy=True)
            if self._stream is not None:
                saved.ready = self._stream.record_event()

    def _free_oldest(self) -> None:
        """Make the computation wait for the oldest copy, so that its GPU memory can be used again."""
        _, ready = self._outgoing.popleft()
        if ready is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def _require_compiler(device: torch.device) -> None:
    """Raises: ConfigError if torch.compile has no compiler on this machine."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401 (what torch.compile writes GPU kernels in)
        except ImportError as cause:
            raise ConfigError("[model.compile] needs triton on a GPU; pip install triton, or remove it") from cause
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"[model.compile] needs a C++ compiler on a CPU and {compiler} is not installed; install it, "
            "set CXX, or remove it"
        )
