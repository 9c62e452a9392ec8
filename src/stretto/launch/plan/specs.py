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
    """Its first GPU on the node; None: the next one after the GPUs of the engine before it."""

    @property
    def is_served(self) -> bool:
        """Whether this process takes requests. If nodes share the ranks of an engine, only the first one does."""
        return self.section.vllm_extra.get("headless") is not True

    def url(self, hosts: Sequence[str]) -> str:
        return f"http://{in_url(hosts[self.node])}:{self.section.server.port}"


@dataclass(frozen=True)
class HelperSpec:
    """A process beside the engines: a router, a registrar, the cache store's master, or one node's part of it."""

    name: str
    node: int
    argv: tuple[str, ...]
    port: int | None = None
    """The port on which it listens; None: it does not listen."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EnginesPlan:
    """All processes of inference, and their addresses."""

    engines: tuple[EngineSpec, ...]
    routers: tuple[HelperSpec, ...]
    stores: tuple[HelperSpec, ...]
    """The processes of the KV cache store that all engines share: the master, then one per node."""
    base_urls: tuple[str, ...]
    """Addresses for rollouts."""
    admin_urls: tuple[str, ...]
    """Addresses for admin calls: every engine process that takes requests."""
    registrars: tuple[HelperSpec, ...] = ()
    """Per node, the process that adds its engines to the list of a router that runs elsewhere."""
