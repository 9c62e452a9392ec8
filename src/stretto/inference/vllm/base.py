"""The weights with which vLLM was started, into which adapters of weight updates are merged.

They are memory-mapped from the model's files once, so all workers of a host share their pages. A new version reads
only the modules that some adapter has changed: all others still hold the weights with which they were started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from stretto.models.hf import find_adaptable_layers
from stretto.models.hub import build_tensor_map, has_custom_module, load_config, map_tensors
from stretto.models.lora import Adapter, with_adapter
from stretto.models.tensor_map import TensorMap
from stretto.transports.weights.layout import NamedTensor

EXPERTS = ".experts."


def adaptable_weights(directory: Path) -> TensorMap:
    """Where the files hold the weights that can have an adapter, by PEFT's names.

    The names are those of our own modules for a model that we implement, else those of transformers.

    Raises: DataError for a model that neither knows.
    """
    return (
        build_tensor_map(load_config(directory))
        if has_custom_module(directory)
        else find_adaptable_layers(directory)
    )


class BaseWeights:
    """A model directory, and the modules of the running model that may differ from it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._table = adaptable_weights(directory)
        self._tensors = dict(map_tensors(directory))
        self._changed: set[str] = set()

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
            # The policy is transformers' module (impl = "hf"), which may fuse layers that ours has apart.
            self._table = find_adaptable_layers(self._directory)
        adapter.check(self._table.shapes, str(self._directory))
        self._changed |= {_module(name) for name in self._adapted_by(adapter)}
        return self._load(adapter, device)

    def _adapted_by(self, adapter: Adapter) -> Iterator[str]:
        for name in self._tensors:
            if any(piece.ours in adapter.pairs for piece in self._table.slices_of(name)):
                yield name

    def _load(self, adapter: Adapter, device: torch.device) -> Iterator[NamedTensor]:
        for name, tensor in self._tensors.items():
            if _module(name) in self._changed:
                yield name, with_adapter(name, tensor.to(device), self._table, adapter)


def _module(name: str) -> str:
    """The module that vLLM loads as one.

    For `a.self_attn.q_proj.weight` this is `a.self_attn`; for an expert it is all experts of the layer.
    """
    if EXPERTS in name:
        return name.partition(EXPERTS)[0] + EXPERTS
    return name.rpartition(".")[0].rpartition(".")[0]
