"""The orchestrator tells the person at the console how the run is going: one JSON object a line on a pipe.

`report(kind, **fields)` is the writing end; `launch/console.py` reads and renders. The pipe's file
descriptor is in the environment variable STRETTO_STATUS_FD; a process started alone has none and logs the
same line instead. A field that is missing or None is not shown. The first report that is not
a note tells the launcher that SIGINT is handled from now on: install signal handlers before it.

    phase    text                          what the run does until the first step ("waiting for the engine")
    note     text                          a line to keep ("resumed from step 40: 37 rollouts reused")
    step     step, max_steps, time_s       one trained step
             reward, loss, mismatch_kl     means over the batch; mismatch_kl in nats
             staleness, staleness_max      versions between sampling and training, mean and max
             tokens_per_s                  trained tokens over wall time
             waits                         {process: share of the step, 0..1, in which it had nothing to do}
    engine   url, state, reason            an engine that is "down"; the launcher starts it anew
    eval     step, sampled, greedy, env    mean reward on held-out tasks
    summary  the fields of summary.json
"""

from __future__ import annotations

import json
import logging
import os
import signal
from typing import Any

logger = logging.getLogger(__name__)

STATUS_FD_VAR = "STRETTO_STATUS_FD"
SUPERVISED_VAR = "STRETTO_SUPERVISED"
"""Set for children of a launcher, which asks for a good end itself and sends SIGTERM when it must be quick."""
KINDS = frozenset({"phase", "note", "step", "eval", "summary", "engine"})


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask to finish the step and save: without a launcher SIGTERM, of a preemption, does as well."""
    if os.environ.get(SUPERVISED_VAR):
        return (signal.SIGINT,)
    return (signal.SIGINT, signal.SIGTERM)


def report(kind: str, **fields: Any) -> None:
    """Send one status line to the launcher; never blocks and never fails.

    A line is dropped when the launcher does not read (the pipe is full) or is gone: the ledger and the
    metrics files hold the same facts.
    """
    assert kind in KINDS, f"unknown status kind {kind!r}"
    line = json.dumps({"kind": kind, **fields}, default=_plain)
    fd = os.environ.get(STATUS_FD_VAR)
    if fd is None:
        logger.info("%s", line)
        return
    try:
        os.set_blocking(int(fd), False)
        os.write(int(fd), line.encode() + b"\n")
    except OSError as error:
        logger.debug("status line dropped: %s", error)


def _plain(value: Any) -> Any:
    """numpy scalars as numbers, everything else as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
