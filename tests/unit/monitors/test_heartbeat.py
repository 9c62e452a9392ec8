"""Heartbeats and metrics for Prometheus reach who asks, and a service that is away ends nothing."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from ports import free_port

from stretto.base.paths import RunDir
from stretto.config.sections.monitors import HeartbeatSection, MonitorsSection, PrometheusSection
from stretto.monitors import build_monitors
from stretto.monitors.heartbeat import HeartbeatMonitor


def test_a_heartbeat_is_sent_after_a_step_and_not_more_often_than_said():
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/beat"
    monitor = HeartbeatMonitor(HeartbeatSection(url=url, min_interval_s=0))
    monitor.log(1, {})
    monitor.log(2, {})
    rare = HeartbeatMonitor(HeartbeatSection(url=url, min_interval_s=60))
    rare.log(1, {})
    rare.log(2, {})
    server.shutdown()
    server.server_close()
    assert asked == ["/beat"] * 3


def test_a_service_that_does_not_answer_is_named_once(caplog):
    monitor = HeartbeatMonitor(HeartbeatSection(url=f"http://127.0.0.1:{free_port()}/", min_interval_s=0))
    monitor.log(1, {})
    monitor.log(2, {})
    assert caplog.text.count("monitors.heartbeat.url") == 1


def test_prometheus_reads_the_latest_metrics(tmp_path: Path):
    port = free_port()
    section = MonitorsSection(prometheus=PrometheusSection(port=port))
    monitors = build_monitors(section, RunDir(tmp_path), "trainer", "mine")
    monitors.log(1, {"loss/mean": 0.5})
    monitors.log(2, {"loss/mean": 0.25})
    wanted = 'stretto_loss_mean{role="trainer",run="mine"} 0.25\n'
    for _ in range(100):
        try:
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except urllib.error.URLError:  # its thread has not begun to listen
            continue
        if wanted in text:
            break
    assert wanted in text and 'stretto_step{role="trainer",run="mine"} 2.0\n' in text
    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=5)
    monitors.close()
