"""Who asks: tokens of users and of the admin, and what each may reach.

Tokens are in RUN/tokens.json (mode 0600), never in configs. A request carries one as `X-API-Key`, as clients of Tinker
do, or as `Authorization: Bearer`. All tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.base.secret import ADMIN
from stretto.config.service import UserSection
from stretto.transports.engine.api import Refusal


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
        given = (headers.get("X-API-Key") or bearer).strip().encode()
        found = None
        for token, user in self._users.items():  # all of them, so that time says nothing
            if hmac.compare_digest(token, given):
                found = user
        if found is None:
            what = "this token is not known here" if given else "there is no token"
            raise Refusal(f"{what}; send one of RUN/tokens.json as X-API-Key", 401)
        return found

    def section(self, name: str) -> UserSection:
        """The settings of a user; those of a new one if he is no longer there."""
        return next((user.section for user in self._users.values() if user.name == name), UserSection())
