"""Signed messages between trainer and engines at a TCP store, which accepts any connection.

Every publisher has a key of its own, new at each start and sent only in manifests. With it a process recognises forged
messages, and the store of another publisher. Messages are deleted when all receivers have read them.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore

from stretto.base.errors import WireError

FOREVER = timedelta(days=365)
SHORTEST_WAIT_S = 0.001
"""The store takes a wait of 0 for one without an end."""


class Board:
    """Signed messages at a store, by name; only a process with the key can make valid ones."""

    def __init__(self, store: TCPStore, key: str) -> None:
        self.store = store
        self._key = key.encode()

    def mark_own(self) -> None:
        """Mark the store as that of the publisher with this key."""
        self.store.set(self._mark, "")

    def is_own(self) -> bool:
        """Whether the store is that of the publisher with this key."""
        return self.store.check([self._mark])

    @property
    def _mark(self) -> str:
        return f"publisher/{self._sign('publisher', '')}"

    def set(self, name: str, message: str) -> None:
        self.store.set(name, f"{self._sign(name, message)} {message}")

    def wait(self, name: str, timeout_s: float, what: str, of_s: float | None = None) -> str:
        """Wait for the message with this name; what: its sender, for error messages.

        of_s: the whole wait whose rest timeout_s is, for error messages; None: timeout_s.

        Raises: WireError if there is none in time, or its signature is wrong; DistNetworkError if the store is gone.
        """
        try:
            self.store.wait([name], timedelta(seconds=timeout_s))
        except DistStoreError as error:
            raise WireError(f"{what}: no message in {of_s or timeout_s:g} s.") from error
        return self._verified(name, self.store.get(name), what)

    def pop(self, name: str) -> str:
        """Wait for a message as long as the store lives, delete it and return it.

        Raises: WireError if its signature is wrong; it stays then, because the real one may be replacing it.
        """
        self.store.wait([name], FOREVER)
        message = self._verified(name, self.store.get(name), f"weight_broadcast: {name}")
        self.delete(name)
        return message

    def delete(self, name: str) -> None:
        self.store.delete_key(name)

    def send_request(self, sender: int, message: str) -> None:
        """Append a message to a sender's requests."""
        count = self.store.add(f"count/{sender}", 1) - 1
        self.set(f"request/{sender}/{count}", message)

    def exchange(self, name: str, rank: int, world_size: int, message: str, what: str, timeout_s: float) -> list[str]:
        """All-gather: the messages of all ranks of a group.

        timeout_s: the longest wait for all of them together.

        Raises: WireError, `what` and the rank, if a rank sends none in time.
        """
        self.set(f"{name}/{rank}", message)
        deadline = time.monotonic() + timeout_s  # of all of them: each may come just before it is given up
        messages = []
        for other in range(world_size):
            left_s = max(deadline - time.monotonic(), SHORTEST_WAIT_S)
            messages.append(self.wait(f"{name}/{other}", left_s, f"{what} {other} of {world_size}", timeout_s))
        self.mark_read(name, world_size, [f"{name}/{other}" for other in range(world_size)])
        return messages

    def mark_read(self, name: str, world_size: int, messages: Sequence[str]) -> None:
        """Record that one of world_size readers has read these messages; the last one deletes them."""
        if self.store.add(f"{name}/num_read", 1) == world_size:
            for each in (*messages, f"{name}/num_read"):
                self.delete(each)

    def _sign(self, name: str, message: str) -> str:
        return hmac.digest(self._key, f"{name} {message}".encode(), hashlib.sha256).hex()

    def _verified(self, name: str, text: bytes, what: str) -> str:
        signature, _, message = text.decode(errors="replace").partition(" ")
        if not hmac.compare_digest(signature.encode(), self._sign(name, message).encode()):
            raise WireError(f"{what}: a message with a wrong signature, from outside this run.")
        return message
