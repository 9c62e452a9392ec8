"""A version that a thread of a worker receives and verifies while the worker decodes.

    begin -> is_here (asked again and again) -> check -> take

Weights in files and in shared memory, and those that come to a CPU, have arrived when their receiver is there, and need
no memory that they would not need without this. Weights that travel to a GPU while they are read (`has_arrived` is
False) are copied to the memory of the host, if it has room for them; on a GPU that also computes its steps with other
ranks no thread may broadcast beside them, because two NCCL communicators at once may wait for each other for ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from stretto.base.runtime import available_bytes
from stretto.records.weight_manifest import WeightManifest
from stretto.transports.weights.layout import NamedTensor, Receiver

ROOM = 1.2
"""How much more memory must be available than a version takes."""
GPUS = "/proc/driver/nvidia/gpus"


class HostTensors(Receiver):
    """The tensors of a version, in the memory of this host."""

    def __init__(self, receiver: Receiver) -> None:
        """Reads all tensors of another receiver. Raises: WireError if they cannot be received."""
        self.manifest = receiver.manifest
        with receiver:
            self._tensors = [(name, tensor.to("cpu", copy=True)) for name, tensor in receiver]

    def __iter__(self) -> Iterator[NamedTensor]:
        yield from self._tensors

    def close(self) -> None:
        self._tensors = []


class Arrival:
    """The version of the update that this worker is in, if it is received beside decoding."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="receive")
        self._version: Future[Receiver] | None = None

    def begin(self, receive: Callable[[], Receiver]) -> None:
        """Start to receive a version; one that was received before and not taken is dropped."""
        self.drop()
        self._version = self._thread.submit(_receive_whole, receive)

    @property
    def is_here(self) -> bool:
        """Whether `take` returns, or raises, at once."""
        return self._version is None or self._version.done()

    def check(self) -> None:
        """Raises: WireError if the version could not be received, or if its bytes have changed since then."""
        if self._version is not None:
            self._version.result().check_unchanged()

    def take(self, manifest: WeightManifest) -> Receiver | None:
        """What was received of this version; the caller closes it. None: nothing was begun.

        Raises: WireError if it could not be received.
        """
        version, self._version = self._version, None
        if version is None:
            return None
        receiver = version.result()
        if receiver.manifest != manifest:
            receiver.close()
            return None
        return receiver

    def drop(self) -> None:
        """Close what was received, now or when it is here."""
        version, self._version = self._version, None
        if version is not None and not version.cancel():
            version.add_done_callback(_close)

    def close(self) -> None:
        self.drop()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _receive_whole(receive: Callable[[], Receiver]) -> Receiver:
    receiver = receive()
    return receiver if receiver.has_arrived else HostTensors(receiver)


def _close(version: Future[Receiver]) -> None:
    if not version.cancelled() and version.exception() is None:
        version.result().close()


def num_gpus_of_host() -> int:
    """GPUs of this machine, whose engines receive together; without NVIDIA's driver no number limits them."""
    try:
        return len(os.listdir(GPUS))
    except OSError:
        return sys.maxsize


def reason_to_stop(manifest: WeightManifest, device: torch.device, *, num_ranks: int, num_workers: int) -> str | None:
    """Why a worker cannot receive a version while it decodes; None if it can.

    num_ranks: that compute a step together. num_workers: that receive on this host.
    """
    if device.type == "cpu" or not manifest.needs_group:
        return None
    if num_ranks > 1:
        return f"{num_ranks} ranks on GPUs compute each step together, and broadcasts may not run beside that"
    needed = int(ROOM * num_workers * sum(entry.num_bytes for entry in manifest.tensors))
    if needed > (found := available_bytes()):
        return (
            f"a version takes {needed / 2**30:.1f} GiB of this host's memory until it is loaded, and "
            f"{found / 2**30:.1f} GiB are available"
        )
    return None
