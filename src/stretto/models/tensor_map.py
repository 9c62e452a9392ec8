"""Maps our parameters to the tensors of Hugging Face checkpoints.

In this file "ours" are parameters and "theirs" are checkpoint tensors. A family lists only the differences
(`WeightRule`); every other name is the same. A `TensorMap` is built from the rules and the shapes of our parameters: it
says which slice of ours is which slice of theirs. Loading and exporting copy these slices, and a rank that has a slice
of a parameter (`TensorSlice`) reads only the bytes of that slice. hub.py reads and writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.families.family import WeightRule

if TYPE_CHECKING:
    from jaxtyping import Shaped

VISION_PREFIX = "model.visual."
"""The prefix of a vision tower's names, in our modules and in checkpoints."""

Shape = tuple[int, ...]
Region = tuple[slice, ...]


class LazyTensor(Protocol):
    """A checkpoint's tensor that can be read by slices: a Tensor, or one in a file."""

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]: ...


@dataclass(frozen=True)
class CheckpointReader:
    """The checkpoint of a module on the meta device.

    read: returns the name, shape and lazy tensor of every weight.
    """

    directory: Path
    read: Callable[[], Iterator[tuple[str, Shape, LazyTensor]]]


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a whole tensor of `shape`, at `start`; it may be empty."""

    tensor: Tensor
    start: Shape
    shape: Shape

    @classmethod
    def whole(cls, tensor: Shaped[Tensor, " ..."]) -> TensorSlice:
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))

    @property
    def region(self) -> Region:
        """Its place in the whole tensor."""
        return region_of(self.start, self.tensor.shape)


@dataclass(frozen=True)
class SharedSlice:
    """A slice that one of our parameters and one checkpoint tensor have in common.

    ours[start : start + shape] equals theirs[their_start : ...], after dropping the first `lead` dims of ours.
    """

    ours: str
    start: Shape
    shape: Shape
    theirs: str
    their_start: Shape
    lead: int
    """Number of first dims of ours, each of size 1, that theirs does not have."""

    @property
    def their_shape(self) -> Shape:
        return self.shape[self.lead :]

    def overlap(self, local: TensorSlice) -> tuple[Region, Region] | None:
        """The overlap with a slice of ours, as regions of theirs and of local.tensor, or None."""
        low = tuple(max(a, b) for a, b in zip(self.start, local.start))
        ends = zip(self.start, self.shape, local.start, local.tensor.shape)
        high = tuple(min(a + n, b + m) for a, n, b, m in ends)
        if any(a >= b for a, b in zip(low, high)):
            return None
        theirs = zip(low[self.lead :], high[self.lead :], self.start[self.lead :], self.their_start, strict=True)
        return (
            tuple(slice(a - s + t, b - s + t) for a, b, s, t in theirs),
            tuple(slice(a - s, b - s) for a, b, s in zip(low, high, local.start)),
        )


class _Swapped:
    """A checkpoint tensor with its last two dims swapped."""

    def __init__(self, source: LazyTensor) -> None:
        self._source = source

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        *first, rows, columns = region
        return self._source[(*first, columns, rows)].mT


class TensorMap:
    """The slices that parameters of these shapes share with a checkpoint's tensors."""

    def __init__(self, shapes: Mapping[str, Shape], rules: Iterable[WeightRule], text_prefix: str = "model.") -> None:
        """text_prefix: the prefix of the decoder's names in a checkpoint, instead of "model."."""
        self._text_prefix = text_prefix
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        templates = {template: (rule, at) for rule in rules for at, template in enumerate(rule.ours)}
        slices: list[SharedSlice] = []
        swappable: set[str] = set()
        for name, shape in self.shapes.items():
            template, layer = _split_layer(name)
            rule, at = templates.get(template, (WeightRule((template,), (template,)), 0))
            parts = list(self._apply_rule(name, shape, rule, at, layer))
            slices += parts
            if rule.may_be_swapped:
                swappable |= {part.theirs for part in parts}
        self.swappable = frozenset(swappable)
        """Checkpoint tensors whose last two dims may be swapped."""
        self._set_slices(slices)

    @classmethod
    def of(cls, shapes: Mapping[str, Shape], slices: Iterable[SharedSlice]) -> TensorMap:
        """A map from these slices, without rules."""
        table = cls(shapes, ())
        table._set_slices(slices)
        return table

    def _set_slices(self, slices: Iterable[SharedSlice]) -> None:
        self._by_theirs: dict[str, list[SharedSlice]] = {}
        for shared in slices:
            self._by_theirs.setdefault(shared.theirs, []).append(shared)
        self.their_shapes = {name: _bounds(parts) for name, parts in self._by_theirs.items()}

    def _apply_rule(self, name: str, shape: Shape, rule: WeightRule, at: int, layer: str) -> Iterator[SharedSlice]:
        fill = lambda text, **more: _fill(text, layer=layer, **more)
        if rule.is_stacked:
            num, rows = len(rule.theirs), shape[1] // len(rule.theirs)
            part = (1, rows, *shape[2:])
            for expert in range(shape[0]):
                for i in range(num):
                    start = (expert, i * rows, *(0,) * len(shape[2:]))
                    theirs = self._their_name(fill(rule.theirs[i], expert=str(expert)))
                    yield SharedSlice(name, start, part, theirs, (0,) * (len(shape) - 1), 1)
            return
        rest = (0,) * (len(shape) - 1)
        if len(rule.ours) > 1:
            above = sum(self.shapes[fill(other)][0] for other in rule.ours[:at])
            theirs = self._their_name(fill(rule.theirs[0]))
            yield SharedSlice(name, (0, *rest), shape, theirs, (above, *rest), 0)
            return
        rows = shape[0] // len(rule.theirs)
        for i, theirs in enumerate(rule.theirs):
            their_name = self._their_name(fill(theirs))
            yield SharedSlice(name, (i * rows, *rest), (rows, *shape[1:]), their_name, (0, *rest), 0)

    def _their_name(self, name: str) -> str:
        if name.startswith(VISION_PREFIX):
            return name
        return re.sub(r"^model\.", self._text_prefix, name)

    def slices_of(self, theirs: str) -> list[SharedSlice]:
        """Slices of our parameters that make up a checkpoint's tensor; empty if it is unknown."""
        return self._by_theirs.get(theirs, [])

    def export(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint tensors by name from our parameters, in a fixed order; views where possible."""
        for name, slices in self._by_theirs.items():
            views = [tensors[s.ours][region_of(s.start, s.shape)].reshape(s.their_shape) for s in slices]
            yield name, views[0] if len(views) == 1 else torch.cat(views)

    def find_needed(self, targets: Mapping[str, TensorSlice]) -> set[str]:
        """The names of the checkpoint tensors that overlap with any of these slices."""
        return {
            name
            for name, slices in self._by_theirs.items()
            if any(s.ours in targets and s.overlap(targets[s.ours]) for s in slices)
        }

    def copy_in(self, name: str, shape: Shape, source: LazyTensor, targets: Mapping[str, TensorSlice]) -> None:
        """Copy from the checkpoint tensor `name` into these slices; only the overlaps are read.

        Raises: KeyError if there is no tensor of this name; DataError if its shape is wrong.
        """
        slices = self._by_theirs[name]
        expected = self.their_shapes[name]
        if name in self.swappable and tuple(shape) == (*expected[:-2], expected[-1], expected[-2]) != expected:
            shape, source = expected, _Swapped(source)
        if tuple(shape) != expected:
            raise DataError(f"tensor {name!r} has shape {tuple(shape)}, config.json asks for {expected}")
        read = getattr(source, "peek", source.__getitem__)  # from a file: without a copy in between
        for shared in slices:
            if shared.ours not in targets or (overlap := shared.overlap(targets[shared.ours])) is None:
                continue
            theirs, ours = overlap
            target = targets[shared.ours].tensor[ours]
            target.copy_(read(theirs).reshape(target.shape))


def as_whole_slices(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, TensorSlice]:
    """Each tensor as a slice that covers all of it."""
    return {name: TensorSlice.whole(tensor) for name, tensor in tensors}


def _split_layer(name: str) -> tuple[str, str]:
    """A parameter's name with its layer number replaced, and that number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join((*parts[:i], "{layer}", *parts[i + 1 :])), part
    return name, ""


def _fill(template: str, **values: Any) -> str:
    """Fill in the fields of a template; a template without {layer} ignores the layer."""
    names = {field for _, field, _, _ in Formatter().parse(template) if field}
    return template.format(**{key: values[key] for key in names})


def region_of(start: Iterable[int], shape: Iterable[int]) -> Region:
    """The region of this shape that begins at `start`."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def _bounds(slices: list[SharedSlice]) -> Shape:
    """The shape of a checkpoint tensor, from its slices."""
    return tuple(max(ends) for ends in zip(*(map(sum, zip(s.their_start, s.their_shape)) for s in slices)))
