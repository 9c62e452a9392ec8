"""The queues of a run's engines, for `stretto status`: it asks each for `/metrics`, with the run's key."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.base.ports import in_url, open_url
from stretto.base.secret import find_secret

ANSWER_S = 2.0
"""Longest wait for an engine's answer."""
MOST_NAMED = 8
"""Engines of a role that are shown one by one."""
QUEUES = ("running", "waiting")
_VALUE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Address:
    """A process that has a route `/metrics`."""

    role: str
    """`inference`, `prefill`, `decode`, `teacher` or the name of a frozen model."""
    name: str
    url: str


def queue_text(run: RunDir) -> str | None:
    """`5 running, 2 waiting (inference_0 3 + 0, inference_1 2 + 2)`, by role; None if no engine answers."""
    places = list(addresses(run))
    key = engine_key(run)
    with ThreadPoolExecutor(max(1, min(32, len(places)))) as pool:
        found = list(pool.map(lambda place: queues_at(place.url, key), places))
    if not any(isinstance(each, tuple) for each in found):
        return next((each for each in found if isinstance(each, str)), None)
    parts = []
    for role in dict.fromkeys(place.role for place in places):
        own = [(place.name, queue) for place, queue in zip(places, found) if place.role == role]
        counted = [queue for _, queue in own if isinstance(queue, tuple)]
        running, waiting = (sum(queue[part] for queue in counted) for part in (0, 1))
        named = [
            f"{name} {f'{queue[0]} + {queue[1]}' if isinstance(queue, tuple) else 'no answer'}" for name, queue in own
        ]
        if not counted:
            parts.append(f"{role}: no answer")
            continue
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        each = f" ({', '.join(named[:MOST_NAMED])}{more})" if len(named) > 1 else ""
        parts.append(f"{role}: {running} running, {waiting} waiting{each}")
    return "; ".join(parts)


def addresses(run: RunDir) -> Iterator[Address]:
    """Every engine process of the plan that answers requests."""
    plan = read_json(run.plan)
    hosts = plan.get("hosts") or []
    for spec in plan.get("processes", []):
        port, config = spec.get("ports", {}).get("http"), read_json(run.config(spec["name"]))
        if port is None or spec["role"] in ("router", "trainer", "orchestrator"):
            continue
        own = config.get("server", {}).get("host", "127.0.0.1")
        host = hosts[spec["node"]] if hosts else own
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        side = re.search(r"prefill|decode", spec["name"]) if spec["role"] == "inference" else None
        yield Address(side[0] if side else spec["role"], spec["name"], f"http://{in_url(host)}:{port}")


def engine_key(run: RunDir) -> str | None:
    """The key that this run's engines require: the config's, the environment's, or that of the run's secret."""
    cfg: dict[str, Any] = read_json(run.config("run"))
    given = (cfg.get("inference") or {}).get("api_key")
    variable = cfg.get("orchestrator", {}).get("client", {}).get("api_key_var", "VLLM_API_KEY")
    if key := given or os.environ.get(variable):
        return str(key)
    try:
        return find_secret(run, 0.0).text_key("inference.api_key")
    except ConfigError:  # another user's run, or one that keeps it in the environment of its nodes
        return None


def queues_at(url: str, key: str | None) -> tuple[int, int] | str | None:
    """Requests that run and that wait at one engine; None if it does not answer, or a text that says what it lacks."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with open_url(urllib.request.Request(f"{url}/metrics", headers=headers), ANSWER_S) as answer:
            page = answer.read().decode(errors="replace")
    except OSError as error:
        is_refused = getattr(error, "code", None) == 401
        return "the engines require a key that this run's secret is not: set VLLM_API_KEY" if is_refused else None
    totals = dict.fromkeys(QUEUES, 0.0)
    for name, value in _VALUE.findall(page):
        totals[name] += float(value)
    return int(totals["running"]), int(totals["waiting"])
