"""Plans the router in front of several engines: it is started with them, or runs elsewhere.

    vllm      vllm-router: started here, or already running at `address`; there, a registrar per node
              adds the node's engines to the router's list
    dynamo    Dynamo's frontend with a worker for each engine, in a Python that has Dynamo
    llm-d     only in Kubernetes, where the chart starts it and it finds engines by their labels

The client of a router (transports/engine/client.py) is the same for all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stretto import addons
from stretto.base.ports import address_towards, in_url
from stretto.check.routers import dynamo_python
from stretto.config.flags import router as router_flags
from stretto.config.sections.engines import ADMITTED, Disaggregated, RouterSection
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.specs import EngineSpec, HelperSpec

LOOPBACK = "127.0.0.1"
DYNAMO_MODES = {
    "kv": ("--router-mode", "kv", "--no-router-kv-events"),
    "session_affinity": ("--router-mode", "round-robin", "--router-session-affinity-ttl-secs", "86400"),
}
"""Flags of Dynamo's frontend for policies that are not the name of one of its modes. Engines report no cache events: in
kv mode Dynamo records which prompts it has sent to which engine."""


def _module(name: str) -> str:
    """The module of an add-on that is run as a process; a plan names it, whether it is installed or not."""
    return addons.registered("stretto.routers")[name]


def listen_address(host: str, node: str) -> str:
    """The node's address instead of loopback, the default, which other machines cannot reach."""
    return node if host == LOOPBACK and node != "localhost" else host


def has_unguarded_router(section: InferenceSection | None) -> bool:
    """Whether the router that is started accepts requests without the engines' key."""
    return section is not None and section.router is not None and section.router.type == "dynamo"


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
    router: RouterSection, engines: Sequence[EngineSpec], hosts: Sequence[str], section: InferenceSection
) -> tuple[HelperSpec, str]:
    """The router in front of engines on these hosts, and its address, which is on the first host."""
    port = section.deployment.router_port or section.server.port
    if has_unguarded_router(section):
        return _dynamo(router, engines, hosts, section), f"http://{LOOPBACK}:{port}"
    return _vllm_router(router, engines, hosts, section), f"http://{in_url(hosts[0])}:{port}"


def _vllm_router(
    router: RouterSection, engines: Sequence[EngineSpec], hosts: Sequence[str], section: InferenceSection
) -> HelperSpec:
    host = listen_address(section.server.host, hosts[0])
    port = section.deployment.router_port or section.server.port
    words = ["--host", host, "--port", str(port), "--policy", router.policy]
    if isinstance(section.deployment, Disaggregated):
        words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for engine in engines:
            words += [f"--{engine.role}", engine.url(hosts)]
    else:
        words += ["--worker-urls", *(engine.url(hosts) for engine in engines)]
    # The limits are high because rollouts may take long, and the orchestrator limits their number and retries them.
    options: dict[str, Any] = {
        "health_check_endpoint": ADMITTED,
        "health_check_interval_secs": 2,
        "health_failure_threshold": 2,
        "health_success_threshold": 1,
        "worker_startup_timeout_secs": 1800,
        "worker_startup_check_interval": 1,  # the default is 30 s, for which a run with ready engines would wait
        "request_timeout_secs": 7200,
        "max_concurrent_requests": 65536,
        "log_level": "warning",
        "prometheus_host": LOOPBACK,
        **router.extra,
    }
    for name, value in options.items():
        words += router_flags.arguments(name, value, f"inference.router.extra.{name}")
    return HelperSpec("router", 0, (sys.executable, "-m", _module("vllm"), *words), port)


# -- Dynamo --


def _dynamo(
    router: RouterSection, engines: Sequence[EngineSpec], hosts: Sequence[str], section: InferenceSection
) -> HelperSpec:
    script = Path(addons.__file__).parents[1].joinpath(*_module("dynamo").split(".")).with_suffix(".py")
    model, port = section.model or "", section.deployment.router_port or section.server.port
    words = [dynamo_python(router), "-P", str(script), "--model", str(Path(model).expanduser().absolute())]
    words += ["--name", section.served_model_name or model, "--engines", *(e.url(hosts) for e in engines)]
    words += ["--", "--http-host", LOOPBACK, "--http-port", str(port)]
    words += DYNAMO_MODES.get(router.policy, ("--router-mode", router.policy.replace("_", "-")))
    for name, value in router.extra.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        else:
            words += [option, value if isinstance(value, str) else json.dumps(value)]
    return HelperSpec("router", 0, tuple(words), port)


# -- a router that runs elsewhere --


def plan_registrars(
    router: RouterSection, engines: Sequence[EngineSpec], hosts: Sequence[str]
) -> tuple[HelperSpec, ...]:
    """Per node, the process that adds its engines to the list of the router at `address`.

    () for prefill and decode engines, which vllm-router accepts only when it starts.
    """
    if router.type != "vllm" or router.address is None or any(engine.role != "engine" for engine in engines):
        return ()
    by_node: dict[int, list[str]] = {}
    for engine in engines:
        by_node.setdefault(engine.node, []).append(engine.url(hosts))
    command = (sys.executable, "-m", _module("registrar"), router.address)
    return tuple(HelperSpec("registrar", node, (*command, *urls)) for node, urls in by_node.items())
