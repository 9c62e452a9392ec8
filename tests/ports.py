"""Ports on which servers of tests listen.

A server listens long after its port has been chosen, half a minute and more on a busy machine. So ports are taken from
below those that the kernel gives to connections, and no other session of tests on this machine chooses them.
"""

from __future__ import annotations

import atexit
import itertools
import os

from stretto.base.ports import PortClaims

_FIRSTS = range(20_000, 32_000, 8)  # some servers also listen on the ports after theirs
_START = os.getpid() % len(_FIRSTS)
_candidates = itertools.cycle([*_FIRSTS[_START:], *_FIRSTS[:_START]])
_claims = PortClaims(f"tests-port-{os.getuid()}")
atexit.register(_claims.close)


def free_port() -> int:
    """A port nobody listens on, another one in every call."""
    return free_ports_in_a_row(1)


def free_ports(count: int) -> list[int]:
    """Several of them."""
    return [free_port() for _ in range(count)]


def free_ports_in_a_row(count: int) -> int:
    """The first of up to 8 consecutive free ports."""
    for first in itertools.islice(_candidates, len(_FIRSTS)):
        if all(_claims.claim("127.0.0.1", port) for port in range(first, first + count)):
            return first
    raise AssertionError("no free ports")
