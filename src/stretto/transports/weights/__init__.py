"""Weights from trainer to engines: published by version, described by a manifest, received as (name, tensor).

The manifest travels by HTTP and by the control wire, the bytes by one of the files here, each with both ends: files
and shared memory (which are received alike: mapped), broadcast, and the memory of one GPU. delta.py sends what
changed through any of the first three. Several trainer ranks publish together, each the tensors that it owns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.base.errors import WireError
from stretto.base.paths import RunDir
from stretto.config.transport import (
    CollectiveWeights,
    FilesystemWeights,
    IpcWeights,
    ShmWeights,
    WeightBroadcast,
)
from stretto.records.weights import WeightGroup, WeightManifest
from stretto.transports.weights.collective import CollectivePublisher, CollectiveReceived
from stretto.transports.weights.delta import DeltaPublisher, DeltaReceived
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.ipc import IpcPublisher, IpcReceived
from stretto.transports.weights.layout import ONE_RANK, Publisher, Ranks, Received
from stretto.transports.weights.shm import ShmPublisher

if TYPE_CHECKING:
    import torch

__all__ = ["ONE_RANK", "Publisher", "Ranks", "Received", "build_publisher", "receive"]


def build_publisher(cfg: WeightBroadcast, run_dir: RunDir, run_id: str, ranks: Ranks = ONE_RANK) -> Publisher:
    """The publisher of `[weight_broadcast]` on one of the trainer's ranks, each of which has one."""
    publisher = _build_whole(cfg, run_dir, run_id, ranks)
    return publisher if cfg.delta is None else DeltaPublisher(publisher, run_id, cfg.delta, ranks)


def _build_whole(cfg: WeightBroadcast, run_dir: RunDir, run_id: str, ranks: Ranks) -> Publisher:
    if isinstance(cfg, ShmWeights):
        # With changes a chain of them is held, each in a segment of its own.
        num_segments = 2 if cfg.delta is None else 2 * cfg.delta.max_links + 2
        return ShmPublisher(run_id, num_segments=num_segments, ranks=ranks)
    if isinstance(cfg, CollectiveWeights):
        return CollectivePublisher(
            cfg.host, cfg.port, bucket_bytes=cfg.bucket_bytes, timeout_s=cfg.join_timeout_s, ranks=ranks
        )
    if isinstance(cfg, IpcWeights):
        return IpcPublisher(bucket_bytes=cfg.bucket_bytes)
    assert isinstance(cfg, FilesystemWeights), cfg
    return FilesystemPublisher(run_dir.broadcasts, keep_versions=cfg.keep_versions, ranks=ranks)


def receive(
    manifest: WeightManifest,
    group: WeightGroup | None = None,
    worker: int = 0,
    device: torch.device | None = None,
) -> Received | CollectiveReceived | DeltaReceived | IpcReceived:
    """A published version: `with receive(manifest) as tensors: load_tensors(model, tensors)`.

    group: of an update, where the transport sends to all engines at once; worker: which of the engine's
    processes this is; device: where its weights are.

    Raises: WireError when bytes are missing, cut off, of another version, or damaged.
    """
    if manifest.needs_group and group is None:
        raise WireError(
            f"weights of version {manifest.version} come by broadcast, and the update names no group."
        )
    if manifest.transport == "delta":
        return DeltaReceived(
            manifest, group, worker, lambda link, group: receive(link, group, worker, device)
        )
    if manifest.transport == "collective":
        assert group is not None
        return CollectiveReceived(manifest, group, worker, device)
    if manifest.transport == "ipc":
        return IpcReceived(manifest)
    return Received(manifest)
