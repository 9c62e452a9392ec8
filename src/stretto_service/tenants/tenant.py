"""One tenant: its adapter's weights, optimizer, schedule and gradients, and the place of their memory.

Names of weights, initial values, updates and saved state are those of a run with [model.lora], so that a tenant can
become such a run, and back. The backbone's layers get the weights as `Pair`s (layers.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stretto.base.errors import ConfigError, DataError, EngineError
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import AdamWOptim, Optim, Scheduler
from stretto.models import hub
from stretto.models.lora import Adapter, fill_uniform, peft_name
from stretto.models.moe import EXPERT_PARAMETERS
from stretto.models.tensor_map import TensorSlice
from stretto.trainer.batch.metrics import StepSums
from stretto.trainer.optim.build import MasterWeights, allocate_optimizer_slices, build_optimizer, optimizer_slices
from stretto.trainer.optim.schedule import learning_rate
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state.learner_state import LearnerState, StateSource, add_prefix, check_same_model, select_prefix
from stretto_service.tenants.layers import AdaptableLayers, Pair, TenantLinear
from stretto_service.wires.operations import AdamSettings, TenantSpec

Place = Literal["device", "host", "disk"]


class Tenant:
    """A tenant on this rank; every rank has the same weights and state."""

    def __init__(
        self,
        spec: TenantSpec,
        sections: tuple[LoRASection, Optim, Scheduler],
        layers: AdaptableLayers,
        model: ModelSection,
        mesh: Mesh,
    ) -> None:
        """sections: the spec as checked sections.

        Raises: ConfigError when no layer has one of the target_modules.
        """
        self.spec, self._mesh, self._layers = spec, mesh, layers
        self.lora, self._optim, self._scheduler = sections
        self.step = 0
        self.place: Place = "device"
        self._schedule_start = 0  # the step after which the schedule began
        self.num_passes = 0
        """Passes with a gradient since the last step, over all ranks."""
        self.sums = StepSums()
        module = self._trained_module(model)
        self.weights = MasterWeights(module, hub.DTYPES[model.optimization_dtype])
        self.num_parameters = sum(p.numel() for p in self.weights.parameters)
        self.optimizer = build_optimizer(self.weights, self._optim)
        self._file: Path | None = None
        self._random = _RandomState(spec.seed, mesh.device)

    def _trained_module(self, model: ModelSection) -> nn.Module:
        """The module whose parameters are trained."""
        module = _Weights()
        self._halves = self._build(module, hub.dtype_of(model.dtype, self._mesh.device))
        return module

    @property
    def scaling(self) -> float | None:
        """Factor of the adapter's products; None if all weights are trained."""
        return self.lora.alpha / self.lora.rank

    def _build(self, module: _Weights, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """Create the matrices of the adapter with their initial values; by name of the weight that they adapt."""
        generator = torch.Generator().manual_seed(self.spec.seed)
        halves: dict[str, tuple[Tensor, Tensor]] = {}
        make = lambda *shape: nn.Parameter(torch.empty(shape, dtype=dtype, device=self._mesh.device))
        rank = self.lora.rank
        for path, layer in self._layers.by_path.items():
            if path.rpartition(".")[2] not in self.lora.target_modules:
                continue
            if isinstance(layer, TenantLinear):
                names: dict[str, tuple[int, ...]] = {"weight": (layer.out_features, layer.in_features)}
            else:
                names = {name: tuple(getattr(layer, name).shape) for name in EXPERT_PARAMETERS}
            for name, (*lead, rows, columns) in names.items():
                a, b = make(*lead, rank, columns), make(*lead, rows, rank)
                fill_uniform(a, generator)
                nn.init.zeros_(b)
                prefix = "" if name == "weight" else f"{name}_"
                module.add(path, f"{prefix}lora_A", a)
                module.add(path, f"{prefix}lora_B", b)
                halves[f"{path}.{name}"] = (a, b)
        if not halves:
            targets = ", ".join(self.lora.target_modules)
            raise ConfigError(f"target_modules = {targets}: this model has no layer of these names")
        return halves

    def attach(self) -> None:
        """Add the adapter to the backbone's layers."""
        scaling, dropout = self.scaling, self.lora.dropout
        for weight, (a, b) in self._halves.items():
            assert scaling is not None
            path, _, name = weight.rpartition(".")
            layer, pair = self._layers.by_path[path], Pair(a, b, scaling, dropout)
            if isinstance(layer, TenantLinear):
                layer.pairs[self.spec.name] = pair
            else:
                layer.pairs.setdefault(self.spec.name, {})[name] = pair

    def remove(self) -> None:
        """Remove the adapter from the layers, and delete the file that it is kept in."""
        for layer in self._layers.by_path.values():
            layer.pairs.pop(self.spec.name, None)
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    # -- a step --

    @property
    def next_lr(self) -> float:
        """Learning rate of the next step, by the tenant's schedule."""
        start, last = self._schedule_start, self.spec.max_steps
        last = None if last is None else last - start
        return learning_rate(self.step - start + 1, self._optim.lr, self._scheduler, last)

    def update(self, adam: AdamSettings | None) -> dict[str, float]:
        """End the step: sum the gradient over ranks, clip it, update the weights. All ranks must call it.

        Raises: DataError when there is no gradient, or `adam` is given for another optimizer; EngineError when the
        gradient is not finite: it is then dropped, and weights and steps stay.
        """
        if not self.num_passes:
            raise DataError("there is no gradient: there was no pass with a loss since the last step")
        max_norm = self._optim.max_norm if adam is None else adam.max_norm
        lr = self._configure(adam)
        self._sum_over_ranks()
        norm = float(self.weights.clip_gradients(max_norm))
        if not math.isfinite(norm):
            self.drop_gradients()
            raise EngineError(
                f"step {self.step + 1}: the gradient's norm is {norm}; the step is dropped and the weights are those "
                f"of step {self.step}. Lower the learning rate, {lr:g}, or look for bad data."
            )
        self.optimizer.step()
        self.weights.zero_grad()
        self.weights.copy_to_model()
        self.step, self.num_passes = self.step + 1, 0
        self._random.keep()
        self.sums.add({"max/updates": 1.0})
        metrics = self.sums.pop_means(lambda sums: sums)  # these are sums over all ranks already
        return metrics | {"optim/lr": lr, "optim/grad_norm": norm, "step": float(self.step)}

    def _configure(self, adam: AdamSettings | None) -> float:
        """Configure the optimizer for the next step; the learning rate."""
        lr = self.next_lr if adam is None else adam.lr
        settings: dict[str, Any] = {"lr": lr}
        if adam is not None:
            if not isinstance(self._optim, AdamWOptim):
                raise DataError(
                    f"settings of AdamW for a step of {self._optim.type!r}, which the tenant was created with"
                )
            settings |= {"betas": (adam.beta1, adam.beta2), "eps": adam.eps, "weight_decay": adam.weight_decay}
        for group in self.optimizer.param_groups:
            group.update(settings)
        return lr

    def _sum_over_ranks(self) -> None:
        if self._mesh.world_size == 1:
            return
        grads: list[Tensor] = []
        for parameter in self.weights.parameters:
            if parameter.grad is None:  # no pass of this rank had rows for it
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        offset = 0
        for grad in grads:
            size = grad.numel()
            grad.copy_(flat[offset : offset + size].view_as(grad))
            offset += size

    def drop_gradients(self) -> None:
        """Drop the gradients since the last step, and take back the random numbers that their passes have drawn."""
        self.weights.zero_grad()
        self.num_passes, self.sums = 0, StepSums()
        self._random.rewind()

    @contextmanager
    def random_numbers(self, *, has_gradient: bool) -> Iterator[None]:
        """A context in which dropout draws from the tenant's random numbers; they advance only with a gradient."""
        if not self.lora.dropout:
            yield
            return
        with self._random.used(is_kept=has_gradient):
            yield

    def check_finite(self) -> None:
        """Raises: EngineError when a weight is NaN or infinite."""
        if (name := self.weights.find_not_finite()) is not None:
            raise EngineError(f"weights of step {self.step} are not finite ({name}); they are not saved")

    # -- state --

    def adapter(self, policy: nn.Module) -> Adapter:
        """The current weights, by PEFT's names."""
        assert self.scaling is not None, "a tenant with an adapter"
        pairs = {peft_name(policy, name): (a.detach(), b.detach()) for name, (a, b) in self._halves.items()}
        return Adapter(pairs, self.lora.rank, self.scaling)

    def state(self, progress: dict[str, Any], *, with_optimizer: bool) -> LearnerState:
        """Everything that the next step depends on, named as in a run's checkpoint; and the caller's progress.

        Gradients are not part of it. Random numbers are those before the passes since the last step, so that these draw
        the same ones when they are computed again.
        """
        slices = add_prefix("model", self.weights.slices())
        if with_optimizer:
            slices |= add_prefix("optim", optimizer_slices(self.optimizer, self.weights))
            slices |= self._random.slices()
        values = {
            "step": self.step,
            "schedule_start": self._schedule_start,
            "optim": self._optim.type if with_optimizer else None,
            "adapter_scaling": self.scaling,
            "tenant": msgspec.to_builtins(self.spec),
            "progress": progress,
        }
        return LearnerState(slices, values)

    @torch.no_grad()
    def read_state(self, source: StateSource, *, with_optimizer: bool) -> Callable[[], None]:
        """Read what `state` returned, or the state of a run with [model.lora]; a function that applies it.

        with_optimizer: False leaves optimizer and steps as they are.

        Raises: DataError when it belongs to another model, adapter or optimizer.
        """
        values, saved, scaling = source.values, source.tensors, self.scaling
        if scaling is not None and (theirs := values.get("adapter_scaling")) not in (None, scaling):
            raise DataError(f"an adapter with alpha / rank = {theirs:g}, but this one has {scaling:g}")
        if with_optimizer and values["optim"] is None:
            raise DataError("it was saved without optimizer state; load it without optimizer state, too")
        if with_optimizer and values["optim"] != self._optim.type:
            raise DataError(f"state of optimizer {values['optim']!r}, but this tenant has {self._optim.type!r}")
        check_same_model(self.weights.shapes(), select_prefix("model", saved))
        weights = add_prefix("model", self.weights.slices())
        buffers = {name: TensorSlice.whole(torch.empty_like(part.tensor)) for name, part in weights.items()}
        more: dict[str, TensorSlice] = {}
        optimizer, random = self.optimizer, self._random
        if with_optimizer:
            optimizer = build_optimizer(self.weights, self._optim)
            saved_state = select_prefix("optim", saved)
            more = add_prefix("optim", allocate_optimizer_slices(optimizer, self.weights, saved_state))
            random = _RandomState(self.spec.seed, self._mesh.device)
            more |= {name: part for name, part in random.slices().items() if name in saved}
        source.read(buffers | more)

        def apply() -> None:
            with torch.no_grad():
                for name, part in weights.items():
                    part.tensor.copy_(buffers[name].tensor)
            self.optimizer, self._random = optimizer, random
            if with_optimizer:
                self.step, self._schedule_start = values["step"], values.get("schedule_start", 0)
            self.drop_gradients()
            self.weights.copy_to_model()

        return apply

    # -- memory --

    @torch.no_grad()
    def move(self, place: Place, folder: Path | None = None) -> None:
        """Move weights, gradients and optimizer state to a place; folder: for the file if the place is the disk."""
        if place == self.place:
            return
        tensors = self._tensors() if self._file is None else load_file(self._file)
        device = torch.device("cpu") if place != "device" else self._mesh.device
        tensors = {name: tensor.to(device).contiguous() for name, tensor in tensors.items()}
        if self._file is not None:
            self._file.unlink()
            self._file = None
        if place == "disk":
            assert folder is not None
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"{self.spec.name}.{self._mesh.rank}.safetensors"
            save_file(tensors, self._file)
            tensors = {name: tensor.new_empty(0) for name, tensor in tensors.items() if name[:4] != "grad"}
        self._put(tensors)
        self.place = place

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor that `move` moves, by a unique name."""
        tensors = {}
        for kind, name, parameter in self._parameters():
            tensors[f"{kind}.{name}"] = parameter.data
            if parameter.grad is not None:
                tensors[f"grad.{kind}.{name}"] = parameter.grad
        for name, parameter in zip(self.weights.names, self.weights.parameters):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    tensors[f"optim.{key}.{name}"] = value
        return tensors

    def _put(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `_tensors`."""
        for kind, name, parameter in self._parameters():
            parameter.grad = None  # torch refuses one on another device than its parameter
            parameter.data = tensors[f"{kind}.{name}"]
            parameter.grad = tensors.get(f"grad.{kind}.{name}")
        for name, parameter in zip(self.weights.names, self.weights.parameters):
            state = self.optimizer.state.get(parameter, {})
            for key in list(state):
                if (tensor := tensors.get(f"optim.{key}.{name}")) is not None:
                    state[key] = tensor

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        kinds = {"weight": self.weights.parameters}
        if self.weights.are_copies:
            kinds["model"] = self.weights.model_parameters
        for kind, parameters in kinds.items():
            for name, parameter in zip(self.weights.names, parameters):
                yield kind, name, parameter


class _Weights(nn.Module):
    """An adapter's matrices as a tree of modules, named as in a policy with adapters."""

    output_weight = None  # Muon looks for it: an adapter has none

    def add(self, path: str, name: str, parameter: nn.Parameter) -> None:
        """Add the parameter `path.name`."""
        module: nn.Module = self
        for part in path.split("."):
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, parameter)


