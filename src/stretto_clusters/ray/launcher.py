"""Ray as a launcher: a command on the machines of a Ray cluster.

It writes its state to RUN/ray/state.json, and looks for RUN/ray/stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto.base.files import holder, read_json, write_atomic
from stretto.base.paths import RunDir
from stretto.launch.launchers import FINISHES, JobConfig, Launcher


class Ray(Launcher):
    def main(self, cfg: JobConfig, *, check: Callable[[], None] = lambda: None) -> int:
        from stretto_clusters.ray import run

        return run.main(cfg, check=check)

    def screen(self, cfg: JobConfig) -> str:
        from stretto_clusters.ray import placing

        return placing.screen(cfg)

    def status(self, run: RunDir, record: Mapping[str, Any], state: str) -> dict[str, str]:
        text = _state_text(run, record)
        return {"state": state, "ray": text} if text.startswith("ended") else {"state": text}

    def stop(self, run: RunDir, record: Mapping[str, Any], *, now: bool) -> str:
        if holder(run.ray / "lock") is None:
            return f"{run} is not running"
        write_atomic(run.ray / "stop", b"now\n" if now else b"finish\n")
        return f"{run}, on Ray, {'ends at once' if now else FINISHES}"


def _state_text(run: RunDir, record: Mapping[str, Any]) -> str:
    status = read_json(run.ray / "state.json") or {"state": "starting", "text": "", "restarts": 0}
    text = f"{status['state']} on Ray{': ' if status['text'] else ''}{status['text']}"
    if status["restarts"]:
        text += f"; started again {status['restarts']} times"
    who = f"job {record['job']}" if "job" in record else f"process {record['pid']}"
    if status["state"] == "ended":
        return text
    if holder(run.ray / "lock") is None:
        return f"ended: {who} on {record['host']}, which waited for it, is gone; it was {text}"
    return f"{text}; {who} on {record['host']} waits for it"


RAY = Ray()
