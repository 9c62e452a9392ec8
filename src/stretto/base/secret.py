"""The secret of a run, which only its own processes have.

It is a line of text in RUN/secret, mode 0600, written by the launcher or by the first process that is started alone.
Where hosts share no file system, set the environment variable STRETTO_RUN_SECRET instead. The secret is never sent:
each wire uses a key derived from it for one purpose, and no key reveals another key or the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.files import flush
from stretto.base.paths import RunDir

SECRET_VAR = "STRETTO_RUN_SECRET"
MIN_CHARS = 32
_WRITTEN_WITHIN_S = 5.0  # longest time between creating and writing the file
_POLL_S = 0.05


class Secret:
    """A secret, from which keys are derived; its text is never printed."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()

    def __repr__(self) -> str:
        return "Secret(***)"

    def key(self, purpose: str) -> bytes:
        """32 bytes for one purpose, the same in every process of the run."""
        return hmac.digest(self._text, purpose.encode(), hashlib.sha256)

    def text_key(self, purpose: str) -> str:
        """64 hexadecimal characters for one purpose."""
        return self.key(purpose).hex()


def load_secret(run: RunDir) -> Secret:
    """The run's secret; created if the run has none yet.

    Raises: ConfigError if other users can read it or it is too short.
    """
    if (secret := _from_environment()) is not None:
        return secret
    _make(run.secret)
    return _read(run.secret)


def find_secret(run: RunDir, timeout_s: float, who: str = "this node") -> Secret:
    """The secret that another host's launcher writes to a shared run directory; waits for it.

    who: this node's name in messages.

    Raises: ConfigError if there is none within timeout_s, for example because the hosts share no file system.
    """
    deadline = time.monotonic() + timeout_s
    while (secret := _from_environment()) is None and not run.secret.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{who} does not have the run's secret: there is no {run.secret} and {SECRET_VAR} is not set. "
                f"Start the first node, give all nodes the same output_dir, or set {SECRET_VAR} to the same "
                f"{MIN_CHARS} or more random characters on each (openssl rand -hex 32)."
            )
        time.sleep(_POLL_S)
    return secret or _read(run.secret)


def without_secret() -> dict[str, str]:
    """Environment variables for a child that runs user code and must not see the secret."""
    return {SECRET_VAR: ""}


def _from_environment() -> Secret | None:
    text = os.environ.get(SECRET_VAR, "").strip()
    return _checked(text, SECRET_VAR) if text else None


def _make(path: Path) -> None:
    """Write a new secret unless there is one; if several processes call it, one of them writes.

    It is there as a whole or not at all, also if this process is killed meanwhile.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.randbelow(10**12)}")  # several threads may write
    try:
        _write(part)
        _link(part, path)
    except FileExistsError:
        return
    finally:
        part.unlink(missing_ok=True)
    flush(path.parent)


def _link(part: Path, path: Path) -> None:
    """Give a finished file its name; a rename would replace what another process has written.

    Raises: FileExistsError if another process has.
    """
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        _write(path)


def _write(path: Path) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Secret:
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    while not (text := path.read_text()).endswith("\n"):  # without links: created, but not yet written
        if time.monotonic() > deadline:
            raise ConfigError(f"{path} is incomplete; delete it while no process of the run is running.")
        time.sleep(_POLL_S)
    if mode := stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(
            f"{path} is readable by other users (mode {0o600 | mode:04o}), who could then take part in the run; "
            f"`chmod 600` it, or set {SECRET_VAR} if the file system has no modes."
        )
    return _checked(text.strip(), str(path))


def _checked(text: str, where: str) -> Secret:
    if len(text) < MIN_CHARS:
        raise ConfigError(
            f"{where} has {len(text)} characters; a secret needs {MIN_CHARS} or more (openssl rand -hex 32)."
        )
    return Secret(text)
