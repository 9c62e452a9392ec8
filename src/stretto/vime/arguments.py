"""`args`: the facts about the run that hooks may use, under vime's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from stretto import addons
from stretto.base.errors import EnvError

POLICY = "actor"
"""vime's name of the model that is trained."""
Address = tuple[str, int]


class Arguments(SimpleNamespace):
    """Attributes; reading one that does not exist raises an error that lists those that do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(vars(self)))
        raise AttributeError(f"args has no {name!r}; it has {known}. Add your own to `hook_args`.")


def attributes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Further attributes of `args` by a resolved config, from an add-on: the value of every flag of vime."""
    found: dict[str, Any] = {}
    if "arguments" in addons.offers("stretto.hooks"):
        found = addons.load("stretto.hooks", "arguments", "args")(config)
    return found


def addresses_of(urls: Sequence[str], others: Mapping[str, str], policy: str = POLICY) -> dict[str, Any]:
    """The attributes of `args` about addresses: of the policy's engine or router, and of other models.

    policy: the policy's own name, which it has besides `actor`.
    """
    known = ({POLICY: urls[0], policy: urls[0]} if urls else {}) | dict(others)
    ip, port = address_of(urls[0]) if urls else (None, None)
    return {
        "vllm_router_ip": ip,
        "vllm_router_port": port,
        "vllm_model_routers": {name: address_of(url) for name, url in known.items()},
        "vllm_model_urls": {name: url.rstrip("/").removesuffix("/v1") for name, url in known.items()},
    }


def address_of(url: str) -> Address:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def get_model_url(args: Arguments, name: str = POLICY, endpoint: str = "/inference/v1/generate") -> str:
    """The URL of a model of the run: `actor` (the policy) or `teacher`.

    Raises: EnvError if the run has no such model.
    """
    if (url := args.vllm_model_urls.get(name)) is not None:
        return url + endpoint
    if name in args.vllm_model_routers:  # added by the user in `hook_args`
        ip, port = args.vllm_model_routers[name]
        return f"http://{ip}:{port}{endpoint}"
    known = sorted({*args.vllm_model_urls, *args.vllm_model_routers})
    has = f"it has {', '.join(known)}" if known else "worker processes know no addresses; remove num_workers"
    raise EnvError(f"no model {name!r} in this run; {has}")
