"""Weights between two processes on one GPU: the engine maps the trainer's memory, and nothing is copied over a wire.

Publishing copies the tensors into buckets on the GPU, so that the trainer may go on; a manifest carries CUDA's handles
of the buckets. An engine opens them, loads from them, and closes them again. Both must see the same GPU, under
whatever number; it is named by its UUID.

A handle is a few bytes that only a process of the same user on the same machine can open.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from types import TracebackType

import msgspec
import torch

from stretto.base.errors import EngineError, WireError
from stretto.records.weights import TensorEntry, WeightManifest
from stretto.transports.weights.layout import Named, buckets_of, dtype_name, padded, tensors_of


class Handle(msgspec.Struct, frozen=True):
    """How another process opens one bucket: the arguments of torch's own sharing of CUDA memory."""

    memory: str  # base64, as all bytes here
    size_bytes: int
    offset_bytes: int
    ref_counter: str
    ref_counter_offset: int
    event: str
    needs_sync: bool


class Location(msgspec.Struct, frozen=True):
    """`location` of a manifest."""

    gpu: str  # UUID
    bucket_bytes: int
    handles: tuple[Handle, ...]


class IpcPublisher:
    """Holds each version's buckets until it is released; their memory is used again."""

    def __init__(self, *, bucket_bytes: int) -> None:
        if not torch.cuda.is_available():
            raise EngineError(
                'weight_broadcast.type = "ipc" maps the memory of a GPU, and this process has none (CUDA is not '
                'available); use "shm" on one machine'
            )
        self._bucket_bytes = bucket_bytes
        self._held: dict[int, list[torch.Tensor]] = {}

    def publish(self, version: int, tensors: Iterable[Named]) -> WeightManifest:
        named = [(name, tensor.detach().cuda().contiguous()) for name, tensor in tensors]
        entries, end = [], 0
        for name, tensor in named:
            size = tensor.numel() * tensor.element_size()
            entries.append(TensorEntry(name, dtype_name(name, tensor), tuple(tensor.shape), 0, end, size))
            end += padded(size)
        values = iter(tensor for _, tensor in named)
        held: list[torch.Tensor] = []
        for bucket in buckets_of(entries, 0, self._bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device="cuda")
            for (_, target), value in zip(tensors_of(bucket, buffer), values):
                target.copy_(value)
            held.append(buffer)
        torch.cuda.synchronize()
        self._held[version] = held
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        location = Location(gpu, self._bucket_bytes, tuple(map(_handle_of, held)))
        return WeightManifest(
            version=version,
            transport="ipc",
            location=msgspec.json.encode(location).decode(),
            shards=(gpu,),
            tensors=tuple(entries),
            checksum=0,
        )

    def release(self, version: int) -> None:
        self._held = {v: buffers for v, buffers in self._held.items() if v > version}

    def close(self) -> None:
        self._held.clear()


class IpcReceived:
    """Iterable of (name, tensor) over the trainer's buckets; valid until the context is left."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._location = msgspec.json.decode(manifest.location, type=Location)
        self._device = _device_of(self._location.gpu)
        self._buffers = [_opened(handle, self._device) for handle in self._location.handles]

    def __iter__(self) -> Iterator[Named]:
        buckets = buckets_of(self.manifest.tensors, 0, self._location.bucket_bytes)
        for bucket, buffer in zip(buckets, self._buffers, strict=True):
            yield from tensors_of(bucket, buffer)

    def __enter__(self) -> IpcReceived:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize(self._device)  # what was read from them has been read
        self._buffers = []

    def check_unchanged(self) -> None:
        """The trainer frees a version when it is released, which is after this."""


def _handle_of(buffer: torch.Tensor) -> Handle:
    _, memory, size, offset, ref, ref_offset, event, needs_sync = buffer.untyped_storage()._share_cuda_()
    return Handle(_text(memory), size, offset, _text(ref), ref_offset, _text(event), needs_sync)


def _opened(handle: Handle, device: torch.device) -> torch.Tensor:
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,
            _bytes(handle.memory),
            handle.size_bytes,
            handle.offset_bytes,
            _bytes(handle.ref_counter),
            handle.ref_counter_offset,
            _bytes(handle.event),
            handle.needs_sync,
        )
    except RuntimeError as cause:
        raise WireError(f"the trainer's memory on {device}: {str(cause).splitlines()[0]}") from cause
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _device_of(gpu: str) -> torch.device:
    """The GPU of this UUID, as this process counts them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        if str(torch.cuda.get_device_properties(index).uuid) == gpu:
            return torch.device("cuda", index)
    raise WireError(
        f"the weights are in the memory of GPU {gpu}, which this process does not see ({count} GPUs are visible); "
        'trainer and engine must share one GPU, or use weight_broadcast.type = "shm" or "collective"'
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
