"""Matrix products of an engine's pass: x @ weight.T for one row or many, over weights as the model holds them.

torch's products copy or convert weights when there are few rows, and the bits of a row depend on how many there are.
These read each weight once and sum in one order for any number of rows, so that an engine need not add rows for equal
bits. They need AVX-512 and the compiled library; without either, callers use torch's products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto_native.library import DTYPES, LANES, find_library

if TYPE_CHECKING:
    from jaxtyping import Float

_MIN_OUTPUTS = 8


class _Product(Structure):
    """`Product` in products.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "residual", "out")),
        *((name, c_int64) for name in ("rows", "outs", "ins")),
        *((name, c_int) for name in ("is_half", "is_out_half")),
    )


class Products:
    """The function of products.c over float32 or bfloat16 tensors; sums are float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._product = library.product
        self._product.argtypes, self._product.restype = [POINTER(_Product), c_int], None

    @staticmethod
    def find(weights: Iterable[Float[Tensor, "out in"]]) -> Products | None:
        """Products with these weights; None if one of them is not supported, or this machine has none."""
        if not all(map(_is_supported, weights)):
            return None
        library = find_library()
        return None if library is None or not library.has_products() else Products(library)

    def __call__(
        self,
        x: Float[Tensor, "rows in"],
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None = None,
        residual: Float[Tensor, "rows out"] | None = None,
    ) -> Float[Tensor, "rows out"]:
        """x @ weight.T + bias + residual, rounded as a linear layer and a sum after it round."""
        return self._run(x, weight, bias, residual, x.new_empty(len(x), len(weight)))

    def logits(
        self, hidden: Float[Tensor, "rows dim"], weight: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "rows vocab"]:
        """hidden @ weight.T in float32, not rounded."""
        out = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
        return self._run(hidden, weight, None, None, out)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        address = lambda tensor: None if tensor is None else tensor.data_ptr()
        job = _Product(
            x.data_ptr(), weight.data_ptr(), address(bias), address(residual), out.data_ptr(), *out.shape,
            x.shape[1], x.dtype is torch.bfloat16, out.dtype is torch.bfloat16,
        )  # fmt: skip
        self._product(byref(job), torch.get_num_threads())
        return out


def _is_supported(weight: Tensor) -> bool:
    is_plain = weight.device.type == "cpu" and weight.dtype in DTYPES and type(weight.data) is Tensor
    return is_plain and weight.is_contiguous() and weight.shape[1] % LANES == 0 and len(weight) >= _MIN_OUTPUTS
