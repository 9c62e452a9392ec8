"""Authentication and encryption of ZMQ sockets, for both ends: only processes with the run's secret can connect.

Sockets use CURVE (rfc.zeromq.org/spec/26): frames are encrypted, and every connection has its own keys, so that
recorded traffic cannot be replayed. The server's key pair is derived from the secret, and even its public key is not
published: libzmq closes any other connection before our code has read a byte. Outsiders therefore get no answer; a
client with a wrong secret notices that by itself (`RejectionMonitor`).
"""

from __future__ import annotations

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from stretto.base.errors import EngineError, WireError
from stretto.base.secret import SECRET_VAR, Secret

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
MAX_REJECTIONS = 3
"""Failed handshakes in a row that mean rejection; a single one may be due to a server that was just ending."""


def guard_server(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, secret: Secret, wire: str, *, max_bytes: int) -> None:
    """Accept only clients that have the secret; call before bind.

    max_bytes: largest frame that is received.

    Raises: EngineError if libzmq was built without CURVE.
    """
    _check_curve()
    private = z85.encode(secret.key(wire))
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, private)
    socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(private))
    socket.set(zmq.MAXMSGSIZE, max_bytes)


def guard_client(socket: zmq.Socket[bytes], secret: Secret, wire: str) -> None:
    """Make server and client prove to each other that they have the secret; call before connect.

    Raises: EngineError if libzmq was built without CURVE.
    """
    _check_curve()
    public, private = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(secret.key(wire))))
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, private)


class RejectionMonitor:
    """Detects that a server rejects this client; use it in the socket's thread."""

    def __init__(self, socket: zmq.Socket[bytes], server: str) -> None:
        """server: its name in error messages."""
        self._socket, self._server = socket, server
        self._monitor = socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._num_rejections = 0

    def check(self) -> None:
        """Raises: WireError if the server has rejected MAX_REJECTIONS connections in a row."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._num_rejections = 0 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._num_rejections + 1
        if self._num_rejections >= MAX_REJECTIONS:
            raise WireError(
                f"{self._server} rejects this process: it is of another run, or one of the two has a wrong secret. "
                f"Check the file `secret` in its run directory, or {SECRET_VAR} where that is set."
            )

    def close(self) -> None:
        """Call before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise EngineError(
            f"libzmq {zmq.zmq_version()} was built without CURVE, which protects the wires of a run; the wheels of "
            "pyzmq have it (pip install --force-reinstall pyzmq)."
        )
