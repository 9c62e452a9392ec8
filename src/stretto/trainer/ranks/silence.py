"""Ends a rank when a node of the trainer falls silent: its machine or its network is gone, and no socket reports it.

gloo and NCCL would wait for it until their own deadline. Therefore the first rank of each other node has a connection
to rank 0 on which nothing is sent: the kernels at both ends probe each other (TCP keepalive), also while a process
computes, holds the interpreter lock or is stopped. States of a node with such a connection:

    watched -> silent    lost_after_s without an answer: rank 0 names the node, and both ends end their process
    watched -> closed    its last byte has come: the group has ended
    watched -> ended     the process ended without that byte. Rank 0 notices it in its next exchange; the others end if
                         it was rank 0's, because they may be waiting for a node that is silent

Rank 0 has a connection with every node, so that it notices the loss of any machine. If only two other nodes lose each
other, nothing notices it: their ranks wait until the deadline of gloo or NCCL.

Rank 0 listens at a port that the system chooses until all nodes have connected; a node must send the secret word that
is in the group's store.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from stretto.base.errors import ENDED_FIRST
from stretto.base.process import EXIT_LOST, LOST_AFTER_VAR, TRAIN_NODES_VAR
from stretto.transports.weights.store import find_address

logger = logging.getLogger(__name__)

LOST_AFTER_S = 45.0
"""The default where the launcher sets nothing, as under torchrun."""
JOIN_S = 60.0
AFTER_FIRST_S = 10.0  # after the end of rank 0, this rank has so long to report an error itself
KEY = "silence"
BYE = b"."
NUM_WORD = 32


@dataclass(frozen=True)
class Node:
    """Where this rank is among the nodes."""

    rank: int
    num_local: int
    """Ranks of each node."""
    world_size: int

    @property
    def number(self) -> int:
        return self.rank // self.num_local

    @property
    def count(self) -> int:
        """The number of nodes; 1 if they have different numbers of ranks."""
        return 1 if self.world_size % self.num_local else self.world_size // self.num_local

    @property
    def is_watched(self) -> bool:
        """True on the first rank of one of several nodes."""
        return self.count > 1 and self.rank % self.num_local == 0


def find_node() -> Node:
    """This rank's place by the variables of launcher or torchrun; one node without them."""
    rank, world_size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    return Node(rank, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) or 1, world_size)


