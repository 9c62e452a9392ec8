"""Messages of trainer and engines at a store: one deadline holds for all whom a receiver waits for."""

from __future__ import annotations

import time

import pytest
from torch.distributed import DistStoreError

from stretto.base.errors import WireError
from stretto_broadcast.board import Board


class LateStore:
    """A store at which each message comes as late as may be; the last one never comes."""

    def __init__(self, last: str) -> None:
        self.values: dict[str, bytes] = {}
        self.waits: list[float] = []
        self.last = last

    def set(self, name, value):
        self.values[name] = value.encode()

    def get(self, name):
        return self.values[name]

    def wait(self, names, timeout):
        self.waits.append(timeout.total_seconds())
        if names == [self.last]:
            raise DistStoreError("timeout")
        time.sleep(0.02)


def test_a_receiver_waits_for_all_others_together_no_longer_than_its_timeout():
    store = LateStore("join/2")
    board = Board(store, "key")
    board.set("join/1", "here")
    with pytest.raises(WireError, match=r"receiver 2 of 3: no message in 0\.03 s"):
        board.exchange("join", 0, 3, "here", "receiver", 0.03)
    first, second, third = store.waits
    assert first >= second + 0.02 > third > 0
