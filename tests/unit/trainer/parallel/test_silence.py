"""Nodes of the trainer watch each other: who is let in, and whose end ends whom.

Links that are cut are in tests/cluster/test_silent_nodes.py.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch.distributed as dist

from stretto.trainer.ranks import silence
from stretto.trainer.ranks.mesh import lost_rank
from stretto.trainer.ranks.silence import KEY, Node, find_node, watched_nodes

DEADLINE_S = 60.0


class Rank:
    """The first rank of a node, in a thread of this process: watches until it is told to end."""

    def __init__(self, store: dist.Store, node: Node, pool: ThreadPoolExecutor) -> None:
        self.reasons: queue.Queue[str] = queue.Queue()
        self.is_watching, self._may_end, self._fails = threading.Event(), threading.Event(), False
        self._done: Future[None] = pool.submit(self._run, store, node)

    def _run(self, store: dist.Store, node: Node) -> None:
        with watched_nodes(store, "127.0.0.1", node, 45.0, self.reasons.put):
            self.is_watching.set()
            assert self._may_end.wait(DEADLINE_S)
            if self._fails:
                raise RuntimeError("a rank that fails")

    def end(self, *, fails: bool = False) -> None:
        self._fails = fails
        self._may_end.set()
        assert (self._done.exception(DEADLINE_S) is not None) == fails


@pytest.fixture
def ranks() -> Callable[[dist.Store], list[Rank]]:
    def start(store: dist.Store) -> list[Rank]:
        pool = ThreadPoolExecutor(3)
        found = [Rank(store, Node(rank, 2, 6), pool) for rank in (0, 2, 4)]
        pool.shutdown(wait=False)
        return found

    return start


def until_watching(ranks: list[Rank]) -> None:
    assert all(rank.is_watching.wait(DEADLINE_S) for rank in ranks)


def test_a_group_that_ends_well_ends_nobody(ranks: Callable[[dist.Store], list[Rank]]) -> None:
    found = ranks(dist.HashStore())
    until_watching(found)
    for rank in found:
        rank.end()
    assert all(rank.reasons.empty() for rank in found)


def test_strangers_are_not_taken_for_nodes(ranks: Callable[[dist.Store], list[Rank]]) -> None:
    """Neither those who say nothing, nor those who say something else, nor a node that nobody has."""
    store = dist.HashStore()
    pool = ThreadPoolExecutor(1)
    first = Rank(store, Node(0, 2, 6), pool)
    address, port, word = json.loads(store.get(KEY))
    strangers = [socket.create_connection((address, port)) for _ in range(50)]
    for stranger, text in zip(strangers, [b"x" * 36, b"\x80\x04.", word.encode() + b"\x07\0\0\0", word.encode()]):
        stranger.sendall(text)
    others = [Rank(store, Node(rank, 2, 6), ThreadPoolExecutor(1)) for rank in (2, 4)]
    until_watching([first, *others])
    with pytest.raises(OSError):
        socket.create_connection((address, port), 5)
    for stranger in strangers:
        stranger.settimeout(DEADLINE_S)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "it was let go"
        stranger.close()
    for rank in (first, *others):
        rank.end()
        assert rank.reasons.empty()


def test_the_end_of_the_first_rank_ends_those_who_may_wait_for_a_silent_node(
    ranks: Callable[[dist.Store], list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "AFTER_FIRST_S", 0.01)
    first, second, third = found = ranks(dist.HashStore())
    until_watching(found)
    second.end(fails=True)
    first.end(fails=True)
    reason = third.reasons.get(timeout=DEADLINE_S)
    assert reason == "the first node, 127.0.0.1, ended while this rank was still working; see its log"
    assert first.reasons.empty(), "it hears of the second in its next exchange"
    third.end()


def test_nodes_are_counted_from_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**given: int) -> Node:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        return find_node()

    found = place(RANK=8, WORLD_SIZE=16, LOCAL_WORLD_SIZE=8)
    assert (found.number, found.count, found.is_watched) == (1, 2, True)
    assert not place(RANK=9, WORLD_SIZE=16, LOCAL_WORLD_SIZE=8).is_watched, "the first of its node stands for it"
    assert not place(RANK=0, WORLD_SIZE=8, LOCAL_WORLD_SIZE=8).is_watched, "one node"
    assert not place(RANK=0, WORLD_SIZE=5, LOCAL_WORLD_SIZE=3).is_watched, "nodes of different sizes"
    assert not place(RANK=0, WORLD_SIZE=4).is_watched and not place().is_watched


def test_the_end_of_another_rank_is_no_traceback_and_other_errors_stay() -> None:
    for text in (
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7309. This is typically caused by",
        "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:61143: Connection reset by peer.",
        "NCCL error: remote process exited or there was a network error",
    ):
        assert "another of the ranks has ended" in str(lost_rank(RuntimeError(text)))
    assert lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
