"""Which rank does what: the axes of the training mesh, their process groups, and sums over ranks.

Axes, the last one fastest: dp_replicate, dp_shard, cp, tp. Ranks that differ in dp_replicate or dp_shard train
on different micro batches; those that differ in cp share the tokens of one row, those in tp the features of
one token. Weights are sharded over dp_shard x cp. The axis ep is cut out of dp_shard x cp: it says which of
these ranks share the experts of a mixture, for which dp_shard x cp / ep ranks (`efsdp`) hold shards each.

nccl on GPUs, gloo on CPUs (and for objects). What is done with the groups is in parallel/.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.base.errors import ConfigError
from stretto.base.process import num_cores
from stretto.config.model import ModelSection
from stretto.models.config import ModelConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Degrees:
    """Sizes of the axes."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Ranks that train on different micro batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp


def find_degrees(section: ModelSection, world_size: int, shape: ModelConfig) -> Degrees:
    """The degrees that [model] asks for on so many ranks; dp_shard is what the others leave.

    Raises: ConfigError naming the key, and the values it may have.
    """
    _divides("cp x tp", section.cp * section.tp, world_size, f"the {world_size} trainer ranks")
    left = world_size // (section.cp * section.tp)
    _divides("dp_replicate", section.dp_replicate, left, f"the {left} ranks that cp and tp leave")
    island = left // section.dp_replicate * section.cp
    kv_heads, heads = shape.num_kv_heads, shape.num_heads
    _divides("tp", section.tp, kv_heads, f"the {kv_heads} key and value heads of this model")
    _divides("tp", section.tp, shape.intermediate_size, f"intermediate_size = {shape.intermediate_size}")
    if section.cp > 1 and section.cp_style == "ulysses":
        heads, kv_heads = heads // section.tp, kv_heads // section.tp
        _divides("cp", section.cp, heads, f'the {heads} query heads of a rank (cp_style = "ulysses")')
        if kv_heads % section.cp and section.cp % kv_heads:
            valid = [n for n in _divisors(heads) if not (kv_heads % n and n % kv_heads)]
            raise ConfigError(
                f"[model] cp = {section.cp} neither divides the {kv_heads} key and value heads of a rank nor is a "
                f'multiple of them; valid: {_listed(valid)}, or cp_style = "ring"'
            )
    return Degrees(
        dp_replicate=section.dp_replicate,
        dp_shard=island // section.cp,
        cp=section.cp,
        tp=section.tp,
        ep=_expert_degree(section.ep, island, shape),
    )


