"""`args`: what a hook may know of the run, by vime's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit


class Arguments(SimpleNamespace):
    """Attributes; one that is not there says which there are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(vars(self)))
        raise AttributeError(f"args has no {name!r}; it has {known}. Add your own to `hook_args`.")


def address_of(url: str | None) -> dict[str, Any]:
    """Host and port of the engine, or of the router before it, as `args` has them."""
    parts = urlsplit(url or "")
    return {
        "vllm_router_ip": parts.hostname,
        "vllm_router_port": parts.port or (80 if parts.hostname else None),
    }
