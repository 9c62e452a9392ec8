"""The optimizer of a learner, its gradient clipping, and its state as named tensors.

If the optimizer's dtype is finer than the model's (float32 for a bfloat16 model), `MasterWeights` has float32 copies of
the weights: every gradient is added to the copy's gradient in float32 as soon as it exists, and every update is
rounded into the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto import addons
from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.trainer import AdamWOptim, Optim, SgdOptim
from stretto.models.decoder import Decoder
from stretto.models.hf import HFDecoder, Policy
from stretto.models.tensor_map import Shape, TensorSlice
from stretto.trainer.optim.offload import StreamedOptimizer
from stretto.trainer.optim.uncompiled import SGD, AdamW
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state.learner_state import TensorInfo

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def build_optimizer(
    weights: TrainedWeights, cfg: Optim, *, offloads_state: bool = False
) -> torch.optim.Optimizer | StreamedOptimizer:
    """Build the optimizer of [optim]; its weight decay applies to every weight.

    AdamW and SGD run fused (one pass over memory), on the CPU too. offloads_state: keep the state in CPU memory.

    Raises: ConfigError if state is to be offloaded and there is no GPU.
    """
    named = dict(zip(weights.names, weights.parameters))

    def make(some: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        return _build_optimizer(some, cfg, weights)

    if not offloads_state:
        return make(named)
    if weights.parameters[0].device.type != "cuda":
        raise ConfigError("[model] optim_cpu_offload = true needs a GPU to offload from; remove it")
    return StreamedOptimizer(named, make)


def _build_optimizer(named: dict[str, nn.Parameter], cfg: Optim, weights: TrainedWeights) -> torch.optim.Optimizer:
    parameters = list(named.values())
    match cfg:
        case AdamWOptim():
            return AdamW(
                parameters,
                lr=cfg.lr,
                betas=(cfg.betas1, cfg.betas2),
                eps=cfg.eps,
                weight_decay=cfg.weight_decay,
                fused=True,
            )
        case SgdOptim():
            return SGD(
                parameters,
                lr=cfg.lr,
                momentum=cfg.momentum,
                weight_decay=cfg.weight_decay,
                nesterov=cfg.nesterov and cfg.momentum > 0,
                fused=True,
            )
    return addons.load("stretto.optimizers", cfg.type, f'[optim] type = "{cfg.type}"')(named, cfg, weights)


class TrainedWeights(ABC):
    """The trained weights of a module, as optimizer and files see them.

    MasterWeights are those of one rank, ShardedWeights (parallel/shard.py) those of several; a network of an add-on has
    its own.

    module: what has the weights. parameters: this rank's tensors, which the optimizer updates, in the order of `names`.
    export_dtype: the dtype of weights that are exported or published.
    """

    module: nn.Module
    mesh: Mesh
    names: list[str]
    parameters: list[nn.Parameter]
    export_dtype: torch.dtype

    @property
    def policy(self) -> Policy:
        """The module as a model; the tenants of a service may train an adapter alone, which is none."""
        assert isinstance(self.module, (Decoder, HFDecoder)), type(self.module)
        return self.module

    @abstractmethod
    def collect_gradients(self) -> None:
        """Give each parameter its gradient, after all backward passes."""

    @abstractmethod
    def reshard(self) -> None:
        """Free the weights that a forward pass gathered; call it if no backward pass follows."""

    @abstractmethod
    def clip_gradients(self, max_norm: float | None) -> Float[Tensor, ""]:
        """Scale all gradients so that their joint norm is at most max_norm; returns the norm before."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients."""

    @abstractmethod
    def copy_to_model(self) -> None:
        """Round the weights into the model; call it after an update or a load."""

    @abstractmethod
    def slice_of(self, name: str, value: Shaped[Tensor, " ..."]) -> TensorSlice:
        """This rank's part of a weight, or of its optimizer state, as a slice of the whole tensor."""

    @abstractmethod
    def all_slices(self) -> dict[str, TensorSlice]:
        """This rank's slice of every weight, trained or not, with its current value."""

    def slices(self) -> dict[str, TensorSlice]:
        """This rank's slice of every trained weight."""
        return {n: self.slice_of(n, p.detach()) for n, p in zip(self.names, self.parameters)}

    def shapes(self) -> dict[str, Shape]:
        """The shape of every trained weight as a whole."""
        return {name: part.shape for name, part in self.slices().items()}

    @torch.no_grad()
    def find_not_finite(self) -> str | None:
        """The first weight of this rank that is NaN or infinite somewhere; None if all are finite."""
        for name, part in zip(self.names, self.parameters):
            if part.numel() and not torch.isfinite(torch.stack(torch.aminmax(part.detach()))).all():
                return name
        return None


