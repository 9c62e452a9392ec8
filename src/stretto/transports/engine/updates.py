"""Bodies and answers of the routes of a weight update: START_UPDATE, UPDATE_WEIGHTS, FINISH_UPDATE, WORLD_SIZE."""

from __future__ import annotations

import msgspec

from stretto.base.errors import EngineError
from stretto.records.weight_manifest import WeightGroup, WeightManifest
from stretto.transports.engine.api import decode_json

_NAMED = 4
"""Groups of tensors that a message names."""


class UpdateInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The version that an engine loads, and the group with which it receives the version."""

    manifest: WeightManifest
    group: WeightGroup | None = None


class UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of UPDATE_WEIGHTS."""

    update_info: UpdateInfo


class FinishBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of FINISH_UPDATE."""

    weight_version: str | None = None


def encode_update(manifest: WeightManifest, group: WeightGroup | None = None) -> bytes:
    """The body of UPDATE_WEIGHTS."""
    return msgspec.json.encode(UpdateBody(UpdateInfo(manifest, group)))


def decode_update(data: bytes) -> UpdateInfo:
    return decode_json(data, UpdateBody).update_info


class Receivers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of WORLD_SIZE."""

    world_size: int
    """Number of processes behind this address that receive weights."""
    engine: str | None = None
    """Name of an engine that spans several nodes, the same on all of them; None for an engine on one node."""


def encode_world_size(world_size: int) -> bytes:
    """The answer of WORLD_SIZE: the number of processes of this engine that receive weights."""
    return msgspec.json.encode(Receivers(world_size))


def decode_receivers(data: bytes) -> Receivers:
    return decode_json(data, Receivers)


def encode_started(*, loads_between_steps: bool) -> bytes:
    """The answer of START_UPDATE.

    loads_between_steps: the engine needs UPDATE_WEIGHTS only, without the other calls of an update.
    """
    return msgspec.json.encode({"message": "Weight update started", "loads_between_steps": loads_between_steps})


def decode_started(data: bytes) -> bool:
    """Whether the engine loads weights between two steps; vLLM does not, and has no such field."""
    try:
        answer = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return False
    return isinstance(answer, dict) and answer.get("loads_between_steps") is True


class Updated(msgspec.Struct, frozen=True):
    """What the answer of UPDATE_WEIGHTS tells; vLLM's tells nothing."""

    paused_s: float = 0.0
    """For how long an engine that loads between two steps computed nothing, seconds."""
    num_compared: int = 0
    """Groups of tensors whose bits the engine has compared with the trainer's (weights/sums.py)."""
    differing: tuple[str, ...] = ()
    """Those of which it holds other bits."""

    def check(self, url: str, version: int) -> None:
        """Raises: EngineError if the engine holds other bits than the trainer has published."""
        if self.differing:
            named = ", ".join(self.differing[:_NAMED]) + (" ..." if len(self.differing) > _NAMED else "")
            raise EngineError(
                f"{url} has loaded version {version}, and what it holds differs from what the trainer has published in "
                f"{len(self.differing)} of {self.num_compared} groups of tensors: {named}. The bytes came as they were "
                "sent: what loads or keeps these tensors is at fault; report it, with the model's family and dtype."
            )


def encode_updated(version: str, updated: Updated) -> bytes:
    """The answer of UPDATE_WEIGHTS."""
    answer = {"message": "Weights updated", "weight_version": version}
    return msgspec.json.encode(answer | msgspec.to_builtins(updated))


def decode_updated(data: bytes) -> Updated:
    try:
        return msgspec.json.decode(data, type=Updated)
    except msgspec.MsgspecError:
        return Updated()


def encode_finish(version: int) -> bytes:
    """The body of FINISH_UPDATE: the version with which tokens are marked from now on."""
    return msgspec.json.encode(FinishBody(str(version)))


def decode_finish(data: bytes) -> str | None:
    return decode_json(data, FinishBody).weight_version
