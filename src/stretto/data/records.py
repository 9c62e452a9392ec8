"""Records of local .jsonl and .parquet files and of data sets of the Hub, each with its place (`file:line`).

A source is written `path`, or `path@[a:b]` for records a to b - 1; a and b may be missing or negative, as in a Python
slice. A directory stands for its .jsonl and .parquet files, sorted by name. A path that exists, or ends in .jsonl,
.json, .parquet or .csv, is a file; any other text `ORG/NAME[SPLIT]` or `ORG/NAME:CONFIG[SPLIT]` is a data set of the
Hub (hub.py). No line is skipped: the first line that is not a JSON object is an error that names file and line.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, DataError, json_fault
from stretto.base.foreign import call, load_function
from stretto.data.hub import looks_like_hub_name, parse_bare_name, parse_source, read_hub
from stretto.data.values import without_null_columns

SUFFIXES = (".jsonl", ".parquet")
_FILE_SUFFIXES = (*SUFFIXES, ".json", ".csv")
_SLICE = re.compile(r"(?P<path>.+?)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


class Place(str):
    """The place of a record, `file:line`, for error messages; relative paths in it begin in `folder`."""

    folder: Path

    def __new__(cls, text: str, folder: Path) -> Place:
        place = super().__new__(cls, text)
        place.folder = folder
        return place


Record = tuple[str, dict[str, Any]]
"""The place of a record for error messages, and its content."""


def read_records(
    source: str | Path, setting: str = "the data", *, is_streamed: bool = False, convert: str | None = None
) -> Iterator[Record]:
    """All records of a source, in order; `setting` names the source's setting in messages.

    is_streamed: read a data set of the Hub without a copy on disk. convert: `module:function`, whose result replaces
    each record.

    Raises: ConfigError if the path does not exist; DataError for a malformed record or an empty slice.
    """
    records = _read_source(source, setting, is_streamed)
    return records if convert is None else _converted(records, convert)


def _read_source(source: str | Path, setting: str, is_streamed: bool) -> Iterator[Record]:
    path, start, stop = split_source(os.path.expanduser(str(source)), setting)
    if (elsewhere := _not_a_path(path)) and not Path(path).exists():
        raise ConfigError(f"{setting} = {path!r}: {elsewhere}")
    if (found := re.search(r"\$(\w+|\{\w+\})", path)) and not Path(path).exists():
        raise ConfigError(
            f"{setting} = {path!r}: only a shell replaces {found[0]}, and no shell reads this; write the whole path, "
            "or begin it with ~ for your home directory"
        )
    is_path = Path(path).exists() or path.endswith(_FILE_SUFFIXES)
    hub = None if is_path else parse_source(path) or parse_bare_name(path)
    if is_streamed and hub is None and files_of(Path(path), setting):
        raise ConfigError(f"{setting} = {path!r} is a file, which cannot be streamed; remove streaming")
    if hub is not None:
        records = read_hub(hub, setting, is_streamed=is_streamed)
    else:
        records = (record for file in files_of(Path(path), setting) for record in _read_file(file))
    if (start or 0) < 0 or (stop or 0) < 0:
        everything = list(records)
        chosen: Iterator[Record] = iter(everything[start:stop])
    else:
        chosen = islice(records, start, stop)
    first = next(chosen, None)
    if first is None:
        is_whole = start is None and stop is None
        what = "has no record; write one JSON object per line" if is_whole else "is an empty slice; correct its bounds"
        raise DataError(f"{setting} = {str(source)!r} {what}")
    yield first
    yield from chosen


def _converted(records: Iterator[Record], path: str) -> Iterator[Record]:
    """The records as the function at `path` returns them."""
    function = load_function(path, {}, "convert")
    for where, record in records:
        converted = call(function, record, {}, f"{where}: convert = {path!r}")
        if not isinstance(converted, dict):
            raise DataError(
                f"{where}: convert = {path!r} must return a record, a dictionary; it returned "
                f"{type(converted).__name__}"
            )
        yield where, converted


def split_source(source: str, setting: str = "the data") -> tuple[str, int | None, int | None]:
    """Path, start and stop of `path@[start:stop]`.

    Raises: ConfigError for a malformed slice.
    """
    if "@[" not in source:
        return source, None, None
    match = _SLICE.fullmatch(source)
    if match is None:
        raise ConfigError(f"{setting} = {source!r}: write a slice as `file@[a:b]`, such as `rows.jsonl@[0:1000]`")
    start, stop = (int(part) if part else None for part in match.group("start", "stop"))
    return match["path"], start, stop


def _not_a_path(path: str) -> str:
    """What to write for an address or a pattern, neither of which is read; "" for others."""
    if "://" in path and path.partition("://")[0].isalnum():
        return "addresses are not read; copy the file here, or give a data set of the Hub as 'ORG/NAME:CONFIG[train]'"
    if any(sign in path for sign in "*?") and path.endswith(_FILE_SUFFIXES):
        return f"patterns are not read; give the directory, {str(Path(path).parent)!r}, or a list of files"
    return ""


def _advice(path: Path) -> str:
    """Advice for a path that does not exist: a file with a similar name, or where relative paths begin."""
    import difflib

    folder = path.parent
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f" Did you mean {str(folder / near[0])!r}?"
    where = "" if path.is_absolute() else f" Relative paths begin in {str(Path.cwd())!r}."
    return f"{where} Give an existing .jsonl or .parquet file, or a directory of them."


def files_of(path: Path, setting: str) -> list[Path]:
    """The file at a path, or the .jsonl and .parquet files of a directory.

    Raises: ConfigError if there is none.
    """
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
        if not files:
            others = sorted(each for each in path.iterdir() if each.is_file())
            has = f"it has {', '.join(each.name for each in others[:4])}." if others else "it has no file."
            way = next(filter(None, map(_how_to_convert, others)), " Give a file, or the directory that has them.")
            raise ConfigError(f"{setting} = {str(path)!r}: no .jsonl or .parquet file in this directory; {has}{way}")
        return files
    if not path.is_file():
        advice = ""
        if looks_like_hub_name(str(path)) and not path.name.endswith(_FILE_SUFFIXES):
            advice = f" A data set of the Hub is written with its split, '{path}[train]' or 'ORG/NAME:CONFIG[train]'."
        raise ConfigError(f"{setting} = {str(path)!r}: no such file or directory.{advice or _advice(path)}")
    if path.suffix.lower() in SUFFIXES and path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{setting} = {str(path)!r}: its ending must be in small letters: rename it to "
            f"{path.with_suffix(path.suffix.lower()).name}"
        )
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{setting} = {str(path)!r}: must end in .jsonl or .parquet.{_how_to_convert(path)}")
    return [path]


def _how_to_convert(path: Path) -> str:
    """A command that makes a .jsonl file of one with another suffix; "" if there is none."""
    file = "open(sys.argv[1], encoding='utf-8-sig', newline='')"  # as Excel writes it, too
    read = {
        ".csv": f"csv.DictReader({file}, delimiter='{_separator_of(path)}')",
        ".tsv": f"csv.DictReader({file}, delimiter=chr(9))",
        ".json": f"json.load({file})",
    }.get(path.suffix.lower())
    unpack = {".gz": "gunzip -k", ".zst": "unzstd", ".zip": "unzip", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}
    if path.suffix.lower() in unpack:
        return f" Unpack it: {unpack[path.suffix.lower()]} {shlex.quote(str(path))}"
    if read is None:
        return " Write one JSON object per line into a .jsonl file." if path.is_file() else ""
    code = f"import csv, json, sys; [print(json.dumps(row)) for row in {read}]"
    old, new = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".jsonl")))
    return f' To make one of it: python -c "{code}" {old} > {new}'


def _separator_of(path: Path) -> str:
    """What separates the columns of a .csv file: a semicolon where its first line has no comma, but semicolons."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(10_000)
    except OSError:
        return ","
    return ";" if ";" in first and "," not in first else ","


