"""Process groups of one sender and its receivers, which torch does not register: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore

from stretto.transports.weights.store import new_gloo_group, use_interface_to

if TYPE_CHECKING:
    from jaxtyping import UInt8


class Held(msgspec.Struct, frozen=True):
    """A process group that a receiver holds: its name, and this receiver's place in it."""

    name: str
    rank: int
    size: int


@dataclass(frozen=True)
class HeldGroup:
    """A process group that this process holds after an update, until the next one begins."""

    name: str
    rank: int
    size: int
    process_group: object


def enter_group(
    held: HeldGroup | None,
    name: str,
    store: TCPStore,
    sender: int,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
) -> HeldGroup:
    """The held process group if it has this name, else a new one."""
    if held is not None and held.name == name:
        return held
    return HeldGroup(name, rank, size, _new_group(store, f"group/{sender}/{name}", rank, size, device, timeout_s))


def _new_group(store: TCPStore, prefix: str, rank: int, size: int, device: torch.device, timeout_s: float) -> object:
    """A process group that torch does not register, so that an engine's own is not affected."""
    if device.type != "cuda":
        return new_gloo_group(store, prefix, rank, size, timeout_s)
    from torch.distributed import ProcessGroupNCCL

    use_interface_to(store.host)
    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(PrefixStore(prefix, store), rank, size, options)


def broadcast(group: object, tensor: UInt8[torch.Tensor, " bytes"]) -> Any:
    """Start a broadcast from rank 0; returns the work to wait for."""
    options = torch._C._distributed_c10d.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)  # type: ignore[attr-defined]
