"""The replies of a frozen model, kept over starts of a run: a run that is continued does not pay for them again.

One small database per model in RUN/replies, with the latest replies only. It is a cache: a row that a power cut has
lost is asked for again, and a file that cannot be read is made anew.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import msgspec

from stretto.envs.models import ModelReply

logger = logging.getLogger(__name__)

_TABLE = "CREATE TABLE IF NOT EXISTS replies (number INTEGER PRIMARY KEY, key BLOB UNIQUE NOT NULL, reply BLOB)"


class KeptReplies:
    """The latest `most` replies of one model, by the digest of their request. `path` None keeps none."""

    def __init__(self, path: Path | None, most: int) -> None:
        self._path, self._most = path if most else None, most
        self._db: sqlite3.Connection | None = None

    def load(self) -> list[tuple[bytes, ModelReply]]:
        """The replies of earlier starts, the latest last."""
        if self._path is None:
            return []
        try:
            return self._open(self._path)
        except (sqlite3.DatabaseError, msgspec.MsgspecError, OSError) as cause:
            logger.warning("%s: %s; it is made anew, and its replies are asked for again", self._path, cause)
        try:
            self._remove(self._path)
            return self._open(self._path)
        except (sqlite3.DatabaseError, OSError) as cause:
            self._end(cause)
            return []

    def _open(self, path: Path) -> list[tuple[bytes, ModelReply]]:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        # A killed process loses nothing; a power cut may lose the last rows.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(_TABLE)
        self._forget_old()
        rows = self._db.execute("SELECT key, reply FROM replies ORDER BY number")
        return [(key, msgspec.json.decode(reply, type=ModelReply)) for key, reply in rows]

    def _forget_old(self) -> None:
        assert self._db is not None
        self._db.execute("DELETE FROM replies WHERE number <= (SELECT max(number) FROM replies) - ?", (self._most,))

    def _remove(self, path: Path) -> None:
        self.close()
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    def add(self, key: bytes, reply: ModelReply) -> None:
        """Keep a reply. A disk that is full or broken ends the keeping, not the run."""
        if self._db is None:
            return
        try:
            self._db.execute(
                "INSERT OR REPLACE INTO replies (key, reply) VALUES (?, ?)", (key, msgspec.json.encode(reply))
            )
            self._forget_old()
        except sqlite3.Error as cause:
            self._end(cause)

    def _end(self, cause: Exception) -> None:
        logger.warning("%s: %s; replies are kept in memory alone from now on", self._path, cause)
        self.close()

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
