"""Requests of one run since its state was saved, and results that its client has not fetched yet, as files.

`<seq>.<kind>` is the body of a request, `<seq>.result` its result, each behind its crc32. After a crash of the hub or
the trainer the requests are computed again, in order, from the saved state, so that a run loses nothing. One whose file
is damaged is never computed.
"""

from __future__ import annotations

import logging
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from stretto.base.errors import DataError
from stretto.base.files import flush, put_in_place, write_atomic
from stretto_service.futures import Result

logger = logging.getLogger(__name__)

REFUSED = "refused"
"""Kind of a request that was not valid; its number cannot be used again."""
_RESULT = "result"
_CRC_BYTES = 4


class Entry(NamedTuple):
    """A request as its client sent it."""

    seq: int
    kind: str
    body: bytes


class Journal:
    """The files of one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(".*.part"):  # of a process that has died
            if path.suffixes[-2:-1] != [f".{os.getpid()}"]:
                path.unlink(missing_ok=True)

    def write(self, seq: int, kind: str, body: bytes) -> None:
        """Write a request; it is on the disk, safe from a power cut, before it is answered."""
        write_atomic(self._path(seq, kind), _crc_of(body) + body, is_durable=True)

    def prepare(self, seq: int, kind: str, body: bytes) -> Path:
        """Write a request that does not count before `put`; may be called in another thread."""
        part = self._directory / f".{seq:08d}.{kind}.{os.getpid()}.part"
        with part.open("wb") as file:
            file.write(_crc_of(body))
            file.write(body)
        flush(part)
        return part

    def put(self, part: Path, seq: int, kind: str) -> None:
        """Let a prepared request count; it is on the disk after `settle`."""
        put_in_place(part, self._path(seq, kind))

    def settle(self) -> None:
        """Wait until the names of all requests are on the disk; may be called in another thread."""
        with suppress(FileNotFoundError):  # the run has ended
            flush(self._directory)

    def write_result(self, seq: int, result: Result) -> None:
        """Write a result. A power cut may take it as long as its request is kept, which is then computed again."""
        body = msgspec.msgpack.encode(result)
        write_atomic(self._path(seq, _RESULT), _crc_of(body) + body)

    def refuse(self, seq: int) -> None:
        """Mark a number as used; a request with it is not computed, now or later."""
        self.write(seq, REFUSED, b"")
        for path in self._files():
            number, kind = self._parts(path)
            if number == seq and kind not in (REFUSED, _RESULT):
                path.unlink(missing_ok=True)

    def requests(self, after: int = 0) -> list[Entry]:
        """Requests with a higher number than `after`, in order, one per number.

        Raises: DataError for a damaged file.
        """
        found: dict[int, tuple[str, Path]] = {}
        for path in self._files():
            seq, kind = self._parts(path)
            if seq > after and kind != _RESULT and (seq not in found or kind == REFUSED):
                found[seq] = (kind, path)
        read = lambda kind, path: b"" if kind == REFUSED else _read(path)
        return [Entry(seq, kind, read(kind, path)) for seq, (kind, path) in sorted(found.items())]

    def results(self) -> dict[int, Result]:
        """The kept results, by number, without damaged ones: a power cut may have emptied or cut them."""
        found = {}
        for path in self._files():
            seq, kind = self._parts(path)
            if kind == _RESULT:
                try:
                    found[seq] = msgspec.msgpack.decode(_read(path), type=Result)
                except (DataError, msgspec.DecodeError) as error:
                    logger.warning("%s; its request is computed again if it is kept", error)
        return found

    def forget(self, up_to: int, *, unsent: set[int]) -> None:
        """Delete requests up to this number, and their results except those in `unsent`, which are made durable."""
        for seq in unsent:
            flush(self._path(seq, _RESULT))
        flush(self._directory)
        for path in self._files():
            seq, kind = self._parts(path)
            if seq <= up_to and not (kind == _RESULT and seq in unsent):
                path.unlink(missing_ok=True)

    def _path(self, seq: int, kind: str) -> Path:
        return self._directory / f"{seq:08d}.{kind}"

    def _files(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if path.name[:8].isdigit()]

    def _parts(self, path: Path) -> tuple[int, str]:
        number, _, kind = path.name.partition(".")
        return int(number), kind


def _crc_of(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CRC_BYTES, "big")


def _read(path: Path) -> bytes:
    """What was written behind its crc32. Raises: DataError if it is not the same any more."""
    data = path.read_bytes()
    body = data[_CRC_BYTES:]
    if data[:_CRC_BYTES] != _crc_of(body):
        raise DataError(f"{path}: damaged: it is not as it was written ({len(data)} bytes)")
    return body