PACKED = {
    b"\x1f\x8b": "packed by gzip; unpack it: gunzip -c OLD > NEW.jsonl",
    b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it: unzstd -c OLD > NEW.jsonl",
    b"PK\x03\x04": "a zip archive; unpack it: unzip OLD",
    b"PAR1": "parquet; name it NEW.parquet",
}
"""What files are that begin so, whatever their names."""


def from_json(text: bytes | str, where: str) -> Any:
    """Decode a JSON text; `where` is its place for error messages.

    Raises: DataError with the place and the mistake.
    """
    if isinstance(text, bytes) and (kind := next((each for each in PACKED if text.startswith(each)), None)):
        raise DataError(f"{where}: not text but {PACKED[kind]}")
    if isinstance(text, bytes) and b"\0" in text and not text.strip(b"\0 \t\r\n"):
        raise DataError(f"{where}: zero bytes in place of text, as after a power cut; copy or write the file again")
    if isinstance(text, bytes) and b"\0" in text[:4]:
        raise DataError(f"{where}: not UTF-8 text but UTF-16; convert it: iconv -f utf-16 -t utf-8 OLD > NEW")
    try:
        return json.loads(text)
    except UnicodeDecodeError as cause:
        at = f"byte 0x{text[cause.start]:02x} at {cause.start}" if isinstance(text, bytes) else "a byte"
        raise DataError(f"{where}: not UTF-8 text ({at}); convert it: iconv -f latin1 -t utf-8 OLD > NEW") from cause
    except json.JSONDecodeError as cause:
        raise DataError(f"{where}: not JSON: {json_fault(cause)}") from cause
    except RecursionError:
        raise DataError(f"{where}: too many levels of lists and objects; flatten it") from None
    except ValueError as cause:  # a number with thousands of digits
        raise DataError(f"{where}: not read: {cause}; write such a number as text") from cause


def _read_file(file: Path) -> Iterator[Record]:
    if file.suffix == ".parquet":
        yield from _read_parquet(file)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                where = Place(f"{file}:{number}", file.parent)
                row = from_json(line, where)
                if not isinstance(row, dict):
                    raise DataError(
                        f"{where}: a row must be an object, got {type(row).__name__}; write one object per line."
                    )
                yield where, row


def _read_parquet(file: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(f"{file}: parquet files are read by pyarrow; pip install 'stretto[parquet]'.") from None

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield Place(f"{file}, row {number}", file.parent), without_null_columns(row)
    except (pyarrow.ArrowException, OSError) as cause:
        raise DataError(f"{file}: not a readable parquet file: {cause} Copy or write it again.") from cause
