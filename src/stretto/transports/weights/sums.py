"""Sums of what trainer and engine hold, by group of tensors: equal bits on both sides, whatever lies between them.

A canary sees what changes an engine's answers by more than rounding. One norm that has stayed behind, or a matrix that
was rounded once more, may not. So with a canary the trainer sums the tensors that it publishes before they travel, and
an engine that keeps them under the same names sums its own after it has loaded them. A group is a layer, or a tensor
outside of all layers. Where one side keeps a wider type than the other, the bits are those of the published type.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from stretto.records.weight_manifest import WeightManifest
from stretto.transports.weights.checksum import BLOCK, WORD
from stretto.transports.weights.layout import DTYPES, NamedTensor

if TYPE_CHECKING:
    from jaxtyping import Shaped

logger = logging.getLogger(__name__)

_LAYER = re.compile(r".*?\.\d+(?=\.)")
_PIECE = 1 << 20
"""Bytes that are summed at a time, whole blocks: they are still in the processor's cache."""


class GroupSums:
    """The sums of tensors so far, 32 bits each, by group; the order of the tensors makes no difference."""

    def __init__(self) -> None:
        self.by_group: dict[str, int] = {}

    def add(self, name: str, tensor: Shaped[torch.Tensor, " ..."]) -> None:
        """Add a tensor under its Hugging Face name."""
        value = zlib.crc32(name.encode(), _sum(tensor))
        group = _group_of(name)
        self.by_group[group] = (self.by_group.get(group, 0) + value) % 2**32

    def of(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The same tensors, each of which is added before it is passed on."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor


def merge_sums(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of tensors that several ranks have summed, each its own."""
    merged: dict[str, int] = {}
    for part in parts:
        for group, value in part.items():
            merged[group] = (merged.get(group, 0) + value) % 2**32
    return merged


def compare_sums(manifest: WeightManifest, tensors: Iterable[NamedTensor]) -> tuple[int, list[str]]:
    """Compare an engine's tensors with a version's sums: the number of groups, and the names of those that differ.

    0 groups if the version has no sums, or is a probe, or an engine's type is narrower than the published one. Tensors
    that are not published are left out, as an output matrix that is the embedding.
    """
    expected = {} if manifest.canary is None or manifest.is_probe else manifest.canary.sums
    if not expected:
        return 0, []
    dtypes, sums = {entry.name: DTYPES[entry.dtype] for entry in manifest.tensors}, GroupSums()
    for name, tensor in tensors:
        if (published := dtypes.get(name)) is None:
            continue
        if torch.promote_types(published, tensor.dtype) is not tensor.dtype:
            logger.info("%s is published as %s, and %s here: bits are not compared", name, published, tensor.dtype)
            return 0, []
        sums.add(name, tensor.to(published))
    return len(expected), [group for group, value in expected.items() if sums.by_group.get(group) != value]


def _group_of(name: str) -> str:
    """The layer of a tensor, or the tensor itself if it is in none."""
    layer = _LAYER.match(name)
    return name if layer is None else layer.group()


def _sum(tensor: Shaped[torch.Tensor, " ..."]) -> int:
    """The crc32 over the sums of all blocks: of their 64-bit words, times odd numbers that tell their places apart.

    The tensor's device computes them. What is moved from place to place changes a sum, as does any other word.
    """
    data = tensor.detach().contiguous().reshape(-1)
    if not data.numel():
        return 0
    if data.storage_offset() * data.element_size() % WORD:
        data = data.clone()
    data = data.view(torch.uint8)
    end = data.numel() - data.numel() % BLOCK
    places = 2 * torch.arange(BLOCK // WORD, device=data.device) + 1
    value = 0
    for piece in data[:end].split(_PIECE) if end else ():
        sums = (piece.view(torch.int64).view(-1, len(places)) * places).sum(1)
        value = zlib.crc32(sums.cpu().numpy().data, value)
    return zlib.crc32(data[end:].cpu().numpy().data, value)
