"""The view of the present: latest metrics, shares of waiting, queues, machine, warnings."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from stretto import state
from stretto.base.errors import StrettoError
from stretto.base.files import read_json
from stretto.base.ports import open_url
from stretto.ledger.reader import LedgerReader
from stretto.monitors.catalog import find_metric
from stretto.monitors.file import newest_rows
from stretto_view.page.library import OpenRun
from stretto_view.page.logs import warnings
from stretto_view.page.timeline import engine_state

_SHOWN = (
    "reward/mean", "nll/mean", "val/loss", "entropy/mean", "completion/mean", "completion/truncated_share",
    "mismatch_kl/mean", "off_policy/mean", "off_policy/max", "groups/zero_signal_share", "tokens_per_s",
    "perf/throughput", "time/step", "inference/num_requests_running", "inference/num_requests_waiting",
    "inference/kv_cache_usage",
)  # fmt: skip
_RECENT = 20  # steps that are averaged, and drawn as a small curve
_RECENT_ROLLOUTS = 2000
_LOOKS = 60  # at the engines, that are averaged: five minutes of a few engines
_WINDOW_S = 30.0
_GPU_QUERY = ("index", "name", "utilization.gpu", "memory.used", "memory.total")
_GPU_AGE_S = 4.0  # nvidia-smi takes its time, and asks the driver for a lock
_TIMEOUT_S = 2.0
_OPEN_DRAWS = """
    SELECT state, count(*) AS n FROM draws WHERE state IN ('drawn', 'finished', 'shipped') GROUP BY state
"""


def now(run: OpenRun) -> dict[str, Any]:
    """State, whether it learned, latest metrics, shares of waiting, queues, machine, warnings."""
    run.tokenizer_within(0.0)  # the view of rollouts, which may come next, needs it
    about = state.describe(run.dir)
    own = next((rows for role in state.ROLES if (rows := newest_rows(run.dir.metrics(role), _RECENT + 1))), [])
    steps = [row for row in own if row["step"] > 0][-_RECENT:]
    return {
        **about,
        "metrics": _metrics(steps),
        "waits": waits(steps),
        "left_s": _left(steps, run.config.get("max_steps")),
        **_queues(run),
        "engines": engines(run) if about["state"] == "running" and run.dir.ledger.exists() else [],
        "machine": machine(run.path) if about["state"] == "running" else None,
        "warnings": warnings(run.dir),
        # While a run goes on again, its summary is that of its start before.
        "verdict": None if about["state"] == "running" else read_json(run.dir.summary).get("verdict"),
    }


def _queues(run: OpenRun) -> dict[str, Any]:
    """`queues`, or why there are none: a ledger that cannot be read must not break the rest of the view."""
    if not run.dir.ledger.exists():
        return {"queues": None, "no_queues": None, "staleness": None, "engine_waits": None}
    try:
        found = {"queues": queues(run), "staleness": staleness(run), "engine_waits": engine_waits(run)}
        return {**found, "no_queues": None}
    except StrettoError as error:
        return {"queues": None, "no_queues": str(error), "staleness": None, "engine_waits": None}


def _metrics(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for name in _SHOWN:
        values = [row[name] for row in steps if row.get(name) is not None]
        if values:
            metric = find_metric(name)
            unit = metric.unit if metric else ""
            reading = metric.reading if metric else ""
            found.append({"name": name, "unit": unit, "reading": reading, "value": values[-1], "recent": values})
    return found


def waits(steps: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Share of these steps' time in each of _WAITS; None if no step has such a metric."""
    total = sum(row.get("time/step", 0.0) for row in steps)
    found = {
        name: min(1.0, sum(row.get(key, 0.0) for row in steps) / total)
        for name, key in _WAITS
        if total and any(key in row for row in steps)
    }
    return found or None


_WAITS = (
    ("trainer waits for rollouts", "time/wait_for_rollouts"),
    ("engines wait for the trainer", "time/wait_for_trainer"),
    ("weights are loaded", "time/update_weights"),
    ("batches are packed", "time/pack"),
)


def _left(steps: Sequence[Mapping[str, Any]], max_steps: int | None) -> float | None:
    # Steps of this incarnation only: between two incarnations the run was stopped.
    recent = [row for row in steps if row.get("incarnation") == steps[-1].get("incarnation")]
    if not max_steps or len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    # Where the clock was set back, that step does not count.
    took = sum(max(0.0, after["time"] - before["time"]) for before, after in pairwise(recent))
    return max(0.0, (max_steps - last["step"]) * took / max(1, last["step"] - first["step"]))


def queues(run: OpenRun) -> dict[str, Any]:
    """Draws and rollouts that are under way, versions, and sampled tokens per second of the last half minute."""
    with LedgerReader(run.dir) as ledger:
        draws = {row["state"]: row["n"] for row in ledger.rows(_OPEN_DRAWS)}
        [running] = ledger.rows("SELECT count(*) AS n FROM rollouts WHERE status = 'running'")
        loaded = ledger.rows("SELECT version, state FROM versions WHERE state != 'undone' ORDER BY id DESC LIMIT 20")
        [newest] = ledger.rows("SELECT max(row) AS row FROM rollouts")
        recent = ledger.rows(
            "SELECT num_sampled_tokens AS tokens, finished_at FROM rollouts WHERE row > ? AND finished_at > ?",
            (newest["row"] or 0) - _RECENT_ROLLOUTS,
            time.time() - _WINDOW_S,
        )
    return {
        "groups_running": draws.get("drawn", 0),
        "groups_finished": draws.get("finished", 0),
        "groups_shipped": draws.get("shipped", 0),
        "rollouts_running": running["n"],
        "published": max((row["version"] for row in loaded), default=None),
        "loaded": max((row["version"] for row in loaded if row["state"] == "loaded"), default=None),
        "tokens_per_s": sum(row["tokens"] or 0 for row in recent) / _WINDOW_S,
    }


