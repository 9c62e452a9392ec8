"""LoRA: trains low-rank matrices beside frozen weights, saves, loads and merges them.

This file has the layers that train an adapter (`attach_adapters`), an adapter as data (`Adapter`, which is read from
and written to PEFT directories and weight transports), and merging: into a policy that is exported, or into checkpoint
tensors that an engine reloads. Serving several adapters beside a base model is inference/embedded/adapters.py.

A linear layer computes W x + scaling * B A dropout(x), with A [rank, in] and B [out, rank]; experts have one such
pair for every expert and each of their two stacked matrices. scaling = alpha / rank. B starts at 0.

Source: LoRA, arXiv:2106.09685, equation 3. Differs: experts have adapters too, as with PEFT's `target_parameters`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.base.errors import ConfigError, DataError
from stretto.models.fp8.reference import RowGroups, multiply, product
from stretto.models.moe import EXPERT_PARAMETERS, Experts
from stretto.models.safetensors_file import read_file
from stretto.models.tensor_map import Region, TensorMap, region_of

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int, Shaped

    from stretto.config.sections.model import LoRASection

logger = logging.getLogger(__name__)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ADAPTABLE = (nn.Linear, Experts)
"""Layers that can have an adapter."""
_PREFIX = "base_model.model."
_HALVES = ("lora_A", "lora_B")

Times = Callable[[Tensor, Tensor], Tensor]
"""(rows sorted by expert, weights [experts, out, in]) -> every row times its expert's weight."""


