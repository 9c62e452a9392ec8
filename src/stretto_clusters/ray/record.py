"""Which command runs a run on a Ray cluster: RUN/launch.json, and RUN/ray/lock, which it holds as long as it lives."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import try_lock, write_holder
from stretto.base.paths import RunDir
from stretto.launch.launchers import JobConfig
from stretto_clusters.job import VERBS

SUBMISSION = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable in which `ray job submit` describes this job."""


def record(cfg: JobConfig) -> dict[str, Any]:
    """This command, for RUN/launch.json."""
    assert cfg.ray is not None
    record: dict[str, Any] = {"by": "ray", "verb": VERBS[type(cfg)], "host": socket.gethostname()}
    record |= {"pid": os.getpid(), "address": cfg.ray.address or os.environ.get("RAY_ADDRESS")}
    with suppress(KeyError, ValueError):
        record["job"] = json.loads(os.environ[SUBMISSION])["metadata"]["job_submission_id"]
    return record


@contextmanager
def hold(run: RunDir) -> Iterator[None]:
    """Hold RUN/ray/lock. Raises: ConfigError if another command holds it."""
    run.ray.mkdir(parents=True, exist_ok=True)
    fd = os.open(run.ray / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not try_lock(fd):
            raise ConfigError(
                f"run {run.path.name!r} in {run} is on a Ray cluster already; follow it with `stretto status {run}`, "
                f"end it with `stretto stop {run}`, or give this run another name with --run.name."
            )
        write_holder(fd)
        yield
    finally:
        os.close(fd)