class MasterWeights(TrainedWeights):
    """The model's own weights, or float32 copies of them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.export_dtype = model, next(model.parameters()).dtype
        self.model_parameters = [p for p in model.parameters() if p.requires_grad]
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        model_dtype = self.model_parameters[0].dtype
        self.mesh = Mesh.single_rank(self.model_parameters[0].device)
        if torch.finfo(dtype).bits < torch.finfo(model_dtype).bits:
            raise ConfigError(
                f"[model] optimization_dtype = {_name(dtype)} is coarser than dtype = {_name(model_dtype)}; "
                f"use optimization_dtype = {_name(model_dtype)} or a coarser dtype"
            )
        self.are_copies = dtype != model_dtype
        self._hooks: list[RemovableHandle] = []
        if not self.are_copies:
            self.parameters = self.model_parameters
            return
        self.parameters = [nn.Parameter(p.detach().to(dtype)) for p in self.model_parameters]
        for parameter, master in zip(self.model_parameters, self.parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_add_into(master)))

    def release(self) -> None:
        """Detach from the model, so that its gradients are no longer added to these copies."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.model_parameters:
            parameter.grad = None

    def collect_gradients(self) -> None:
        """Do nothing: on one rank the gradients are complete after the backward passes."""

    def reshard(self) -> None:
        """Do nothing: on one rank no weights were gathered."""

    def clip_gradients(self, max_norm: float | None) -> Float[Tensor, ""]:
        return clip_gradients(self.parameters, max_norm)

    def all_slices(self) -> dict[str, TensorSlice]:
        return {name: TensorSlice.whole(p.detach()) for name, p in self.module.named_parameters()}

    def slice_of(self, name: str, value: Shaped[Tensor, " ..."]) -> TensorSlice:
        """The whole value."""
        return TensorSlice.whole(value)

    def copy_to_model(self) -> None:
        if self.are_copies:
            with torch.no_grad():
                for parameter, master in zip(self.model_parameters, self.parameters):
                    parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Float[Tensor, ""]:
    """Scale all gradients so that their joint norm is at most max_norm; returns the norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    if max_norm is not None:
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def optimizer_slices(
    optimizer: torch.optim.Optimizer | StreamedOptimizer, weights: TrainedWeights
) -> dict[str, TensorSlice]:
    """Optimizer state as `<key>.<parameter name>` -> slice; tensors only."""
    parameters, state = optimizer.param_groups[0]["params"], optimizer.state
    return {
        f"{key}.{name}": weights.slice_of(name, value)
        for name, parameter in zip(weights.names, parameters)
        for key, value in state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def allocate_optimizer_slices(
    optimizer: torch.optim.Optimizer | StreamedOptimizer, weights: TrainedWeights, saved: Mapping[str, TensorInfo]
) -> dict[str, TensorSlice]:
    """Allocate tensors for saved state in the optimizer, as slices for the caller to fill.

    Raises: DataError for state of a parameter that this model does not have.
    """
    parameters = dict(zip(weights.names, optimizer.param_groups[0]["params"]))
    parts = {}
    for full_name, info in saved.items():
        key, _, name = full_name.partition(".")
        if name not in parameters:
            raise DataError(f"optimizer state of {name!r}, which this model does not have")
        parameter = parameters[name]
        shape = parameter.shape if info.shape else ()
        if isinstance(optimizer, StreamedOptimizer):
            value = torch.empty(shape, dtype=info.dtype, pin_memory=parameter.is_cuda)
        else:
            value = torch.empty(shape, dtype=info.dtype, device=parameter.device)
        optimizer.state[parameter][key] = value
        parts[full_name] = weights.slice_of(name, value)
        if parts[full_name].shape != info.shape:
            raise DataError(f"optimizer state of {name!r} has shape {info.shape}, not {parts[full_name].shape}")
    return parts


def _add_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
