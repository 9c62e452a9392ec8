"""LoRA adapters in the embedded engine: several of them, and the base model, in one batch.

An adapter is loaded, replaced in place (requests under way go on under the new one) or unloaded between two steps.
Requests name it as their model; those of the engine's own name get the policy's adapter where a weight update has
brought one. A request keeps its adapter alive: what is unloaded takes no new requests.

Before each pass `select` says whose tokens the rows are. A layer then computes W x for all rows, and B A x for the
rows of each adapter that has a pair for it. Bits: the rows of an adapter are padded like those of a pass
(runner.py), so that a token's do not depend on what else stands in the batch; `tile` is found for the shapes of A
and B as it is for W.
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
from stretto.models.moe import Experts, Routing, gated

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float, Int

    from stretto.models.decoder import Decoder

POLICY = 0
"""Id of the engine's own model, with the policy's adapter where it has one."""
_ROWS = 16


@dataclass(eq=False)
class Served:
    """An adapter that requests may name. `pairs`: A and scaling * B by parameter name."""

    id: int
    name: str | None
    pairs: dict[str, tuple[Tensor, Tensor]]
    path: str | None
    version: int
    serial: int  # of what is loaded: caches made with other weights have another

    @property
    def salt(self) -> str:
        return f"adapter {self.serial}"


@dataclass
class Part:
    """The rows of one adapter in this pass; None: all of them."""

    served: Served
    rows: Tensor | None
    num_rows: int


@dataclass
class Selection:
    """Whose tokens the rows of the current pass are; all adapted layers of a model hold the same one."""

    parts: list[Part] = field(default_factory=list)
    ids: Tensor | None = None  # int64 [rows], for layers that see rows in another order
    multiple: int = _ROWS
    tile: int | None = None

    def product(self, x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"]) -> Tensor:
        """x @ weight.T with the same bits for a row whatever the number of rows."""
        if self.tile is None:
            return F.linear(x, weight)
        padded = F.pad(x, (0, 0, 0, -len(x) % self.tile))
        return torch.cat([F.linear(rows, weight) for rows in padded.split(self.tile)])[: len(x)]


class AdaptedLinear(nn.Linear):
    """A linear layer of the base model, which adds what the adapters of its rows say."""

    def __init__(self, base: nn.Linear, name: str, selection: Selection) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.name, self.selection = name, selection

    def forward(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        out = F.linear(x, self.weight, self.bias)
        product = self.selection.product
        for part in self.selection.parts:
            if (pair := part.served.pairs.get(self.name)) is None:
                continue
            mine = x if part.rows is None else x.index_select(0, part.rows)
            delta = product(product(mine, pair[0]), pair[1])
            if part.rows is None:
                out += delta
            else:
                out.index_add_(0, part.rows[: part.num_rows], delta[: part.num_rows])
        return out


class AdaptedExperts(Experts):
    """Experts of the base model. With an adapter for them, one expert is computed after the other."""

    def __init__(self, base: Experts, name: str, selection: Selection) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = base.gate_up_proj, base.down_proj
        self.use_grouped_mm = base.use_grouped_mm
        self.name, self.selection = name, selection

    def forward(
        self,
        x: Float[Tensor, "rows dim"],
        counts: Int[Tensor, " experts"],
        routing: Routing,
        tokens: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows dim"]:
        name = f"{self.name}.gate_up_proj"
        adapters = [part.served for part in self.selection.parts if name in part.served.pairs]
        if not adapters:
            return super().forward(x, counts, routing, tokens)
        assert self.selection.ids is not None
        sizes = counts.tolist()
        owners = self.selection.ids.index_select(0, tokens).split(sizes)
        out = []
        for expert, (rows, ids) in enumerate(zip(x.split(sizes), owners)):
            if len(rows):
                mine = [(served, (ids == served.id).nonzero()[:, 0]) for served in adapters]
                hidden = gated(self._product(expert, "gate_up_proj", rows, mine, routing))
                out.append(self._product(expert, "down_proj", hidden, mine, routing))
        return torch.cat(out)

    def _product(
        self, expert: int, which: str, x: Tensor, mine: list[tuple[Served, Tensor]], routing: Routing
    ) -> Tensor:
        multiple = routing.row_multiple or 1
        padded = F.pad(x, (0, 0, 0, -len(x) % multiple))
        weight = getattr(self, which)[expert]
        tiles = padded.split(multiple) if routing.is_tiled else (padded,)
        out = torch.cat([F.linear(tile, weight) for tile in tiles])[: len(x)]
        for served, at in mine:
            if len(at):
                a, b = served.pairs[f"{self.name}.{which}"]
                rows = F.pad(x.index_select(0, at), (0, 0, 0, -len(at) % self.selection.multiple))
                product = self.selection.product
                out.index_add_(0, at, product(product(rows, a[expert]), b[expert])[: len(at)])
        return out


class Adapters:
    """The adapters of one engine; free of cost until the first is loaded."""

    def __init__(
        self, model: Decoder, *, find_tile: Callable[[set[tuple[int, int]]], int | None] | None
    ) -> None:
        """find_tile: of shapes, the row count that products must have (runner.py); None: bits do not matter."""
        self._model, self._find_tile = model, find_tile
        self._shapes = _adaptable(model)
        self._selection = Selection(multiple=1 if find_tile is None else _ROWS)
        self._is_adapted = False
        self._probed: set[tuple[int, int]] = set()
        self._policy: Served | None = None
        self._named: dict[str, Served] = {}
        self._alive: WeakValueDictionary[int, Served] = WeakValueDictionary()
        self._ids, self._serials = itertools.count(POLICY + 1), itertools.count(1)

    def __iter__(self) -> Iterator[Served]:
        """Those that requests may name, in the order of loading."""
        return iter(self._named.values())

    def get(self, name: str | None) -> Served | None:
        """By the name that requests use; None: the engine's own model, which may have no adapter."""
        return self._policy if name is None else self._named.get(name)

    def check(self, adapter: Adapter) -> None:
        """Raises: DataError when it is another model's."""
        adapter.check(self._shapes)

    def load(
        self, name: str | None, adapter: Adapter, version: int | None = None, path: str | None = None
    ) -> Served:
        """Add or replace an adapter. version: what its tokens are marked with; None: how often it was replaced.

        Raises: DataError when it is another model's; then nothing has changed.
        """
        self.check(adapter)
        weight = self._model.output_weight
        pairs = {
            key: (
                a.to(weight.device, weight.dtype),
                (adapter.scaling * b.float()).to(weight.device, weight.dtype),
            )
            for key, (a, b) in adapter.pairs.items()
        }
        self._adapt_layers()
        self._probe(pairs)
        served, serial = self.get(name), next(self._serials)
        if served is None:
            number = POLICY if name is None else next(self._ids)
            served = Served(number, name, pairs, path, version or 0, serial)
        else:
            served.pairs, served.path, served.serial = pairs, path, serial
            served.version = served.version + 1 if version is None else version
        if name is None:
            self._policy = served
        else:
            self._named[name] = served
        self._alive[served.id] = served
        return served

    def unload(self, name: str | None) -> None:
        """Take no more requests for it; those under way keep it."""
        if name is None:
            self._policy = None
        else:
            del self._named[name]

    def versions(self, ids: np.ndarray, version: int) -> np.ndarray | int:
        """What tokens of these adapters are marked with; `version` is that of the engine's own model."""
        if not ids.any():
            return version
        return np.array([self._alive[i].version if i else version for i in ids.tolist()], np.int32)

    def select(self, ids: Int[np.ndarray, " rows"]) -> None:
        """The next pass has rows of these adapters; -1: of nobody."""
        selection = self._selection
        selection.parts = []
        if not self._is_adapted:
            return
        for number in np.unique(ids[ids >= 0]).tolist():
            served = self._policy if number == POLICY else self._alive[number]
            if served is None:
                continue
            at = np.flatnonzero(ids == number)
            rows = None
            if (ids >= 0).sum() != len(at):
                padded = np.concatenate([at, np.full(-len(at) % selection.multiple, at[0])])
                rows = torch.from_numpy(padded).to(self._model.output_weight.device)
            selection.parts.append(Part(served, rows, len(at)))
        if selection.parts and self._model.config.moe is not None:
            selection.ids = torch.from_numpy(ids.astype(np.int64)).to(self._model.output_weight.device)

    def _adapt_layers(self) -> None:
        """Put layers that know adapters in place of the model's; their weights stay where they are."""
        if self._is_adapted:
            return
        for path, module in list(self._model.named_modules()):
            parent, _, name = path.rpartition(".")
            if f"{path}.weight" in self._shapes:
                layer: nn.Module = AdaptedLinear(module, f"{path}.weight", self._selection)
            elif isinstance(module, Experts):
                layer = AdaptedExperts(module, path, self._selection)
            else:
                continue
            self._model.get_submodule(parent).add_module(name, layer)
        self._is_adapted = True

    def _probe(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """A shape that makes products depend on the row count makes all of them be computed in tiles."""
        shapes = {(int(half.shape[-2]), int(half.shape[-1])) for pair in pairs.values() for half in pair}
        fresh = shapes - self._probed
        self._probed |= fresh
        if self._find_tile is not None and fresh and self._selection.tile is None:
            self._selection.tile = self._find_tile(fresh)


def _adaptable(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Parameters that an adapter can stand beside: not embeddings, the output head, routers, norms."""
    names = []
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            names += [f"{path}.gate_up_proj", f"{path}.down_proj"]
        elif isinstance(module, nn.Linear) and module.weight is not model.output_weight:
            names.append(f"{path}.weight")
    return {name: tuple(model.get_parameter(name).shape) for name in names}
