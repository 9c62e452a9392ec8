"""What is said about one published version of the weights; the bytes travel by a weight transport."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.base.errors import DataError


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor by its Hugging Face checkpoint name, at byte `offset` of shard `shard`."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    shard: int
    offset: int
    num_bytes: int


class Canary(msgspec.Struct, frozen=True):
    """What the trainer's own forward pass says about fixed tokens under the published weights.

    An engine that loaded them must say the same, up to rounding.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats; index t belongs to token t, the first is 0


class WeightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Who receives a version together, for transports that send to all at once."""

    epoch: str  # the same as long as the same processes receive together
    request: str  # of this one update
    world_size: int  # receiving processes
    rank: int  # of this engine's first process


class AdapterInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tensors of a version are a LoRA adapter by PEFT's names, to be added to the weights an engine began with.

    Source: models/lora.py.
    """

    rank: int
    scaling: float  # alpha / rank
    name: str | None = None  # requests name it as their model; None: it belongs to the policy itself


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where version `version` lies. `location` is the transport's: a directory, or the name of a memory segment."""

    version: int
    transport: str  # "filesystem" | "shm" | "collective" | "ipc" | "delta"
    location: str
    shards: tuple[str, ...]  # file or segment names, index = TensorEntry.shard
    tensors: tuple[TensorEntry, ...]
    checksum: int  # crc32 over all shards in order
    canary: Canary | None = None
    adapter: AdapterInfo | None = None  # None: the tensors are the whole model
    changed_bytes: int | None = None  # what travels where only changes do
    needs_group: bool = False  # it is sent to all who ask together: an update names a WeightGroup

    @property
    def sent_bytes(self) -> int:
        """What this version puts on the wire, for each engine."""
        if self.changed_bytes is not None:
            return self.changed_bytes
        return sum(entry.num_bytes for entry in self.tensors)


MANIFEST = "manifest.json"
"""Its name where a version is a directory."""


def load_manifest(directory: Path) -> WeightManifest:
    """The manifest of a version that was published as a directory.

    Raises: DataError when the directory holds no complete version.
    """
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=WeightManifest)
    except (OSError, msgspec.MsgspecError) as cause:
        raise DataError(f"{directory}: no published weights there ({cause}).") from cause
