"""Weights from trainer to engines: published by version, described by a manifest, received as (name, tensor).

The manifest travels by HTTP and by the control wire, the bytes by one of the files here; each holds its
publisher and says what its shards look like. Receiving is the same for both, since both are files that can be
mapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.base.errors import WireError
from stretto.base.paths import RunDir
from stretto.config.transport import CollectiveWeights, FilesystemWeights, ShmWeights, WeightBroadcast
from stretto.records.weights import WeightGroup, WeightManifest
from stretto.transports.weights.collective import CollectivePublisher, CollectiveReceived
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.layout import Publisher, Received
from stretto.transports.weights.shm import ShmPublisher

if TYPE_CHECKING:
    import torch

__all__ = ["Publisher", "Received", "build_publisher", "receive"]


def build_publisher(cfg: WeightBroadcast, run_dir: RunDir, run_id: str) -> Publisher:
    """The publisher of `[weight_broadcast]`; only the trainer's first rank has one."""
    if isinstance(cfg, ShmWeights):
        return ShmPublisher(run_id)
    if isinstance(cfg, CollectiveWeights):
        return CollectivePublisher(
            cfg.host, cfg.port, bucket_bytes=cfg.bucket_bytes, timeout_s=cfg.join_timeout_s
        )
    assert isinstance(cfg, FilesystemWeights), cfg
    return FilesystemPublisher(run_dir.broadcasts, keep_versions=cfg.keep_versions)


def receive(
    manifest: WeightManifest,
    group: WeightGroup | None = None,
    worker: int = 0,
    device: torch.device | None = None,
) -> Received | CollectiveReceived:
    """A published version: `with receive(manifest) as tensors: load_tensors(model, tensors)`.

    group: of an update, where the transport sends to all engines at once; worker: which of the engine's
    processes this is; device: where its weights are.

    Raises: WireError when bytes are missing, cut off, of another version, or damaged.
    """
    if manifest.transport != "collective":
        return Received(manifest)
    if group is None:
        raise WireError(
            f"weights of version {manifest.version} come by broadcast, and the update names no group."
        )
    return CollectiveReceived(manifest, group, worker, device)
