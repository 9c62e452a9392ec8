"""An engine's cache as the compiled kernels read it: attention in place over blocks, without gathers and slabs.

A row reads exactly the keys up to its position, block by block, so its bits do not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.families.shape import ModelConfig
from stretto.inference.embedded.caches.kv_cache import KVCache, PassLayout, PassRows
from stretto.models.fused import InPlaceAttend
from stretto.models.parts.rope import angle_table
from stretto_native.kernels import AttentionPass, Kernels

if TYPE_CHECKING:
    from jaxtyping import Float


def build_cache(
    config: ModelConfig, weight: Float[Tensor, "vocab dim"], num_blocks: int, block_size: int, max_len: int
) -> NativeCache | None:
    """A cache that kernels read; None if they do not support this model or cannot be compiled here.

    weight: of the head, whose dtype and device are those of the model.
    """
    kernels = Kernels.find(config, weight)
    return None if kernels is None else NativeCache(config, num_blocks, block_size, max_len, kernels, weight.dtype)


class NativeCache(KVCache):
    """Blocks of keys are [head_dim, block_size] here; only kernels read them."""

    kernels: Kernels

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, max_len: int, kernels: Kernels,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        cpu = torch.device("cpu")
        super().__init__(config, num_blocks, block_size, max_len, dtype=dtype, device=cpu, is_exact=True)
        self.widths = np.array([max_len], np.int64)
        self.kernels = kernels
        angles = angle_table(config.rope, config.head_dim, config.max_position_embeddings, cpu, dtype)
        # The kernels read floats; in bfloat16 they are those to which the model rounds cos and sin.
        self._angles = angles._replace(cos=angles.cos.float(), sin=angles.sin.float())
        cos, sin = self._angles.cos.data_ptr(), self._angles.sin.data_ptr()
        self._sizes = {
            "heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim,
            "block_size": block_size, "num_blocks": num_blocks, "cos": cos, "sin": sin,
            "eps": config.rms_norm_eps, "scale": self.scale, "is_half": dtype is torch.bfloat16,
        }  # fmt: skip
        self._layers, self._sections = list(self.blocks.unbind()), config.rope.sections

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # The kernels read only what was written: blocks take memory when sequences first use them.
        return torch.empty(shape, dtype=dtype)

    def layout(self, rows: PassRows) -> PassLayout:
        return PassLayout(rows, torch.empty(0), [])

    def advance(self, layout: PassLayout) -> None:
        """Nothing to prepare: `attend` reads the rows."""

    def attend(self, layout: PassLayout) -> InPlaceAttend:
        rows, sizes, turns = layout.rows, self._sizes, layout.rows.rotations
        tables: tuple[Tensor, ...] = ()
        if turns is not None and turns.ndim == 2:  # tables of these rows, instead of the tables by position
            angles = self._angles.select(torch.from_numpy(turns), self._sections)
            tables = cos, sin = angles.cos.contiguous(), angles.sin.contiguous()
            sizes = sizes | {"cos": cos.data_ptr(), "sin": sin.data_ptr()}
            turns = np.arange(len(rows.owners))
        how = AttentionPass(
            rows=len(rows.owners), table_width=rows.tables.shape[1], threads=torch.get_num_threads(),
            owners=rows.owners.ctypes.data, positions=rows.positions.ctypes.data, tables=rows.tables.ctypes.data,
            turns=None if turns is None else turns.ctypes.data, **sizes,
        )  # fmt: skip
        how.memory = (turns, tables)  # keeps alive what the pointers refer to

        def attend(layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Float[Tensor, "rows dim"]:
            return self.kernels.attend(how, qkv, q_norm, k_norm, self._layers[layer])

        return attend
