"""The state of a learner, as named slices of whole tensors; each rank has its own slices.

A `TensorSlice` (models/tensor_map.py) says where it lies in the whole tensor, so that a reader on another mesh finds
what it needs. A learner returns its state as `LearnerState` and loads it from any `StateSource`: a LearnerState, or
the files of a checkpoint (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stretto.base.errors import DataError
from stretto.models.tensor_map import Shape, TensorSlice


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a whole tensor in a source."""

    shape: Shape
    dtype: torch.dtype


class StateSource(Protocol):
    """Where a learner's state can be read from."""

    values: dict[str, Any]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The whole tensors that can be read, by name."""

    def read(self, targets: Mapping[str, TensorSlice]) -> None:
        """Fill the tensors of these slices; nothing else is read."""


@dataclass(frozen=True)
class LearnerState:
    """A learner's current state; the tensors are the learner's own and change with it."""

    slices: dict[str, TensorSlice]
    values: dict[str, Any]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(part.shape, part.tensor.dtype) for name, part in self.slices.items()}

    def read(self, targets: Mapping[str, TensorSlice]) -> None:
        """Copy the state to another learner on the same mesh."""
        for name, target in targets.items():
            assert self.slices[name].start == target.start, (
                f"{name}: another slice; use a checkpoint to change the mesh"
            )
            target.tensor.copy_(self.slices[name].tensor)


def add_prefix(prefix: str, parts: Mapping[str, TensorSlice]) -> dict[str, TensorSlice]:
    """Put `prefix` and a dot before every name."""
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def select_prefix(prefix: str, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors whose names have this prefix, by the rest of their names."""
    return {n.removeprefix(f"{prefix}."): t for n, t in tensors.items() if n.startswith(f"{prefix}.")}


def check_same_model(shapes: Mapping[str, Iterable[int]], saved: Mapping[str, TensorInfo]) -> None:
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
