"""Weights from trainer to engines: published by version, described by a manifest, received as (name, tensor).

The manifest travels by the control wire and by HTTP. The bytes travel by one of the transports here, one file each
with both ends: files or shared memory; or by one that an add-on offers. What sends only changes has another one within.
Trainer ranks publish together, each its own tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto import addons
from stretto.base.errors import WireError
from stretto.base.paths import RunDir
from stretto.config.sections.transport import CollectiveWeights, FilesystemWeights, ShmWeights, WeightBroadcast
from stretto.records.weight_manifest import WeightGroup, WeightManifest
from stretto.transports.weights.filesystem import FilesystemPublisher, MappedReceiver
from stretto.transports.weights.layout import ONE_RANK, ProbeReceiver, Publisher, Ranks, Receiver
from stretto.transports.weights.shm import ShmPublisher, ShmReceiver

if TYPE_CHECKING:
    import torch

GROUP = "stretto.weights"
"""Entry points: the type of a transport, and "delta", to a module with build_receiver, and build_publisher or
DeltaPublisher."""
__all__ = ["ONE_RANK", "Publisher", "Ranks", "build_publisher", "meeting_host", "receive"]


def build_publisher(cfg: WeightBroadcast, run_dir: RunDir, run_id: str, ranks: Ranks = ONE_RANK) -> Publisher:
    """The publisher that `[weight_broadcast]` describes; every trainer rank has one."""
    publisher = _build_full_publisher(cfg, run_dir, run_id, ranks)
    if cfg.delta is None:
        return publisher
    module = addons.load(GROUP, "delta", "[weight_broadcast.delta]")
    changes: Publisher = module.DeltaPublisher(publisher, run_id, cfg.delta, ranks)
    return changes


def meeting_host(cfg: WeightBroadcast) -> str | None:
    """The address where trainer ranks and engines of several machines meet; None for other transports.

    A process has one interface for gloo and NCCL, so the ranks' own group has to use this network too: engines of
    another machine could not connect to ranks that listen at 127.0.0.1 because all ranks are on one machine.
    """
    if isinstance(cfg, CollectiveWeights) and cfg.host not in ("127.0.0.1", "localhost", "::1"):
        return cfg.host
    return None


def _build_full_publisher(cfg: WeightBroadcast, run_dir: RunDir, run_id: str, ranks: Ranks) -> Publisher:
    if isinstance(cfg, ShmWeights):
        # A delta publisher holds a chain of versions, each in a file of its own.
        num_files = 2 if cfg.delta is None else 2 * cfg.delta.max_links + 2
        return ShmPublisher(run_id, num_files=num_files, ranks=ranks)
    if isinstance(cfg, FilesystemWeights):
        return FilesystemPublisher(run_dir.broadcasts, keep_versions=cfg.keep_versions, ranks=ranks)
    module = addons.load(GROUP, cfg.type, f'weight_broadcast.type = "{cfg.type}"')
    publisher: Publisher = module.build_publisher(cfg, ranks)
    return publisher


def receive(
    manifest: WeightManifest, group: WeightGroup | None = None, worker: int = 0, device: torch.device | None = None
) -> Receiver:
    """Receive a version: `with receive(manifest) as tensors: load_tensors(model, tensors)`.

    group: that of the update, if manifest.needs_group. worker: index of this process in its engine. device: where its
    weights are.

    Raises: WireError if bytes are missing, cut off, of another version, or damaged.
    """
    receiver = _receive(manifest, group, worker, device)
    return ProbeReceiver(receiver) if manifest.is_probe else receiver


def _receive(manifest: WeightManifest, group: WeightGroup | None, worker: int, device: torch.device | None) -> Receiver:
    if manifest.needs_group and group is None:
        raise WireError(f"weights of version {manifest.version} come by broadcast, but the update names no group.")
    if manifest.transport == "shm":
        return ShmReceiver(manifest)
    if manifest.transport == "filesystem":
        return MappedReceiver(manifest)
    module = addons.load(GROUP, manifest.transport, f"weights that come by {manifest.transport}")
    receiver: Receiver = module.build_receiver(manifest, group, worker, device, receive)
    return receiver
