"""Usage, storage and audit log of the Tinker API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from stretto.transports.engine.api import Refusal
from stretto_service.hub import USER, Routes, answer, texts, when
from stretto_service.store import Checkpoint, Session
from stretto_service.usage import HOUR_S


class AccountRoutes(Routes):
    """Usage, storage and audit log."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/v1/billing/usage/events", self.usage),
            web.get("/api/v1/billing/usage/checkpoints/current", self.storage),
            web.get("/api/v1/audit", self.audit),
        ]

    async def usage(self, http: web.Request) -> web.Response:
        """The user's usage by hour; the admin gets that of all users. Nothing has a price."""
        start, stop = (_seconds(http, name) for name in ("starting_on", "ending_before"))
        if not start < stop <= start + 14 * 86400:
            raise Refusal("ending_before must be after starting_on, by at most 14 days")
        usages = [each for each in self.hub.training.meter.between(start, stop) if http[USER].may_access(each.owner)]
        projects = {session.id: session.project for session in self.hub.store.all(Session)}
        events = [
            {
                "bucket_start": when(usage.hour * HOUR_S),
                "bucket_end": when((usage.hour + 1) * HOUR_S),
                "base_model": self.hub.model_name,
                "user_id": usage.owner,
                "user_name": usage.owner,
                "session_id": usage.session,
                "project_id": projects.get(usage.session or "") or None,
                "event_info": _USAGE[kind](count),
            }
            for usage in usages
            for kind, count in usage.counts.items()
            if count
        ]
        names = {usage.session for usage in usages}
        sessions = {
            session.id: {"user_metadata": texts(session.user_metadata)}
            for session in self.hub.store.all(Session)
            if session.id in names
        }
        return answer({"data": events, "sessions": sessions})

    async def storage(self, http: web.Request) -> web.Response:
        """Bytes of checkpoints by user."""
        sizes: dict[str, list[int]] = defaultdict(list)
        for checkpoint in self.hub.records_of(Checkpoint, http[USER]):
            sizes[checkpoint.owner].append(checkpoint.size_bytes)
        rows = [
            {
                "user_name": owner,
                "checkpoint_count": len(each),
                "size_bytes": sum(each),
                "size_gigabytes": sum(each) / 1e9,
            }
            for owner, each in sizes.items()
        ]
        return answer({"data": rows})

    async def audit(self, http: web.Request) -> web.Response:
        """The user's newest entries; the admin gets those of all users."""
        user, day = http[USER], http.query.get("day")
        entries = [
            {
                "timestamp": when(entry["time"]),
                "event": entry["action"],
                "event_details": {key: value for key, value in entry.items() if key not in ("time", "action")},
            }
            for entry in self.hub.audit.read(None if user.is_admin else user.name)
        ]
        return answer({"entries": [e for e in entries if day is None or str(e["timestamp"])[:10] == day]})


def _seconds(http: web.Request, name: str) -> float:
    """A time in the query, in seconds since 1970. Raises: Refusal if it is not one."""
    try:
        moment = datetime.fromisoformat(http.query.get(name, ""))
    except ValueError:
        raise Refusal(
            f"{name}: {http.query.get(name)!r} is not a time; send one such as 2026-01-31T12:00:00Z"
        ) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


_USAGE: dict[str, Callable[[int], dict[str, Any]]] = {
    "training": lambda count: {"type": "training", "token_count": count},
    "prefill": lambda count: {"type": "sampling_prefill", "cached": False, "token_count": count},
    "cached": lambda count: {"type": "sampling_prefill", "cached": True, "token_count": count},
    "sampled": lambda count: {"type": "sampling_sample", "token_count": count},
    "checkpoints": lambda count: {"type": "checkpoint", "count": count},
}
"""Counts of usage.py as clients read them."""
