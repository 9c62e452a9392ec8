"""Batches from orchestrator to trainer ranks: one per rank and step, acknowledged, delivered exactly once."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto.config.sections.transport import FilesystemRollouts, RolloutTransport, ZmqRollouts
from stretto.transports.rollouts.delivery import Receiver, Sender
from stretto.transports.rollouts.filesystem import FilesystemReceiver, FilesystemSender
from stretto.transports.rollouts.zmq import ZmqReceiver, ZmqSender

__all__ = ["Receiver", "Sender", "build_receiver", "build_sender"]


def build_sender(cfg: RolloutTransport, run_dir: RunDir, world_size: int, sessions: Mapping[int, str]) -> Sender:
    """The orchestrator's end; open it before use.

    sessions: by rank, the session of the process that the control wire has registered; read again at every use.
    """
    if isinstance(cfg, ZmqRollouts):
        return ZmqSender(cfg, run_dir.path.name, load_secret(run_dir), world_size, sessions)
    assert isinstance(cfg, FilesystemRollouts), cfg
    return FilesystemSender(cfg, run_dir, world_size)


def build_receiver(cfg: RolloutTransport, run_dir: RunDir, rank: int, session: str) -> Receiver:
    """The end of one trainer rank, connected; session: its session on the control wire."""
    if isinstance(cfg, ZmqRollouts):
        return ZmqReceiver(cfg, run_dir.path.name, load_secret(run_dir), rank, session)
    assert isinstance(cfg, FilesystemRollouts), cfg
    return FilesystemReceiver(run_dir, rank)
