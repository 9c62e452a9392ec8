"""Plans the router in front of several engines: it is started with them, or runs elsewhere.

What a type of router is started with, and what it must have, add-ons say: a `Router` each (group stretto.routers).
The client of a router (transports/engine/client.py) is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.base.ports import LOOPBACK, address_towards, in_url
from stretto.config.sections.engines import MultiNode, RouterSection
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.specs import EngineSpec, HelperSpec

GROUP = "stretto.routers"
Engines = Sequence[EngineSpec]
Hosts = Sequence[str]


@dataclass(frozen=True)
class Router:
    """A type of router."""

    plan: Callable[[Engines, Hosts, InferenceSection], HelperSpec]
    """The router in front of these engines, which is started on the first of these hosts."""
    fault: Callable[[InferenceSection], str | None]
    """Why it cannot be used before something is installed or started, as a message; None if it can.

    Raises: ConfigError for what will never do.
    """
    registrar: Callable[[RouterSection, Sequence[str]], tuple[str, ...]] | None = None
    """The command that adds engines with these addresses to the list of the router at `address`; None: there is none,
    because the router finds engines itself."""


def router_of(router: RouterSection) -> Router:
    """Raises: ConfigError if no add-on that is installed has this type."""
    found: Router = addons.load(GROUP, router.type, f'inference.router.type = "{router.type}"')
    return found


def has_router(section: InferenceSection) -> bool:
    """Whether a router is started: for several engines, and for one engine if the user configured a router."""
    shape = section.deployment
    if section.router is None:
        return False
    ports = (shape.router_port, getattr(shape, "backend_port", None))
    is_several = shape.num_processes > 1 or is_wide(section)
    return is_several or section.router.is_needed or any(port is not None for port in ports)


def is_wide(section: InferenceSection) -> bool:
    """Whether all nodes form one engine and share its data-parallel ranks."""
    shape = section.deployment
    if not isinstance(shape, MultiNode) or not section.enable_expert_parallel:
        return False
    return shape.nodes_per_engine == 1 < shape.num_nodes


def check_router(section: InferenceSection | None, *, is_dry_run: bool = False) -> str | None:
    """Check that the router can be used; in a dry run, returns what is missing as a message.

    Raises: ConfigError for a router that does not answer or accepts no engines, and for one that is not installed.
    """
    if section is None or section.router is None or not has_router(section):
        return None
    fault = router_of(section.router).fault(section)
    if fault is not None and not is_dry_run:
        raise ConfigError(fault)
    return fault


def listen_address(host: str, node: str) -> str:
    """The node's address instead of loopback, the default, which other machines cannot reach."""
    return node if host == LOOPBACK and node != "localhost" else host


def with_reachable_host(section: InferenceSection) -> InferenceSection:
    """The section with engines that listen where a router on another machine reaches them.

    An address that the user gave stays.
    """
    router, server = section.router, section.server
    if router is None or router.address is None or "host" in server.model_fields_set:
        return section
    parts = urlsplit(router.address)
    host = address_towards(parts.hostname or "", parts.port or 80)
    if host is None or host == LOOPBACK:
        return section
    return section.model_copy(update={"server": server.model_copy(update={"host": host})})


def plan_router(
    router: RouterSection, engines: Engines, hosts: Hosts, section: InferenceSection
) -> tuple[HelperSpec, str]:
    """The router in front of engines on these hosts, and its address, which is on the first host."""
    host = in_url(hosts[0]) if router.requires_key else LOOPBACK
    url = f"http://{host}:{section.deployment.router_port or section.server.port}"
    return router_of(router).plan(engines, hosts, section), url


def plan_registrars(router: RouterSection, engines: Engines, hosts: Hosts) -> tuple[HelperSpec, ...]:
    """Per node, the process that adds its engines to the list of the router at `address`.

    () for prefill and decode engines, which a router accepts only when it starts.
    """
    registrar = router_of(router).registrar
    if registrar is None or any(engine.role != "engine" for engine in engines):
        return ()
    by_node: dict[int, list[str]] = {}
    for engine in engines:
        by_node.setdefault(engine.node, []).append(engine.url(hosts))
    return tuple(HelperSpec("registrar", node, registrar(router, urls)) for node, urls in by_node.items())
