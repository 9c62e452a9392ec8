"""Weights between two processes on one GPU, both ends: the engine maps the trainer's memory, so no bytes travel.

Publishing copies the tensors into buckets on the GPU, so that the trainer can continue; the manifest has CUDA's
handles of the buckets. An engine opens them, loads from them, and closes them. Both processes must see the same GPU;
it is identified by its UUID, because its number may differ between them. A handle is a few bytes, which only a process
of the same user on the same machine can open.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

import msgspec
import torch

from stretto.base.errors import EngineError, WireError
from stretto.config.sections.transport import IpcWeights
from stretto.records.weight_manifest import TensorEntry, WeightManifest
from stretto.transports.weights.layout import NamedTensor, Receiver, dtype_name, padded
from stretto_broadcast.buckets import buckets_of, tensors_of


class Handle(msgspec.Struct, frozen=True):
    """How another process opens a bucket: arguments of torch's function for shared CUDA memory."""

    memory: str  # bytes in base64, like ref_counter and event
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
    """Publishes versions in the GPU's memory; holds each one's buckets until it is released."""

    def __init__(self, *, bucket_bytes: int) -> None:
        if not torch.cuda.is_available():
            raise EngineError(
                'weight_broadcast.type = "ipc" maps the memory of a GPU, but this process has none (CUDA is not '
                'available); use "shm" on one machine'
            )
        self._bucket_bytes = bucket_bytes
        self._buckets: dict[int, list[torch.Tensor]] = {}  # by version

    def publish(self, version: int, tensors: Iterable[NamedTensor]) -> WeightManifest:
        named = [(name, tensor.detach().cuda().contiguous()) for name, tensor in tensors]
        entries, end = [], 0
        for name, tensor in named:
            size = tensor.numel() * tensor.element_size()
            entries.append(TensorEntry(name, dtype_name(name, tensor), tuple(tensor.shape), 0, end, size))
            end += padded(size)
        values = iter(tensor for _, tensor in named)
        buffers: list[torch.Tensor] = []
        for bucket in buckets_of(entries, 0, self._bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device="cuda")
            for (_, target), value in zip(tensors_of(bucket, buffer), values):
                target.copy_(value)
            buffers.append(buffer)
        torch.cuda.synchronize()
        self._buckets[version] = buffers
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        location = Location(gpu, self._bucket_bytes, tuple(map(_handle_of, buffers)))
        return WeightManifest(
            version=version,
            transport="ipc",
            location=msgspec.json.encode(location).decode(),
            shards=(gpu,),
            tensors=tuple(entries),
            checksum=0,
        )

    def release(self, version: int) -> None:
        self._buckets = {v: buffers for v, buffers in self._buckets.items() if v > version}
        torch.cuda.ipc_collect()  # torch keeps what another process has mapped until it is told to look again

    def close(self) -> None:
        self._buckets.clear()
        torch.cuda.ipc_collect()


class IpcReceiver(Receiver):
    """Reads the trainer's buckets; the trainer frees a version only when it is released, which is later."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._location = msgspec.json.decode(manifest.location, type=Location)
        self._device = _device_of(self._location.gpu)
        self._buffers = [_open(handle, self._device) for handle in self._location.handles]

    def __iter__(self) -> Iterator[NamedTensor]:
        buckets = buckets_of(self.manifest.tensors, 0, self._location.bucket_bytes)
        for bucket, buffer in zip(buckets, self._buffers, strict=True):
            yield from tensors_of(bucket, buffer)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)  # all reads from the buckets have ended
        self._buffers = []


def _handle_of(buffer: torch.Tensor) -> Handle:
    _, memory, size, offset, ref, ref_offset, event, needs_sync = buffer.untyped_storage()._share_cuda_()
    return Handle(_text(memory), size, offset, _text(ref), ref_offset, _text(event), needs_sync)


def _open(handle: Handle, device: torch.device) -> torch.Tensor:
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
        raise WireError(f"cannot map the trainer's memory on {device}: {str(cause).splitlines()[0]}") from cause
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _device_of(gpu: str) -> torch.device:
    """The GPU with this UUID, by the number that it has in this process."""
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


def build_publisher(cfg: IpcWeights, ranks: object) -> IpcPublisher:
    """The publisher of a section, on one rank."""
    return IpcPublisher(bucket_bytes=cfg.bucket_bytes)


def build_receiver(
    manifest: WeightManifest, group: object, worker: int, device: torch.device | None, receive: object
) -> IpcReceiver:
    """The receiver of a version."""
    return IpcReceiver(manifest)
