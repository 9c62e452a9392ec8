"""Tokens by which a service knows its users, in a file that only its owner can read (mode 0600)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.files import write_atomic

ADMIN = "admin"
"""Name of who may see and change everything."""
PREFIX = "tml-"
"""Begin of the tokens that are made: clients of Tinker accept no others."""


def prepare_tokens(path: Path, given: Mapping[str, str | None]) -> dict[str, str]:
    """The token of every user and of the admin: the given one, the one in the file, or a new one; the file has them.

    Raises: ConfigError for a user with the admin's name, for equal tokens and for a file that is damaged.
    """
    if ADMIN in given:
        raise ConfigError(f"[service.users.{ADMIN}]: the admin has this name; choose another")
    known: dict[str, str] = {}
    if path.exists():
        try:
            known = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}; delete it, and new tokens are made") from error
    tokens = {name: given.get(name) or known.get(name) or _new(name) for name in (*given, ADMIN)}
    if len({*tokens.values()}) < len(tokens):
        raise ConfigError("[service.users]: two users have the same token; each needs one of his own")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(tokens, indent=1) + "\n").encode(), mode=0o600)
    return tokens


def _new(name: str) -> str:
    return f"{PREFIX}{name}-{secrets.token_hex(20)}"
