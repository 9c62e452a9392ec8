"""Conversion of weights to the 8 bits of checkpoints such as zai-org/GLM-5-FP8, and back.

In such a checkpoint `X.weight` is float8_e4m3fn, and `X.weight_scale_inv` has one float32 factor per block of 128 x 128
values. Which weights are in 8 bits follows from the names of the tensors: modules_to_not_convert may be incomplete.
Programs that compute with such weights also round the inputs of their products (activation_scheme "dynamic", tiles of
1 x 128): `round_inputs`.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3, and the checkpoints that name quant_method "fp8". Differs: scales
are always float32; checkpoints that keep them in bfloat16 are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.base.errors import DataError
from stretto.models.fp8.reference import (
    BLOCK,
    FP8,
    Quantized,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
)
from stretto.models.moe import Experts
from stretto.models.tensor_map import LazyTensor, Region, TensorMap

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

SCALE = "_scale_inv"
"""Suffix of the name of a weight's scales."""
_FIXED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float"}
Named = tuple[str, Tensor]
NamedSource = tuple[str, tuple[int, ...], LazyTensor]


@dataclass(frozen=True)
class BlockLayout:
    """Which weights of a checkpoint are in 8 bits; has_round_scales: scales are powers of two."""

    names: frozenset[str]
    has_round_scales: bool = False


def parse_layout(quantization: Mapping[str, Any], names: Iterable[str], where: str) -> BlockLayout:
    """The layout of a checkpoint with this `quantization_config` and tensors of these names.

    Raises: DataError for any other kind of quantization, and if no tensor has scales.
    """
    has_round_scales = quantization.get("scale_fmt") == "ue8m0"
    settings = dict(quantization) | ({"scale_fmt": "float"} if has_round_scales else {})
    if settings.get("weight_block_size") != [BLOCK, BLOCK] or any(
        settings.get(key, value) != value for key, value in _FIXED.items()
    ):
        shown = ", ".join(f"{key} = {quantization.get(key)!r}" for key in ("quant_method", "fmt", "weight_block_size"))
        raise DataError(
            f"{where}: quantization_config {shown} is not supported; weights in 8 bits are fp8 e4m3 in blocks of "
            f"{BLOCK} x {BLOCK} with activation_scheme dynamic"
        )
    weights = frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE))
    if not weights:
        raise DataError(f"{where}: quantization_config is fp8, and no tensor has scales (*{SCALE}) in its files")
    return BlockLayout(weights, has_round_scales)


# -- to 8 bits --


@torch.no_grad()
def to_8_bits(tensors: Iterable[Named], layout: BlockLayout) -> Iterator[Named]:
    """Named weights, those of the layout in 8 bits, each after its scales."""
    for name, tensor in tensors:
        if name not in layout.names:
            yield name, tensor
            continue
        values, scales = _quantize(tensor.detach(), has_round_scales=layout.has_round_scales)
        yield name + SCALE, scales
        yield name, values


def _quantize(weight: Float[Tensor, "*groups out dim"], *, has_round_scales: bool) -> Quantized:
    groups = weight if weight.dim() == 3 else weight[None]
    quantized = quantize_blocks(groups, has_round_scales=has_round_scales)
    return quantized if weight.dim() == 3 else Quantized(quantized.values[0], quantized.scales[0])


# -- back --


@torch.no_grad()
def from_8_bits(tensors: Iterable[Named]) -> Iterator[Named]:
    """Named weights, those in 8 bits as float32; scales may come before or after their weight.

    Raises: DataError if one lacks its scales.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        is_scale = name.endswith(SCALE)
        if not is_scale and tensor.dtype is not FP8:
            yield name, tensor
            continue
        weight, other = name.removesuffix(SCALE), name.removesuffix(SCALE) + ("" if is_scale else SCALE)
        if other not in waiting:
            waiting[name] = tensor.clone()  # it may be a view of a buffer that is reused
            continue
        pair = (waiting.pop(other), tensor) if is_scale else (tensor, waiting.pop(other))
        yield weight, _dequantize(*pair)
    if waiting:
        raise _unpaired(next(iter(waiting)))


@dataclass(frozen=True)
class _DequantizedTensor:
    """A weight of a file in 8 bits; indexing it reads the whole weight."""

    values: LazyTensor
    scales: LazyTensor
    num_dims: int

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        whole = (slice(None),) * self.num_dims
        return _dequantize(self.values[whole], self.scales[whole])[region]


def lazily_from_8_bits(sources: Iterable[NamedSource], layout: BlockLayout) -> Iterator[NamedSource]:
    """The same for the tensors of files; nothing is read before a result is indexed."""
    sources = list(sources)
    scales = {name: source for name, _, source in sources if name.endswith(SCALE)}
    for name, shape, source in sources:
        if name in scales:
            continue
        if name not in layout.names:
            yield name, shape, source
            continue
        yield name, shape, _DequantizedTensor(source, scales[name + SCALE], len(shape))


def _dequantize(values: Tensor, scales: Tensor) -> Float[Tensor, "*groups out dim"]:
    if values.dim() == 3:
        return dequantize_blocks(Quantized(values, scales.float()))
    return dequantize_blocks(Quantized(values[None], scales.float()[None]))[0]


def _unpaired(name: str) -> DataError:
    is_scale = name.endswith(SCALE)
    fault = "has the scales of a missing weight" if is_scale else "is in 8 bits, and has no scales"
    return DataError(f"tensor {name!r} {fault}")


# -- computing --


def rounded(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """Rows rounded to 8-bit values and scales, each by itself, in the dtype of x."""
    return dequantize_rows(quantize_rows(x)).to(x.dtype)


def round_inputs(model: nn.Module, names: Iterable[str], table: TensorMap | None) -> list[Any]:
    """Let products with these weights round their inputs; returns hooks for `stop_rounding`.

    names: checkpoint names. table: where these are in the model; None: in linear layers of the same names below
    `model.` (transformers models before they are sharded).
    """
    if table is None:
        paths = {f"model.{name.removesuffix('.weight')}" for name in names}
    else:
        paths = {shared.ours.rpartition(".")[0] for name in names for shared in table.slices_of(name)}
    hooks = []
    for path, module in model.named_modules():
        if path not in paths:
            continue
        if isinstance(module, Experts):
            module.round_input = rounded
        else:
            hooks.append(module.register_forward_pre_hook(_round_first))
    return hooks


def stop_rounding(model: nn.Module, hooks: Iterable[Any]) -> None:
    """Undo `round_inputs`."""
    for hook in hooks:
        hook.remove()
    for module in model.modules():
        if isinstance(module, Experts):
            module.round_input = None


def _round_first(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (rounded(args[0]), *args[1:])