class _RandomState:
    """A tenant's own random numbers, those that torch draws after `manual_seed(seed)`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._before: tuple[Tensor, Tensor | None] | None = None
        """The state before the first pass with a gradient since the last step; None without such a pass."""
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._cuda: Tensor | None = None
        if device.type == "cuda":
            self._cuda = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def used(self, *, is_kept: bool) -> Iterator[None]:
        """A context in which torch draws from these numbers; is_kept: the next context continues after it."""
        if is_kept and self._before is None:
            self._before = (self._cpu, self._cuda)
        devices = [self._device] if self._cuda is not None else []
        with torch.random.fork_rng(devices):
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            yield
            if is_kept:
                self._cpu = torch.get_rng_state()
                self._cuda = None if self._cuda is None else torch.cuda.get_rng_state(self._device)

    def keep(self) -> None:
        """Make the draws of the passes since the last step final."""
        self._before = None

    def rewind(self) -> None:
        """Undo the draws of the passes since the last step."""
        self._cpu, self._cuda = self._before or (self._cpu, self._cuda)
        self._before = None

    def slices(self) -> dict[str, TensorSlice]:
        """The state before the passes since the last step, named as in a learner's state."""
        cpu, cuda = self._before or (self._cpu, self._cuda)
        slices = {"rng.cpu": TensorSlice.whole(cpu)}
        if cuda is not None:
            slices["rng.cuda"] = TensorSlice.whole(cuda)
        return slices
