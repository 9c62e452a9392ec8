"""Kernels of add-ons (group stretto.kernels) for what a pass computes between its matrix products, or for these too.

Who computes something asks here. Without an add-on, for tensors that its kernels do not take, and under torch.compile,
which fuses operations itself, the answer is None: then torch's operations, the slow reference, compute it. A pass with
gradients calls the same kernels as one without, so their results have equal bits.

    rows           function that builds the `RowKernels` of a GPU, or returns None
    cpu.rows       function of tensors -> their `RowKernels`
    cpu.attention  function of a `SegmentTree` -> function of q, k and v -> what they attend to (attention.py)
    cpu.chosen     module with find_index_kernels and find_attention_kernels -> `ChosenKernels` (key_choice.py)
    cpu.cache      function of a model's shape, its head's weight and sizes -> a `KVCache` with `PassKernels`

Each of the last four returns None for what it does not take.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from stretto import addons

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float, Int, Shaped

logger = logging.getLogger(__name__)

GROUP = "stretto.kernels"
_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RowKernels(Protocol):
    """What a training step computes row by row, of a CPU or a GPU."""

    def rms_norm(
        self, x: Float[Tensor, "*rows dim"], weight: Float[Tensor, " dim"] | None, eps: float
    ) -> tuple[Float[Tensor, "*rows dim"], Float[Tensor, " *rows"]]:
        """x / rms(x) * weight, and 1 / rms(x) of every row."""

    def rms_norm_backward(
        self,
        x: Float[Tensor, "*rows dim"],
        weight: Float[Tensor, " dim"] | None,
        inverse: Float[Tensor, " *rows"],
        grad: Float[Tensor, "*rows dim"],
        needed: tuple[bool, bool],
    ) -> tuple[Float[Tensor, "*rows dim"] | None, Float[Tensor, " dim"] | None]:
        """Gradients of x and weight, where needed; `inverse` is the second result of rms_norm."""

    def gate_product(self, gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """silu(gate) * up."""

    def gate_product_backward(
        self, gate: Float[Tensor, "rows dim"], up: Float[Tensor, "rows dim"], grad: Float[Tensor, "rows dim"]
    ) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, "rows dim"]]:
        """Gradients of gate and up."""

    def rotate(
        self,
        x: Float[Tensor, "tokens heads dim"],
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        sign: int,
    ) -> Float[Tensor, "tokens heads dim"]:
        """x * cos + sign * swapped(x) * sin, where the halves of every head are swapped."""


class Products(Protocol):
    """Products with the weights of an engine's pass, whose rows have equal bits in any number."""

    def __call__(
        self,
        x: Float[Tensor, "rows in"],
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None = None,
        residual: Float[Tensor, "rows out"] | None = None,
    ) -> Float[Tensor, "rows out"]:
        """x @ weight.T + bias + residual, rounded as a linear layer and a sum after it round."""

    def logits(
        self, hidden: Float[Tensor, "rows dim"], weight: Float[Tensor, "vocab dim"]
    ) -> Float[Tensor, "rows vocab"]:
        """hidden @ weight.T in float32, not rounded."""


class PassKernels(Protocol):
    """What an engine's pass computes over contiguous rows, each by itself; they belong to a cache that they read."""

    def rms_norm(
        self, x: Float[Tensor, "rows dim"], weight: Float[Tensor, " dim"], eps: float
    ) -> Float[Tensor, "rows dim"]:
        """x / sqrt(mean(x ** 2) + eps) * weight."""

    def silu_product(self, gate_up: Float[Tensor, "rows two_dims"]) -> Float[Tensor, "rows dim"]:
        """silu(gate) * up, where each row is gate, then up."""

    def sample(
        self,
        logits: Float[Tensor, "rows vocab"],
        u: Float[np.ndarray, " rows"],
        is_greedy: Bool[np.ndarray, " rows"] | None,
    ) -> tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        """A token per row and its logprob: sampled with a uniform number, or the likeliest."""

    def find_products(self, weights: Iterable[Float[Tensor, "out in"]]) -> Products | None:
        """Products with these weights; None if one of them, or the processor, is not supported."""


@functools.cache
def _loaded(name: str) -> Any:
    if name in addons.offers(GROUP):
        return addons.load(GROUP, name, "a model")
    logger.info("no add-on offers `%s` (%s): torch's operations are used, which are slower", name, GROUP)
    return None


def find_kernels(name: str) -> Any:
    """What an add-on offers under this name; None without it, and under torch.compile."""
    return None if torch.compiler.is_compiling() else _loaded(name)


def find_row_kernels(x: Shaped[Tensor, "*_"], *others: Shaped[Tensor, "*_"] | None) -> RowKernels | None:
    """The kernels for what is computed row by row; None if there are none for these tensors.

    On a GPU all must have one dtype. The caller checks that the shapes fit together.
    """
    if not x.is_cuda:
        find = find_kernels("cpu.rows")
        return None if find is None else find(x, *others)
    is_alike = all(t is None or (t.dtype is x.dtype and t.is_cuda and type(t) in PLAIN) for t in (x, *others))
    return find_gpu_kernels() if is_alike and x.dtype in _GPU_DTYPES and not torch.compiler.is_compiling() else None


@functools.cache
def find_gpu_kernels() -> Any:
    """`RowKernels` of a GPU, with two more for the head (lm_head.py); None without an add-on that has them."""
    build = _loaded("rows")
    return None if build is None else build()


PLAIN = (Tensor, nn.Parameter)
"""The types of tensors whose memory kernels may read."""
