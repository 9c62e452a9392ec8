"""Heartbeats are sent, Prometheus can read the metrics, and a service that does not answer stops nothing."""

from __future__ import annotations

import threading
import time
import urllib.error
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from ports import free_port

from stretto.base.paths import RunDir
from stretto.base.ports import open_url
from stretto.config.sections.monitors import HeartbeatSection, MonitorsSection, PrometheusSection
from stretto.monitors.base import build_monitors
from stretto.monitors.heartbeat import HeartbeatMonitor
from stretto.monitors.monitor import Source


def heartbeat(url: str, min_interval_s: float) -> HeartbeatMonitor:
    section = HeartbeatSection(url=url, min_interval_s=min_interval_s)
    return HeartbeatMonitor(section, Source(RunDir("run"), "trainer", "run", None))


@pytest.mark.heavy
def test_a_heartbeat_is_sent_after_a_step_but_at_most_once_per_interval():
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/beat"
    for monitor in (heartbeat(url, 0), heartbeat(url, 60)):
        monitor.log(1, {})
        monitor.log(2, {})
    server.shutdown()
    server.server_close()
    assert requests == ["/beat"] * 3


def test_a_service_that_does_not_answer_is_named_once(caplog):
    monitor = heartbeat(f"http://127.0.0.1:{free_port()}/", 0)
    monitor.log(1, {})
    monitor.log(2, {})
    assert caplog.text.count("monitors.heartbeat.url") == 1


@pytest.mark.heavy
def test_monitors_without_tables_and_histograms_ignore_them_and_stay_on(tmp_path: Path, caplog):
    heartbeat = HeartbeatSection(url=f"http://127.0.0.1:{free_port()}/")
    section = MonitorsSection(heartbeat=heartbeat, prometheus=PrometheusSection(port=free_port()))
    monitors = build_monitors(section, RunDir(tmp_path), "trainer", "mine")
    monitors.log_histograms(1, {"reward/distribution": np.ones(3)})
    monitors.log_table(1, "train/samples", [{"reward": 1.0}])
    monitors.close()
    assert "is off from now on" not in caplog.text


@pytest.mark.heavy
def test_prometheus_reads_the_latest_metrics(tmp_path: Path):
    port = free_port()
    section = MonitorsSection(prometheus=PrometheusSection(port=port))
    monitors = build_monitors(section, RunDir(tmp_path), "trainer", "mine")
    monitors.log(1, {"loss/mean": 0.5})
    monitors.log(2, {"loss/mean": 0.25})
    expected = 'stretto_loss_mean{role="trainer",run="mine"} 0.25\n'
    for _ in range(100):
        try:
            with open_url(f"http://127.0.0.1:{port}/metrics", 5) as answer:
                text = answer.read().decode()
        except urllib.error.URLError:  # its thread has not begun to listen
            time.sleep(0.05)
            continue
        if expected in text:
            break
    assert expected in text and 'stretto_step{role="trainer",run="mine"} 2.0\n' in text
    with open_url(f"http://127.0.0.1:{port}/health", 5) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError):
        open_url(f"http://127.0.0.1:{port}/other", 5)
    monitors.close()
