"""Which experts computed which cached token: what a trainer replays.

Choices lie beside the keys and values, block by block, so they come and go with them: a prompt found in the
prefix cache brings the choices with which its keys were computed, a fork copies them, and what is evicted is
recorded again when it is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stretto.models.config import ModelConfig
from stretto.models.moe import Routing

if TYPE_CHECKING:
    from jaxtyping import Int


class RouteStore:
    """uint8 (uint16 from 256 experts on) [blocks, block_size, layers, top_k]; dense layers keep NO_EXPERT."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        moe = config.moe
        assert moe is not None, f"a {config.family} has no experts"
        self.block_size = block_size
        dtype = np.uint8 if moe.num_experts < 256 else np.uint16
        self.missing = np.iinfo(dtype).max
        shape = (num_blocks, block_size, config.num_layers, moe.top_k)
        self.choices = np.full(shape, self.missing, dtype)

    def write(
        self,
        tables: Int[np.ndarray, "slots blocks"],
        owners: np.ndarray,
        positions: np.ndarray,
        seen: Routing,
    ) -> None:
        """Keep the choices of one pass; row i is token positions[i] of slot owners[i] (-1: padding)."""
        layers = sorted(seen.choices)
        stacked = torch.stack([seen.choices[layer] for layer in layers], dim=1).cpu().numpy()
        is_real = owners >= 0
        owners, positions = owners[is_real], positions[is_real]
        blocks = tables[owners, positions // self.block_size]
        rows = self.choices[blocks, positions % self.block_size]
        rows[:, layers] = stacked[is_real]
        self.choices[blocks, positions % self.block_size] = rows

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole blocks, as the cache does."""
        self.choices[target] = self.choices[source]

    def read(
        self, table: Int[np.ndarray, " blocks"], start: int, num_computed: int, num_tokens: int
    ) -> np.ndarray:
        """[num_tokens - start, layers, top_k] of the sequence with these blocks; not computed is missing.

        The last token of a reply is never computed: nothing was predicted from it.
        """
        out = np.full((num_tokens - start, *self.choices.shape[2:]), self.missing, self.choices.dtype)
        positions = np.arange(start, num_computed)
        blocks = table[positions // self.block_size]
        out[: len(positions)] = self.choices[blocks, positions % self.block_size]
        return out
