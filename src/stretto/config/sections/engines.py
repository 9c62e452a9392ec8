"""[inference.deployment], [inference.router], [inference.kv_cache_offload]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from stretto.config.section import Section

STORE_VARIABLE = "STRETTO_MOONCAKE"
"""Environment variable of an engine: the address of the store of caches, as JSON."""
ADMITTED = "/admitted"
"""Route for routers: whether an engine accepts work."""
PEERS_VAR = "STRETTO_PEERS"
"""Environment variable of an engine over several nodes: addresses of its other servers, separated by spaces."""
HOLD_VAR = "STRETTO_HOLD"
"""Environment variable: if set, an engine accepts no work before it has this run's weights."""
LEAVES_FIRST_VAR = "STRETTO_LEAVES_FIRST"
"""Environment variable of an engine that has joined a run: the process that it asks at SIGTERM, instead of ending. That
process ends it by SIGINT, once the run has let it go."""

RouterType = Literal["vllm", "dynamo", "llm-d"]
VllmPolicy = Literal[
    "consistent_hash", "round_robin", "random", "cache_aware", "kv_aware", "power_of_two", "sticky_least_loaded"
]  # fmt: skip
DynamoPolicy = Literal["kv", "session_affinity", "round_robin", "random", "power_of_two", "least_loaded"]
POLICIES: dict[str, tuple[str, ...]] = {"vllm": get_args(VllmPolicy), "dynamo": get_args(DynamoPolicy)}
"""Policies by type of router; the first is the default."""

CACHE_AWARE_OPTIONS = (
    "balance_abs_threshold", "balance_rel_threshold", "cache_threshold", "eviction_interval_secs", "max_tree_size"
)  # fmt: skip
"""Options of the router that do something only with policy = "cache_aware"."""


class RouterSection(Section):
    """The router before several engines; a single engine has one only if a key here is given."""

    type: RouterType = "vllm"
    """`vllm`: vllm-router; `dynamo`: NVIDIA Dynamo's frontend, which `make dynamo` installs; `llm-d`: llm-d's endpoint
    picker, which the Helm chart starts."""
    policy: Literal[VllmPolicy, DynamoPolicy] = "consistent_hash"
    """`consistent_hash`: the turns of a rollout go to the engine that has its cache; `round_robin`: each in turn;
    `cache_aware` is the default where an option is given that only it has, such as `balance_abs_threshold`. Dynamo:
    `kv`, the default, the engine with the longest cached prefix and the least load; `session_affinity`: as
    `consistent_hash`; `round_robin`, `random`, `power_of_two`, `least_loaded`."""
    address: str | None = None
    """A router that runs already, `http://host:port`; None: one is started where there are several engines. Engines
    enter the list of a vllm-router themselves."""
    interpreter: str | None = None
    """The Python that has Dynamo; None: that of `make dynamo`."""
    extra: dict[str, Any] = Field({})
    """Any other option of vllm-router, such as `cb_failure_threshold = 3`, or of Dynamo's frontend."""

    @classmethod
    def _derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        if values.get("type") == "dynamo":
            return {"policy": POLICIES["dynamo"][0]}
        options = [path.removeprefix("extra.") for path in values if path.startswith("extra.")]
        return {"policy": "cache_aware"} if cache_aware_options(options) else {}

    @property
    def requires_key(self) -> bool:
        """Whether requests need the engines' key when it is started here; else it listens at loopback only."""
        return self.type != "dynamo"

    @property
    def is_needed(self) -> bool:
        """Whether a single engine has one too."""
        return self != RouterSection()


def cache_aware_options(extra: Iterable[str]) -> list[str]:
    """The options that belong to policy = "cache_aware"."""
    return [name for name in extra if name.replace("-", "_") in CACHE_AWARE_OPTIONS]


class EnginesSection(Section):
    """Keys and sizes of all kinds of deployment."""

    type: str

    @property
    def num_engines(self) -> int:
        """Engines of all kinds."""
        raise NotImplementedError

    @property
    def num_processes(self) -> int:
        """Processes that serve requests; an engine whose nodes share ranks has one."""
        return self.num_engines


