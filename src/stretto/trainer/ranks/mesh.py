"""The training mesh: its axes, their process groups, and sums over ranks.

Axes, the last one fastest: dp_replicate, dp_shard, cp, tp. Ranks that differ in dp_replicate or dp_shard train
on different micro batches; ranks that differ in cp split the tokens of one row, ranks that differ in tp the features
of one token. Weights are sharded over dp_shard x cp. The axis ep divides dp_shard x cp: ranks that differ in ep have
different experts, and each expert is sharded over dp_shard x cp / ep ranks (the axis `efsdp`). If ranks of tp split the
tokens (sequence.py), ep divides dp_shard x cp x tp. A network of another kind (`addons.py`, stretto.networks) may also
have the axis pp, the slowest: ranks that differ in pp have different layers, and the last of them has the scores.

Groups use nccl on GPUs, and gloo on CPUs and for values (exchange.py). A single rank has a mesh too, without groups.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.base.errors import ConfigError, EngineError, WireError
from stretto.base.process import TRAIN_NODES_VAR, num_cores
from stretto.check.backend import Backend
from stretto.check.degrees import Degrees, find_degrees, find_plain_degrees
from stretto.config.sections.model import ModelSection
from stretto.families.shape import ModelConfig
from stretto.trainer.ranks import exchange, silence
from stretto.transports.weights.store import connect_store, create_store, use_interface_to

logger = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_POLL_S = 0.1
MAX_NAMED = 16
"""The most missing ranks that an error message names."""
_LOST_PEER = re.compile(r"(?i)connection closed by peer|connection reset by peer|broken pipe|remote process exited")
"""What errors of gloo and NCCL say if another rank has ended."""

_THREADS_BELOW = ((1e6, 1), (30e6, 4))
"""(number of parameters, threads): a model with fewer parameters is not faster with more threads."""


class Mesh:
    """This rank's coordinates, the process groups, and exchange of values between ranks.

    dense and experts are the device meshes over which weights and experts are sharded: one dim, or
    (replicas, shards). They and the groups exist only with several ranks, which must have opened the process group.
    """

    def __init__(self, degrees: Degrees, device: torch.device, *, is_sharded: bool = True) -> None:
        """is_sharded: weights are sharded over its device meshes; if not, it has groups for values and tokens only."""
        self.degrees, self.device, self._is_sharded = degrees, device, is_sharded
        self.rank = self.dp_rank = self.cp_rank = self.tp_rank = self.ep_rank = self.pp_rank = 0
        self.world_size = degrees.world_size
        self._values: Any = exchange.ALONE
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
        if self._is_sharded:
            self._create_device_meshes()
        axes = init_device_mesh(kind, (d.pp, d.dp, d.cp, d.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
        self.cp_group, self._stages = axes.get_group("cp"), axes.get_group("pp")
        self.pp_rank, self.dp_rank, self.cp_rank, self.tp_rank = map(axes.get_local_rank, ("pp", "dp", "cp", "tp"))
        # Ranks of one micro batch are neighbours in each stage: tp and cp are the fastest axes.
        ranks = torch.arange(self.world_size).view(d.pp, d.dp, -1).transpose(0, 1).reshape(d.dp, -1)
        sharing = DeviceMesh(kind, ranks, mesh_dim_names=("dp", "sharing"))
        self._sharing, self._batch_lead = sharing.get_group("sharing"), self.dp_rank * d.cp * d.tp
        # Values travel over gloo: a wait for the next batch must not hold a GPU stream.
        self._values = new_values_group() if kind != "cpu" else dist.group.WORLD

    def _create_device_meshes(self) -> None:
        d, kind = self.degrees, self.device.type
        assert d.pp == 1, "stages are of networks that shard weights themselves"
        island = d.dp_shard * d.cp
        dense = init_device_mesh(kind, (d.dp_replicate, island, d.tp), mesh_dim_names=("replica", "shard", "tp"))
        copies = island * d.tp // d.experts_over  # ranks of tp with the same experts
        sparse = init_device_mesh(
            kind,
            (d.dp_replicate, d.experts_over // d.ep, d.ep, copies),
            mesh_dim_names=("replica", "efsdp", "ep", "copies"),
        )
        self.dense = _sharding(dense, "shard", d.dp_replicate)
        self.experts = _sharding(sparse, "efsdp", d.dp_replicate)
        self.shard_group, self.tp_group = dense.get_group("shard"), dense.get_group("tp")
        self.ep_group, self.ep_rank = sparse.get_group("ep"), sparse.get_local_rank("ep")

    @property
    def is_lead(self) -> bool:
        """True on rank 0, which exchanges messages with other processes and writes files."""
        return self.rank == 0

    @property
    def is_batch_lead(self) -> bool:
        """True on one of the ranks with the same micro batches: it receives them."""
        return self.cp_rank == self.tp_rank == self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the ranks that have scores: all of them without pp."""
        return self.pp_rank == self.degrees.pp - 1

    @property
    def is_counted(self) -> bool:
        """True on one of the ranks with the same micro batches and their scores: only its sums are counted."""
        return self.cp_rank == self.tp_rank == 0 and self.is_last_stage

    def local_items(self, items: Sequence[T]) -> list[T]:
        """This rank's share of items that every rank has."""
        return list(items[self.dp_rank :: self.degrees.dp])

    def reduce(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums over all micro batches by name; maxima for names that begin with `max/`."""
        return self.reduce_each([sums])[0]

    def reduce_each(self, sums: list[dict[str, float]]) -> list[dict[str, float]]:
        """`reduce` for each of several dictionaries, in one exchange."""
        counted = sums if self.is_counted else [{} for _ in sums]
        return [_merge_sums(each) for each in zip(*self.gather(counted, list[dict[str, float]]))]

    def reduce_token_sums(self, sums: dict[str, float]) -> dict[str, float]:
        """`reduce` for sums over the tokens of this rank, which the axis cp splits, and perhaps tp."""
        is_counted = self.tp_rank == 0 or self.degrees.splits_tokens
        return _merge_sums(self.gather(sums if is_counted else {}, dict[str, float]))

    def gather(self, value: T, kind: Any) -> list[T]:
        """The values of all ranks, in rank order, on every rank; kind: their type."""
        return exchange.gather(value, kind, self._values)

    def broadcast(self, value: T, kind: Any) -> T:
        """The lead's value, on every rank; kind: its type."""
        return exchange.broadcast(value, kind, group=self._values)

    def broadcast_batch(self, value: T, kind: Any) -> T:
        """The batch lead's value, on all ranks that train on the same micro batches; kind: its type."""
        if self.degrees.cp * self.degrees.tp * self.degrees.pp == 1:
            return value
        return exchange.broadcast(value, kind, self._batch_lead, self._sharing, self.device)

    def from_last_stage(self, value: T, kind: Any) -> T:
        """The value of the last pipeline stage, on the same rank of each; kind: its type."""
        if self.degrees.pp == 1:
            return value
        last = self.rank + (self.degrees.pp - 1 - self.pp_rank) * self.degrees.dp * self.degrees.cp * self.degrees.tp
        return exchange.broadcast(value, kind, last, self._stages, self.device)

    def barrier(self) -> None:
        """Wait until all ranks call this."""
        self.gather(None, None)


def _merge_sums(of_ranks: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for sums in of_ranks:
        for name, value in sums.items():
            if name in total:
                value = max(total[name], value) if name.startswith("max/") else total[name] + value
            total[name] = value
    return total


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


def run_on_lead(function: Callable[[], T], kind: Any) -> T:
    """Call `function` on rank 0 only; its result, which is of this type, on every rank."""
    result = function() if is_lead_process() else None
    group = exchange.ALONE if num_ranks() == 1 else None
    return cast(T, exchange.broadcast(result, kind, group=group))


def build_mesh(section: ModelSection, shape: ModelConfig | Any, backend: Backend | None = None) -> Mesh:
    """The mesh of this run's ranks for a policy of this shape; backend: what spreads it, if our own modules do not.

    Raises: ConfigError for degrees that do not fit the number of ranks or the model.
    """
    if backend is not None:
        degrees = backend.degrees(section, num_ranks(), shape)
    elif isinstance(shape, ModelConfig):
        degrees = find_degrees(section, num_ranks(), shape)
    else:
        degrees = find_plain_degrees(section, num_ranks())
    if num_ranks() == 1:
        if section.fsdp_cpu_offload:
            rule = "needs several trainer ranks, each with a GPU; on one use optim_cpu_offload and ac_offloading"
            raise ConfigError(f"[model] fsdp_cpu_offload = true {rule}")
    else:
        logger.info("%d ranks: %s", num_ranks(), degrees)
    return Mesh(degrees, training_device(), is_sharded=backend is None)


def training_device() -> torch.device:
    """This rank's GPU, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def process_group(
    timeout_s: float, join_timeout_s: float = 600.0, *, reaches: str | None = None, title: str = "the trainer's ranks"
) -> Iterator[None]:
    """Open the process group of all trainer ranks, and watch their nodes; does nothing for a single rank.

    timeout_s: the longest that ranks wait for each other, and for the first rank, which `rl` starts only when the
    orchestrator has checked everything. join_timeout_s: the longest that the first rank waits until all have joined.
    reaches: ranks listen on the network on which this address is reached; None: MASTER_ADDR. title: a name of these
    ranks, for messages.

    Raises: ConfigError if a variable of the environment is missing, WireError if ranks cannot reach each other, and
    EngineError where another rank has ended.
    """
    if num_ranks() == 1:
        yield
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE = {num_ranks()} but {', '.join(missing)} is not set; start several ranks with torchrun, or rl"
        )
    device, rank = training_device(), int(os.environ["RANK"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    host, port, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_s))
    use_interface_to(reaches or host)
    meeting: dict[str, Any] = {}  # with torchrun, torch finds the store by itself
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        open_store, wait_s = (create_store, join_timeout_s) if rank == 0 else (connect_store, timeout_s)
        store = open_store(host, port, wait_s, title)
        _wait_for_ranks(store, rank, join_timeout_s)
        meeting = {"store": store, "rank": rank, "world_size": num_ranks()}
    dist.init_process_group(backend, timeout=timeout, **meeting)
    try:
        default_store = dist.distributed_c10d._get_default_store()
        with silence.watched_nodes(default_store, host, silence.find_node(), silence.find_lost_after_s()):
            yield
    except RuntimeError as error:
        if (lost := lost_rank(error)) is not None:
            raise lost from error
        raise
    finally:
        dist.destroy_process_group()


def lost_rank(error: RuntimeError) -> EngineError | None:
    """What an error of gloo or NCCL says if another rank has ended; None for any other error."""
    if not _LOST_PEER.search(str(error)):
        return None
    return EngineError("another of the ranks has ended, so this one cannot go on; that rank's message says why")


def new_values_group() -> Any:
    """A gloo group of all ranks, in which they wait for each other as long as in that of `process_group`.

    By itself torch ends waits in a new group after half an hour; a rank may wait longer for the lead's next batch.
    """
    if num_ranks() == 1:
        return exchange.ALONE
    all_ranks: Any = dist.group.WORLD
    options = all_ranks._get_backend(torch.device("cpu")).options
    return dist.new_group(backend="gloo", timeout=options._timeout)


def join_group(store: dist.Store, index: int, count: int, timeout_s: float, *, name: str) -> list[int]:
    """Register member `index` in a store and wait for `count` members; those that did not register in time.

    name: the member's, for a message.

    Raises: WireError if it is registered already: the store is then that of processes that are about to end.
    """
    if store.add(f"here/{index}", 1) > 1:
        raise WireError(
            f"{name} was already in this group, whose first rank has not ended yet; start this process again"
        )
    store.add("num_here", 1)
    deadline = time.monotonic() + timeout_s
    while store.add("num_here", 0) < count:
        if time.monotonic() > deadline:
            return [each for each in range(count) if not store.check([f"here/{each}"])]
        time.sleep(JOIN_POLL_S)
    return []


def _wait_for_ranks(store: dist.Store, rank: int, timeout_s: float) -> None:
    """Wait on rank 0 until all ranks are there; the others wait for it in the group.

    Raises: WireError that names the missing ranks and their nodes, or as `join_group`.
    """
    count, nodes = num_ranks(), os.environ.get(TRAIN_NODES_VAR, "").split()
    awaited = count if rank == 0 else 0
    if absent := join_group(store, rank, awaited, timeout_s, name=f"trainer rank {rank}"):
        names = [f"{each} ({nodes[each * len(nodes) // count]})" if nodes else str(each) for each in absent]
        raise WireError(
            f"trainer rank {', '.join(names[:MAX_NAMED])} did not come within {timeout_s:g} s; was the command "
            "started there, and does it reach this node? See its log."
        )
