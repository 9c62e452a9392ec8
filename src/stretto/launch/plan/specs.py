"""The processes of inference as data: engines.py and routers.py make them, plan.py and nodes.py place them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from stretto.base.ports import in_url
from stretto.config.sections.inference import InferenceSection

Role = Literal["engine", "prefill", "decode"]


@dataclass(frozen=True)
class EngineSpec:
    """One `stretto inference` process."""

    name: str
    role: Role
    node: int
    section: InferenceSection
    """The section of this process: its port and vLLM options, the parallel degrees of the whole engine."""
    env: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 1
    """GPUs of this process."""
    num_nodes: int = 1
    """Processes of the whole engine, one per node."""
    first_gpu: int | None = None
    """Its first GPU on the node; None: the one after those of the engines before it."""

    @property
    def is_served(self) -> bool:
        """Whether this process takes requests; of an engine that shares its ranks among nodes the first one does."""
        return self.section.vllm_extra.get("headless") is not True

    def url(self, hosts: Sequence[str]) -> str:
        return f"http://{in_url(hosts[self.node])}:{self.section.server.port}"


@dataclass(frozen=True)
class HelperSpec:
    """A process that is not an engine: a router, a registrar, the store's master, or one node's part of the store."""

    name: str
    node: int
    argv: tuple[str, ...]
    port: int | None = None
    """Where it listens; None: it does not."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EnginesPlan:
    """All processes of inference, and where to reach them."""

    engines: tuple[EngineSpec, ...]
    routers: tuple[HelperSpec, ...]
    stores: tuple[HelperSpec, ...]
    """The processes of the KV cache store that all engines share: the master, then one per node."""
    base_urls: tuple[str, ...]
    """Where rollouts go."""
    admin_urls: tuple[str, ...]
    """Every engine process that takes requests, for admin calls."""
    registrars: tuple[HelperSpec, ...] = ()
    """Per node, the process that enters its engines in a router that runs elsewhere."""