@contextmanager
def watched_nodes(
    store: dist.Store, host: str, node: Node, lost_after_s: float, end: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Watch the other nodes from the first rank of each node; do nothing on other ranks.

    host: the address of rank 0 for the others. end: ends the process; called in another thread, with the reason.
    """
    if not node.is_watched:
        yield
        return
    with ExitStack() as stack:
        if node.rank == 0:
            sockets = _meet_all(store, find_address(host), node.count - 1)
            peers = {peer: _name(number, peer) for number, peer in sockets.items()}
        else:
            peers = {_meet_first(store, node.number): f"the first node, {host}"}
        for peer in peers:
            stack.enter_context(peer)
            _keep_alive(peer, lost_after_s)
        watch, is_done = _Watch(peers, lost_after_s, node.rank > 0, end or end_process), False
        try:
            yield
            is_done = True
        finally:
            watch.close(is_done=is_done)


def end_process(reason: str) -> None:
    """Print the reason, as every command does, and end this process although its threads may be waiting."""
    logger.error("%s", reason)
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    logging.shutdown()
    os._exit(EXIT_LOST)


def find_lost_after_s() -> float:
    """Seconds of silence after which a node is lost."""
    return float(os.environ.get(LOST_AFTER_VAR, LOST_AFTER_S))


# -- meeting --


def _meet_all(store: dist.Store, address: str, count: int) -> dict[int, socket.socket]:
    """Accept one connection from each further node; a node that does not come is not watched."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    word = secrets.token_hex(NUM_WORD // 2).encode()
    guests: dict[int, socket.socket] = {}
    deadline = time.monotonic() + JOIN_S
    with (
        socket.create_server((address, 0), family=family, backlog=1024) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        store.set(KEY, json.dumps([address, listener.getsockname()[1], word.decode()]))
        while len(guests) < count and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    _accept(listener, selector)
                    continue
                selector.unregister(guest := _socket_of(key))
                number = _greeting(guest, word)
                if number is None or number in guests or not 0 < number <= count:
                    guest.close()
                else:
                    guests[number] = guest
        for key in [*selector.get_map().values()]:  # these have sent nothing
            _socket_of(key).close()
    if missing := [each for each in range(1, count + 1) if each not in guests]:
        logger.warning("nodes %s did not connect within %g s: they are not watched", missing, JOIN_S)
    return guests


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    """What was registered."""
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    try:
        guest, _ = listener.accept()
    except OSError:  # the peer has disconnected, or this process has no more descriptors
        return
    guest.setblocking(False)
    selector.register(guest, selectors.EVENT_READ)


def _greeting(guest: socket.socket, word: bytes) -> int | None:
    """The number of the node that has sent the word; None if anything else was sent."""
    try:
        sent = guest.recv(64)
    except OSError:
        return None
    is_known = len(sent) == NUM_WORD + 4 and secrets.compare_digest(sent[:NUM_WORD], word)
    return int.from_bytes(sent[NUM_WORD:], "little") if is_known else None


def _meet_first(store: dist.Store, number: int) -> socket.socket:
    address, port, word = json.loads(store.get(KEY))
    first = socket.create_connection((address, port), JOIN_S)
    first.sendall(word.encode() + number.to_bytes(4, "little"))
    first.setblocking(False)
    return first


def _name(number: int, peer: socket.socket) -> str:
    hosts = os.environ.get(TRAIN_NODES_VAR, "").split()
    return f"node {number}, {hosts[number] if number < len(hosts) else peer.getpeername()[0]}"


def _keep_alive(peer: socket.socket, lost_after_s: float) -> None:
    """Let the kernel probe the other end, and fail the connection after lost_after_s without an answer."""
    each_s = max(1, round(lost_after_s / 6))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        peer.setsockopt(socket.IPPROTO_TCP, option, each_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * lost_after_s))


# -- watching --


class _Watch:
    """A thread that waits for connections to end."""

    def __init__(
        self, peers: dict[socket.socket, str], lost_after_s: float, is_first: bool, end: Callable[[str], None]
    ) -> None:
        """is_first: the only peer is rank 0."""
        self._peers, self._lost_after_s, self._is_first, self._end = peers, lost_after_s, is_first, end
        self._stop_read, self._stop_write = socket.socketpair()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=KEY, daemon=True)
        self._thread.start()

    def close(self, *, is_done: bool) -> None:
        """Stop watching; is_done: let the other ends know that the group has ended."""
        self._is_closing.set()
        for peer in self._peers if is_done else ():
            with suppress(OSError):
                peer.send(BYE)
        self._stop_write.send(BYE)
        self._thread.join()
        self._stop_read.close()
        self._stop_write.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (*self._peers, self._stop_read):
                selector.register(each, selectors.EVENT_READ)
            while not self._is_closing.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._stop_read:
                        return
                    selector.unregister(peer := _socket_of(key))
                    if reason := self._reason(peer):
                        return self._end(reason)

    def _reason(self, peer: socket.socket) -> str | None:
        """Why this process should end, after a peer has sent something or its connection has ended; None to go on."""
        try:
            if peer.recv(1) == BYE:
                return None
        except (ConnectionResetError, BrokenPipeError):
            pass
        except OSError as error:
            return (
                f"{self._peers[peer]}, has been silent for {self._lost_after_s:g} s (deployment.lost_after_s): "
                f"{(error.strerror or str(error)).lower()}. Its machine or its network is gone, and its trainer ranks "
                "with it"
            )
        if not self._is_first or self._is_closing.wait(AFTER_FIRST_S):
            return None
        return f"{self._peers[peer]}, {ENDED_FIRST}; see its log"
