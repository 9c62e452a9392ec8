"""Two hosts measure the network between them: `stretto doctor --listen` on one, `--peer HOST:PORT` on the other.

    peer                                    listener
    hello: who it is, what it has found  ->
                                         <- hello: a token, which may be the name of a file that both should see
    ping, 20 times                       -> the time here
    pieces for a second, then an end     -> how many bytes came
    go                                   -> pieces for a second, then an end
    what it has measured                 ->

Control lines are JSON of bounded size. Both ends are here. No data of a run is sent, and received texts are only shown.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from io import BufferedRWPair
from typing import Any

from stretto.base.errors import WireError
from stretto.base.status import printable
from stretto_doctor.finding import Finding, finding_of, good, warn

PORT = 8766
MAX_LINE = 1 << 20
PIECE = bytes(1 << 18)
MEASURE_S, TIMEOUT_S, CONNECT_TIMEOUT_S = 1.0, 15.0, 5.0
RETRY_S = 0.5
QUEUE_FACTOR = 10
NUM_PINGS = 20
SLOW_GBIT_PER_S, MAX_OFFSET_S = 1.0, 0.1
MAX_FINDINGS = 200
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Link:
    """The network between a peer and a listener, as the peer has measured it."""

    up_bytes_per_s: float
    """From the peer to the listener."""
    down_bytes_per_s: float
    round_trip_s: float
    clock_offset_s: float
    """The listener's clock minus the peer's."""


@dataclass(frozen=True)
class Report:
    """What a listener has received from one peer."""

    host: str
    node: int | None
    link: Link
    findings: list[Finding] = field(default_factory=list)


def findings_of(link: Link, way: str) -> Iterator[Finding]:
    """Findings about bandwidth and clocks; way: `a to b`."""
    up, down = (8 * speed / 1e9 for speed in (link.up_bytes_per_s, link.down_bytes_per_s))
    text = f"{up:.2f} Gbit/s there, {down:.2f} Gbit/s back, round trip {1e3 * link.round_trip_s:.2f} ms"
    if min(up, down) < SLOW_GBIT_PER_S:
        fix = "give addresses of the fast network in deployment.hosts (ip -br addr), or NCCL_SOCKET_IFNAME"
        yield warn(f"TCP {way}", f"{text}: one stream carries weights slowly", fix)
    else:
        yield good(f"TCP {way}", text)
    offset = f"{1e3 * link.clock_offset_s:+.1f} ms (half a round trip is the error)"
    if abs(link.clock_offset_s) > MAX_OFFSET_S + link.round_trip_s:
        text = f"{offset}: merged logs and the timeline are out of order"
        yield warn(f"clocks {way}", text, "timedatectl set-ntp true on both")
    else:
        yield good(f"clocks {way}", offset)


# -- the listener --


def listen(listener: socket.socket, token: str, *, wait_s: float, is_renewed: bool = False) -> Iterator[Report]:
    """Yield the reports of peers, one after another, until wait_s has passed.

    is_renewed: wait_s counts from the last peer, since peers wait for each other; at most QUEUE_FACTOR times.
    """
    start = time.monotonic()
    deadline = start + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        with contextlib.suppress(OSError, WireError), connection:  # it is no peer, or has disconnected
            yield _receive_report(connection, token)
            if is_renewed:
                deadline = min(time.monotonic(), start + QUEUE_FACTOR * wait_s) + wait_s


def _receive_report(connection: socket.socket, token: str) -> Report:
    connection.settimeout(TIMEOUT_S)
    with connection.makefile("rwb") as file:
        assert isinstance(file, BufferedRWPair)
        hello = _receive(file)
        if hello.get("stretto") != "doctor":
            raise WireError("not a doctor")
        _send(file, {"stretto": "doctor", "token": token})
        for _ in range(NUM_PINGS):
            _receive(file)
            _send(file, {"time": time.time()})
        _send(file, {"bytes": _receive_pieces(file)})
        _receive(file)
        _send_pieces(file)
        measured = _receive(file)
    host = printable(str(hello.get("host", "?")))[:100]
    listed = [*_listed(hello.get("findings")), *_listed(measured.get("findings"))][:MAX_FINDINGS]
    node = hello.get("node")
    node = node if isinstance(node, int) else None
    return Report(host, node, _link(measured.get("link")), [finding_of(each, host) for each in listed])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _link(data: Any) -> Link:
    try:
        return Link(**{name: float(data[name]) for name in Link.__dataclass_fields__})
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"the peer has sent no valid measurement: {error}") from error


# -- the peer --


class Peer:
    """The connecting end; `measure` is called once, then `close` sends the findings."""

    def __init__(self, host: str, port: int, *, wait_s: float = 0.0) -> None:
        """Connect; try again for wait_s seconds, because the other host may be started later.

        Raises: WireError if the other host does not answer.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
                break
            except OSError as error:
                if time.monotonic() + RETRY_S > deadline:
                    raise WireError(
                        f"{host}:{port} does not answer ({error.strerror or error}); start `stretto doctor --listen` "
                        "there, and open the port in the firewall"
                    ) from error
                time.sleep(RETRY_S)
        self._wait_s = wait_s
        self._file = self._connection.makefile("rwb")
        self.token = ""

    def measure(self, findings: Sequence[Finding] = (), node: int | None = None) -> Link:
        """Send the findings of this host, and measure the network.

        Raises: WireError if the other end is no doctor, or disconnects.
        """
        with _wire_errors():
            hello = {"stretto": "doctor", "host": socket.gethostname(), "node": node}
            # The listener serves peers one after another: this one may wait for its turn.
            self._connection.settimeout(max(TIMEOUT_S, QUEUE_FACTOR * self._wait_s))
            _send(self._file, hello | {"findings": [finding.as_json() for finding in findings]})
            answer = _receive(self._file)
            self._connection.settimeout(TIMEOUT_S)
            if answer.get("stretto") != "doctor":
                raise WireError("what listens there is no `stretto doctor --listen`")
            token = str(answer.get("token"))
            self.token = token if len(token) == 2 * _TOKEN_BYTES and token.isalnum() else ""
            trips, offsets = zip(*(self._ping() for _ in range(NUM_PINGS)))
            start = time.perf_counter()
            _send_pieces(self._file)
            num_sent = float(_receive(self._file)["bytes"])
            up = num_sent / (time.perf_counter() - start)
            _send(self._file, {"go": True})
            start = time.perf_counter()
            down = _receive_pieces(self._file) / (time.perf_counter() - start)
        return Link(up, down, min(trips), statistics.median(offsets))

    def _ping(self) -> tuple[float, float]:
        start = time.time()
        _send(self._file, {"ping": True})
        there = float(_receive(self._file)["time"])
        end = time.time()
        return end - start, there - (start + end) / 2

    def close(self, link: Link, findings: Sequence[Finding] = ()) -> None:
        """Send the listener the measurement, and disconnect."""
        with _wire_errors(), self._connection:
            listed = [finding.as_json() for finding in findings]
            _send(self._file, {"link": asdict(link), "findings": listed})
            self._file.close()


