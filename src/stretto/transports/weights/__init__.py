"""Weights from trainer to engines: published by version, described by a manifest, received as (name, tensor).

The manifest travels by HTTP and by the control wire, the bytes by one of the files here; each holds its
publisher and says what its shards look like. Receiving is the same for both, since both are files that can be
mapped.
"""

from __future__ import annotations

from stretto.base.paths import RunDir
from stretto.config.transport import FilesystemWeights, ShmWeights, WeightBroadcast
from stretto.transports.weights.filesystem import FilesystemPublisher
from stretto.transports.weights.layout import Publisher, Received, receive
from stretto.transports.weights.shm import ShmPublisher

__all__ = ["Publisher", "Received", "build_publisher", "receive"]


def build_publisher(cfg: WeightBroadcast, run_dir: RunDir, run_id: str) -> Publisher:
    """The publisher of `[weight_broadcast]`; only the trainer's first rank has one."""
    if isinstance(cfg, ShmWeights):
        return ShmPublisher(run_id)
    assert isinstance(cfg, FilesystemWeights), cfg
    return FilesystemPublisher(run_dir.broadcasts, keep_versions=cfg.keep_versions)