def find_plain_degrees(section: ModelSection, world_size: int) -> Degrees:
    """The degrees for a model of transformers': its weights are sharded, its layers are not cut.

    Raises: ConfigError naming the key.
    """
    for key, what in (
        ("tp", "the features of its layers"),
        ("cp", "the tokens of a row"),
        ("ep", "its experts"),
    ):
        if (value := getattr(section, key)) not in (1, "auto"):
            raise ConfigError(
                f"[model] {key} = {value} cuts {what}, which only modules of our own can; a model of transformers' "
                f'(impl = "hf") is sharded over all ranks, so leave {key} out'
            )
    _divides("dp_replicate", section.dp_replicate, world_size, f"the {world_size} trainer ranks")
    return Degrees(dp_replicate=section.dp_replicate, dp_shard=world_size // section.dp_replicate)


def _expert_degree(ep: int | str, island: int, shape: ModelConfig) -> int:
    if shape.moe is None:
        if ep not in ("auto", 1):
            raise ConfigError(f"[model] ep = {ep}, but the policy has no experts; leave ep out")
        return 1
    experts = shape.moe.num_experts
    valid = [n for n in _divisors(island) if experts % n == 0]
    if ep == "auto":
        return valid[-1]
    if ep not in valid:
        raise ConfigError(
            f"[model] ep = {ep} must divide both dp_shard x cp = {island} ranks and the {experts} experts; "
            f'valid: {_listed(valid)}, or "auto"'
        )
    return int(ep)


def _divides(key: str, value: int, number: int, what: str) -> None:
    if number % value:
        raise ConfigError(
            f"[model] {key} = {value} does not divide {what}; valid: {_listed(_divisors(number))}"
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


class Mesh:
    """This rank's place among all ranks, and what crosses between them. Needs an open process group.

    dense and experts are the device meshes over which weights and experts are sharded: one dim, or
    (replicas, shards).
    """

    def __init__(self, degrees: Degrees, device: torch.device) -> None:
        self.degrees, self.device = degrees, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        assert degrees.world_size == self.world_size, (degrees, self.world_size)
        d, kind = degrees, device.type
        island = d.dp_shard * d.cp
        dense = init_device_mesh(
            kind, (d.dp_replicate, island, d.tp), mesh_dim_names=("replica", "shard", "tp")
        )
        sparse = init_device_mesh(
            kind,
            (d.dp_replicate, island // d.ep, d.ep, d.tp),
            mesh_dim_names=("replica", "efsdp", "ep", "tp"),
        )
        self.dense = _sharding(dense, "shard", d.dp_replicate)
        self.experts = _sharding(sparse, "efsdp", d.dp_replicate)
        self.shard_group, self.tp_group = dense.get_group("shard"), dense.get_group("tp")
        self.ep_group = sparse.get_group("ep")
        context = init_device_mesh(kind, (d.dp, d.cp, d.tp), mesh_dim_names=("dp", "cp", "tp"))
        self.cp_group = context.get_group("cp")
        self.dp_rank, self.cp_rank, self.tp_rank = (context.get_local_rank(n) for n in ("dp", "cp", "tp"))
        self.ep_rank = sparse.get_local_rank("ep")
        # Ranks of one micro batch are neighbours: tp and cp are the fastest axes.
        sharing = init_device_mesh(kind, (d.dp, d.cp * d.tp), mesh_dim_names=("dp", "sharing"))
        self._sharing, self._first = sharing.get_group("sharing"), self.dp_rank * d.cp * d.tp
        # Objects travel over gloo: a wait for the next batch must not hold a GPU stream.
        self._objects = dist.new_group(backend="gloo") if kind != "cpu" else dist.group.WORLD

    @property
    def is_lead(self) -> bool:
        """The one rank that talks to other processes and writes files."""
        return self.rank == 0

    @property
    def is_counted(self) -> bool:
        """Of the ranks that train on the same micro batch, the one whose sums count."""
        return self.cp_rank == 0 and self.tp_rank == 0

    def deal(self, items: Sequence[T]) -> list[T]:
        """This rank's share of what all ranks hold."""
        return list(items[self.dp_rank :: self.degrees.dp])

    def reduce(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums of all micro batches by name, `max/` by maximum (metrics.Reduce)."""
        return self._joined(sums if self.is_counted else {})

    def reduce_tokens(self, sums: dict[str, float]) -> dict[str, float]:
        """The same for sums that each rank of the axis cp has for its own tokens only."""
        return self._joined(sums if self.tp_rank == 0 else {})

    def _joined(self, sums: dict[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for part in self.gather(sums):
            for name, value in part.items():
                if name in total:
                    value = max(total[name], value) if name.startswith("max/") else total[name] + value
                total[name] = value
        return total

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self._objects)
        return out

    def tell(self, value: T) -> T:
        """The lead's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._objects)
        return box[0]

    def share(self, value: T) -> T:
        """The value of the rank that is counted, on all that train on the same micro batches."""
        box = [value]
        if dist.get_world_size(self._sharing) > 1:
            dist.broadcast_object_list(box, src=self._first, group=self._sharing)
        return box[0]


def _sharding(mesh: DeviceMesh, name: str, num_replicas: int) -> DeviceMesh:
    return mesh["replica", name] if num_replicas > 1 else mesh[name]


def num_ranks() -> int:
    """Trainer ranks of this run, as torchrun and the launcher say it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def share_of_cores() -> int:
    """CPU threads of this rank, where the ranks of a machine share its cores."""
    return max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def is_lead_process() -> bool:
    """True on rank 0; known before a process group is open."""
    return int(os.environ.get("RANK", "0")) == 0


def rank_name(role: str) -> str:
    """What this process is called in logs: its role, and its rank where there are several."""
    return role if num_ranks() == 1 else f"{role}_{os.environ.get('RANK', '0')}"


def by_lead(make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, on every rank; the others do not call it."""
    box = [make() if is_lead_process() else None]
    if num_ranks() > 1:
        dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def build_mesh(section: ModelSection, shape: ModelConfig | Any) -> Mesh | None:
    """The mesh of this run's ranks for a policy of this shape; None for one rank.

    Raises: ConfigError for degrees that do not fit.
    """
    if isinstance(shape, ModelConfig):
        degrees = find_degrees(section, num_ranks(), shape)
    else:
        degrees = find_plain_degrees(section, num_ranks())
    if num_ranks() == 1:
        if section.fsdp_cpu_offload:
            rule = (
                "needs several trainer ranks, each with a GPU; on one use optim_cpu_offload and ac_offloading"
            )
            raise ConfigError(f"[model] fsdp_cpu_offload = true {rule}")
        return None
    logger.info("%d ranks: %s", num_ranks(), degrees)
    return Mesh(degrees, training_device())


def training_device() -> torch.device:
    """The accelerator this rank was given, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def process_group(timeout_s: float) -> Iterator[None]:
    """The process group of all trainer ranks, open while inside; nothing at all where there is one rank.

    timeout_s: longest wait for another rank. Raises: ConfigError when the ranks cannot find each other.
    """
    if num_ranks() == 1:
        yield
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE = {num_ranks()} but {', '.join(missing)} is not set; start several ranks with torchrun, or rl"
        )
    device = training_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()
