"""Which experts computed each cached token, for a trainer that replays the choices.

Choices are stored in the same blocks as keys and values: a prompt found in the prefix cache has the choices with which
its keys were computed, a fork copies them, and tokens that are computed again after an eviction are recorded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stretto.families.shape import ModelConfig
from stretto.models.parts.router import Routing

if TYPE_CHECKING:
    from jaxtyping import Int, Int64, UInt


class ExpertChoices:
    """Array [blocks, block_size, layers, top_k]; uint8, or uint16 from 256 experts on.

    Dense layers and tokens without choices hold `missing`, the largest value of the dtype.
    """

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
        owners: Int[np.ndarray, " rows"],
        positions: Int[np.ndarray, " rows"],
        routing: Routing,
    ) -> None:
        """Store the choices of one pass; row i is token positions[i] of slot owners[i], -1: padding."""
        layers = sorted(routing.choices)
        stacked = torch.stack([routing.choices[layer] for layer in layers], dim=1).cpu().numpy()
        is_real = owners >= 0
        owners, positions = owners[is_real], positions[is_real]
        blocks = tables[owners, positions // self.block_size]
        rows = self.choices[blocks, positions % self.block_size]
        rows[:, layers] = stacked[is_real]
        self.choices[blocks, positions % self.block_size] = rows

    def copy(self, source: Int64[np.ndarray, " blocks"], target: Int64[np.ndarray, " blocks"]) -> None:
        """Copy whole blocks, as KVCache.copy_blocks does."""
        self.choices[target] = self.choices[source]

    def read(
        self, table: Int[np.ndarray, " blocks"], start: int, num_computed: int, num_tokens: int
    ) -> UInt[np.ndarray, "tokens layers top_k"]:
        """The choices of tokens start..num_tokens of the sequence with these blocks.

        Tokens that were not computed have `missing`. The last token of a reply is never computed, because no token was
        predicted from it.
        """
        out = np.full((num_tokens - start, *self.choices.shape[2:]), self.missing, self.choices.dtype)
        positions = np.arange(start, num_computed)
        blocks = table[positions // self.block_size]
        out[: len(positions)] = self.choices[blocks, positions % self.block_size]
        return out
