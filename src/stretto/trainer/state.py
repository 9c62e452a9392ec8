"""What decides a learner's next step, as named rectangles of whole tensors: each rank has its own.

A `Part` says where a rank's piece lies in the whole tensor, so that whoever reads it on another mesh finds the
pieces it needs. `State` is what a learner gives; a learner is put back from any `StateSource`: such a State, or a
checkpoint's files (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.base.errors import DataError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """`tensor` is the rectangle at `start` of a whole tensor of `shape`; it may be empty."""

    tensor: Tensor
    start: Shape
    shape: Shape

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


@dataclass(frozen=True)
class Described:
    """A whole tensor of a source."""

    shape: Shape
    dtype: torch.dtype


class StateSource(Protocol):
    """Where a learner's state can be read from."""

    values: dict[str, Any]

    @property
    def tensors(self) -> Mapping[str, Described]:
        """What is there, by name."""

    def read(self, targets: Mapping[str, Part]) -> None:
        """Fill the tensors of these parts; what nobody asks for is not read."""


@dataclass(frozen=True)
class State:
    """A learner's state as it is: the tensors are the learner's own and change with it."""

    parts: dict[str, Part]
    values: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Described]:
        return {name: Described(part.shape, part.tensor.dtype) for name, part in self.parts.items()}

    def read(self, targets: Mapping[str, Part]) -> None:
        """Between learners on the same mesh."""
        for name, target in targets.items():
            assert self.parts[name].start == target.start, f"{name} lies elsewhere; go through a checkpoint"
            target.tensor.copy_(self.parts[name].tensor)


def under(prefix: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def part_of(prefix: str, tensors: Mapping[str, Described]) -> dict[str, Described]:
    """What stands under a prefix, without it."""
    return {n.removeprefix(f"{prefix}."): t for n, t in tensors.items() if n.startswith(f"{prefix}.")}


def check_same_model(shapes: Mapping[str, Iterable[int]], saved: Mapping[str, Described]) -> None:
    """Raises: DataError when the saved weights are not those of a model with these shapes."""
    for name, shape in shapes.items():
        if name not in saved:
            raise DataError(f"no weights for {name!r}: the state belongs to another model")
        if saved[name].shape != tuple(shape):
            raise DataError(
                f"weights of {name!r} have shape {saved[name].shape}, this model's have {tuple(shape)}: "
                "another model's state"
            )
    if more := sorted(set(saved) - set(shapes)):
        raise DataError(f"weights of {more[0]!r} are not in this model: the state belongs to another model")
