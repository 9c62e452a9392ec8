"""`args`: what a hook may know of the run, by vime's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from stretto.base.errors import EnvError

POLICY = "actor"
"""What vime calls the model that is trained."""
Address = tuple[str, int]


class Arguments(SimpleNamespace):
    """Attributes; one that is not there says which there are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(vars(self)))
        raise AttributeError(f"args has no {name!r}; it has {known}. Add your own to `hook_args`.")


def addresses_of(urls: Sequence[str], others: Mapping[str, str]) -> dict[str, Any]:
    """Hosts and ports of the policy's engine (or of the router before it) and of other models, as `args` has them."""
    ip, port = address_of(urls[0]) if urls else (None, None)
    routers = {name: address_of(url) for name, url in others.items()}
    return {
        "vllm_router_ip": ip,
        "vllm_router_port": port,
        "vllm_model_routers": {POLICY: (ip, port)} | routers,
    }


def address_of(url: str) -> Address:
    """Host and port of an URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def get_model_url(args: Arguments, name: str = POLICY, endpoint: str = "/inference/v1/generate") -> str:
    """Where a model of the run answers: `actor`, the policy, or `teacher`.

    Raises: EnvError for a model that the run does not have.
    """
    if name not in args.vllm_model_routers:
        known = ", ".join(sorted(args.vllm_model_routers))
        raise EnvError(f"no model {name!r} in this run; it has {known}")
    ip, port = args.vllm_model_routers[name]
    return f"http://{ip}:{port}{endpoint}"
