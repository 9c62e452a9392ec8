"""LoRA adapters in the embedded engine: several of them, and the base model, in one batch.

An adapter is loaded, replaced in place (running requests continue with the new one) or unloaded between two steps.
Requests name an adapter as their model. Requests for the engine's own model use the policy's adapter if a weight
update has loaded one. A request keeps its adapter in memory; an unloaded adapter accepts no new requests.

Before each pass, `select` sets the adapter of every row. The pass computes W x for all rows as without adapters, and
`add` adds B A x to the rows of each adapter that has a pair for W. Bits: the rows of an adapter are padded like those
of a pass (runner.py), so that a token's result does not depend on the rest of the batch; `find_tile` checks the shapes
of A and B as those of W.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.lora import Adapter
from stretto.models.moe import Experts
from stretto.models.parts.router import Routing

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int

    from stretto.models.decoder import Decoder

POLICY = 0
"""Id of the engine's own model, with the policy's adapter if it has one."""
_ROW_MULTIPLE = 16


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in the engine. `pairs`: A and scaling * B by parameter name."""

    id: int
    name: str | None  # None for the policy's adapter
    pairs: dict[str, tuple[Tensor, Tensor]]
    version: int
    serial: int  # new for each load, so that caches of other weights are not reused

    @property
    def salt(self) -> str:
        return f"adapter {self.serial}"


@dataclass
class AdapterRows:
    """The rows of one adapter in this pass."""

    adapter: LoadedAdapter
    rows: Tensor | None  # int64, padded; None if they are all rows of the pass
    num_rows: int  # without padding


@dataclass
class Selection:
    """The adapters of the current pass's rows; shared with the layers of AdaptedExperts."""

    parts: list[AdapterRows] = field(default_factory=list)
    ids: Tensor | None = None  # adapter id of each row, int64 [rows]; for layers that reorder rows
    multiple: int = _ROW_MULTIPLE
    tile: int | None = None

    def product(self, x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "rows out"]:
        """x @ weight.T; the bits of a row do not depend on the number of rows."""
        if self.tile is None:
            return F.linear(x, weight)
        padded = F.pad(x, (0, 0, 0, -len(x) % self.tile))
        return torch.cat([F.linear(rows, weight) for rows in padded.split(self.tile)])[: len(x)]


