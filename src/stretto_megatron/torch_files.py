"""Reads the `torch` format of Megatron: one file per rank, `iter_N/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`.

A rank has its stages' layers with numbers from 0 on, its rows or columns of matrices, and its experts. Where ranks of
tensor parallelism have different experts, not every pair of both numbers has a file, and an expert is whole in it.
Files are mapped, so that a slice costs its own bytes.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.models.tensor_map import LazyTensor, Region, Shape
from stretto_megatron.names import ALIASES, LAYERS

if TYPE_CHECKING:
    from jaxtyping import Shaped

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?$")
_BY_COLUMN = ("linear_proj.weight", "linear_fc2.weight")
"""Matrices that tensor parallelism divides by their inputs: dim 1. Others are divided by dim 0, or not at all."""


class Rank(NamedTuple):
    tensor: int
    stage: int
    expert: int


@dataclass(frozen=True)
class _Joined:
    """Parts of a tensor side by side along `dim`."""

    parts: tuple[LazyTensor, ...]
    starts: tuple[int, ...]
    dim: int
    shape: Shape
    dtype: torch.dtype

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        low, high, _ = region[self.dim].indices(self.shape[self.dim])
        ends = (*self.starts[1:], self.shape[self.dim])
        found = []
        for part, start, end in zip(self.parts, self.starts, ends):
            if (first := max(low, start)) < (last := min(high, end)):
                inner = (*region[: self.dim], slice(first - start, last - start), *region[self.dim + 1 :])
                found.append(part[inner])
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


@dataclass(frozen=True)
class _Stacked:
    """One tensor per expert, as one with the experts in front."""

    experts: tuple[LazyTensor, ...]
    shape: Shape
    dtype: torch.dtype

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        chosen = range(*region[0].indices(self.shape[0]))
        return torch.stack([self.experts[i][region[1:]] for i in chosen])


class TorchFiles:
    """The tensors of one iteration."""

    def __init__(self, directory: Path) -> None:
        """Raises: DataError if a rank's file is missing or cannot be read."""
        self.directory = directory
        self._ranks: dict[Rank, dict[str, Tensor]] = {}
        for path in sorted(directory.glob("mp_rank_*")):
            if (match := _RANK.match(path.name)) is not None:
                self._ranks[Rank(*(int(number or 0) for number in match.groups()))] = _model_of(path / FILE)
        if not self._ranks:
            raise DataError(f"{directory}: no mp_rank_* with a {FILE}")
        self._fix_expert_ranks()
        sizes = [1 + max(getattr(rank, field) for rank in self._ranks) for field in Rank._fields]
        self.num_tensor, self.num_stages, self.num_expert = sizes
        self._first_layers = self._count_layers()

    def _fix_expert_ranks(self) -> None:
        """mp_rank_TT_EEE: without pipeline stages the second number is that of the experts."""
        is_short = all(not (self.directory / f"mp_rank_{r.tensor:02d}_{r.stage:03d}_{r.expert:03d}").exists()
                       for r in self._ranks)  # fmt: skip
        has_layer_0 = all(any(name.startswith(f"{LAYERS}0.") for name in model) and
                          any(name.startswith("embedding.") for name in model)
                          for model in self._ranks.values())  # fmt: skip
        if is_short and has_layer_0:
            self._ranks = {Rank(r.tensor, 0, r.stage): model for r, model in self._ranks.items()}

    def _count_layers(self) -> list[int]:
        """The number of the first layer of each stage."""
        first, starts = 0, []
        for stage in range(self.num_stages):
            starts.append(first)
            model = self._first(stage)
            layers = [int(name.split(".")[2]) for name in model if name.startswith(LAYERS)]
            first += 1 + max(layers, default=-1)
        self.num_layers = first
        return starts

    def _models(self, stage: int, **numbers: int) -> list[dict[str, Tensor]]:
        """The weights of all ranks of a stage with this number in tensor or expert parallelism, at least of one."""
        has = lambda rank: rank.stage == stage and all(getattr(rank, key) == each for key, each in numbers.items())
        found = [model for rank, model in self._ranks.items() if has(rank)]
        if not found:
            which = " and ".join(f"{key} rank {number}" for key, number in numbers.items())
            raise DataError(f"{self.directory}: the file of stage {stage} and {which} is missing")
        return found

    def _first(self, stage: int) -> dict[str, Tensor]:
        return self._models(stage, tensor=0)[0]

    def names(self) -> Iterator[str]:
        """The names of all weights, with the numbers of layers in the whole model."""
        seen = set()
        for stage, first in enumerate(self._first_layers):
            for name in self._first(stage):
                if "_extra_state" in name or name.startswith("mtp."):
                    continue
                if name.startswith(LAYERS):
                    layer, part = name.removeprefix(LAYERS).split(".", 1)
                    part = re.sub(r"mlp\.experts\.local_experts\.\d+\.", "mlp.experts.experts.", part)
                    name = f"{LAYERS}{int(layer) + first}.{part}"
                if name not in seen:
                    seen.add(name)
                    yield name

    def find(self, name: str) -> LazyTensor | None:
        """The tensor of this name, or of one that means the same; None if there is none."""
        if not name.startswith(LAYERS):
            stages = range(self.num_stages) if name != "output_layer.weight" else reversed(range(self.num_stages))
            for each in (name, *ALIASES.get(name, ())):
                for stage in stages:
                    if each in self._first(stage):
                        return self._join(each, stage)
            return None
        number, part = name.removeprefix(LAYERS).split(".", 1)
        stage = max(i for i, first in enumerate(self._first_layers) if first <= int(number))
        local = f"{LAYERS}{int(number) - self._first_layers[stage]}."
        if part.startswith("mlp.experts.experts."):
            return self._stack(local, part.removeprefix("mlp.experts.experts."), stage)
        for each in (part, *ALIASES.get(part, ())):
            if local + each in self._first(stage):
                return self._join(local + each, stage)
        return None

    def _stack(self, local: str, part: str, stage: int) -> LazyTensor | None:
        experts: list[LazyTensor] = []
        for rank in range(self.num_expert):
            models, number = self._models(stage, expert=rank), 0
            while (name := f"{local}mlp.experts.local_experts.{number}.{part}") in models[0]:
                parts = [model[name] for model in models]
                is_whole = all(torch.equal(parts[0], each) for each in parts[1:])
                experts.append(parts[0] if is_whole else _joined(name, parts))
                number += 1
        if not experts:
            return None
        first: Any = experts[0]
        return _Stacked(tuple(experts), (len(experts), *first.shape), first.dtype)

    def _join(self, name: str, stage: int) -> LazyTensor:
        """One tensor from the parts of all tensor-parallel ranks."""
        parts = [self._models(stage, tensor=tensor)[0].get(name) for tensor in range(self.num_tensor)]
        if any(part is None for part in parts):
            raise DataError(f"{self.directory}: {name} is not in the files of all tensor-parallel ranks")
        return _joined(name, [part for part in parts if part is not None])


