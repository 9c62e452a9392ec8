"""Spreads a policy over a mesh: cuts layers (tp, ep), then shards blocks with FSDP2.

`parallelise` changes the module in place. Afterwards a weight is cut along at most one dim by tp or ep, and
each part is a DTensor over the ranks that share it. Optimizer, clipping and checkpoints do not see this:
`ShardedWeights` offers the local tensors as plain parameters, gathers whole tensors, and says which slice of the whole
tensor a rank has. Gradients are summed, not averaged, over ranks: losses are already divided by the tokens of all
ranks (learner.py).

FSDP2 and DTensor take nearly a second to import, so only what runs on several ranks does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.families.table import FAMILIES
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.hf import HFDecoder, Policy, check_output_head
from stretto.models.lora import initial_values, is_adapter_parameter
from stretto.models.moe import mixtures
from stretto.models.tensor_map import CheckpointReader, TensorSlice
from stretto.trainer.optim.build import TrainedWeights
from stretto.trainer.parallel.collectives import all_gather
from stretto.trainer.parallel.expert import cut_experts
from stretto.trainer.parallel.memory import find_blocks, find_vision_blocks, recomputed_blocks
from stretto.trainer.parallel.sequence import split_tokens
from stretto.trainer.parallel.tensor import cut_layers
from stretto.trainer.parallel.token_dispatcher import build_token_dispatcher
from stretto.trainer.ranks.mesh import Mesh

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def parallelise(policy: Policy, mesh: Mesh, section: ModelSection) -> ShardedWeights:
    """Spread a policy over the mesh; its weights for the optimizer.

    The policy must be the same on every rank.

    Raises: ConfigError if a model or setting does not work on several ranks.
    """
    if section.fsdp_cpu_offload and mesh.device.type == "cpu":
        raise ConfigError("[model] fsdp_cpu_offload = true needs a GPU to offload from; remove it")
    is_custom = isinstance(policy, Decoder)
    if isinstance(policy, HFDecoder) and not hasattr(policy, "tensor_map"):
        policy.prepare_for_sharding()
    _ = policy.tensor_map  # built now, while the parameters have their whole shapes
    for name, parameter in policy.named_parameters():
        # Frozen weights keep their dtype: they are never updated.
        if parameter.requires_grad or (is_custom and name in policy.unsharded_names):
            parameter.data = parameter.data.to(hub.DTYPES[section.optimization_dtype])
    features: dict[str, int] = {}
    partial: set[str] = set()
    if mesh.degrees.tp > 1:
        features, partial, cut = cut_layers(policy, FAMILIES[policy.config.family].tp_plan, mesh)
        if mesh.degrees.splits_tokens:
            assert isinstance(policy, Decoder), "tp is refused for models of transformers"
            split_tokens(policy, mesh, cut, recomputed_blocks(section, policy.config.num_layers))
    if mesh.degrees.splits_tokens:
        # Each rank has gradients of its own tokens. Those of experts are summed where they are sharded.
        partial = {name for name, _ in policy.named_parameters()} - features.keys() - _expert_names(policy)
    experts = {}
    if mesh.degrees.ep > 1:
        experts = cut_experts(policy, mesh, build_token_dispatcher(section, mesh))
    _shard(policy, mesh, section)
    is_on_meta = any(parameter.is_meta for parameter in policy.parameters())
    if is_on_meta:
        buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
        policy.to_empty(device="cpu" if section.fsdp_cpu_offload else mesh.device)
        for name, buffer in policy.named_buffers():
            buffer.copy_(buffers[name])
    shards = ShardedWeights(policy, mesh, features, experts, partial, hub.dtype_of(section.dtype, mesh.device))
    if is_on_meta:
        shards.load(policy.checkpoint_reader)
    if is_on_meta and isinstance(policy, HFDecoder):
        check_output_head(policy, str(policy.checkpoint_reader.directory))
        shards.reshard()
    return shards


def _expert_names(policy: Policy) -> set[str]:
    """The parameters of experts, which are sharded over other ranks than the rest of a block if ep or tp needs it."""
    named = mixtures(policy).items()
    return {f"{name}.experts.{key}" for name, mixture in named for key, _ in mixture.experts.named_parameters()}


def _shard(policy: Policy, mesh: Mesh, section: ModelSection) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    common: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=hub.dtype_of(section.dtype, mesh.device),
            reduce_dtype=hub.DTYPES[section.reduce_dtype],
            # Inputs have the dtype already; casting would give each block its own copy of the Routing.
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if section.fsdp_cpu_offload else OffloadPolicy(),
        "ignored_params": {p for name, p in policy.named_parameters() if name in policy.unsharded_names},
    }
    units: list[nn.Module] = []
    if mesh.degrees.ep > 1 or mesh.degrees.splits_tokens:
        for mixture in mixtures(policy).values():
            # Dim 0 is the experts of this rank, which may be fewer than the shards; dim 1 is large enough.
            fully_shard(
                mixture.experts,
                mesh=mesh.experts,
                shard_placement_fn=lambda parameter: Shard(1),
                reshard_after_forward=section.reshard_after_forward,
                **common,
            )
            units.append(mixture.experts)
    for block in (*find_blocks(policy), *find_vision_blocks(policy)):
        fully_shard(block, mesh=mesh.dense, reshard_after_forward=section.reshard_after_forward, **common)
        units.append(block)
    # The root is not resharded after forward: the output head is used after the root's forward pass.
    fully_shard(policy, mesh=mesh.dense, reshard_after_forward=False, **common)
    for unit in (*units, policy):
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


class ShardedWeights(TrainedWeights):
    """The weights of a parallelised policy; `parameters` share memory with the policy's.

    features: by name the dim that ranks of tp cut.
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
        self.module, self.mesh = policy, mesh
        self.features, self._experts, self._partial = features, experts, partial
        # Parameters of which ranks of tp have different parts.
        self._differing = features.keys() | (_expert_names(policy) if mesh.degrees.splits_tokens else set())
        self.export_dtype = export_dtype
        self.all_parameters: dict[str, nn.Parameter] = dict(policy.named_parameters())
        self._trained = {name: p for name, p in self.all_parameters.items() if p.requires_grad}
        self.names = list(self._trained)
        self.parameters = [nn.Parameter(local_tensor(p.detach())) for p in self._trained.values()]

    # -- a step --

    def collect_gradients(self) -> None:
        """Give each parameter its gradient, summed over ranks, after all backward passes."""
        for (name, parameter), part in zip(self._trained.items(), self.parameters):
            if parameter.grad is None:
                continue
            part.grad = local_tensor(parameter.grad)
            if name in self._partial:
                dist.all_reduce(part.grad, group=self.mesh.tp_group)

    def reshard(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(self.module, FSDPModule)
        self.module.reshard()

    def clip_gradients(self, max_norm: float | None) -> Float[Tensor, ""]:
        """optim.clip_gradients over all ranks; the norm is the same on each."""
        whole, cut = (torch.zeros((), dtype=torch.float32, device=self.mesh.device) for _ in range(2))
        for name, part in zip(self.names, self.parameters):
            if part.grad is not None:
                square = part.grad.float().square().sum().to(self.mesh.device)
                (cut if name in self._differing else whole).add_(square)
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

    def copy_to_model(self) -> None:
        """Free gathered copies of old weights; the policy shares memory with the parameters."""
        self.reshard()

    # -- whole tensors --

    def gather_tensor(self, name: str, part: Shaped[Tensor, " ..."]) -> Shaped[Tensor, " ..."]:
        """Gather a weight on every rank, each of which gives its part; all ranks must call it."""
        from torch.distributed.tensor import DTensor

        parameter = self.all_parameters[name]
        if isinstance(parameter, DTensor):
            sharded = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            part = sharded.full_tensor()
        for cuts, group in ((self.features, self.mesh.tp_group), (self._experts, self.mesh.ep_group)):
            if name in cuts:
                part = all_gather(part, cuts[name], group)
        return part

    def slice_of(self, name: str, value: Shaped[Tensor, " ..."]) -> TensorSlice:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        parameter, mesh = self.all_parameters[name], self.mesh
        if value.dim() == 0 and parameter.dim():
            return TensorSlice.whole(value)
        start, shape = [0] * parameter.dim(), list(parameter.shape)
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = list(offset)
        cuts = ((self.features, mesh.tp_rank, mesh.degrees.tp), (self._experts, mesh.ep_rank, mesh.degrees.ep))
        for dims, rank, degree in cuts:
            if name in dims:
                dim = dims[name]
                start[dim] += rank * shape[dim]
                shape[dim] *= degree
        return TensorSlice(value, tuple(start), tuple(shape))

    def all_slices(self) -> dict[str, TensorSlice]:
        named = self.all_parameters.items()
        return {name: self.slice_of(name, local_tensor(parameter.detach())) for name, parameter in named}

    @torch.no_grad()
    def load(self, reader: CheckpointReader) -> None:
        """Read this rank's slice of every weight; adapters get the initial values that they have on one rank."""
        targets = self.all_slices()
        base = {name: part for name, part in targets.items() if not is_adapter_parameter(name)}
        hub.load_slices(self.policy.tensor_map, base, reader.read(), self.policy.config, str(reader.directory))
        for name, values in initial_values(self.policy, torch.initial_seed() % 2**63):
            part = targets[name]
            part.tensor.copy_(values(part.shape)[part.region])


def local_tensor(tensor: Shaped[Tensor, " ..."]) -> Shaped[Tensor, " ..."]:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