class LoRALinear(nn.Linear):
    """A linear layer with a frozen weight and trained `lora_A` and `lora_B`."""

    def __init__(self, base: nn.Linear, lora: LoRASection) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.kernels = base.weight, base.bias, getattr(base, "kernels", None)
        self.scaling, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.lora_A = nn.Parameter(base.weight.new_empty(lora.rank, self.in_features))
        self.lora_B = nn.Parameter(base.weight.new_empty(self.out_features, lora.rank))

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        out = product(x, self) if self.bias is None else product(x, self) + self.bias
        return out + self.adapted(x)

    def adapted(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The adapter's part of the output."""
        return adapted_rows(x, self.lora_A, self.lora_B, self.scaling, self.dropout)


def adapted_rows(
    x: Float[Tensor, "*rows in"],
    a: Float[Tensor, "rank in"],
    b: Float[Tensor, "out rank"],
    scaling: float,
    dropout: float,
) -> Float[Tensor, "*rows out"]:
    """scaling * B A x for these rows: what an adapter adds to the products with its weight."""
    low = F.linear(dropped(x, dropout), a)
    return scaling * F.linear(low, b)


class LoRAExperts(Experts):
    """Experts with adapters beside both of their weights.

    `<weight>_lora_A` is [experts, rank, columns], `<weight>_lora_B` [experts, rows, rank], for the rows and columns of
    the weight as it is stored: B A is added to it. Columns are inputs, unless the family stores its experts transposed.
    """

    gate_up_proj_lora_A: nn.Parameter

    def __init__(self, base: Experts, lora: LoRASection) -> None:
        self.share_weights_of(base)
        self.kernels = getattr(base, "kernels", None)
        self.scaling, self.dropout = lora.alpha / lora.rank, lora.dropout
        for name in EXPERT_PARAMETERS:
            weight = getattr(base, name)
            num, out, width = weight.shape
            setattr(self, f"{name}_lora_A", nn.Parameter(weight.new_empty(num, lora.rank, width)))
            setattr(self, f"{name}_lora_B", nn.Parameter(weight.new_empty(num, out, lora.rank)))

    def _grouped(self, x: Float[Tensor, "rows dim"], counts: Int[Tensor, " experts"]) -> Tensor:
        offsets = counts.cumsum(0, dtype=torch.int32)

        def times(rows: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)

        return self._adapted_mlp(x, counts, times)

    def _loop(self, x: Float[Tensor, "rows dim"], counts: list[int]) -> Tensor:
        def times(rows: Tensor, weight: Tensor) -> Tensor:
            experts = weight.unbind()
            if not len(rows):
                return F.linear(rows, experts[0])  # zero gradients for a rank that has no token
            return torch.cat([F.linear(part, w) for part, w in zip(rows.split(counts), experts) if len(part)])

        return self._adapted_mlp(x, torch.tensor(counts, device=x.device), times)

    def _adapted_mlp(self, x: Tensor, counts: Tensor, times: Times) -> Tensor:
        base = times
        if self.kernels is not None:
            groups, kernels = RowGroups.of(counts, len(x)), self.kernels

            def base(rows: Tensor, weight: Tensor) -> Tensor:
                return multiply(rows, weight, groups, kernels)

        return self._gated_mlp(x, counts, lambda rows, name: self._adapted(rows, name, base, times))

    def _padded(self, x: Tensor, counts: list[int], multiple: int, *, is_tiled: bool) -> Tensor:
        raise AssertionError("padded experts are for engines, whose adapter layers are others")

    def _adapted(self, x: Tensor, name: str, base: Times, times: Times) -> Tensor:
        first, second = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
        if self.shape.is_transposed:
            first, second = second.mT, first.mT
        low = times(dropped(x, self.dropout), first)
        return base(x, self.matrix(name)) + self.scaling * times(low, second)

    def _is_aligned(self, dtype: torch.dtype) -> bool:
        rank = self.gate_up_proj_lora_A.shape[1]
        return super()._is_aligned(dtype) and rank * dtype.itemsize % 16 == 0


def dropped(x: Float[Tensor, "*rows dim"], share: float) -> Float[Tensor, "*rows dim"]:
    """Dropout if gradients are computed; without them the result must equal the engine's."""
    return F.dropout(x, share) if share and torch.is_grad_enabled() else x


def attach_adapters(policy: nn.Module, lora: LoRASection, seed: int = 0) -> None:
    """Add adapters to the layers that [model.lora] names, and freeze all other weights.

    Raises: ConfigError if no layer has one of the names, or if the output head has.
    """
    # The map is cached now, because it must not contain the adapters' parameters.
    _ = getattr(policy, "tensor_map", None)
    policy.requires_grad_(False)
    num_layers = dict.fromkeys(lora.target_modules, 0)
    for path, module in list(policy.named_modules()):
        name = path.rpartition(".")[2]
        if name not in num_layers or not isinstance(module, ADAPTABLE):
            continue
        if isinstance(module, nn.Linear) and module.weight is policy.output_weight:
            raise ConfigError(f"[model.lora] target_modules: {name} is the output head, which has no adapter")
        layer = LoRALinear(module, lora) if isinstance(module, nn.Linear) else LoRAExperts(module, lora)
        policy.get_submodule(path.rpartition(".")[0]).add_module(name, layer)
        num_layers[name] += 1
    if absent := [name for name, count in num_layers.items() if not count]:
        logger.info("[model.lora] target_modules that this model does not have: %s", ", ".join(absent))
    if not any(num_layers.values()):
        raise ConfigError(
            f"[model.lora] target_modules = {', '.join(lora.target_modules)}: this model has no layer of these names"
        )
    for name, values in initial_values(policy, seed):
        parameter = policy.get_parameter(name)
        parameter.data.copy_(values(tuple(parameter.shape)))
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    logger.info("LoRA: %d parameters are trained, in %d layers", trained, sum(num_layers.values()))


@torch.no_grad()
def fill_uniform(parameter: Float[Tensor, " ..."], generator: torch.Generator) -> None:
    """Fill with uniform values within 1/sqrt(in), the same for every device and dtype."""
    bound = 1 / math.sqrt(parameter.shape[-1])
    parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


class MergedWeights(Mapping[str, Tensor]):
    """A policy's weights by name, merged with adapters on access; the last one is cached."""

    def __init__(self, policy: nn.Module) -> None:
        tensors = {name: parameter.detach() for name, parameter in policy.named_parameters()}
        self._tensors = {name: tensor for name, tensor in tensors.items() if not is_adapter_parameter(name)}
        has_adapters = len(self._tensors) < len(tensors)
        self._pairs = {
            f"{path}.{name}": pair
            for path, module in (policy.named_modules() if has_adapters else ())
            for name, pair in _pairs_of(module)
        }
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Shaped[Tensor, " ..."]:
        if name not in self._pairs:
            return self._tensors[name]
        if self._last is None or self._last[0] != name:
            self._last = (name, merge_pair(self._tensors[name], *self._pairs[name]))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def is_adapter_parameter(name: str) -> bool:
    """True for the names of adapter matrices."""
    return name.endswith(_HALVES)


def _adapters_of(module: LoRALinear | LoRAExperts) -> Iterator[tuple[str, str, str]]:
    """(weight, A, B) by parameter name for the adapter pairs of one layer."""
    if isinstance(module, LoRALinear):
        yield "weight", *_HALVES
    else:
        for name in EXPERT_PARAMETERS:
            yield name, f"{name}_lora_A", f"{name}_lora_B"


def pair_names(policy: nn.Module) -> Iterator[tuple[str, str, str, float]]:
    """(weight, A, B, scaling) for every adapter pair of a policy, by parameter names."""
    for path, module in policy.named_modules():
        if isinstance(module, LoRALinear | LoRAExperts):
            for weight, a, b in _adapters_of(module):
                yield f"{path}.{weight}", f"{path}.{a}", f"{path}.{b}", module.scaling


def initial_values(
    policy: nn.Module, seed: int
) -> Iterator[tuple[str, Callable[[tuple[int, ...]], Float[Tensor, " ..."]]]]:
    """(name, shape -> initial values) for every adapter matrix; call them in order.

    The values are those of `attach_adapters` with the same seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...]) -> Tensor:
        values = torch.empty(shape)
        fill_uniform(values, generator)
        return values

    for _, a, b, _ in pair_names(policy):
        yield a, uniform
        yield b, torch.zeros


def _peft_root(policy: nn.Module) -> nn.Module:
    """The module at which PEFT's names start; for an HFDecoder its transformers model."""
    return getattr(policy, "wrapped", policy)


def peft_name(policy: nn.Module, name: str) -> str:
    """A parameter's name in PEFT's files, without its prefix."""
    return name if _peft_root(policy) is policy else name.removeprefix("model.")


def _pairs_of(module: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor, float]]]:
    """(parameter name, (A, B, scaling)) for the adapter pairs of one layer."""
    if isinstance(module, LoRALinear | LoRAExperts):
        for name, a, b in _adapters_of(module):
            yield name, (getattr(module, a).detach(), getattr(module, b).detach(), module.scaling)