class SingleNode(EnginesSection):
    """Engines on one machine."""

    type: Literal["single_node"] = "single_node"
    num_replicas: int = Field(1, gt=0)
    """Independent engines, each with inference.parallel; more than one are behind a router."""
    router_port: int | None = Field(None, ge=1, le=65535)
    """Port of the router, which a single engine has too then; None: inference.server.port, with engines above it."""
    backend_port: int | None = Field(None, ge=1, le=65535)
    """Port of the first engine behind a router, which a single engine has too then; None: 100 above the router's."""
    num_nodes: ClassVar[int] = 1

    @property
    def num_engines(self) -> int:
        return self.num_replicas


class NodesSection(EnginesSection):
    """Keys of engines over several nodes."""

    gpus_per_node: int = Field(8, gt=0)
    """GPUs of a node."""
    router_port: int | None = Field(None, ge=1, le=65535)
    """Port of the router; None: inference.server.port."""
    data_parallel_rpc_port: int = Field(29550, ge=1, le=65535)
    """Port on an engine's first node where its processes meet."""


class MultiNode(NodesSection):
    """Independent engines, each on one node or on `nodes_per_engine`; with enable_expert_parallel and one node each
    it is one engine over all nodes (wide EP)."""

    type: Literal["multi_node"] = "multi_node"
    num_nodes: int = Field(2, gt=0)
    """Nodes of all engines."""
    nodes_per_engine: int = Field(1, gt=0)
    """Nodes that share the tensor and pipeline parallel ranks of an engine, tp x pp / nodes_per_engine GPUs of each."""
    backend_port: int | None = Field(None, ge=1, le=65535)
    """Port of an engine; None: 100 above the router's."""

    @property
    def num_engines(self) -> int:
        return self.num_nodes // self.nodes_per_engine


@dataclass(frozen=True)
class Side:
    """The engines of one kind in a disaggregated deployment."""

    num_engines: int
    nodes_each: int
    per_node: int
    """Engines on one node."""
    tp: int | None
    """None: inference.parallel.tp."""


class Disaggregated(NodesSection):
    """Prompts are read by some engines and replies written by others; caches travel between them (NIXL)."""

    type: Literal["disaggregated"] = "disaggregated"
    num_prefill_nodes: int = Field(1, gt=0)
    """Nodes of one engine that reads prompts."""
    num_decode_nodes: int = Field(1, gt=0)
    """Nodes of one engine that writes replies."""
    num_prefill_replicas: int = Field(1, gt=0)
    """Engines that read prompts."""
    num_decode_replicas: int = Field(1, gt=0)
    """Engines that write replies."""
    num_prefill_per_node: int = Field(1, gt=0)
    """Engines that read prompts on one node, where they are smaller than a node."""
    num_decode_per_node: int = Field(1, gt=0)
    """Engines that write replies on one node, where they are smaller than a node."""
    prefill_tp: int | None = Field(None, gt=0)
    """Tensor parallel degree of the engines that read prompts; None: inference.parallel.tp. Above the GPUs of a node
    the num_prefill_nodes of an engine share its ranks."""
    decode_tp: int | None = Field(None, gt=0)
    """Tensor parallel degree of the engines that write replies; None: inference.parallel.tp. Above the GPUs of a node
    the num_decode_nodes of an engine share its ranks."""
    prefill_port: int = Field(8100, ge=1, le=65535)
    """Port of the engines that read prompts."""
    decode_port: int = Field(8200, ge=1, le=65535)
    """Port of the engines that write replies."""
    side_channel_port: int = Field(5600, ge=1, le=65535)
    """First port on which engines exchange the places of caches."""
    prefill_env_overrides: dict[str, str] = Field({})
    """Environment of the engines that read prompts."""
    decode_env_overrides: dict[str, str] = Field({})
    """Environment of the engines that write replies."""
    prefill_vllm_overrides: dict[str, Any] = Field({})
    """Options of vLLM for the engines that read prompts, such as `enable_dbo = true`."""
    decode_vllm_overrides: dict[str, Any] = Field({})
    """Options of vLLM for the engines that write replies, such as `max_num_seqs = 96`."""
    is_local: bool = False
    """All engines are on this machine, one process each, with inference.parallel: for a test of the shape."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole."""
        if self.is_local:
            return 1
        return sum(math.ceil(side.num_engines / side.per_node) * side.nodes_each for side in self.sides.values())

    @property
    def num_processes(self) -> int:
        """Processes of all engines: one per node of each."""
        return sum(side.num_engines * (1 if self.is_local else side.nodes_each) for side in self.sides.values())

    @property
    def sides(self) -> dict[Literal["prefill", "decode"], Side]:
        """The engines of both kinds."""
        return {
            "prefill": Side(
                self.num_prefill_replicas, self.num_prefill_nodes, self.num_prefill_per_node, self.prefill_tp
            ),
            "decode": Side(self.num_decode_replicas, self.num_decode_nodes, self.num_decode_per_node, self.decode_tp),
        }

    @property
    def num_engines(self) -> int:
        return self.num_prefill_replicas + self.num_decode_replicas


