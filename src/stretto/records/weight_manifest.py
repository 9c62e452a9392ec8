"""Description of one published version of the weights; the bytes travel by a weight transport."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from stretto.base.errors import DataError
from stretto.records.images import Image, image_of


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor by its Hugging Face checkpoint name, at byte `offset` of shard `shard`."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    shard: int
    offset: int
    num_bytes: int


class CanaryImage(msgspec.Struct, frozen=True):
    """The image of a canary: noise that trainer and engines generate alike from these numbers."""

    grid: tuple[int, int, int]  # patches along time, height and width
    patch_values: int  # values per patch
    token_id: int  # its placeholder

    def draw(self) -> Image:
        """The image, as patches between -1 and 1."""
        random = np.random.default_rng([*self.grid, self.patch_values])
        shape = (prod(self.grid), self.patch_values)
        return image_of((2 * random.random(shape, np.float32) - 1).astype(np.float32), self.grid)


BFLOAT16_TOLERANCE = 0.3
"""Mean difference between the log-probabilities of a canary in two programs that round to 16 bits is less, nats."""


class Canary(msgspec.Struct, frozen=True, omit_defaults=True):
    """The trainer's logprobs of some fixed tokens under the published weights.

    An engine that has loaded these weights must compute the same, up to rounding.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats; index t belongs to token t, the first is 0
    rounding: float = 0.0  # mean difference that the engine's 8-bit rounding explains, nats
    image: CanaryImage | None = None  # what the placeholders among the tokens show; these have logprob 0
    probe: tuple[float, ...] | None = None  # logprobs under weights scaled by `probe_scale`, where these are checked
    sums: dict[str, int] = {}  # of the published tensors by group (weights/sums.py); empty: not compared


def probe_scale(shape: Sequence[int]) -> float:
    """Factor of a tensor in a probe: a version all of whose tensors differ visibly from those of the model.

    Halved matrices and slightly larger norms keep the network calm. With SmolLM2-135M a probe moves log-probabilities
    by 2.5 nats, a kind of tensors that stays behind (all q_proj, ...) by 0.9 to 4.5, and bfloat16 rounds by 0.11
    (benchmarks/canary.py).
    """
    return 0.5 if len(shape) > 1 else 1.25


class WeightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that receive a version together, for transports that send to all at once."""

    request: str  # id of this update
    world_size: int  # number of receiving processes
    rank: int  # rank of this engine's first process


class AdapterInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Marks a version whose tensors are a LoRA adapter under PEFT's names (models/lora.py).

    An engine adds it to the weights that it started with.
    """

    rank: int
    scaling: float  # alpha / rank
    name: str | None = None  # requests name it as their model; None if it is the policy's own adapter


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version's bytes are; what `location` means depends on the transport."""

    version: int
    transport: str  # "filesystem" | "shm" | "collective" | "ipc" | "delta"
    location: str
    shards: tuple[str, ...]  # names of files or senders, index = TensorEntry.shard
    tensors: tuple[TensorEntry, ...]
    checksum: int  # over the checksums of all shards in order
    checksum_kind: str = "crc32"  # algorithm of the checksums (checksum.py)
    canary: Canary | None = None
    adapter: AdapterInfo | None = None  # None if the tensors are the whole model
    changed_bytes: int | None = None  # bytes sent, if only changes are sent
    is_probe: bool = False  # engines load the tensors scaled by `probe_scale`
    needs_group: bool = False  # whether it is sent to a WeightGroup, which every update then names

    @property
    def sent_bytes(self) -> int:
        """Bytes that this version sends to each engine."""
        if self.changed_bytes is not None:
            return self.changed_bytes
        return sum(entry.num_bytes for entry in self.tensors)


MANIFEST = "manifest.json"
"""File name of the manifest in a version's directory."""


def load_manifest(directory: Path) -> WeightManifest:
    """Load the manifest of a version that was published as a directory.

    Raises: DataError if the directory holds no complete version.
    """
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=WeightManifest)
    except (OSError, msgspec.MsgspecError) as cause:
        raise DataError(f"{directory}: no published weights there ({cause}).") from cause