def new_token() -> str:
    """A name that cannot be guessed."""
    return secrets.token_hex(_TOKEN_BYTES)


@contextlib.contextmanager
def _wire_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"the other end is no doctor, or has gone: {type(error).__name__}: {error}") from error


# -- the wire --


def _send(file: BufferedRWPair, message: dict[str, Any]) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def _receive(file: BufferedRWPair) -> dict[str, Any]:
    line = file.readline(MAX_LINE)
    try:
        message = json.loads(line)
    except ValueError as error:
        raise WireError("not a doctor's message") from error
    if not isinstance(message, dict):
        raise WireError("not a doctor's message")
    return message


def _send_pieces(file: BufferedRWPair) -> None:
    """Send pieces for MEASURE_S, each with a byte before it that says whether there is one."""
    end = time.perf_counter() + MEASURE_S
    while time.perf_counter() < end:
        file.write(b"\1")
        file.write(PIECE)
    file.write(b"\0")
    file.flush()


def _receive_pieces(file: BufferedRWPair) -> int:
    """Receive pieces until the end; their number of bytes."""
    num_bytes, end = 0, time.monotonic() + TIMEOUT_S
    while file.read(1) == b"\1":
        num_bytes += len(file.read(len(PIECE)))
        if time.monotonic() > end:
            raise WireError("pieces without end")
    return num_bytes