def staleness(run: OpenRun) -> dict[int, float] | None:
    """Shares of the last steps' rollouts by how many versions old their first token was; None before a step."""
    with LedgerReader(run.dir) as ledger:
        rows = ledger.rows(_STALENESS, _RECENT)
    total = sum(row["n"] for row in rows)
    return {row["age"]: row["n"] / total for row in rows} or None


_STALENESS = """
    SELECT b.step - 1 - r.first_version AS age, count(*) AS n
    FROM (SELECT batch, step FROM batches WHERE state != 'undone' ORDER BY step DESC LIMIT ?) b
    JOIN batch_rollouts x USING (batch) JOIN rollouts r USING (row)
    WHERE r.first_version IS NOT NULL GROUP BY age ORDER BY age
"""


def engine_waits(run: OpenRun) -> list[dict[str, Any]]:
    """By engine: shares of the newest looks at it in which it was idle, busy or full, and how old its weights are.

    behind: versions that it is behind the newest one that was published, at the last look.
    """
    with LedgerReader(run.dir) as ledger:
        rows = ledger.rows("SELECT at, data FROM events WHERE kind = 'engines' ORDER BY id DESC LIMIT ?", _LOOKS)
        [newest] = ledger.rows("SELECT max(version) AS version FROM versions WHERE state != 'undone'")
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, load in row["data"].items():
            if name not in found:
                known = newest["version"] is not None and load[3] is not None
                behind = max(0, newest["version"] - int(load[3])) if known else None
                found[name] = {"engine": name, "looks": 0, "idle": 0, "busy": 0, "full": 0, "behind": behind}
            own = found[name]
            own["looks"] += 1
            own[engine_state(load)[0]] += 1
    for own in found.values():
        own |= {kind: own[kind] / own["looks"] for kind in ("idle", "busy", "full")}
    return [found[name] for name in sorted(found)]


def engines(run: OpenRun) -> list[dict[str, Any]]:
    """What each engine of the run does at this moment: requests, cache, version, sampled tokens per second.

    An engine that does not answer at once has `error` alone.
    """
    addresses, key = run.engines()
    admin = addresses[1:] or addresses  # behind a router
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda address: _engine(run, address, key), admin[:_MOST_ENGINES]))


def _engine(run: OpenRun, address: str, key: str | None) -> dict[str, Any]:
    request = urllib.request.Request(address.rstrip("/").removesuffix("/v1") + "/metrics")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with open_url(request, _ENGINE_TIMEOUT_S) as answer:
            text = answer.read(1_000_000).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return {"address": address, "error": f"does not answer: {error}"}
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#") and "_bucket" not in line:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("vllm:").removesuffix("_total")
            with suppress(ValueError):
                totals[name] = totals.get(name, 0.0) + float(value)
    return {
        "address": address,
        "running": totals.get("num_requests_running"),
        "waiting": totals.get("num_requests_waiting"),
        "cache": totals.get("kv_cache_usage_perc"),
        "version": totals.get("weight_version"),
        "tokens_per_s": _rate(run, address, totals.get("generation_tokens")),
        "error": None,
    }


def _rate(run: OpenRun, address: str, sampled: float | None) -> float | None:
    """Tokens per second since the engine was last asked; None the first time, or if it has begun anew."""
    if sampled is None:
        return None
    at, before = time.monotonic(), run.sampled.get(address)
    run.sampled[address] = sampled, at
    if before is None or at <= before[1] or sampled < before[0]:
        return None
    return (sampled - before[0]) / (at - before[1])


_MOST_ENGINES = 64
_ENGINE_TIMEOUT_S = 0.5


def machine(path: Path) -> dict[str, Any]:
    """Load, memory and disk of the machine that serves the page, and its GPUs."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(memory[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    disk = shutil.disk_usage(path)
    return {
        "host": os.uname().nodename,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "memory_used": total - free,
        "memory_total": total,
        "disk_free": disk.free,
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, Any]]:
    """Use and memory of each GPU by nvidia-smi, a few seconds old at most; [] without GPUs."""
    with _gpu_lock:
        if time.monotonic() - _cached_gpus[0] > _GPU_AGE_S:
            _cached_gpus[:] = [time.monotonic(), _query_gpus()]
        return _cached_gpus[1]


_gpu_lock = threading.Lock()
_cached_gpus: list[Any] = [float("-inf"), []]  # the time of the query, and its result


def _query_gpus() -> list[dict[str, Any]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return []
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    return [dict(zip(("index", "name", "use_percent", "memory_mib", "memory_total_mib"), row)) for row in rows]
