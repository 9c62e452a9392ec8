"""Rows that become tables: dicts with `to_pandas`, `to_polars`, `to_dataset`; a library is imported if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from stretto.base.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    import pandas
    import polars

Row = dict[str, Any]


class Table:
    """What turns rows into tables of other libraries; a column that a row does not have is empty there."""

    def __iter__(self) -> Iterator[Row]:
        raise NotImplementedError

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas.DataFrame with a row each. Raises: ConfigError without pandas."""
        return _library("pandas").DataFrame(list(self))

    def to_polars(self) -> polars.DataFrame:
        """A polars.DataFrame with a row each. Raises: ConfigError without polars."""
        return _library("polars").DataFrame(_columns(self), strict=False)

    def to_dataset(self) -> datasets.Dataset:
        """A datasets.Dataset with a row each. Raises: ConfigError without datasets."""
        return _library("datasets").Dataset.from_dict(_columns(self))


class Rows(Table, list[Row]):
    """A list of dicts."""

    def __iter__(self) -> Iterator[Row]:
        return list.__iter__(self)


class LazyRows(Table, Sequence[Row]):
    """Rows that are read as they are asked for, and not kept: iterating over many needs the memory of few."""

    def __init__(self, rows: Sequence[Row], read: Callable[[Iterable[Row]], Iterator[Row]]) -> None:
        """rows: what is known of each without reading; read: makes whole rows of some of them."""
        self._rows, self._read = rows, read

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return self._read(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> LazyRows: ...
    def __getitem__(self, index: int | slice) -> Row | LazyRows:
        if isinstance(index, slice):
            return LazyRows(self._rows[index], self._read)
        return next(self._read([self._rows[index]]))

    def __add__(self, other: Iterable[Row]) -> Rows:
        return Rows([*self, *other])

    def __radd__(self, other: Iterable[Row]) -> Rows:
        return Rows([*other, *self])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        names = ", ".join(next(iter(self), {}))
        return f"<{len(self)} rows: {names}>"


def _columns(rows: Iterable[Row]) -> dict[str, list[Any]]:
    """The columns of rows, with Python's own types."""
    plain = [_plain(row) for row in rows]
    return {name: [row.get(name) for row in plain] for name in dict.fromkeys(name for row in plain for name in row)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name != name:
            raise
        raise ConfigError(f"rows as a table of {name} need it: pip install {name}") from None