def merge_pair(
    weight: Float[Tensor, "*experts out in"],
    a: Float[Tensor, "*experts rank in"],
    b: Float[Tensor, "*experts out rank"],
    scaling: float,
) -> Float[Tensor, "*experts out in"]:
    """weight + scaling * B A, computed in float32 and rounded once."""
    return (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)


# -- an adapter as data --


@dataclass(frozen=True)
class Adapter:
    """An adapter: pairs (A, B) by our parameter names.

    An example of a name is "model.layers.0.self_attn.q_proj.weight".

    A is [rank, in] and B [out, rank]; for experts [experts, rank, in] and [experts, out, rank].
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    scaling: float

    @classmethod
    def of(cls, policy: nn.Module) -> Adapter:
        """The current adapter of a policy."""
        pairs, rank, scaling = {}, 0, 0.0
        for path, module in _peft_root(policy).named_modules():
            for name, (a, b, scaling_here) in _pairs_of(module):
                pairs[f"{path}.{name}"], rank, scaling = (a, b), a.shape[-2], scaling_here
        return cls(pairs, rank, scaling)

    @classmethod
    def from_tensors(
        cls, tensors: Iterable[tuple[str, Tensor]], rank: int, scaling: float, where: str = "adapter"
    ) -> Adapter:
        """An adapter from tensors by PEFT's names.

        Raises: DataError for names and shapes that no adapter has.
        """
        halves: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            path, _, half = name.removesuffix(".weight").rpartition(".")
            if not name.startswith(_PREFIX) or half not in _HALVES:
                raise DataError(f"{where}: tensor {name!r} is not a LoRA matrix of a linear layer or of experts")
            halves.setdefault(path.removeprefix(_PREFIX), {})[half] = tensor
        pairs = {}
        for path, found in halves.items():
            if len(found) < 2:
                raise DataError(f"{where}: {path} has {next(iter(found))} only; A and B belong together")
            a, b = found["lora_A"], found["lora_B"]
            if a.dim() != 2 or b.dim() != 2 or len(a) % rank or b.shape[1] != len(a):
                shape = f"A {list(a.shape)} and B {list(b.shape)}"
                raise DataError(f"{where}: {path} has {shape}, which are not a pair of rank {rank}")
            name, pair = _from_peft(path, a, b, rank)
            pairs[name] = pair
        for path in {name.rpartition(".")[0] for name in pairs if not name.endswith(".weight")}:
            if not all(f"{path}.{name}" in pairs for name in EXPERT_PARAMETERS):
                raise DataError(f"{where}: {path} has one adapted matrix of two; {' and '.join(EXPERT_PARAMETERS)}")
        return cls(pairs, rank, scaling)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by PEFT's names, in a fixed order, as they are saved and published."""
        for name, (a, b) in self.pairs.items():
            path, a, b = _to_peft(name, a, b)
            yield f"{_PREFIX}{path}.lora_A.weight", a
            yield f"{_PREFIX}{path}.lora_B.weight", b

    def check(self, shapes: Mapping[str, tuple[int, ...]], where: str = "adapter") -> None:
        """Check that the adapter fits a model with parameters of these shapes.

        Raises: DataError if it does not.
        """
        for name, (a, b) in self.pairs.items():
            if name not in shapes:
                raise DataError(f"{where}: this model has no {name.removesuffix('.weight')} that can be adapted")
            expected = tuple(shapes[name])
            adapted = (*a.shape[:-2], b.shape[-2], a.shape[-1])
            if adapted != expected or a.shape[-2] != b.shape[-1]:
                shape = f"A {list(a.shape)} and B {list(b.shape)}"
                raise DataError(f"{where}: {name} has {shape}, which do not fit a weight of {list(expected)}")

    def delta(self, name: str, region: Region) -> Float32[Tensor, "... rows columns"]:
        """The addend of this region of a parameter, float32."""
        a, b = self.pairs[name]
        *lead, rows, columns = region
        for part in lead:
            a, b = a[part], b[part]
        return self.scaling * (b[..., rows, :].float() @ a[..., :, columns].float())


