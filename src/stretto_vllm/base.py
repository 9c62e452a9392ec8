"""The weights with which vLLM was started, into which adapters of weight updates are merged.

They are mapped from the model's files. The first update copies those of modules that the adapter changes into shared
memory, once per host: all workers of all engines merge from there, and later versions read nothing from disk. A new
version loads only modules in which the running model differs: those of this adapter, and those that only the adapter
before had changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stretto.base.errors import EngineError, WireError
from stretto.base.files import SHARED_MEMORY
from stretto.base.runtime import available_bytes
from stretto.models.hf import find_adaptable_layers
from stretto.models.hub import build_tensor_map, has_custom_module, load_config, map_tensors
from stretto.models.lora import Adapter, with_adapter
from stretto.models.tensor_map import TensorMap
from stretto.transports.weights.layout import HEAD_BYTES, NamedTensor
from stretto_broadcast.host_copy import CopyReader, HostCopy

if TYPE_CHECKING:
    from jaxtyping import Shaped

logger = logging.getLogger(__name__)

EXPERTS = ".experts."
_ALIGN = 64
_VERSION = 0
"""Version of the copy: constant, because the weights with which an engine was started never change."""


def adaptable_weights(directory: Path) -> TensorMap:
    """Where the files have the weights that can have an adapter, by PEFT's names.

    The names are those of our own modules for a model that we implement, else those of transformers.

    Raises: DataError for a model that neither implements.
    """
    return (
        build_tensor_map(load_config(directory)) if has_custom_module(directory) else find_adaptable_layers(directory)
    )


def names_in_files(table: TensorMap) -> dict[str, str]:
    """The names in the files for matrices that have another there, by PEFT's names; vLLM knows those of the files."""
    found: dict[str, str] = {}
    for theirs, shape in table.their_shapes.items():
        slices = table.slices_of(theirs)
        if len(slices) == 1 and slices[0].ours != theirs and tuple(table.shapes[slices[0].ours]) == tuple(shape):
            found[slices[0].ours] = theirs
    return found


