"""Exchange of values between trainer ranks, as typed messages.

torch's own functions for objects (`all_gather_object` and others) send pickles, and whoever reaches a rank's port could
run code in it. Here a value is encoded by records/codec.py and decoded as the type that the receiver expects, so
that a received message executes nothing. All ranks of a group must call these functions alike. A process without other
ranks passes ALONE.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.records.codec import decode_blob, encode_blob

T = TypeVar("T")

CPU = torch.device("cpu")
ALONE = "alone"
"""The group of a single process."""


def gather(value: T, kind: Any, group: Any = None) -> list[T]:
    """The values of all ranks of a group, in rank order, on each of them.

    kind: the type of the values, for example `tuple[str, int]`.

    Raises: WireError or DataError if a rank sent something else.
    """
    if group == ALONE:
        return [value]
    message = _message(value, CPU)
    size = torch.tensor([len(message)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(message)] = message
    buffers = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(buffers, padded, group=group)
    return [_value(buffer[:length], kind, rank) for rank, (buffer, length) in enumerate(zip(buffers, lengths))]


def broadcast(value: T, kind: Any, source: int = 0, group: Any = None, device: torch.device = CPU) -> T:
    """The value of one rank of a group, on each of them.

    source: its number among all ranks. device: where the group's backend wants tensors. The other parameters and errors
    are those of `gather`.
    """
    if group == ALONE:
        return value
    is_source = dist.get_rank() == source
    message = _message(value, device) if is_source else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([len(message)], device=device)
    dist.broadcast(size, source, group=group)
    if not is_source:
        message = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(message, source, group=group)
    return value if is_source else _value(message, kind, source)


def find_rank(group: Any) -> int:
    """This process's number in a group."""
    return 0 if group == ALONE else dist.get_rank(group)


def _message(value: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(encode_blob(value)), np.uint8)).to(device)


def _value(message: Tensor, kind: Any, rank: int) -> Any:
    return decode_blob(message.cpu().numpy().data, kind, where=f"the message of trainer rank {rank}")
