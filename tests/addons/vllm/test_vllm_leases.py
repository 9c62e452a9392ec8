"""Leases of caches that decode engines fetch: the time of a pause for new weights does not count."""

from __future__ import annotations

import time

import pytest

from stretto_vllm.patches import leases


class Worker:
    """Leases as vLLM's worker has them: request to the time at which it ends."""

    def __init__(self) -> None:
        self._reqs_to_send: dict[str, float] = {}

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        for request, end in [*self._reqs_to_send.items()]:
            if time.perf_counter() >= end:
                del self._reqs_to_send[request]
                done_sending.add(request)


def test_a_lease_ends_at_its_time_but_for_that_of_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    class Patched(Worker):
        _reap_expired_send_leases = Worker._reap_expired_send_leases

    leases.stop_time_in_pauses(Patched)
    worker, done = Patched(), set()
    worker._reqs_to_send = {"short": 105.0, "long": 130.0}
    worker._reap_expired_send_leases(done)
    now = 104.0
    worker._reap_expired_send_leases(done)
    leases.note_pause()
    now = 164.0
    worker._reap_expired_send_leases(done)
    assert not done and worker._reqs_to_send == {"short": 165.0, "long": 190.0}
    now = 189.0  # a long step is no pause
    worker._reap_expired_send_leases(done)
    assert done == {"short"}
    now = 190.0
    worker._reap_expired_send_leases(done)
    assert done == {"short", "long"}
