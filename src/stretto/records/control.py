"""What trainer ranks and orchestrator say to each other over the control wire (transports/control.py)."""

from __future__ import annotations

import msgspec

from stretto.records.weights import WeightManifest


class Register(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank is there. Everything that has a default is filled in by the client."""

    rank: int = 0
    world_size: int = 1
    resumed_step: int | None = None  # step whose checkpoint it loaded
    version: int = 0  # of the weights it holds
    pid: int = 0
    host: str = ""
    run_id: str = ""


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The orchestrator knows the rank; resume_step is where the run continues (None: from the start)."""

    run_id: str
    resume_step: int | None = None
    pid: int = 0
    host: str = ""


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step was trained; sent before the version it made."""

    step: int
    metrics: dict[str, float] = {}
    num_tokens: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0  # of it, waiting for the batch


class VersionReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A version was published; engines may load it."""

    manifest: WeightManifest


class VersionLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every engine has loaded the version; older ones may be released."""

    version: int


class CheckpointBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has put its state aside, and writes it while it trains on."""

    step: int


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer's part of a checkpoint is on disk."""

    step: int


class CheckpointComplete(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Both parts and the marker are on disk."""

    step: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End after the current step; with `save`, after a checkpoint."""

    reason: str
    save: bool = True


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sender is about to end because of an error."""

    reason: str


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sender ends in good order; its silence from here on means nothing."""


Message = (
    StepDone
    | VersionReady
    | VersionLoaded
    | CheckpointBegun
    | CheckpointSaved
    | CheckpointComplete
    | Stop
    | Failed
    | Bye
)
