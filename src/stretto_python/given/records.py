"""Records that are objects (lists of dicts, tables of datasets, pandas and polars), as files that a run reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import atomic_path

LABELS = ("label", "answer", "solution")
"""Columns that have the right answer, the first that records have."""
PROMPTS = ("prompt", "question")
"""Columns that have the prompt, the first that records have."""


@dataclass
class Records:
    """Records of a call, and how they are written."""

    columns: list[str]
    kind: str
    """The ending of the file: jsonl or parquet."""
    write: Callable[[Path], Any]

    @classmethod
    def of(cls, value: Any, key: str) -> Records:
        """Raises: ConfigError for what is no table of records."""
        module = type(value).__module__.partition(".")[0]
        if module == "datasets":
            return cls._of_datasets(value, key)
        if hasattr(value, "to_dicts"):  # polars
            value = value.to_dicts()
        elif hasattr(value, "to_dict") and hasattr(value, "columns"):  # pandas
            value = value.to_dict("records")
        rows = list(value)
        wrong = next((index for index, row in enumerate(rows) if not isinstance(row, Mapping)), None)
        if wrong is not None or not rows:
            what = f"its entry {wrong} is a {type(rows[wrong]).__name__}" if wrong is not None else "it is empty"
            raise ConfigError(f"{key}: {what}; give a list of dicts with the same keys, one for each record")
        columns = list(dict.fromkeys(str(name) for row in rows for name in row))
        return cls(columns, "jsonl", lambda path: _write_lines(rows, columns, path, key))

    @classmethod
    def _of_datasets(cls, value: Any, key: str) -> Records:
        if hasattr(value, "keys"):
            raise ConfigError(f"{key} has the splits {', '.join(value.keys())}; give one of them: dataset['train']")
        if not hasattr(value, "to_parquet") or not hasattr(value, "__len__"):
            raise ConfigError(
                f"{key} is a {type(value).__name__}, whose end is not known; give list(dataset.take(10000)), or the "
                'name of the data set with streaming = true in the arguments of "dataset"'
            )
        columns = list(value.column_names)
        if any("Image" in repr(feature) for feature in (value.features or {}).values()):
            return cls(columns, "parquet", lambda path: value.to_parquet(str(path)))
        return cls(columns, "jsonl", lambda path: _write_lines(value, columns, path, key))


def is_records(value: Any) -> bool:
    """Whether a value is records and not the name of a file with them, or a list of names."""
    if isinstance(value, str | Path | Mapping):
        return type(value).__module__.partition(".")[0] == "datasets"  # a DatasetDict is a dict
    if isinstance(value, Sequence):
        return not all(isinstance(each, str | Path) for each in value) or not value
    return hasattr(value, "__iter__")


def columns_of(sources: Any, key: str) -> list[str]:
    """The columns of the first record, of records or of a file with them."""
    if is_records(sources):
        return Records.of(sources, key).columns
    from stretto.data.records import read_records

    if not isinstance(sources, str | Path | list | tuple) or not sources:
        raise ConfigError(f"{key} = {sources!r:.60}: give a list of dicts, a data set, a table, or a file of records")
    first = str(sources if isinstance(sources, str | Path) else next(iter(sources)))
    is_here = Path(first.partition("@")[0]).expanduser().exists()
    if isinstance(sources, list | tuple) and not is_here and "/" not in first and "." not in first:
        raise ConfigError(
            f'{key}: its entry 0 is the text {first!r:.60}; records are dicts, such as {{"prompt": {first!r:.60}}}, '
            "and a list of texts names files"
        )
    return [str(name) for _, row in islice(read_records(first, key, is_streamed=not is_here), 1) for name in row]


def first_of(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """The first of these names that is a column."""
    return next((name for name in names if name in columns), None)


def _write_lines(rows: Any, columns: Sequence[str], path: Path, key: str) -> None:
    """Write records as lines of JSON, each with every column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial, partial.open("w", encoding="utf-8") as file:
        for index, row in enumerate(rows):
            for name in columns:
                _check_json(row.get(name), f"{key}, record {index}: {name}")
            file.write(json.dumps({name: row.get(name) for name in columns}, default=_number) + "\n")


def _check_json(value: Any, where: str) -> None:
    try:
        json.dumps(value, default=_number)
    except (TypeError, ValueError, RecursionError) as cause:
        raise ConfigError(
            f"{where}: {cause}; records hold text, numbers, lists and dicts. Images: give a datasets.Dataset, or a file"
        ) from None


def _number(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON")
