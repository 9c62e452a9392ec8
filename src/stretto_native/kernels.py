"""The operations of a decoder's pass between its matrix products, each as one call.

For float32 and bfloat16 on a CPU. A call costs a few microseconds, as much as an operation of torch, and in a pass over
few rows of a small model there are four times fewer calls. Every row is computed by itself, so it has equal bits in
every batch. products.py has the matrix products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.families.shape import ModelConfig
from stretto_native.library import DTYPES, LANES, declare, find_library
from stretto_native.products import Products

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class AttentionPass(Structure):
    """`Pass` in kernels.c: the rows of a pass, and where their sequences' caches are.

    Row i is token positions[i] of the sequence with block table owners[i] (-1: padding). It is rotated by row turns[i]
    of the tables cos and sin; turns = None: by row positions[i].

    A layer's cache is [2 * kv_heads, num_blocks, block]: blocks of keys are [head_dim, block_size], those of
    values [block_size, head_dim].
    """

    _fields_ = (
        *((name, c_int64) for name in ("rows", "heads", "kv_heads", "head_dim", "block_size", "num_blocks")),
        *((name, c_int64) for name in ("table_width", "threads", "is_half")),
        *((name, c_void_p) for name in ("owners", "positions", "tables", "turns", "cos", "sin")),
        *((name, c_float) for name in ("eps", "scale")),
    )


class Kernels:
    """The functions of kernels.c over contiguous tensors in float32 or bfloat16: `PassKernels`, and attention."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm = declare(library.rms_norm, "pppllfii")
        self._silu_product = declare(library.silu_product, "ppllii")
        self._sample = declare(library.sample, "ppppplli")
        self._attend = library.attend
        self._attend.argtypes, self._attend.restype = [POINTER(AttentionPass), *[c_void_p] * 5], None

    @staticmethod
    def find(config: ModelConfig, weight: Float[Tensor, "vocab dim"]) -> Kernels | None:
        """Kernels for such a model; None if they do not support it or cannot be compiled here."""
        if weight.device.type != "cpu" or weight.dtype not in DTYPES or type(weight.data) is not Tensor:
            return None
        widths = (config.hidden_size, config.intermediate_size, config.head_dim)
        if any(n % LANES for n in widths) or not config.has_plain_attention:
            return None
        if config.moe is not None and (config.moe.shared_size or 0) % LANES:
            return None
        library = find_library()
        return None if library is None else Kernels(library)

    def find_products(self, weights: Iterable[Float[Tensor, "out in"]]) -> Products | None:
        """Products with these weights; None if one of them is not supported, or this machine has none."""
        return Products.find(weights)

    def rms_norm(
        self, x: Float[Tensor, "rows dim"], weight: Float[Tensor, " dim"], eps: float
    ) -> Float[Tensor, "rows dim"]:
        """x / sqrt(mean(x ** 2) + eps) * weight."""
        assert x.is_contiguous()
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps, x.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def silu_product(self, gate_up: Float[Tensor, "rows two_dims"]) -> Float[Tensor, "rows dim"]:
        """silu(gate) * up, where each row is gate, then up."""
        assert gate_up.is_contiguous()
        rows, dims = gate_up.shape
        out = gate_up.new_empty(rows, dims // 2)
        is_half = gate_up.dtype is torch.bfloat16
        self._silu_product(gate_up.data_ptr(), out.data_ptr(), rows, dims // 2, is_half, torch.get_num_threads())
        return out

    def attend(
        self,
        settings: AttentionPass,
        qkv: Float[Tensor, "rows columns"],
        q_norm: Float[Tensor, " head_dim"] | None,
        k_norm: Float[Tensor, " head_dim"] | None,
        cache: Float[Tensor, "planes blocks block"],
    ) -> Float[Tensor, "rows heads_dim"]:
        """Attention from the result of the q, k and v product, which is overwritten.

        Normalises heads if there are norms, rotates them, writes keys and values to the cache of this layer, and
        reads the keys and values up to each row's position.
        """
        assert qkv.is_contiguous() and cache.is_contiguous()
        out = qkv.new_empty(settings.rows, settings.heads * settings.head_dim)
        norms = (None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm))
        self._attend(byref(settings), qkv.data_ptr(), *norms, cache.data_ptr(), out.data_ptr())
        return out

    def sample(
        self,
        logits: Float[Tensor, "rows vocab"],
        u: Float[np.ndarray, " rows"],
        is_greedy: Bool[np.ndarray, " rows"] | None,
    ) -> tuple[Int[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
        """A token per row and its logprob: sampled with a uniform number, or the likeliest."""
        assert logits.is_contiguous() and u.flags.c_contiguous
        rows, vocab = logits.shape
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
        greedy = None if is_greedy is None else is_greedy.ctypes.data
        self._sample(
            logits.data_ptr(), u.ctypes.data, greedy, tokens.ctypes.data, logprobs.ctypes.data, rows, vocab,
            torch.get_num_threads(),
        )  # fmt: skip
        return tokens, logprobs