class EngineGroup(Section):
    """Engines of one shape."""

    num_engines: int = Field(1, ge=0)
    """Engines of this shape; 0 in a group that has only `idle_gpus`."""
    tp: int | None = Field(None, gt=0)
    """Tensor parallel degree of each; None: inference.parallel.tp. Above the GPUs of a node several nodes share its
    ranks."""
    overrides: dict[str, Any] = Field({})
    """Keys of [inference], and options of vLLM, with other values for these engines, such as `max_num_seqs = 96`."""
    idle_gpus: int = Field(0, ge=0)
    """GPUs after these engines that the run leaves free, for processes of your own. Over several machines only: on one,
    leave them out of inference_gpu_ids."""

    def path(self, at: str, key: str) -> str:
        """The path of a key of [inference] for the engines of this group, whose own path is `at`."""
        if key == "parallel.tp" and self.tp is not None:
            return f"{at}.tp"
        if key == "vllm_extra" and self.overrides:
            return f"{at}.overrides"
        named = (name for name in self.overrides if name.replace("-", "_") == key)
        return next((f"{at}.overrides.{name}" for name in named), key)


class EngineGroups(NodesSection):
    """Engines of differing shape that serve one model behind one router. In the order of the groups each engine has the
    next GPUs of its node, or whole nodes."""

    type: Literal["groups"] = "groups"
    groups: list[EngineGroup] = Field(min_length=1)
    """Groups of engines."""
    num_nodes: int = Field(1, gt=0)
    """Nodes of all groups together."""
    backend_port: int | None = Field(None, ge=1, le=65535)
    """Port of the first engine of a node; None: 100 above the router's."""

    @property
    def num_engines(self) -> int:
        return sum(group.num_engines for group in self.groups)


InferenceDeployment = Annotated[SingleNode | MultiNode | Disaggregated | EngineGroups, Field(discriminator="type")]


class CpuTier(Section):
    """Caches in the machine's memory."""

    num_bytes: int = Field(gt=0)
    """Bytes: of the whole engine with `native`, of each node's share with `mooncake`."""


class DiskTier(Section):
    """Caches on disk, behind those in memory."""

    path: str
    """Directory."""


class OffloadSection(Section):
    """Keys of both ways to offload caches."""

    type: str
    cpu: CpuTier
    disk: DiskTier | None = None


class NativeOffload(OffloadSection):
    """vLLM's own offloading; no other process."""

    type: Literal["native"] = "native"


class MooncakeOffload(OffloadSection):
    """A Mooncake store that all nodes share: a prefix that one engine has read serves all."""

    type: Literal["mooncake"] = "mooncake"
    protocol: Literal["rdma", "tcp"] = "rdma"
    """`rdma` needs such a fabric; `tcp` works anywhere."""
    device_name: str = ""
    """Network devices of rdma, `mlx5_0,mlx5_1`; empty: the store looks for them."""
    master_port: int = Field(50051, ge=1, le=65535)
    """Port of the store's master on the first node."""
    metadata_port: int = Field(8080, ge=1, le=65535)
    """Port of its metadata server."""
    metrics_port: int = Field(9003, ge=1, le=65535)
    """Port of the master's metrics."""
    client_port: int = Field(50052, ge=1, le=65535)
    """Port, on each node, of the process that holds the node's share."""


KvCacheOffload = Annotated[NativeOffload | MooncakeOffload, Field(discriminator="type")]
