"""Authentication: the tokens of users and of the admin, and whose records each may access.

`Reading` and `check_bytes` limit the memory that a user's requests take.

Tokens are in RUN/tokens.json (mode 0600), never in configs. A request carries one as `X-API-Key`, as clients of Tinker
do, or as `Authorization: Bearer`. All tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.files import write_atomic
from stretto.transports.engine.api import Refusal
from stretto_service.config import UserSection

ADMIN = "admin"
"""Name of the user who may see and change everything in a service."""
PREFIX = "tml-"
"""Beginning of new tokens: clients of Tinker accept no others."""
SMALL_BYTES = 64 << 10
"""Bodies of at most this size are always read."""


@dataclass(frozen=True)
class User:
    """The sender of a request."""

    name: str
    section: UserSection
    is_admin: bool = False

    def may_access(self, owner: str) -> bool:
        """Whether this user may see and change the records of an owner."""
        return self.is_admin or self.name == owner


class Access:
    """The users of a service by their tokens."""

    def __init__(self, users: Mapping[str, UserSection], tokens: Mapping[str, str]) -> None:
        sections = {**users, ADMIN: UserSection()}
        self._users = {
            tokens[name].encode(): User(name, section, is_admin=name == ADMIN) for name, section in sections.items()
        }

    def user(self, headers: Mapping[str, str]) -> User:
        """The user whose token is in the headers. Raises: Refusal 401 for no token, or an unknown one."""
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        sent = (headers.get("X-API-Key") or bearer).strip()
        found, code = None, sent.encode(errors="surrogateescape")
        for token, user in self._users.items():  # always all of them, so that the time reveals nothing
            if hmac.compare_digest(token, code):
                found = user
        if found is None:
            what = "this token is not known here" if sent else "there is no token"
            raise Refusal(f"{what}; send one of RUN/tokens.json as X-API-Key", 401)
        return found


def check_bytes(num_waiting: int, num_more: int, limit: int) -> None:
    """Raises: Refusal 429 if a body of num_more bytes does not fit beside others; a single one always does."""
    if num_waiting and num_waiting + num_more > limit:
        raise Refusal(
            f"{num_waiting} bytes of your requests are waiting, and with these {num_more} there are more than {limit} "
            "(service.max_waiting_bytes); send this later",
            429,
        )


class Reading:
    """Limits the bytes per user of bodies that are being read or handled.

    waiting_bytes: a user's bytes that wait in queues already.
    """

    def __init__(self, limit: int, waiting_bytes: Callable[[str], int]) -> None:
        self._limit, self._waiting_bytes = limit, waiting_bytes
        self._reading_bytes: Counter[str] = Counter()

    @contextmanager
    def body(self, user: str, size: int) -> Iterator[None]:
        """Reserve room for a body of this size. Raises: Refusal 429 before anything is read."""
        if size <= SMALL_BYTES:
            yield
            return
        check_bytes(self._reading_bytes[user] + self._waiting_bytes(user), size, self._limit)
        self._reading_bytes[user] += size
        try:
            yield
        finally:
            self._reading_bytes[user] -= size


def prepare_tokens(path: Path, given: Mapping[str, str | None]) -> dict[str, str]:
    """Tokens of all users and of the admin: the given one, the one in the file, or a new one; the file gets them all.

    Raises: ConfigError for a user with the admin's name, for equal tokens, and for a damaged file.
    """
    if ADMIN in given:
        raise ConfigError(f"[service.users.{ADMIN}]: the admin has this name; choose another")
    known: dict[str, str] = {}
    if path.exists():
        try:
            known = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}; delete it, and new tokens are made") from error
    tokens = {name: given.get(name) or known.get(name) or _new_token(name) for name in (*given, ADMIN)}
    if len({*tokens.values()}) < len(tokens):
        raise ConfigError("[service.users]: two users have the same token; each needs one of his own")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(tokens, indent=1) + "\n").encode(), mode=0o600, is_durable=True)
    return tokens


def _new_token(name: str) -> str:
    return f"{PREFIX}{name}-{secrets.token_hex(20)}"
