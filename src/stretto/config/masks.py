"""Which keys of a config are secrets, and a config without them; imports no section."""

from __future__ import annotations

import re
from typing import Any

SECRETS = frozenset({"api_key", "hf_token"})
"""Keys of any section whose values are not shown."""
_SECRET_VARIABLE = re.compile(r"([A-Z0-9_]*_)?(KEY|TOKEN|SECRET|PASSWORD)")
"""Environment variables that contain a secret, as in `env_vars`."""


def is_secret(name: str) -> bool:
    """Whether the value of a key of this name is not shown."""
    return name.replace("-", "_") in SECRETS or _SECRET_VARIABLE.fullmatch(name) is not None


def masked(data: Any) -> Any:
    """The data of a config with *** in place of secrets."""
    if isinstance(data, list):
        return [masked(item) for item in data]
    if not isinstance(data, dict):
        return data
    hidden = lambda name, value: "***" if value is not None and is_secret(name) else masked(value)
    return {name: hidden(name, value) for name, value in data.items()}