class AdaptedExperts(Experts):
    """Experts of the base model; if a row has an adapter for them, they are computed one by one."""

    def __init__(self, base: Experts, name: str, selection: Selection) -> None:
        self.share_weights_of(base)
        self.name, self.selection = name, selection

    def forward(
        self,
        x: Float[Tensor, "rows dim"],
        counts: Int[Tensor, " experts"],
        routing: Routing,
        tokens: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows dim"]:
        name = f"{self.name}.gate_up_proj"
        adapters = [part.adapter for part in self.selection.parts if name in part.adapter.pairs]
        if not adapters:
            return super().forward(x, counts, routing, tokens)
        assert self.selection.ids is not None
        sizes = counts.tolist()
        owners = self.selection.ids.index_select(0, tokens).split(sizes)
        out = []
        for expert, (rows, ids) in enumerate(zip(x.split(sizes), owners)):
            if len(rows):
                rows_of = [(loaded, (ids == loaded.id).nonzero()[:, 0]) for loaded in adapters]
                hidden = self.gated(self._product(expert, "gate_up_proj", rows, rows_of, routing))
                out.append(self._product(expert, "down_proj", hidden, rows_of, routing))
        return torch.cat(out)

    def _product(
        self, expert: int, which: str, x: Tensor, rows_of: list[tuple[LoadedAdapter, Tensor]], routing: Routing
    ) -> Tensor:
        multiple = routing.row_multiple or 1
        padded = F.pad(x, (0, 0, 0, -len(x) % multiple))
        weight, bias = self.matrix(which)[expert], self.bias(which)
        tiles = padded.split(multiple) if routing.is_tiled else (padded,)
        out = torch.cat([F.linear(tile, weight) for tile in tiles])[: len(x)]
        if bias is not None:
            out += bias[expert]
        for loaded, at in rows_of:
            if len(at):
                a, b = (half[expert] for half in loaded.pairs[f"{self.name}.{which}"])
                if self.shape.is_transposed:  # B A is added to the weight as it is stored
                    a, b = b.mT, a.mT
                rows = F.pad(x.index_select(0, at), (0, 0, 0, -len(at) % self.selection.multiple))
                product = self.selection.product
                out.index_add_(0, at, product(product(rows, a), b)[: len(at)])
        return out


class Adapters:
    """The adapters of one engine; they cost nothing until the first one is loaded."""

    def __init__(self, model: Decoder, *, find_tile: Callable[[set[tuple[int, int]]], int | None] | None) -> None:
        """find_tile: runner.find_tile; None if equal bits are not required."""
        self._model, self._find_tile = model, find_tile
        self._shapes = _adaptable(model)
        self._selection = Selection(multiple=1 if find_tile is None else _ROW_MULTIPLE)
        self.is_used = False
        """Whether an adapter has been loaded since the engine was built."""
        self._probed: set[tuple[int, int]] = set()
        self._policy: LoadedAdapter | None = None
        self._named: dict[str, LoadedAdapter] = {}
        self._alive: WeakValueDictionary[int, LoadedAdapter] = WeakValueDictionary()
        self._ids, self._serials = itertools.count(POLICY + 1), itertools.count(1)

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """The adapters that requests may name, in the order of loading."""
        return iter(self._named.values())

    def get(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of this name, None if there is none; name=None: the policy's adapter."""
        return self._policy if name is None else self._named.get(name)

    def check(self, adapter: Adapter) -> None:
        """Raises: DataError if the adapter does not fit this model."""
        adapter.check(self._shapes)

    def load(self, name: str | None, adapter: Adapter, version: int | None = None) -> LoadedAdapter:
        """Add or replace an adapter. version: that of its tokens; None counts its replacements.

        Raises: DataError if it does not fit this model; then nothing has changed.
        """
        self.check(adapter)
        weight = self._model.output_weight
        pairs = {
            key: (a.to(weight.device, weight.dtype), (adapter.scaling * b.float()).to(weight.device, weight.dtype))
            for key, (a, b) in adapter.pairs.items()
        }
        self._adapt_experts()
        self._probe(pairs)
        loaded, serial = self.get(name), next(self._serials)
        if loaded is None:
            number = POLICY if name is None else next(self._ids)
            loaded = LoadedAdapter(number, name, pairs, version or 0, serial)
        else:
            loaded.pairs, loaded.serial = pairs, serial
            loaded.version = loaded.version + 1 if version is None else version
        if name is None:
            self._policy = loaded
        else:
            self._named[name] = loaded
        self._alive[loaded.id] = loaded
        return loaded

    def unload(self, name: str | None) -> None:
        """Remove an adapter; running requests keep it."""
        if name is None:
            self._policy = None
        else:
            del self._named[name]

    def versions(self, ids: Int[np.ndarray, " rows"], version: int) -> Int[np.ndarray, " rows"] | int:
        """Versions of tokens sampled with these adapters; `version`: that of the engine's own model."""
        if not ids.any():
            return version
        return np.array([self._alive[i].version if i else version for i in ids.tolist()], np.int32)

    def select(self, ids: Int[np.ndarray, " rows"]) -> bool:
        """Set the adapter id of each row of the next pass (-1: padding); False if no row has one."""
        selection = self._selection
        selection.parts = []
        if not self.is_used:
            return False
        for number in np.unique(ids[ids >= 0]).tolist():
            loaded = self._policy if number == POLICY else self._alive[number]
            if loaded is None:
                continue
            at = np.flatnonzero(ids == number)
            rows = None
            if (ids >= 0).sum() != len(at):
                padded = np.concatenate([at, np.full(-len(at) % selection.multiple, at[0])])
                rows = torch.from_numpy(padded).to(self._model.output_weight.device)
            selection.parts.append(AdapterRows(loaded, rows, len(at)))
        if selection.parts and self._model.config.moe is not None:
            selection.ids = torch.from_numpy(ids.astype(np.int64)).to(self._model.output_weight.device)
        return bool(selection.parts)

    def add(self, name: str, x: Float[Tensor, "rows in"], out: Float[Tensor, "rows out"]) -> None:
        """Add the adapters' products for parameter `name` to `out`, its product with x."""
        product = self._selection.product
        for part in self._selection.parts:
            if (pair := part.adapter.pairs.get(name)) is None:
                continue
            selected = x if part.rows is None else x.index_select(0, part.rows)
            delta = product(product(selected, pair[0]), pair[1])
            if part.rows is None:
                out += delta
            else:
                out.index_add_(0, part.rows[: part.num_rows], delta[: part.num_rows])

    def matrices(
        self, name: str
    ) -> Callable[[], list[tuple[Int[Tensor, " rows"] | None, int, Float[Tensor, "in out"]]]]:
        """A function for a mixer's `matrix` (fused.py): rows, and what adapters add there to parameter `name`."""

        def selected() -> list[tuple[Tensor | None, int, Tensor]]:
            parts = [part for part in self._selection.parts if name in part.adapter.pairs]
            matrix = lambda a, b: self._selection.product(a.mT, b)
            return [(part.rows, part.num_rows, matrix(*part.adapter.pairs[name])) for part in parts]

        return selected

    def _adapt_experts(self) -> None:
        """Replace the model's Experts by AdaptedExperts, which share their weights."""
        if self.is_used:
            return
        for path, module in list(self._model.named_modules()):
            parent, _, name = path.rpartition(".")
            if isinstance(module, Experts):
                layer = AdaptedExperts(module, path, self._selection)
                self._model.get_submodule(parent).add_module(name, layer)
        self.is_used = True

    def _probe(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """From now on compute products in tiles if one of a new shape depends on the row count."""
        shapes = {(int(half.shape[-2]), int(half.shape[-1])) for pair in pairs.values() for half in pair}
        new = shapes - self._probed
        self._probed |= new
        if self._find_tile is not None and new and self._selection.tile is None:
            self._selection.tile = self._find_tile(new)


def _adaptable(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters that can have an adapter: not embeddings, output head, routers, norms."""
    names = []
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            names += [f"{path}.gate_up_proj", f"{path}.down_proj"]
        elif isinstance(module, nn.Linear) and module.weight is not model.output_weight:
            names.append(f"{path}.weight")
    return {name: tuple(model.get_parameter(name).shape) for name in names}
