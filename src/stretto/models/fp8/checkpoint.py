"""Checkpoints with weights in 8 bits, such as zai-org/GLM-5-FP8: to that layout, and back.

`X.weight` is float8_e4m3fn there, and `X.weight_scale_inv` has one float32 number per block of 128 x 128, which the
values are multiplied with. Which weights are in 8 bits is read from the names of the checkpoint's own tensors, so that
modules_to_not_convert and what its authors left out need not be guessed. Whoever computes with such a checkpoint also
rounds what its 8-bit weights are multiplied with (activation_scheme "dynamic", tiles of 1 x 128): `round_inputs`.

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
"""Ending of the name of a weight's scales."""
_FIXED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float"}
Named = tuple[str, Tensor]
NamedSource = tuple[str, tuple[int, ...], LazyTensor]


@dataclass(frozen=True)
class BlockLayout:
    """The weights of a checkpoint that are in 8 bits; has_round_scales: scales are powers of two."""

    names: frozenset[str]
    has_round_scales: bool = False


def parse_layout(quantization: Mapping[str, Any], names: Iterable[str], where: str) -> BlockLayout:
    """The layout that a `quantization_config` describes, for a checkpoint with tensors of these names.

    Raises: DataError for any other kind of quantization, and if no tensor has scales.
    """
    has_round_scales = quantization.get("scale_fmt") == "ue8m0"
    found = dict(quantization) | ({"scale_fmt": "float"} if has_round_scales else {})
    if found.get("weight_block_size") != [BLOCK, BLOCK] or any(
        found.get(key, value) != value for key, value in _FIXED.items()
    ):
        shown = ", ".join(
            f"{key} = {quantization.get(key)!r}" for key in ("quant_method", "fmt", "weight_block_size")
        )
        raise DataError(
            f"{where}: quantization_config {shown} is not supported; weights in 8 bits are fp8 e4m3 in blocks of "
            f"{BLOCK} x {BLOCK} with activation_scheme dynamic"
        )
    weights = frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE))
    if not weights:
        raise DataError(
            f"{where}: quantization_config is fp8, and no tensor has scales (*{SCALE}) in its files"
        )
    return BlockLayout(weights, has_round_scales)


# -- to 8 bits --


@torch.no_grad()
def to_8_bits(tensors: Iterable[Named], layout: BlockLayout) -> Iterator[Named]:
    """Named weights with those of the layout in 8 bits, each after its scales; all others as they are."""
    for name, tensor in tensors:
        if name not in layout.names:
            yield name, tensor
            continue
        values, scales = _quantize(tensor.detach(), has_round_scales=layout.has_round_scales)
        yield name + SCALE, scales
        yield name, values


def _quantize(weight: Float[Tensor, "*groups out dim"], *, has_round_scales: bool) -> Quantized:
    groups = weight if weight.dim() == 3 else weight[None]
    found = quantize_blocks(groups, has_round_scales=has_round_scales)
    return found if weight.dim() == 3 else Quantized(found.values[0], found.scales[0])


# -- back --


@torch.no_grad()
def from_8_bits(tensors: Iterable[Named]) -> Iterator[Named]:
    """Named weights with those in 8 bits as float32 and without scales, which may come before or after their weight.

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
            waiting[name] = tensor.clone()  # what it is a view of may be gone by then
            continue
        pair = (waiting.pop(other), tensor) if is_scale else (tensor, waiting.pop(other))
        yield weight, _dequantize(*pair)
    if waiting:
        raise _unpaired(next(iter(waiting)))


@dataclass(frozen=True)
class _DequantizedTensor:
    """A weight in 8 bits of a file; indexing it reads all of it."""

    values: LazyTensor
    scales: LazyTensor
    num_dims: int

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        whole = (slice(None),) * self.num_dims
        return _dequantize(self.values[whole], self.scales[whole])[region]


def lazily_from_8_bits(sources: Iterable[NamedSource], layout: BlockLayout) -> Iterator[NamedSource]:
    """The same for the tensors of files, of which nothing is read before a slice is asked for."""
    found = list(sources)
    scales = {name: source for name, _, source in found if name.endswith(SCALE)}
    for name, shape, source in found:
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
    what = (
        "the scales of a weight that is not there" if name.endswith(SCALE) else "in 8 bits, and has no scales"
    )
    return DataError(f"tensor {name!r} is {what}")


# -- computing --


def rounded(x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
    """The nearest 8-bit values and scales of rows, as numbers of their own type; does not depend on other rows."""
    return dequantize_rows(quantize_rows(x)).to(x.dtype)


def round_inputs(model: nn.Module, names: Iterable[str], table: TensorMap | None) -> list[Any]:
    """Let the products of these weights of a checkpoint round their inputs, until `stop_rounding` gets the hooks.

    names: checkpoint names; table: where they are in the model, None: in linear layers of the same names below `model.`
    (models of transformers' before they are sharded).
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
