"""The types of router, as the core asks for them: how each is started, and what is known of it before that.

vllm      vllm-router: started here, or already running at `address`; there, a registrar per node
          adds the node's engines to the router's list
dynamo    Dynamo's frontend with a worker for each engine, in a Python that has Dynamo
llm-d     only in Kubernetes, where the chart starts it and it finds engines by their labels
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.ports import LOOPBACK, open_url
from stretto.config.sections.engines import ADMITTED, Disaggregated, RouterSection, RouterType
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.routers import Router, listen_address
from stretto.launch.plan.specs import EngineSpec, HelperSpec
from stretto_routers import flags

ANSWER_TIMEOUT_S = 5.0
MADE = Path("opt/dynamo/bin/python")
"""Where `make dynamo` installs Dynamo's Python, from the environment's directory."""
DYNAMO_MODES = {
    "kv": ("--router-mode", "kv", "--no-router-kv-events"),
    "session_affinity": ("--router-mode", "round-robin", "--router-session-affinity-ttl-secs", "86400"),
}
"""Flags of Dynamo's frontend for policies that are not the name of one of its modes. Engines report no cache events: in
kv mode Dynamo records which prompts it has sent to which engine."""


# -- vllm-router, and what stands in for llm-d's picker --


def plan_vllm_router(engines: Sequence[EngineSpec], hosts: Sequence[str], section: InferenceSection) -> HelperSpec:
    router = _router(section)
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
        words += flags.arguments(name, value, f"inference.router.extra.{name}")
    return HelperSpec("router", 0, (sys.executable, "-m", "stretto_routers.router", *words), port)


def _register(router: RouterSection, urls: Sequence[str]) -> tuple[str, ...]:
    return sys.executable, "-m", "stretto_routers.register", str(router.address), *urls


def _find_vllm_router(section: InferenceSection) -> str | None:
    address = _router(section).address
    fault = None if address is None else _unanswered(address, "vllm")
    if address is not None and fault is None and not isinstance(section.deployment, Disaggregated):
        _check_takes_engines(address, section.key)
    return fault


def _find_picker(section: InferenceSection) -> str | None:
    address = _router(section).address
    return None if address is None else _unanswered(address, "llm-d")


def _router(section: InferenceSection) -> RouterSection:
    assert section.router is not None
    return section.router


def _unanswered(address: str, kind: RouterType) -> str | None:
    """A message if nothing answers at the router's address; None if something does."""
    try:
        with open_url(address.rstrip("/") + "/liveness", ANSWER_TIMEOUT_S):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        first = "start llm-d's gateway, which must see these engines, first"
        if kind == "vllm":
            first = "start the router first, such as `vllm-router --host 0.0.0.0 --port 3000`"
        return (
            f"inference.router.address = {address}: nothing answers there ({why}); {first}, or leave the address out: "
            "vllm-router is started with the engines"
        )


def _check_takes_engines(address: str, key: str | None) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(address.rstrip("/") + "/list_workers", headers=headers)
    try:
        with open_url(request, ANSWER_TIMEOUT_S) as answer:
            if isinstance(json.load(answer)["urls"], list):
                return
            why = "no list"
    except urllib.error.HTTPError as error:
        why = f"HTTP {error.code}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"inference.router.address = {address}: what answers there has no list of engines (GET /list_workers: {why}), "
        "so engines cannot enter it by POST /add_worker as they do with vllm-router; give the address of one, "
        'or inference.router.type = "llm-d" for a router that finds engines itself'
    )


# -- Dynamo --


def plan_dynamo(engines: Sequence[EngineSpec], hosts: Sequence[str], section: InferenceSection) -> HelperSpec:
    router = _router(section)
    script = Path(__file__).with_name("dynamo_router.py")
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


def dynamo_python(router: RouterSection) -> str:
    """The Python that Dynamo is installed in."""
    return router.interpreter or str(Path(sys.prefix) / MADE)


def _find_dynamo(section: InferenceSection) -> str | None:
    if Path(python := dynamo_python(_router(section))).is_file():
        return None
    return (
        f'inference.router.type = "dynamo": there is no {python}. `make dynamo` installs Dynamo beside stretto, in '
        "an environment of its own; or give the Python that has it as inference.router.interpreter"
    )


VLLM_ROUTER = Router(plan_vllm_router, _find_vllm_router, _register)
LLM_D = Router(plan_vllm_router, _find_picker)
DYNAMO = Router(plan_dynamo, _find_dynamo)
