"""Who asks: tokens of users and of the admin, and what each may reach.

`Reading` and `check_bytes` bound the memory that a user's requests take.

Tokens are in RUN/tokens.json (mode 0600), never in configs. A request carries one as `X-API-Key`, as clients of Tinker
do, or as `Authorization: Bearer`. All tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from stretto.base.secret import ADMIN
from stretto.config.service import UserSection
from stretto.transports.engine.api import Refusal

SMALL_BYTES = 64 << 10
"""Bodies of this size are always read."""


@dataclass(frozen=True)
class User:
    """Who sends a request."""

    name: str
    section: UserSection
    is_admin: bool = False

    def may_reach(self, owner: str) -> bool:
        return self.is_admin or self.name == owner


class Access:
    """Tokens of a service."""

    def __init__(self, users: Mapping[str, UserSection], tokens: Mapping[str, str]) -> None:
        sections = {**users, ADMIN: UserSection()}
        self._users = {
            tokens[name].encode(): User(name, section, is_admin=name == ADMIN)
            for name, section in sections.items()
        }

    def user(self, headers: Mapping[str, str]) -> User:
        """Whose token the headers carry. Raises: Refusal 401 without one, or with an unknown one."""
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        given = (headers.get("X-API-Key") or bearer).strip()
        found, code = None, given.encode(errors="surrogateescape")
        for token, user in self._users.items():  # all of them, so that time says nothing
            if hmac.compare_digest(token, code):
                found = user
        if found is None:
            what = "this token is not known here" if given else "there is no token"
            raise Refusal(f"{what}; send one of RUN/tokens.json as X-API-Key", 401)
        return found

    def section(self, name: str) -> UserSection:
        """The settings of a user; those of a new one if he is no longer there."""
        return next((user.section for user in self._users.values() if user.name == name), UserSection())


def check_bytes(held: int, more: int, most: int) -> None:
    """Raises: Refusal 429 if bodies of this size do not fit; one alone always does."""
    if held and held + more > most:
        raise Refusal(
            f"{held} bytes of your requests are waiting, and with these {more} there are more than {most} "
            "(service.max_waiting_bytes); send this later",
            429,
        )


class Reading:
    """Bodies that are being read, or whose handlers wait, by user. waiting: bytes of those that have been taken."""

    def __init__(self, most: int, waiting: Callable[[str], int]) -> None:
        self._most, self._waiting = most, waiting
        self._held: Counter[str] = Counter()

    @contextmanager
    def body(self, user: str, size: int) -> Iterator[None]:
        """Hold room for a body of this size. Raises: Refusal 429 before anything is read."""
        if size <= SMALL_BYTES:
            yield
            return
        check_bytes(self._held[user] + self._waiting(user), size, self._most)
        self._held[user] += size
        try:
            yield
        finally:
            self._held[user] -= size
