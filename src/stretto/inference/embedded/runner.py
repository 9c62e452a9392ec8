"""One forward pass over the tokens of a StepPlan, to the logits of sequences that sample a token.

Bits: a row of a matrix product may depend on how many rows are multiplied (BLAS has other kernels for a few rows), so
rows are padded to a multiple of `_ROW_MULTIPLE`. At start, `find_model_tile` checks on the model's own weight shapes
that every padded row count then gives the same bits. If it does not, every product has exactly `tile` rows. Where all
products are those of an add-on (models/device/kernels.py), rows have equal bits in any number and none are added.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.inference.embedded.adapters import Adapters
from stretto.inference.embedded.caches.kv_cache import KVCache, PassLayout, PassRows
from stretto.inference.embedded.drafts import DraftRows
from stretto.inference.embedded.expert_choices import ExpertChoices
from stretto.inference.embedded.sampler import PromptScores
from stretto.inference.embedded.scheduler import StepPlan
from stretto.inference.embedded.slots import SequenceSlots
from stretto.inference.embedded.vision.rows import find_rotations
from stretto.inference.embedded.vision.store import ImageStore
from stretto.models.decoder import Decoder
from stretto.models.fused import FusedDecoder, ModuleDecoder, build_pass
from stretto.models.lm_head import head_logits
from stretto.models.moe import EXPERT_PARAMETERS, mixtures
from stretto.models.parts.router import Routing

if TYPE_CHECKING:
    from jaxtyping import Float, Int

logger = logging.getLogger(__name__)

_ROW_MULTIPLE = 16
_TILE_ROWS = 64
_MAX_PROBED_DIM = 4096
_PROMPT_ROWS = 256  # prompt rows whose logits are in memory at one time


def find_model_tile(model: FusedDecoder | ModuleDecoder) -> int | None:
    """The row count that a model's products must have; None if any multiple of 16 gives equal bits."""
    weights = [*(product.weight for product in model.linears), model.model.output_weight]
    for mixture in mixtures(model.model).values():
        weights += [mixture.experts.matrix(name) for name in EXPERT_PARAMETERS]
    return find_tile({(weight.shape[-2], weight.shape[-1]) for weight in weights})


def find_tile(shapes: set[tuple[int, int]]) -> int | None:
    """The row count for products with weights of these shapes; None if any multiple of 16 gives equal bits.

    Checked for plain products and for those that add a residual.
    """
    generator = torch.Generator().manual_seed(0)
    for out_dim, in_dim in {(min(out_dim, _MAX_PROBED_DIM), in_dim) for out_dim, in_dim in shapes}:
        weight = torch.randn(out_dim, in_dim, generator=generator)
        rows = torch.randn(32 * _ROW_MULTIPLE, in_dim, generator=generator)
        added = torch.randn(32 * _ROW_MULTIPLE, out_dim, generator=generator)
        whole, summed = F.linear(rows, weight), torch.addmm(added, rows, weight.T)
        for multiple in (1, 2, 3, 7, 16):
            count = multiple * _ROW_MULTIPLE
            last_rows, last_added = rows[-count:].clone(), added[-count:].clone()
            is_same = torch.equal(F.linear(last_rows, weight), whole[-count:])
            if not (is_same and torch.equal(torch.addmm(last_added, last_rows, weight.T), summed[-count:])):
                logger.warning("matrix products depend on the row count here; every product gets %d rows", _TILE_ROWS)
                return _TILE_ROWS
    return None


@dataclass(slots=True)
class _Pass:
    """The rows of a pass, padded, in the order in which they are computed, cut into tiles.

    places: the row of the pass that computes row i of the plan (plan order, token by token); None if it is row i.
    """

    num_rows: int
    places: Int[np.ndarray, " rows"] | None
    layouts: list[PassLayout]
    documents: list[Any]  # by layout; none for a model without states
    plan_slots: np.ndarray
    num_left: int  # later passes, one token further each, that can reuse these layouts
    row_multiple: int


