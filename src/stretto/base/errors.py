"""Every error that a user can meet, one class per person who must act.

A message says where (TOML path, file:line, record id), the value got, the rule, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

ENDED_FIRST = "ended while this rank was still working"
"""In the message of a process that fails because another has ended, by default the orchestrator: that one knows the
cause. The name of another process stands before it."""


class StrettoError(Exception):
    """Something is wrong outside our own code; the command line prints it without a traceback."""


class ConfigError(StrettoError):
    """The user must change a setting or a command."""


class DataError(StrettoError):
    """The data, the checkpoint or the model directory is bad; who wrote it must fix it."""


class EnvError(StrettoError):
    """The environment failed (a rollout, its reward, its task list)."""


class EngineError(StrettoError):
    """Infrastructure failed: an engine, a process, a device, a deadline."""


class WireError(StrettoError):
    """Two processes do not understand each other: schema, version or network."""


@contextmanager
def boundary(kind: type[StrettoError], where: str) -> Iterator[None]:
    """Turn any exception except a StrettoError into `kind`, with `where` in its message.

    Use it only at the named boundaries: a rollout, a server request, a monitor, the launcher.
    """
    try:
        yield
    except StrettoError:
        raise
    except Exception as cause:
        raise kind(f"{where}: {type(cause).__name__}: {cause}") from cause
