"""A policy over a mesh: its layers cut (tp, ep), then sharded block by block with FSDP2.

`parallelise` changes the module in place. Afterwards a weight is cut along at most one dim by tp or ep, and
what is left of it is a DTensor over the ranks that share it. Optimizer, clipping and checkpoints see none of
that: `Shards` offers the local parts as plain parameters, and joins or cuts whole tensors by name. Gradients
are summed, not averaged, over ranks: losses are divided by the tokens of all ranks before (learner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stretto.base.errors import ConfigError
from stretto.config.model import ModelSection
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.hf import HFDecoder, check_output_head
from stretto.models.lora import Adapter, initial_values, is_adapter_parameter, own_name
from stretto.models.moe import mixtures
from stretto.models.tensor_map import Local
from stretto.trainer.mesh import Mesh
from stretto.trainer.parallel.expert import cut_experts
from stretto.trainer.parallel.memory import find_blocks
from stretto.trainer.parallel.tensor import cut_layers
from stretto.trainer.parallel.token_wire import build_token_wire
from stretto.trainer.parallel.weights import Whole, local_part, whole_adapter
from stretto.trainer.parallel.whole import cuts_of, on_whole
from stretto.trainer.state import Part

Policy = Decoder | HFDecoder


def parallelise(policy: Policy, mesh: Mesh, section: ModelSection) -> Shards:
    """Spread a whole policy, the same on every rank, over the mesh.

    Raises: ConfigError for what does not run on several ranks.
    """
    if section.fsdp_cpu_offload and mesh.device.type == "cpu":
        raise ConfigError("[model] fsdp_cpu_offload = true needs a GPU to offload from; leave it out")
    is_ours = isinstance(policy, Decoder)
    if not is_ours and not hasattr(policy, "tensor_map"):
        policy.prepare_for_ranks()
    _ = policy.tensor_map  # the table is of whole weights
    for name, parameter in policy.named_parameters():
        # What is frozen stays in its own type: nothing is added to it.
        if parameter.requires_grad or (is_ours and name in policy.kept_whole):
            parameter.data = parameter.data.to(hub.DTYPES[section.optimization_dtype])
    features, partial = ({}, set())
    if mesh.degrees.tp > 1:
        features, partial = cut_layers(policy, policy.config.family_data.tp_plan, mesh)
    experts = {}
    if mesh.degrees.ep > 1:
        experts = cut_experts(policy, mesh, build_token_wire(section, mesh))
    _shard(policy, mesh, section)
    is_outline = any(parameter.is_meta for parameter in policy.parameters())
    if is_outline:
        buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
        policy.to_empty(device="cpu" if section.fsdp_cpu_offload else mesh.device)
        for name, buffer in policy.named_buffers():
            buffer.copy_(buffers[name])
    shards = Shards(policy, mesh, features, experts, partial, hub.DTYPES[section.dtype])
    if is_outline:
        shards.load(policy.origin)
    if is_outline and not is_ours:
        check_output_head(policy, str(policy.origin.directory))
        shards.settle()
    return shards


def _shard(policy: Policy, mesh: Mesh, section: ModelSection) -> None:
    common: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=hub.DTYPES[section.dtype],
            reduce_dtype=hub.DTYPES[section.reduce_dtype],
            # Inputs have the type already; casting them would hand each block a copy of the pass's Routing.
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if section.fsdp_cpu_offload else OffloadPolicy(),
        "ignored_params": {p for name, p in policy.named_parameters() if name in policy.kept_whole},
    }
    units = []
    if mesh.degrees.ep > 1:
        for mixture in mixtures(policy).values():
            # Dim 0 counts the few experts of this rank; rows are there for any number of shards.
            fully_shard(
                mixture.experts,
                mesh=mesh.experts,
                shard_placement_fn=lambda parameter: Shard(1),
                reshard_after_forward=section.reshard_after_forward,
                **common,
            )
            units.append(mixture.experts)
    for block in find_blocks(policy):
        fully_shard(block, mesh=mesh.dense, reshard_after_forward=section.reshard_after_forward, **common)
        units.append(block)
    # The root stays whole between forward and backward: the output head is used after its forward pass.
    fully_shard(policy, mesh=mesh.dense, reshard_after_forward=False, **common)
    for unit in (*units, policy):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


class Shards:
    """The weights of a parallelised policy, as optimizer and files want them (see optim.Masters).

    parameters: this rank's parts, sharing memory with the policy's own. names: theirs.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        features: dict[str, int],
        experts: dict[str, int],
        partial: set[str],
        export_dtype: torch.dtype,
    ) -> None:
        self.policy, self.mesh = policy, mesh
        self._features, self._experts, self._partial = features, experts, partial
        self.export_dtype = export_dtype
        policy.shards = self  # for whoever wants whole weights of it (hub.py, lora.py)
        self.all_parameters: dict[str, nn.Parameter] = dict(policy.named_parameters())
        self._trained = {name: p for name, p in self.all_parameters.items() if p.requires_grad}
        self.names = list(self._trained)
        self.parameters = [nn.Parameter(local_part(p.detach())) for p in self._trained.values()]

    # -- one step --

    def collect(self) -> None:
        """After all backward passes: give each part its gradient, whole over every axis."""
        for (name, parameter), part in zip(self._trained.items(), self.parameters):
            if parameter.grad is None:
                continue
            part.grad = local_part(parameter.grad)
            if name in self._partial:
                dist.all_reduce(part.grad, group=self.mesh.tp_group)

    def settle(self) -> None:
        """After a pass without a backward pass: let go of what was gathered for it."""
        self.policy.reshard()

    def clip(self, max_norm: float | None) -> Tensor:
        """optim.clip_gradients over all ranks; the same norm on each."""
        whole, cut = (torch.zeros((), dtype=torch.float32, device=self.mesh.device) for _ in range(2))
        for name, part in zip(self.names, self.parameters):
            if part.grad is not None:
                square = part.grad.float().square().sum().to(self.mesh.device)
                (cut if name in self._features else whole).add_(square)
        dist.all_reduce(cut, group=self.mesh.tp_group)
        total = whole + cut
        dist.all_reduce(total, group=self.mesh.shard_group)
        norm = total.sqrt()
        if max_norm is not None:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            grads = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_mul_(grads, scale.to(grads[0].device))
        return norm

    def zero_grad(self) -> None:
        for parameter in (*self.parameters, *self._trained.values()):
            parameter.grad = None

    def write_back(self) -> None:
        """The parts are the policy's memory; only what was gathered of the old weights has to go."""
        self.settle()

    # -- whole tensors --

    def on_whole(
        self, parts: Mapping[str, Tensor], compute: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """`compute` of whole matrices, each on one rank of those that share it; parts in, parts out."""
        named = {name: self._trained[name] for name in parts}
        cuts = {name: cuts_of(p, self._features.get(name), self.mesh.tp_group) for name, p in named.items()}
        shapes = {name: p.shape for name, p in named.items()}
        dtype = torch.bfloat16 if self.mesh.device.type == "cuda" else torch.float32
        return on_whole(parts, shapes, cuts, compute, dtype)

    def shapes(self) -> dict[str, torch.Size]:
        """The whole shape of every trained weight."""
        return {n: torch.Size(self.part(n, p).shape) for n, p in zip(self.names, self.parameters)}

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Join a weight; every rank must ask, and gets it."""
        parameter = self.all_parameters[name]
        if isinstance(parameter, DTensor):
            spread = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            part = spread.full_tensor()
        for cuts, group in ((self._features, self.mesh.tp_group), (self._experts, self.mesh.ep_group)):
            if name in cuts:
                parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, part.contiguous(), group=group)
                part = torch.cat(parts, dim=cuts[name])
        return part

    def part(self, name: str, value: Tensor) -> Part:
        """Where this rank's part of a weight, or of what an optimizer keeps of one, lies in the whole tensor."""
        parameter, mesh = self.all_parameters[name], self.mesh
        if value.dim() == 0 and parameter.dim():
            return Part.whole(value)
        start, shape = [0] * parameter.dim(), list(parameter.shape)
        if isinstance(parameter, DTensor):
            _, start = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = list(start)
        cuts = (
            (self._features, mesh.tp_rank, mesh.degrees.tp),
            (self._experts, mesh.ep_rank, mesh.degrees.ep),
        )
        for dims, rank, degree in cuts:
            if name in dims:
                dim = dims[name]
                start[dim] += rank * shape[dim]
                shape[dim] *= degree
        return Part(value, tuple(start), tuple(shape))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by checkpoint name, whole, one at a time; every rank must go through all of it."""
        return self.policy.tensor_map.export(Whole(self))

    def adapter(self) -> Adapter:
        """The adapter that is trained, whole; every rank must ask."""
        adapter = whole_adapter(self)
        return replace(adapter, pairs={own_name(self.policy, n): pair for n, pair in adapter.pairs.items()})

    @torch.no_grad()
    def load(self, origin: hub.Origin) -> None:
        """Fill every part from a checkpoint, of which no more is read; adapters begin as on one rank."""
        targets = {}
        for name, parameter in self.all_parameters.items():
            part = self.part(name, local_part(parameter.detach()))
            targets[name] = Local(part.tensor, part.start)
        base = {name: local for name, local in targets.items() if not is_adapter_parameter(name)}
        hub.fill(self.policy.tensor_map, base, origin.read(), self.policy.config, str(origin.directory))
        for name, values in initial_values(self.policy, torch.initial_seed() % 2**63):
            local = targets[name]
            whole = values(self.part(name, local.tensor).shape)
            region = tuple(slice(a, a + n) for a, n in zip(local.start, local.tensor.shape))
            local.tensor.copy_(whole[region])
