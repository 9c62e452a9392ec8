"""What a server accepts from a client that has the secret."""

from __future__ import annotations

import zmq

from stretto.base.secret import Secret
from stretto.transports.guard import guard_client, guard_server


def test_a_frame_above_the_limit_ends_its_client_and_no_other() -> None:
    context, secret = zmq.Context(), Secret("s" * 32)
    server = context.socket(zmq.ROUTER)
    guard_server(server, secret, "wire", max_bytes=1000)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    clients = [context.socket(zmq.DEALER) for _ in range(2)]
    try:
        for client in clients:
            guard_client(client, secret, "wire")
            client.connect(f"tcp://127.0.0.1:{port}")
        clients[0].send(b"x" * 2000)
        clients[1].send(b"y" * 900)
        assert server.poll(10_000) and server.recv_multipart()[-1] == b"y" * 900
        assert not server.poll(200)
    finally:
        for socket in (*clients, server):
            socket.close(linger=0)
        context.term()
