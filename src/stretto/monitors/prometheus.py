"""The latest value of every metric, as text that Prometheus reads: `stretto_loss_mean{role="trainer"} 0.1`."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stretto.base.ports import is_local, refusal_of
from stretto.config.sections.monitors import PrometheusSection
from stretto.monitors.monitor import Monitor, Source

ROLES = ("trainer", "sft", "orchestrator")
"""Processes that serve metrics; the orchestrator runs beside the trainer, so it takes the next port."""


class PrometheusMonitor(Monitor):
    """A server in a thread; processes of other roles start none.

    Raises: OSError if the port is in use.
    """

    def __init__(self, section: PrometheusSection, source: Source) -> None:
        role = source.role
        self._labels = f'role="{role}",run="{source.run_name}"'
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        if role in ROLES:
            port = section.port + (role == "orchestrator")
            self._server = ThreadingHTTPServer((section.host, port), self._handler(section.host))
            self._server.daemon_threads = True
            threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._values |= {"step": step, **metrics}

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def text(self) -> str:
        """All values in Prometheus' text format."""
        with self._lock:
            values = dict(self._values)
        return "".join(f"{_metric_name(name)}{{{self._labels}}} {float(value)!r}\n" for name, value in values.items())

    def _handler(self, host: str) -> type[BaseHTTPRequestHandler]:
        monitor = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # A host that the user gave is for other machines, which call it by any of its names.
                if refused := refusal_of("GET", self.headers, has_key=not is_local(host)):
                    self.send_error(*refused)
                    return
                is_known = self.path in ("/metrics", "/health")
                body = (monitor.text() if self.path == "/metrics" else "ok\n" if is_known else "").encode()
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are not logged: one comes every few seconds."""

        return Handler


def _metric_name(name: str) -> str:
    return "stretto_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
