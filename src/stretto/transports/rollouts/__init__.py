"""Batches from orchestrator to trainer ranks: one a rank and step, acknowledged, delivered exactly once."""

from __future__ import annotations

from stretto.base.paths import RunDir
from stretto.config.transport import FilesystemRollouts, RolloutTransport, ZmqRollouts
from stretto.transports.rollouts.delivery import Receiver, Sender
from stretto.transports.rollouts.filesystem import FilesystemReceiver, FilesystemSender
from stretto.transports.rollouts.zmq import ZmqReceiver, ZmqSender

__all__ = ["Receiver", "Sender", "build_receiver", "build_sender"]


def build_sender(cfg: RolloutTransport, run_dir: RunDir, world_size: int) -> Sender:
    """The orchestrator's end; open it before use."""
    if isinstance(cfg, ZmqRollouts):
        return ZmqSender(cfg, run_dir.path.name, world_size)
    assert isinstance(cfg, FilesystemRollouts), cfg
    return FilesystemSender(cfg, run_dir, world_size)


def build_receiver(cfg: RolloutTransport, run_dir: RunDir, rank: int) -> Receiver:
    """The end of one trainer rank; connected from here on."""
    if isinstance(cfg, ZmqRollouts):
        return ZmqReceiver(cfg, run_dir.path.name, rank)
    assert isinstance(cfg, FilesystemRollouts), cfg
    return FilesystemReceiver(cfg, run_dir, rank)
