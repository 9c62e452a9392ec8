"""[rollout_transport], [weight_broadcast], [control]: the three wires between the processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from stretto.base.files import SHARED_MEMORY
from stretto.config.section import Section


class ZmqRollouts(Section):
    """Batches travel over TCP sockets; every batch is acknowledged by every rank."""

    type: Literal["zmq"] = "zmq"
    host: str = "127.0.0.1"
    """Address the orchestrator binds and the ranks connect to; as control.host where none is given."""
    port: int = Field(5555, ge=1, le=65535)
    """TCP port."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for an acknowledgement before the run stops, naming the rank."""


class FilesystemRollouts(Section):
    """Batches are files under RUN/rollouts; needs a file system that both sides see."""

    type: Literal["filesystem"] = "filesystem"
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for an acknowledgement before the run stops, naming the rank."""
    keep_steps: int = Field(2, ge=1)
    """Batches kept on disk."""


RolloutTransport = Annotated[ZmqRollouts | FilesystemRollouts, Field(discriminator="type")]


class DeltaSection(Section):
    """Send only the elements that changed, where that is less; for wires slower than memory."""

    max_ratio: float = Field(0.5, gt=0, le=1)
    """All weights are sent where the changes since all were sent last are more than this part of them."""
    max_links: int = Field(16, ge=1)
    """Changes sent one after another before all weights are sent again; an engine that is started anew reads all."""
    directory: Path = SHARED_MEMORY
    """Where each engine host keeps one copy of the weights, to which changes are applied."""


class WeightsSection(Section):
    """Keys of all weight transports: checks of what engines received, and sending only changes."""

    interval: int = Field(1, gt=0)
    """Steps between two versions that engines get, at most max_async_level + 1: with 4 they sample with versions 0, 4,
    8, ... and with the last one. Larger: fewer updates, older tokens."""
    delta: DeltaSection | None = None
    """Send only the elements that changed; None: all weights every time."""
    engine_model: str | None = None
    """Model that engines were started from. If its weights are in 8 bits (`quantization_config`), published weights are
    brought to its layout. None: the one that is trained; `rl` sets it to inference.model."""
    quantize_in_weight_transfer: bool | None = None
    """true: it is an error if engine_model is not in 8 bits; false: if it is; None: weights follow engine_model."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait until every engine has loaded a version."""
    canary_interval: int | None = Field(10, gt=0)
    """Versions between two checks: the engine scores fixed tokens and must agree with the trainer; None: never. The
    first ten versions after a start, and the next one after an engine joined or left, are checked as well."""
    canary_tokens: int = Field(64, gt=1)
    """Tokens that are scored."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean difference of logprobs, nats; None: 0.001 if trainer and engine compute in float32, else 0.3; with
    engines in 8 bits what their rounding explains, which the trainer measures, if that is more."""


class ShmWeights(WeightsSection):
    """Weights travel through shared memory; trainer and engines are on one host."""

    type: Literal["shm"] = "shm"
    timeout_s: float = Field(300.0, gt=0)


class FilesystemWeights(WeightsSection):
    """Weights are safetensors files with a manifest under RUN/broadcasts."""

    type: Literal["filesystem"] = "filesystem"
    keep_versions: int = Field(2, ge=2)
    """Versions kept on disk."""


class CollectiveWeights(WeightsSection):
    """Weights are broadcast from trainer to engines (NCCL on GPUs, gloo on CPUs); no file system is shared."""

    type: Literal["collective"] = "collective"
    host: str = "127.0.0.1"
    """Address of the trainer's first rank, as engines reach it."""
    port: int = Field(29501, ge=1, le=65535)
    """TCP port there, where engines and trainer ranks meet."""
    bucket_bytes: int = Field(64_000_000, gt=0)
    """Bytes of one broadcast."""
    join_timeout_s: float = Field(60.0, gt=0)
    """Longest wait of engines for each other before a broadcast, and of one broadcast: what an engine costs that
    dies in an update, and how long the next update may wait for engines that still wait for it."""


class IpcWeights(WeightsSection):
    """An engine maps the trainer's memory on the GPU they share."""

    type: Literal["ipc"] = "ipc"
    bucket_bytes: int = Field(256_000_000, gt=0)
    """Bytes of one piece of memory that is shared."""
    timeout_s: float = Field(300.0, gt=0)


WeightBroadcast = Annotated[
    ShmWeights | FilesystemWeights | CollectiveWeights | IpcWeights, Field(discriminator="type")
]


class ControlSection(Section):
    """The wire on which trainer and orchestrator register, report and acknowledge."""

    host: str = "127.0.0.1"
    """Address the orchestrator binds and the trainer connects to. Without it, an `orchestrator` that is started alone
    listens at all addresses, and a `trainer` that is finds it by RUN/orchestrator.json."""
    port: int = Field(5556, ge=1, le=65535)
    """TCP port."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Seconds between heartbeats."""
    dead_after_s: float = Field(60.0, gt=0)
    """A peer that is silent for longer counts as dead."""
    register_timeout_s: float = Field(600.0, gt=0)
    """Longest wait for the other side to appear."""
