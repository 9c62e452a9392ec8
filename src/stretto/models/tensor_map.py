"""Names and layouts of weights: ours beside those of Hugging Face checkpoints, as one table read both ways.

A family lists only where the two differ (`Rule`); every other name is the same. From the rules and the shapes
of our parameters comes a `TensorMap`: for every rectangle of ours, where it lies in which tensor of theirs.
Loading copies rectangles in, exporting reads them out, and a rank that holds a slice of a parameter
(`Local`) reads the bytes of that slice only. Files are hub.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.base.errors import DataError

Shape = tuple[int, ...]
Region = tuple[slice, ...]


class Source(Protocol):
    """A tensor of theirs, read by rectangles: a Tensor, or a tensor of a safetensors file."""

    def __getitem__(self, region: Region) -> Tensor: ...


@dataclass(frozen=True)
class Rule:
    """Tensors of ours that are other tensors of theirs; `{layer}` stands for a number on both sides.

    One of ours and several of theirs: ours is theirs one below the other (equal numbers of rows). Several of
    ours and one of theirs: the other way round. `{expert}` on their side: ours has one more dim in front,
    which counts the experts.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def __post_init__(self) -> None:
        assert min(len(self.ours), len(self.theirs)) == 1, f"{self}: one side must be a single tensor"
        assert not (len(self.ours) > 1 and self.is_stacked), f"{self}: experts cannot be split as well"

    @property
    def is_stacked(self) -> bool:
        return "{expert}" in self.theirs[0]


@dataclass(frozen=True)
class Local:
    """The part of one of our parameters that is here: `tensor` begins at `start` of the whole."""

    tensor: Tensor
    start: Shape


@dataclass(frozen=True)
class Piece:
    """A rectangle that both sides have: `shape` at `start` of ours and, less `lead` dims, at `their_start`."""

    ours: str
    start: Shape
    shape: Shape
    theirs: str
    their_start: Shape
    lead: int  # dims of ours (of size 1 here) that theirs does not have

    @property
    def their_shape(self) -> Shape:
        return self.shape[self.lead :]

    def overlap(self, local: Local) -> tuple[Region, Region] | None:
        """What a local part needs of theirs, and where in the local tensor it goes; None: nothing."""
        low = tuple(max(a, b) for a, b in zip(self.start, local.start))
        ends = zip(self.start, self.shape, local.start, local.tensor.shape)
        high = tuple(min(a + n, b + m) for a, n, b, m in ends)
        if any(a >= b for a, b in zip(low, high)):
            return None
        theirs = zip(
            low[self.lead :], high[self.lead :], self.start[self.lead :], self.their_start, strict=True
        )
        return (
            tuple(slice(a - s + t, b - s + t) for a, b, s, t in theirs),
            tuple(slice(a - s, b - s) for a, b, s in zip(low, high, local.start)),
        )


class TensorMap:
    """All pieces of a network with parameters of these shapes."""

    def __init__(self, shapes: Mapping[str, Shape], rules: Iterable[Rule]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        templates = {template: (rule, at) for rule in rules for at, template in enumerate(rule.ours)}
        found: list[Piece] = []
        for name, shape in self.shapes.items():
            template, layer = _template(name)
            rule, at = templates.get(template, (Rule((template,), (template,)), 0))
            found += self._pieces(name, shape, rule, at, layer)
        self._take(found)

    @classmethod
    def of(cls, shapes: Mapping[str, Shape], pieces: Iterable[Piece]) -> TensorMap:
        """The same of pieces that are known."""
        table = cls(shapes, ())
        table._take(pieces)
        return table

    def _take(self, pieces: Iterable[Piece]) -> None:
        self._by_theirs: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._by_theirs.setdefault(piece.theirs, []).append(piece)
        self.their_shapes = {name: _bounds(found) for name, found in self._by_theirs.items()}

    def _pieces(self, name: str, shape: Shape, rule: Rule, at: int, layer: str) -> Iterator[Piece]:
        fill = lambda text, **more: _fill(text, layer=layer, **more)
        if rule.is_stacked:
            num, rows = len(rule.theirs), shape[1] // len(rule.theirs)
            part = (1, rows, *shape[2:])
            for expert in range(shape[0]):
                for i in range(num):
                    start = (expert, i * rows, *(0,) * len(shape[2:]))
                    theirs = fill(rule.theirs[i], expert=str(expert))
                    yield Piece(name, start, part, theirs, (0,) * (len(shape) - 1), 1)
            return
        rest = (0,) * (len(shape) - 1)
        if len(rule.ours) > 1:
            above = sum(self.shapes[fill(other)][0] for other in rule.ours[:at])
            yield Piece(name, (0, *rest), shape, fill(rule.theirs[0]), (above, *rest), 0)
            return
        rows = shape[0] // len(rule.theirs)
        for i, theirs in enumerate(rule.theirs):
            yield Piece(name, (i * rows, *rest), (rows, *shape[1:]), fill(theirs), (0, *rest), 0)

    def pieces_of(self, theirs: str) -> list[Piece]:
        """Where a tensor of theirs lies in ours; none for a name that is not in the table."""
        return self._by_theirs.get(theirs, [])

    def export(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Their tensors from ours, in a fixed order: views where a tensor of theirs lies in one of ours."""
        for name, pieces in self._by_theirs.items():
            views = [_cut(tensors[p.ours], p.start, p.shape).reshape(p.their_shape) for p in pieces]
            yield name, views[0] if len(views) == 1 else torch.cat(views)

    def names_of(self, targets: Mapping[str, Local]) -> set[str]:
        """Tensors of theirs of which these parts need something."""
        return {
            name
            for name, pieces in self._by_theirs.items()
            if any(p.ours in targets and p.overlap(targets[p.ours]) for p in pieces)
        }

    def copy_in(self, name: str, shape: Shape, source: Source, targets: Mapping[str, Local]) -> None:
        """Copy what these parts need of their tensor `name`, and read no more of it.

        Raises: KeyError when no tensor of theirs has this name; DataError when it has another shape.
        """
        pieces = self._by_theirs[name]
        if tuple(shape) != self.their_shapes[name]:
            raise DataError(
                f"tensor {name!r} has shape {tuple(shape)}, config.json asks for {self.their_shapes[name]}"
            )
        for piece in pieces:
            if piece.ours not in targets or (overlap := piece.overlap(targets[piece.ours])) is None:
                continue
            theirs, ours = overlap
            place = targets[piece.ours].tensor[ours]
            place.copy_(source[theirs].reshape(place.shape))


def whole(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Local]:
    """These parameters as parts that are all there."""
    return {name: Local(tensor, (0,) * tensor.dim()) for name, tensor in tensors}


def _template(name: str) -> tuple[str, str]:
    """A parameter's name with its layer number replaced, and that number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join((*parts[:i], "{layer}", *parts[i + 1 :])), part
    return name, ""


def _fill(template: str, **values: Any) -> str:
    """The template's name; a template without {layer} ignores it."""
    fields = {field for _, field, _, _ in Formatter().parse(template) if field}
    return template.format(**{key: values[key] for key in fields})


def _cut(tensor: Tensor, start: Shape, shape: Shape) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, shape))]


def _bounds(pieces: list[Piece]) -> Shape:
    return tuple(max(ends) for ends in zip(*(map(sum, zip(p.their_start, p.their_shape)) for p in pieces)))