class States(Protocol):
    """What recurrent layers keep of each slot: 0 before its first token, and changed by every pass."""

    max_sequences: int

    def __init__(self, model: Decoder, *, max_sequences: int, is_exact: bool) -> None: ...

    def documents(self, owners: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"]) -> Any:
        """What the mixers need of a pass (decoder.py), in which row i is token positions[i] of slot owners[i]."""
        ...

    def copy(self, source: Int[np.ndarray, " slots"], target: Int[np.ndarray, " slots"]) -> None:
        """Copy the states of slots, for samples that start from one prompt."""
        ...


class Runner:
    """Runs the model over its cache: a plan in, logits out."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        adapters: Adapters,
        *,
        tile: int | None = None,
        expert_choices: ExpertChoices | None = None,
        states: States | None = None,
        images: ImageStore | None = None,
    ) -> None:
        self.cache, self.adapters, self.states, self.images = cache, adapters, states, images
        self.model = build_pass(model, cache.kernels)
        if isinstance(self.model, ModuleDecoder):
            self.model.use_matrices(adapters.matrices)
        self.output_weight = model.output_weight
        self.products = self.model.products
        self.has_own_products = self.products is not None and not mixtures(model)
        """Whether no product of a pass without adapters depends on the number of rows."""
        self.tile, self.expert_choices = tile, expert_choices
        self.device = cache.device
        self._latest: _Pass | None = None

    @property
    def row_multiple(self) -> int:
        """The rows of a pass are padded to a multiple of this."""
        if self.tile is not None:
            return self.tile
        return 1 if self.has_own_products and not self.adapters.is_used else _ROW_MULTIPLE

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, slots: SequenceSlots, prompt_scores: dict[int, PromptScores]
    ) -> Float[Tensor, "last vocab"] | None:
        """Logits (float32) of the plan's last rows, in plan order; fills `prompt_scores`, by slot.

        Of a slot with drafts these are several rows: that of its last token, and those of its drafts.
        """
        rows = self._latest = self._follow(plan, slots) or self._arrange(plan, slots)
        hidden = self._forward(slots, rows)
        if prompt_scores:
            self._fill_prompt_scores(plan, slots, hidden, rows.places, prompt_scores)
        if plan.is_decode:
            return self._logits(hidden, rows.places, rows.num_rows)
        last = (np.cumsum(plan.count) - 1)[plan.is_last]
        if plan.num_drafts is not None:
            drafts = DraftRows.of(plan.num_drafts[plan.is_last])
            last = (last - plan.num_drafts[plan.is_last])[drafts.owner] + drafts.nth
        if not len(last):
            return None
        return self._logits(hidden, last if rows.places is None else rows.places[last], len(last))

    def _follow(self, plan: StepPlan, slots: SequenceSlots) -> _Pass | None:
        """The previous pass, advanced by one token; None if sequences or slabs have changed."""
        latest = self._latest
        if (
            not plan.is_following
            or latest is None
            or plan.slots is not latest.plan_slots
            or not latest.num_left
            or latest.row_multiple != self.row_multiple
        ):
            return None
        latest.num_left -= 1
        for layout in latest.layouts:
            layout.rows.advance()
            if slots.blocks is not layout.rows.tables:
                layout.rows.tables = slots.blocks
            self.cache.advance(layout)
        return latest

    def _arrange(self, plan: StepPlan, slots: SequenceSlots) -> _Pass:
        """Order the rows of a plan for the pass, and give decoded sequences rows of slabs."""
        owners, positions, is_decoded = plan.slots, plan.start, plan.is_last & (plan.count == 1)
        if len(owners) != int(plan.count.sum()):
            owners = np.repeat(plan.slots, plan.count)
            first = np.cumsum(plan.count) - plan.count
            positions = np.arange(len(owners)) + np.repeat(plan.start - first, plan.count)
            is_decoded = np.repeat(is_decoded, plan.count)
        width_index, multiple = self.cache.width_index(positions), self.row_multiple
        places, fills = self.cache.running.place(
            slots.allocation_id[owners], positions, width_index, is_decoded, padding=multiple
        )
        for fill in fills:
            self.cache.fill(fill, slots.blocks[owners[fill.sources]])
        nth = np.arange(len(owners))
        order = np.lexsort((np.where(places < 0, nth, places), places < 0, width_index))
        rows = PassRows(owners[order], positions[order], width_index[order], places[order], slots.blocks)
        rows = _padded(rows, -len(order) % multiple)
        rows.rotations = find_rotations(slots, rows.owners, rows.positions)
        step = self.tile or len(rows.owners)
        cuts = [slice(low, low + step) for low in range(0, len(rows.owners), step)]
        layouts = [self.cache.layout(rows.cut(cut) if len(cuts) > 1 else rows) for cut in cuts]
        is_sorted = (order == nth).all()
        inverse = None
        if not is_sorted:
            inverse = np.empty_like(order)
            inverse[order] = nth
        num_left = 0
        if plan.is_decode and (self.cache.kernels is not None or (places >= 0).all()):
            num_left = int((self.cache.widths[width_index] - positions).min()) - 1
        documents = []
        if self.states is not None:
            documents = [self.states.documents(part.rows.owners, part.rows.positions) for part in layouts]
        return _Pass(len(order), inverse, layouts, documents, plan.slots, num_left, multiple)

    def _forward(self, slots: SequenceSlots, whole: _Pass) -> Tensor:
        hidden = []
        for i, layout in enumerate(whole.layouts):
            rows, documents = layout.rows, whole.documents[i : i + 1]
            tokens = slots.tokens[rows.owners, rows.positions].astype(np.int64)
            ids = torch.from_numpy(tokens).to(self.device)
            turns = rows.positions if rows.rotations is None else rows.rotations
            at = torch.from_numpy(turns).to(self.device)
            routing = self._routing()
            adapt = None
            if self.adapters.is_used:
                adapter_ids = np.where(rows.owners < 0, -1, slots.adapter[rows.owners])
                adapt = self.adapters.add if self.adapters.select(adapter_ids) else None
            shown = None
            if self.images is not None:
                shown = self.images.vectors(slots, rows.owners, rows.positions)
            hidden.append(self.model(ids, at, self.cache.attend(layout), routing, adapt, shown, *documents))
            if self.expert_choices is not None:
                self.expert_choices.write(slots.blocks, rows.owners, rows.positions, routing)
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def _routing(self) -> Routing:
        """How experts are computed: their groups of tokens are padded as rows are, for equal bits."""
        if not self.cache.is_exact:
            return Routing(is_recording=self.expert_choices is not None)
        return Routing(
            is_recording=self.expert_choices is not None,
            row_multiple=self.tile or _ROW_MULTIPLE,
            is_tiled=self.tile is not None,
        )

    def _logits(
        self, hidden: Tensor, rows: Int[np.ndarray, " rows"] | None, num_rows: int
    ) -> Float[Tensor, "rows vocab"]:
        """Logits of these rows of `hidden`; of the first num_rows if rows is None."""
        multiple = self.row_multiple
        if rows is not None or num_rows + -num_rows % multiple != len(hidden):
            rows = np.arange(num_rows) if rows is None else rows
            padded = np.concatenate([rows, np.zeros(-num_rows % multiple, rows.dtype)])
            hidden = hidden.index_select(0, torch.from_numpy(padded).to(self.device))
        weight = self.output_weight
        if self.products is not None:
            return self.products.logits(hidden, weight)[:num_rows]
        if self.tile is None:
            return head_logits(hidden, weight)[:num_rows]
        return torch.cat([head_logits(part, weight) for part in hidden.split(self.tile)])[:num_rows]

    def _fill_prompt_scores(
        self, plan: StepPlan, slots: SequenceSlots, hidden: Tensor, places: np.ndarray | None,
        targets: dict[int, PromptScores],
    ) -> None:  # fmt: skip
        first = np.cumsum(plan.count) - plan.count
        for i, slot in enumerate(plan.slots.tolist()):
            if slot not in targets:
                continue
            start, target = int(plan.start[i]), targets[slot]
            # The last prompt token predicts a sampled one.
            count = min(int(plan.count[i]), len(target.logprobs) - 1 - start)
            for low in range(0, count, _PROMPT_ROWS):
                high = min(low + _PROMPT_ROWS, count)
                rows = np.arange(first[i] + low, first[i] + high)
                logits = self._logits(hidden, rows if places is None else places[rows], len(rows))
                ids = slots.tokens[slot, start + low + 1 : start + high + 1]
                target.fill(start + low + 1, logits, ids)


def _padded(rows: PassRows, count: int) -> PassRows:
    """Append `count` padding rows, which belong to the part of the last row."""
    if not count:
        return rows
    more = np.arange(1, count + 1)
    last = int(rows.places[-1])
    return PassRows(
        np.concatenate([rows.owners, np.full(count, -1)]),
        np.concatenate([rows.positions, np.zeros(count, np.int64)]),
        np.concatenate([rows.width_index, np.full(count, rows.width_index[-1])]),
        np.concatenate([rows.places, last + more if last >= 0 else np.full(count, -1)]),
        rows.tables,
    )
