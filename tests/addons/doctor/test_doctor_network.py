"""Two hosts measure the way between them; strangers and peers that come together do not disturb."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stretto_doctor import network
from stretto_doctor.finding import Finding, State
from stretto_doctor.network import Link, Peer, findings_of, listen, new_token


def meet(findings: list[Finding]) -> tuple[Link, list]:
    """A listener and a peer on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        met: list = []
        thread = threading.Thread(target=lambda: met.append(next(listen(listener, new_token(), wait_s=20))))
        thread.start()
        peer = Peer("127.0.0.1", listener.getsockname()[1])
        link = peer.measure(findings, node=1)
        assert peer.token
        peer.close(link, list(findings_of(link, "to here")))
        thread.join(20)
    return link, met


@pytest.mark.heavy
def test_two_hosts_measure_the_way_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MEASURE_S", 0.3)
    link, (meeting,) = meet([Finding("disk", State.BAD, "full")])
    assert link.up_bytes_per_s > 1e7 and link.down_bytes_per_s > 1e7
    assert 0 < link.round_trip_s < 1 and abs(link.clock_offset_s) < 1
    assert meeting.node == 1 and meeting.link == link
    named = {each.name: each for each in meeting.findings}
    assert named["disk"].text == "full" and named["TCP to here"].state is not State.BAD


@pytest.mark.heavy
def test_strangers_do_not_end_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: list(listen(listener, "", wait_s=0.5)))
        thread.start()
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b""):
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(greeting)
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.heavy
def test_peers_that_come_together_are_all_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MEASURE_S", 0.15)
    monkeypatch.setattr(network, "TIMEOUT_S", 0.5)  # of one answer, less than the turns of the others
    with socket.create_server(("127.0.0.1", 0)) as listener:
        met: list = []
        thread = threading.Thread(target=lambda: met.extend(listen(listener, new_token(), wait_s=1.0, is_renewed=True)))
        thread.start()

        def report(node: int) -> None:
            peer = Peer("127.0.0.1", listener.getsockname()[1], wait_s=1.0)
            peer.close(peer.measure(node=node))

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(report, range(1, 6)))
        thread.join(20)
    assert sorted(each.node for each in met) == [1, 2, 3, 4, 5]
