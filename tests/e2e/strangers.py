"""A stranger on the network: holds many connections to the ports it is given and sends garbage to all of them.

`python strangers.py SEED NUM_HELD HOST:PORT ...` goes on until its input ends, and then prints how much it has sent.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import random
import selectors
import socket
import sys
import threading

TIMEOUT_S = 2.0
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + bytes(32)
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
HTTP = b"POST /update_weights HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer guess\r\nContent-Length: %d\r\n\r\n"


class Bomb:
    """A pickle that ends the process which opens it."""

    def __reduce__(self):
        import os

        return os._exit, (99,)


def messages(rng: random.Random) -> bytes:
    """What is sent on one connection."""
    bomb = pickle.dumps(Bomb())
    noise = rng.randbytes(rng.choice((1, 7, 8, 64, 1000, 100_000)))
    return rng.choice(
        (
            noise,
            bomb,
            len(bomb).to_bytes(8, "little") + bomb,
            b"\xff" * 64,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * rng.choice((1, 50)),
            HTTP % len(noise) + noise,
            HTTP % (1 << 40),
            b"GET /v1/models HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
            NULL_GREETING + b"\x04\x19\x05READY" + noise,
            CURVE_GREETING + b"\x04\xc8\x05HELLO" + noise,
            CURVE_GREETING + b"\x06" + (1 << 62).to_bytes(8, "big"),
        )
    )


def send_garbage(rng: random.Random, places: list[tuple[str, int]], stop: threading.Event) -> tuple[int, int]:
    """Connect, send, read an answer or none, and close, again and again; the number of connections and of bytes."""
    connections = sent = 0
    while not stop.is_set():
        for place in places:
            body = messages(rng)
            try:
                with socket.create_connection(place, TIMEOUT_S) as peer:
                    connections += 1
                    peer.settimeout(0.02)
                    peer.sendall(body)
                    sent += len(body)
                    peer.recv(4096)
            except OSError:  # closed, silent, or the run has ended
                pass
        stop.wait(0.05)
    return connections, sent


def hold(places: list[tuple[str, int]], number: int) -> list[socket.socket]:
    """So many connections, spread over all places, that never say a word or only the first byte of one."""
    held = []
    waiting = selectors.DefaultSelector()
    for index in range(number):
        peer = socket.socket()
        peer.setblocking(False)
        code = peer.connect_ex(places[index % len(places)])
        assert code in (0, errno.EINPROGRESS, errno.ECONNREFUSED), code
        waiting.register(peer, selectors.EVENT_WRITE)
        held.append(peer)
    for key, _ in waiting.select(TIMEOUT_S):
        if held.index(key.fileobj) % 2:
            with contextlib.suppress(OSError):
                key.fileobj.send(b"\xff")
    return held


def main() -> None:
    seed, num_held, *words = sys.argv[1:]
    places = [(word.rpartition(":")[0], int(word.rpartition(":")[2])) for word in words]
    stop = threading.Event()
    held = hold(places, int(num_held))
    print("holding", len(held), flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    print(*send_garbage(random.Random(int(seed)), places, stop), flush=True)


if __name__ == "__main__":
    main()
