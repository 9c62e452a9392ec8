"""The optimizer of a learner: built from its section, stepped with clipping, saved as named tensors.

Where the optimizer's weights are finer than the model's (bfloat16 model, float32 masters), `Masters` holds
them: gradients are summed into the masters in float32 as each arrives, and every update is written back
rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError, DataError
from stretto.config.trainer import AdamWOptim, MuonOptim, Optim, SgdOptim
from stretto.trainer.muon import Muon, find_matrices
from stretto.trainer.offload import StreamedOptimizer
from stretto.trainer.state import Described, Part

if TYPE_CHECKING:
    from stretto.trainer.parallel.shard import Shards


def build_optimizer(
    masters: Masters | Shards, cfg: Optim, *, offloads_state: bool = False
) -> torch.optim.Optimizer | StreamedOptimizer:
    """Decay applies to every weight. AdamW and SGD run fused: one pass over memory, on the CPU as well.

    offloads_state: keep its state in CPU memory. Raises: ConfigError where that is all the memory there is.
    """
    named = dict(zip(masters.names, masters.parameters))

    def make(some: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        return _build(some, cfg, masters)

    if not offloads_state:
        return make(named)
    if masters.parameters[0].device.type != "cuda":
        raise ConfigError("[model] optim_cpu_offload = true needs a GPU to offload from; leave it out")
    return StreamedOptimizer(named, make)


def _build(named: dict[str, nn.Parameter], cfg: Optim, masters: Masters | Shards) -> torch.optim.Optimizer:
    parameters = list(named.values())
    match cfg:
        case MuonOptim():
            return Muon(named, cfg, matrices=find_matrices(masters.policy), on_whole=masters.on_whole)
        case AdamWOptim():
            return torch.optim.AdamW(
                parameters,
                lr=cfg.lr,
                betas=(cfg.betas1, cfg.betas2),
                eps=cfg.eps,
                weight_decay=cfg.weight_decay,
                fused=True,
            )
        case SgdOptim():
            return torch.optim.SGD(
                parameters,
                lr=cfg.lr,
                momentum=cfg.momentum,
                weight_decay=cfg.weight_decay,
                nesterov=cfg.nesterov and cfg.momentum > 0,
                fused=True,
            )


class Masters:
    """The weights that the optimizer updates: the model's own, or float32 copies of them.

    On several ranks parallel/shard.py's Shards stands in its place, with the same methods.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.policy = model
        self.model_parameters = [p for p in model.parameters() if p.requires_grad]
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        model_dtype = self.model_parameters[0].dtype
        if torch.finfo(dtype).bits < torch.finfo(model_dtype).bits:
            raise ConfigError(
                f"[model] optimization_dtype = {_name(dtype)} is coarser than dtype = {_name(model_dtype)}; "
                f"use optimization_dtype = {_name(model_dtype)} or a coarser dtype"
            )
        self.are_copies = dtype != model_dtype
        if not self.are_copies:
            self.parameters = self.model_parameters
            return
        self.parameters = [nn.Parameter(p.detach().to(dtype)) for p in self.model_parameters]
        for parameter, master in zip(self.model_parameters, self.parameters):
            parameter.register_post_accumulate_grad_hook(_add_into(master))

    def collect(self) -> None:
        """After all backward passes; gradients are here already."""

    def settle(self) -> None:
        """After a pass without a backward pass; nothing was gathered for it."""

    def clip(self, max_norm: float | None) -> Tensor:
        return clip_gradients(self.parameters, max_norm)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in zip(self.names, self.parameters)}

    def part(self, name: str, value: Tensor) -> Part:
        """Where a weight, or what the optimizer keeps of one, lies in the whole tensor; here it is the whole."""
        return Part.whole(value)

    def on_whole(
        self, parts: Mapping[str, Tensor], compute: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """`compute` of whole matrices; here every part is whole."""
        return {name: compute(name, part) for name, part in parts.items()}

    def write_back(self) -> None:
        """After an update or a load: round the masters into the model."""
        if self.are_copies:
            with torch.no_grad():
                for parameter, master in zip(self.model_parameters, self.parameters):
                    parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint norm is at most max_norm; returns the norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    if max_norm is not None:
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def optimizer_parts(
    optimizer: torch.optim.Optimizer | StreamedOptimizer, masters: Masters | Shards
) -> dict[str, Part]:
    """State as `<key>.<parameter name>` -> part; only tensors, so that any reader can check it."""
    parameters, state = optimizer.param_groups[0]["params"], optimizer.state
    return {
        f"{key}.{name}": masters.part(name, value)
        for name, parameter in zip(masters.names, parameters)
        for key, value in state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def make_optimizer_parts(
    optimizer: torch.optim.Optimizer | StreamedOptimizer,
    masters: Masters | Shards,
    saved: Mapping[str, Described],
) -> dict[str, Part]:
    """Room in the optimizer for saved state, to be filled by whoever reads it.

    Raises: DataError for state of a parameter that is not here.
    """
    parameters = dict(zip(masters.names, optimizer.param_groups[0]["params"]))
    parts = {}
    for full_name, described in saved.items():
        key, _, name = full_name.partition(".")
        if name not in parameters:
            raise DataError(f"optimizer state of {name!r}, which this model does not have")
        parameter = parameters[name]
        shape = parameter.shape if described.shape else ()
        if isinstance(optimizer, StreamedOptimizer):
            value = torch.empty(shape, dtype=described.dtype, pin_memory=parameter.is_cuda)
        else:
            value = torch.empty(shape, dtype=described.dtype, device=parameter.device)
        optimizer.state[parameter][key] = value
        parts[full_name] = masters.part(name, value)
        if parts[full_name].shape != described.shape:
            raise DataError(
                f"optimizer state of {name!r} has shape {described.shape}, not {parts[full_name].shape}"
            )
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
