"""Messages between trainer ranks and orchestrator on the control wire (transports/control.py)."""

from __future__ import annotations

import msgspec

from stretto.records.weight_manifest import WeightManifest


class Register(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank registers. The client fills in the fields that have a default."""

    rank: int = 0
    world_size: int = 1
    resumed_step: int | None = None  # step whose checkpoint it loaded
    version: int = 0  # version of the weights that it holds
    shares_prefixes: bool = False  # what samples of a row begin with alike is computed once, to any depth
    pid: int = 0
    host: str = ""
    run_id: str = ""
    session: str = ""  # new for every process; identifies it on other wires, too


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The orchestrator has registered the rank."""

    run_id: str
    # The step after which the run continues; None if it starts from the beginning.
    resume_step: int | None = None
    pid: int = 0
    host: str = ""


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step was trained; sent before the VersionReady of the version that it made."""

    step: int
    metrics: dict[str, float] = {}
    num_tokens: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0  # part of time_s spent waiting for the batch


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Further metrics of a step, which are known after its StepDone."""

    step: int
    metrics: dict[str, float]


class VersionReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A version was published; engines may load it."""

    manifest: WeightManifest


class VersionLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every engine has loaded the version; older versions may be released."""

    version: int
    wants_canary: bool = False  # check the next version by a canary, even if no check is due


class CheckpointBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has copied its state and writes the checkpoint while it trains on."""

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
    """The sender ends normally; its silence from now on is no failure."""


Message = (
    StepDone
    | StepMetrics
    | VersionReady
    | VersionLoaded
    | CheckpointBegun
    | CheckpointSaved
    | CheckpointComplete
    | Stop
    | Failed
    | Bye
)
