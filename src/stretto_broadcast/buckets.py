"""Buckets: several tensors in one buffer, which both ends form alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from stretto.records.weight_manifest import TensorEntry
from stretto.transports.weights.layout import DTYPES, NamedTensor, padded

if TYPE_CHECKING:
    from jaxtyping import UInt8

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of one sender that travel together."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int


def group_into_buckets(items: Iterable[T], bucket_bytes: int, num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Group consecutive items into buckets of at most bucket_bytes, or one item.

    Both ends of a wire use this, so that they form the same buckets.
    """
    bucket: list[T] = []
    size = 0
    for item in items:
        needed = padded(num_bytes(item))
        if bucket and size + needed > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += needed
    if bucket:
        yield bucket


def buckets_of(entries: Iterable[TensorEntry], sender: int, bucket_bytes: int) -> list[Bucket]:
    """The buckets of one sender, in order."""
    of_sender = (entry for entry in entries if entry.shard == sender)
    groups = group_into_buckets(of_sender, bucket_bytes, lambda entry: entry.num_bytes)
    return [Bucket(tuple(group), sum(padded(entry.num_bytes) for entry in group)) for group in groups]


def tensors_of(bucket: Bucket, buffer: UInt8[torch.Tensor, " bytes"]) -> Iterator[NamedTensor]:
    """The tensors of a bucket, as views of its bytes."""
    start = 0
    for entry in bucket.entries:
        dtype = DTYPES[entry.dtype]
        part = buffer[start : start + entry.num_bytes]
        yield (
            entry.name,
            part.view(dtype).view(entry.shape)
            if entry.num_bytes
            else torch.empty(entry.shape, dtype=dtype, device=buffer.device),
        )
        start += padded(entry.num_bytes)
