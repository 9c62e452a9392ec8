"""The training mesh: its axes, their process groups, and sums over ranks.

Axes, the last one fastest: dp_replicate, dp_shard, cp, tp. Ranks that differ in dp_replicate or dp_shard train
on different micro batches; ranks that differ in cp split the tokens of one row, ranks that differ in tp the features
of one token. Weights are sharded over dp_shard x cp. The axis ep divides dp_shard x cp: ranks that differ in ep have
different experts, and each expert is sharded over dp_shard x cp / ep ranks (the axis `efsdp`).

Groups use nccl on GPUs, and gloo on CPUs and for objects. The other modules of parallel/ use them. A single rank has a
mesh too, without groups.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.base.errors import ConfigError
from stretto.base.process import num_cores
from stretto.config.rules.mesh_degrees import Degrees, find_degrees, find_plain_degrees
from stretto.config.sections.model import ModelSection
from stretto.models.shape import ModelConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS_BELOW = ((1e6, 1), (30e6, 4))
"""(number of parameters, threads): a model with fewer parameters is not faster with more threads."""


class Mesh:
    """This rank's coordinates, the process groups, and exchange of values between ranks.

    dense and experts are the device meshes over which weights and experts are sharded: one dim, or
    (replicas, shards). They and the groups exist only with several ranks, which need an open process group.
    """

    def __init__(self, degrees: Degrees, device: torch.device) -> None:
        self.degrees, self.device = degrees, device
        self.rank = self.dp_rank = self.cp_rank = self.tp_rank = self.ep_rank = 0
        self.world_size = degrees.world_size
        if self.world_size > 1:
            self._create_groups()

    @classmethod
    def single_rank(cls, device: torch.device) -> Mesh:
        """The mesh of a single rank."""
        return cls(Degrees(), device)

    def _create_groups(self) -> None:
        degrees, device = self.degrees, self.device
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
        self._sharing, self._batch_lead = sharing.get_group("sharing"), self.dp_rank * d.cp * d.tp
        # Objects travel over gloo: a wait for the next batch must not hold a GPU stream.
        self._objects = dist.new_group(backend="gloo") if kind != "cpu" else dist.group.WORLD

    @property
    def is_lead(self) -> bool:
        """The one rank that talks to other processes and writes files."""
        return self.rank == 0

    @property
    def is_batch_lead(self) -> bool:
        """True on one of the ranks with the same micro batches: it receives them, its sums count."""
        return self.cp_rank == 0 and self.tp_rank == 0

    def local_items(self, items: Sequence[T]) -> list[T]:
        """This rank's share of items that every rank has."""
        return list(items[self.dp_rank :: self.degrees.dp])

    def reduce(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums over all micro batches by name; maxima for names that begin with `max/`."""
        return self._merge_sums(sums if self.is_batch_lead else {})

    def reduce_token_sums(self, sums: dict[str, float]) -> dict[str, float]:
        """`reduce` for sums that each rank of the axis cp has for its own tokens only."""
        return self._merge_sums(sums if self.tp_rank == 0 else {})

    def _merge_sums(self, sums: dict[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for of_rank in self.gather(sums):
            for name, value in of_rank.items():
                if name in total:
                    value = max(total[name], value) if name.startswith("max/") else total[name] + value
                total[name] = value
        return total

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self._objects)
        return out

    def broadcast(self, value: T) -> T:
        """The lead's value, on every rank."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self._objects)
        return box[0]

    def broadcast_to_cp_tp(self, value: T) -> T:
        """The batch lead's value, on all ranks that train on the same micro batches."""
        box = [value]
        if self.degrees.cp * self.degrees.tp > 1:
            dist.broadcast_object_list(box, src=self._batch_lead, group=self._sharing)
        return box[0]


def _sharding(mesh: DeviceMesh, name: str, num_replicas: int) -> DeviceMesh:
    return mesh["replica", name] if num_replicas > 1 else mesh[name]


def num_ranks() -> int:
    """The number of trainer ranks, from WORLD_SIZE, which torchrun and the launcher set."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_threads(configured: int | None, num_parameters: int | None = None) -> int:
    """CPU threads of this rank: as configured, else OMP_NUM_THREADS, else its share of the cores.

    num_parameters: of the model, once known. A small model gets fewer threads than its share, because its products take
    less time than several threads need to start.
    """
    if configured is not None:
        return configured
    if (from_env := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(from_env) > 0:
        return int(from_env)
    share = max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    most = next((most for below, most in _THREADS_BELOW if (num_parameters or math.inf) < below), share)
    return min(share, most)


def is_lead_process() -> bool:
    """True on rank 0; can be called before the process group is open."""
    return int(os.environ.get("RANK", "0")) == 0


def rank_name(role: str) -> str:
    """The name of this process in logs: its role, and its rank if there are several."""
    return role if num_ranks() == 1 else f"{role}_{os.environ.get('RANK', '0')}"


def run_on_lead(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only; its result, on every rank."""
    box = [function() if is_lead_process() else None]
    if num_ranks() > 1:
        dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def build_mesh(section: ModelSection, shape: ModelConfig | Any) -> Mesh:
    """The mesh of this run's ranks for a policy of this shape.

    Raises: ConfigError for degrees that do not fit the number of ranks or the model.
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
    else:
        logger.info("%d ranks: %s", num_ranks(), degrees)
    return Mesh(degrees, training_device())


def training_device() -> torch.device:
    """This rank's GPU, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def process_group(timeout_s: float) -> Iterator[None]:
    """Open the process group of all trainer ranks; does nothing for a single rank.

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
