"""Lines of .jsonl files that editors and power cuts leave."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from stretto.base.errors import DataError
from stretto.data.records import read_records


def test_an_empty_line_behind_a_byte_order_mark_is_an_empty_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(codecs.BOM_UTF8 + b'\r\n\r\n{"prompt": "a"}\r\n')
    assert [(str(where), row) for where, row in read_records(str(file))] == [(f"{file}:3", {"prompt": "a"})]


def test_zero_bytes_of_a_power_cut_are_not_called_utf_16(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + bytes(64) + b"\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: zero bytes in place of text.*copy or write the file again"):
        list(read_records(str(file)))
