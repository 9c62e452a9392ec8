"""Caches that a prefill engine keeps for decode engines, in a pause for new weights (vLLM 0.32 with NIXL).

A prefill engine keeps the cache of a prompt until a decode engine has fetched it, for at most the time of a lease
(30 s). vLLM's /pause?mode=keep waits for the end of all leases. Decode engines are paused for the same update, fetch
nothing, and cannot extend a lease: each update would last as long as a lease, and they would then fetch from freed
blocks. So with this patch such a pause keeps leases as it keeps requests, and its time does not count for them.
"""

from __future__ import annotations

import functools
import time
from typing import Any

_num_pauses = 0  # in this process


def keep_leases_in_pauses() -> None:
    """Patch vLLM's scheduler and NIXL's worker."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
    from vllm.v1.core.sched.scheduler import Scheduler

    ignore_leases_in_pauses(Scheduler)
    stop_time_in_pauses(NixlBaseConnectorWorker)


def ignore_leases_in_pauses(scheduler: Any) -> None:
    """Make such a pause not wait for finished requests whose caches may still be fetched."""
    from vllm.v1.core.sched.interface import PauseState

    original = scheduler.has_finished_requests

    @functools.wraps(original)
    def has_finished_requests(self: Any) -> bool:
        if self.pause_state == PauseState.PAUSED_ALL:
            return bool(self.finished_req_ids)
        return original(self)

    scheduler.has_finished_requests = has_finished_requests


def note_pause() -> None:
    """Called when the engine of this worker process has been paused."""
    global _num_pauses
    _num_pauses += 1


def stop_time_in_pauses(worker: Any) -> None:
    """Extend leases by the time between the last check before a pause and the first after it.

    An engine with leases checks them after each of its steps, or every few milliseconds, but not in a pause.
    """
    original = worker._reap_expired_send_leases

    @functools.wraps(original)
    def reap(self: Any, done_sending: set[str]) -> None:
        now = time.perf_counter()
        checked_at, num_pauses = getattr(self, "_stretto_latest_check", (now, _num_pauses))
        if num_pauses != _num_pauses:
            for request in self._reqs_to_send:
                self._reqs_to_send[request] += now - checked_at
        self._stretto_latest_check = now, _num_pauses
        original(self, done_sending)

    worker._reap_expired_send_leases = reap