def _joined(name: str, parts: list[Tensor]) -> LazyTensor:
    if len(parts) == 1 or not _is_divided(name):
        return parts[0]
    if "linear_fc1" in name and parts[0].shape[0] % 2 == 0:  # each rank has rows of gate, then rows of up
        halves = [part.chunk(2) for part in parts]
        return _join_along([half[i] for i in (0, 1) for half in halves], 0)
    return _join_along(parts, 1 if name.endswith(_BY_COLUMN) else 0)


def _is_divided(name: str) -> bool:
    is_matrix = any(part in name for part in ("linear_", "word_embeddings", "output_layer", "softmax_offset"))
    is_whole = any(
        part in name for part in ("layer_norm", "_down_proj", "linear_proj.bias", "linear_fc2.bias", "indexer")
    )
    return is_matrix and not is_whole


def _join_along(parts: list[Tensor], dim: int) -> LazyTensor:
    starts, total = [], 0
    for part in parts:
        starts.append(total)
        total += part.shape[dim]
    shape = list(parts[0].shape)
    shape[dim] = total
    return _Joined(tuple(parts), tuple(starts), dim, tuple(shape), parts[0].dtype)


class _Stub:
    """Stands for an object of a class that is not loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> _Stub:
        return self

    def __setstate__(self, state: Any) -> None: ...


class _Careful(pickle.Unpickler):
    """Loads tensors; in the place of every other object it puts one that does nothing."""

    def find_class(self, module: str, name: str) -> Any:
        is_of_tensors = (module, name) in _OF_TENSORS or (module == "torch" and name.endswith("Storage"))
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        return super().find_class(module, name) if is_of_tensors or is_dtype else _Stub


_OF_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"), ("collections", "OrderedDict"),
    ("torch", "Size"), ("torch.storage", "UntypedStorage"),
}  # fmt: skip


class _PickleModule:
    """What torch.load takes as the pickle module."""

    Unpickler = _Careful
    UnpicklingError = pickle.UnpicklingError


UNREADABLE = (RuntimeError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError)
"""What `load_carefully` raises for a file that is none of torch's, or that is cut off."""


def load_carefully(file: Path | IO[bytes], *, is_mapped: bool = False) -> Any:
    """What torch has saved, without running code of the file's choosing."""
    return torch.load(file, map_location="cpu", mmap=is_mapped, weights_only=False, pickle_module=_PickleModule)


def _model_of(path: Path) -> dict[str, Tensor]:
    """The weights of one rank's file, mapped."""
    try:
        found = load_carefully(path, is_mapped=True)
        models = [found[key] for key in ("model", *(f"model{i}" for i in range(64))) if key in found]
    except (OSError, *UNREADABLE) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); the file is missing, truncated or damaged") from None
    if len(models) != 1:
        what = "no weights" if not models else "several virtual stages, which are not supported: save it without them"
        raise DataError(f"{path}: it has {what}")
    return {name: tensor for name, tensor in models[0].items() if isinstance(tensor, Tensor)}