class BaseWeights:
    """A model directory, and the modules of the running model that may differ from it."""

    def __init__(self, directory: Path, memory: Path = SHARED_MEMORY) -> None:
        """memory: a directory in memory (tmpfs) for the copy that the workers of this host share."""
        self._directory, self._memory = directory, memory
        self._table = adaptable_weights(directory)
        self._tensors = dict(map_tensors(directory))
        self._identity = _identity(directory)
        self._changed: set[str] = set()
        self._copied: set[str] = set()
        self._copies: list[tuple[HostCopy, CopyReader]] = []

    @property
    def tensors(self) -> Iterable[Shaped[torch.Tensor, " ..."]]:
        """All weights of the directory, mapped from files or from the shared copy."""
        return self._tensors.values()

    def mark_all_changed(self) -> None:
        """Note that all weights were replaced, so that the next adapter loads the whole model."""
        self._changed = {_module(name) for name in self._tensors}

    def merge(
        self, tensors: Iterable[NamedTensor], rank: int, scaling: float, device: torch.device
    ) -> Iterator[NamedTensor]:
        """Weights that make the running model the base model with this adapter (PEFT's names).

        Yields whole modules, because vLLM stores the projections of an attention, and all experts, as one tensor.

        Raises: DataError if the adapter does not fit this model.
        """
        copies = ((name, tensor.to(device, copy=True)) for name, tensor in tensors)
        adapter = Adapter.from_tensors(copies, rank, scaling)
        if not adapter.pairs.keys() <= self._table.shapes.keys():
            # The policy is transformers' module (impl = "hf"), which may fuse layers that are separate in ours.
            self._table = find_adaptable_layers(self._directory)
        adapter.check(self._table.shapes, str(self._directory))
        adapted = {_module(name) for name in self._adapted_by(adapter)}
        self._changed |= adapted
        self._copy_modules(adapted - self._copied)
        return self._load(adapter, adapted, device)

    def close(self) -> None:
        """Release the copy in shared memory; the last worker of the host removes it."""
        self._tensors.clear()
        for copy, reader in self._copies:
            reader.close()
            copy.close()
        self._copies.clear()

    def _adapted_by(self, adapter: Adapter) -> Iterator[str]:
        for name in self._tensors:
            if any(piece.ours in adapter.pairs for piece in self._table.slices_of(name)):
                yield name

    def _load(self, adapter: Adapter, adapted: set[str], device: torch.device) -> Iterator[NamedTensor]:
        for name, tensor in self._tensors.items():
            if _module(name) in self._changed:
                yield name, with_adapter(name, tensor.to(device), self._table, adapter)
        self._changed = adapted  # all other modules have the weights of the base model again

    def _copy_modules(self, modules: set[str]) -> None:
        """Move the tensors of these modules to shared memory, if they fit there."""
        names = [name for name in self._tensors if _module(name) in modules]
        if not names:
            return
        self._copied |= modules
        starts, end = {}, 0
        for name in names:
            starts[name], end = end, end + -(-self._tensors[name].nbytes // _ALIGN) * _ALIGN
        try:
            copy, reader = self._copy(names, starts, end)
        except (EngineError, WireError, OSError) as error:
            logger.warning(
                "the weights of %s that adapters change, %d bytes, do not fit into %s: each version maps them from the "
                "files, which may be read from disk again; give this machine or container more shared memory (%s)",
                self._directory, end, self._memory, error,
            )  # fmt: skip
            return
        self._copies.append((copy, reader))
        for name in names:
            self._tensors[name] = _view(reader, starts[name], self._tensors[name])

    def _copy(self, names: list[str], starts: dict[str, int], num_bytes: int) -> tuple[HostCopy, CopyReader]:
        """Open the copy of these tensors on this host, which the first worker writes.

        Raises: EngineError, WireError or OSError if there is no space, or another worker could not write it.
        """
        key = blake2b("\n".join((self._identity, *names)).encode(), digest_size=8).hexdigest()
        copy = HostCopy(self._memory, f"base-{key}", num_bytes)
        try:
            # Half: the copy of another worker, which may not be complete yet, also uses this memory.
            if num_bytes <= available_bytes() // 2:
                self._write(copy, names, starts)
            return copy, copy.read(_VERSION)
        except BaseException:
            copy.close()
            raise

    def _write(self, copy: HostCopy, names: list[str], starts: dict[str, int]) -> None:
        """Write the copy, unless another worker has written it or is writing it."""
        with copy.writing(unless=_VERSION) as writer:
            if writer is not None:
                for name in names:
                    source = _bytes_of(self._tensors[name])
                    writer.tensors[starts[name] : starts[name] + len(source)] = source.numpy()
                writer.commit(_VERSION)


def _identity(directory: Path) -> str:
    """Differs between directories whose files differ, and between users, who cannot read each other's memory."""
    stats = ((path.name, path.stat()) for path in sorted(directory.glob("*.safetensors")))
    files = [f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}" for name, stat in stats]
    return "\n".join((str(os.getuid()), str(directory.resolve()), *files))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _view(reader: CopyReader, start: int, like: torch.Tensor) -> torch.Tensor:
    """The tensor in the copy that begins at this byte."""
    if not like.numel():
        return like
    whole = torch.frombuffer(reader.map, dtype=torch.uint8, offset=HEAD_BYTES + start, count=like.nbytes)
    return whole.view(like.dtype).view(like.shape)


def _module(name: str) -> str:
    """The module that vLLM loads as one.

    For `a.self_attn.q_proj.weight` this is `a.self_attn`; for an expert it is all experts of the layer.
    """
    if EXPERTS in name:
        return name.partition(EXPERTS)[0] + EXPERTS
    return name.rpartition(".")[0].rpartition(".")[0]