def _to_peft(name: str, a: Tensor, b: Tensor) -> tuple[str, Tensor, Tensor]:
    """A pair under PEFT's name and in its layout.

    PEFT nests the wrappers of one module's parameters, the first parameter innermost, and concatenates experts.
    """
    path, _, parameter = name.rpartition(".")
    if parameter == "weight":
        return path, a, b
    if parameter == EXPERT_PARAMETERS[0]:
        path += ".base_layer"
    return path, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def _from_peft(path: str, a: Tensor, b: Tensor, rank: int) -> tuple[str, tuple[Tensor, Tensor]]:
    """The inverse of `_to_peft`."""
    outer = path.removesuffix(".base_layer")
    if outer.rpartition(".")[2] != "experts":
        return f"{path}.weight", (a, b)
    num = len(a) // rank
    pair = a.unflatten(0, (num, rank)), b.unflatten(1, (rank, num)).permute(2, 0, 1).contiguous()
    return f"{outer}.{EXPERT_PARAMETERS[0 if outer != path else 1]}", pair


def with_adapter(
    name: str, tensor: Shaped[Tensor, "*dims"], table: TensorMap, adapter: Adapter
) -> Shaped[Tensor, "*dims"]:
    """A checkpoint's tensor with the adapter added; unchanged without an adapter."""
    adapted = [shared for shared in table.slices_of(name) if shared.ours in adapter.pairs]
    if not adapted:
        return tensor
    tensor = tensor.clone()
    for shared in adapted:
        theirs = region_of(shared.their_start, shared.their_shape)
        delta = adapter.delta(shared.ours, region_of(shared.start, shared.shape)).reshape(shared.their_shape)
        tensor[theirs] = (tensor[theirs].float() + delta.to(tensor.device)).to(tensor.dtype)
    return tensor


# -- PEFT directories --


def save_adapter(
    source: nn.Module | Adapter, directory: str | Path, lora: LoRASection, base: str | None = None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which PEFT and vLLM load."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    adapter = source if isinstance(source, Adapter) else Adapter.of(source)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors()}
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    paths = [name.rpartition(".")[0] for name in adapter.pairs if name.endswith(".weight")]
    experts = {".".join(name.rsplit(".", 3)[1:]) for name in adapter.pairs if not name.endswith(".weight")}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # PEFT does not support dropout for experts, and an exported adapter is not trained further.
        "lora_dropout": 0.0 if experts else lora.dropout,
        "target_modules": sorted({path.rpartition(".")[2] for path in paths}),
        "target_parameters": sorted(experts, reverse=True) or None,
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}
"""PEFT settings that are not supported, and the values with which they have no effect."""


def load_adapter(directory: str | Path) -> Adapter:
    """The adapter of a PEFT directory.

    Raises: DataError if it is missing, damaged, or of an unsupported kind.
    """
    directory = Path(directory)
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; an adapter is a directory as PEFT saves it") from None
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(f"{path}: cannot be read ({type(cause).__name__}: {cause})") from cause
    if config.get("peft_type") != "LORA" or rank < 1:
        raise DataError(f"{path}: peft_type {config.get('peft_type')!r} of rank {rank}; only LoRA is served")
    for key, neutral in _UNSUPPORTED.items():
        if config.get(key) not in neutral:
            raise DataError(f"{path}: {key} = {config[key]!r} is not supported")
    if not (directory / TENSORS).is_file():
        raise DataError(f"{directory / TENSORS}: no such file")
    tensors = ((name, source[_whole_region(source.shape)]) for name, source in read_file(directory / TENSORS))
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter.from_tensors(tensors, rank, scaling, str(directory))


def _whole_region(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, n) for n in shape)
