"""One forward pass over the tokens of a plan: rows in, logits of the last rows out.

Bits: a row of a matrix product may depend on how many rows are multiplied (BLAS has other kernels for a few
rows), so rows are padded to a multiple of `_ROWS`. At start `row_tile` checks on the model's own weight
shapes that then every row count gives the same bits; where a BLAS does not, every product has exactly `tile`
rows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.inference.embedded.adapters import Adapters
from stretto.inference.embedded.kv_cache import KVCache
from stretto.inference.embedded.routes import RouteStore
from stretto.inference.embedded.sampler import token_logprobs
from stretto.inference.embedded.scheduler import Plan
from stretto.inference.embedded.slots import Slots
from stretto.models.decoder import Decoder
from stretto.models.moe import Routing

if TYPE_CHECKING:
    from jaxtyping import Float

logger = logging.getLogger(__name__)

_ROWS = 16
_TILE = 64
_PROBED_DIM = 4096
_PROMPT_ROWS = 256  # rows of prompt whose logits exist at one time


def row_tile(model: Decoder) -> int | None:
    """The row count all products must have here; None: any multiple of _ROWS gives the same bits."""
    # Weights of an expert have 3 dims.
    return tile_of({(p.shape[-2], p.shape[-1]) for p in model.parameters() if p.dim() >= 2})


def tile_of(shapes: set[tuple[int, int]]) -> int | None:
    """The same for weights of these shapes."""
    generator = torch.Generator().manual_seed(0)
    for out_dim, in_dim in {(min(out_dim, _PROBED_DIM), in_dim) for out_dim, in_dim in shapes}:
        weight = torch.randn(out_dim, in_dim, generator=generator)
        rows = torch.randn(32 * _ROWS, in_dim, generator=generator)
        whole = F.linear(rows, weight)
        for count in (_ROWS, 2 * _ROWS, 3 * _ROWS, 7 * _ROWS, 16 * _ROWS):
            if not torch.equal(F.linear(rows[-count:].clone(), weight), whole[-count:]):
                logger.warning(
                    "matrix products depend on the row count here; every product gets %d rows", _TILE
                )
                return _TILE
    return None


class Runner:
    """The model, its cache, and the way from a plan to logits."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        adapters: Adapters,
        *,
        tile: int | None = None,
        routes: RouteStore | None = None,
    ) -> None:
        self.model, self.cache, self.adapters = model, cache, adapters
        self.tile, self.routes = tile, routes
        self.device = cache.device

    @torch.inference_mode()
    def run(
        self, plan: Plan, slots: Slots, prompt_logprobs: dict[int, np.ndarray]
    ) -> Float[Tensor, "last vocab"] | None:
        """Logits (float32) of the plan's last rows in plan order; fills `prompt_logprobs`, by slot."""
        if len(plan.slots) == int(plan.count.sum()):
            owners, positions = plan.slots, plan.start
        else:
            owners = np.repeat(plan.slots, plan.count)
            first = np.cumsum(plan.count) - plan.count
            positions = np.arange(len(owners)) + np.repeat(plan.start - first, plan.count)
        width_index = self.cache.width_index(positions)
        order = None
        if width_index[0] != width_index[-1] or (width_index != width_index[0]).any():
            order = np.argsort(width_index, kind="stable")
            owners, positions, width_index = owners[order], positions[order], width_index[order]
        hidden = self._forward(slots, owners, positions, width_index)
        place = np.arange(len(owners))
        if order is not None:
            place[order] = np.arange(len(owners))
        if prompt_logprobs:
            self._fill_prompt_logprobs(plan, slots, hidden, place, prompt_logprobs)
        last = (np.cumsum(plan.count) - 1)[plan.is_last]
        if not len(last):
            return None
        return self._logits(hidden, place[last])

    def _forward(
        self, slots: Slots, owners: np.ndarray, positions: np.ndarray, width_index: np.ndarray
    ) -> Tensor:
        num_rows = len(owners)
        multiple = self.tile or _ROWS
        padding = -num_rows % multiple
        tokens = slots.tokens[owners, positions]
        if padding:
            tokens = np.concatenate([tokens, np.zeros(padding, tokens.dtype)])
            owners = np.concatenate([owners, np.full(padding, -1)])
            positions = np.concatenate([positions, np.zeros(padding, positions.dtype)])
            width_index = np.concatenate([width_index, np.full(padding, width_index[-1])])
        step = self.tile or len(owners)
        hidden = []
        for low in range(0, len(owners), step):
            rows = slice(low, low + step)
            layout = self.cache.layout(owners[rows], positions[rows], slots.blocks, width_index[rows])
            ids = torch.from_numpy(tokens[rows].astype(np.int64)).to(self.device)
            places = torch.from_numpy(positions[rows].astype(np.int64)).to(self.device)
            routing = self._routing()
            self.adapters.select(np.where(owners[rows] < 0, -1, slots.adapter[owners[rows]]))
            hidden.append(self.model(ids, places, self.cache.attend(layout), routing=routing))
            if self.routes is not None:
                self.routes.write(slots.blocks, owners[rows], positions[rows], routing)
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def _routing(self) -> Routing:
        """How experts are computed here: groups of tokens are padded as rows are, for the same reason."""
        if not self.cache.is_exact:
            return Routing(is_recording=self.routes is not None)
        return Routing(
            is_recording=self.routes is not None,
            row_multiple=self.tile or _ROWS,
            is_tiled=self.tile is not None,
        )

    def _logits(self, hidden: Tensor, rows: np.ndarray) -> Float[Tensor, "rows vocab"]:
        multiple = self.tile or _ROWS
        padded = np.concatenate([rows, np.zeros(-len(rows) % multiple, rows.dtype)])
        step = self.tile or len(padded)
        weight = self.model.output_weight
        index = torch.from_numpy(padded).to(self.device)
        out = [
            F.linear(hidden[index[low : low + step]], weight).float() for low in range(0, len(padded), step)
        ]
        return (out[0] if len(out) == 1 else torch.cat(out))[: len(rows)]

    def _fill_prompt_logprobs(
        self, plan: Plan, slots: Slots, hidden: Tensor, place: np.ndarray, wanted: dict[int, np.ndarray]
    ) -> None:
        first = np.cumsum(plan.count) - plan.count
        for i, slot in enumerate(plan.slots.tolist()):
            if slot not in wanted:
                continue
            start, target = int(plan.start[i]), wanted[slot]
            count = min(
                int(plan.count[i]), len(target) - 1 - start
            )  # the last prompt token predicts a sampled one
            for low in range(0, count, _PROMPT_ROWS):
                high = min(low + _PROMPT_ROWS, count)
                logits = self._logits(hidden, place[first[i] + low : first[i] + high])
                ids = slots.tokens[slot, start + low + 1 : start + high + 1]
                target[start + low + 1 : start + high + 1] = token_logprobs(logits, ids)
