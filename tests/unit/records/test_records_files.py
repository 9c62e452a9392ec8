"""Files of records: slices as Python cuts, and every malformed line is reported with its place."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import ConfigError, DataError
from stretto.data.records import read_records, split_source

ROWS = [{"n": i} for i in range(7)]
ends = st.one_of(st.none(), st.integers(-9, 9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@given(start=ends, stop=ends)
def test_a_slice_is_what_python_cuts(folder, name, start, stop):
    source = f"{folder / name}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = ROWS[start:stop]
    if not expected:
        with pytest.raises(DataError, match="empty slice"):
            list(read_records(source))
        return
    assert [record for _, record in read_records(source)] == expected


def test_a_directory_is_its_files_in_order_and_every_record_has_its_place(folder):
    records = list(read_records(folder))
    assert [record for _, record in records] == ROWS + ROWS
    assert records[2][0] == f"{folder / 'rows.jsonl'}:3"
    assert records[7][0] == f"{folder / 'rows.parquet'}, row 1"
    assert split_source("a@b.jsonl") == ("a@b.jsonl", None, None)


WRONG = {
    "a comma too many": (
        '{"a": 1}\n{"prompt": [{"role": "user", "step_loss_mask": 1,}]}\n',
        [":2: not JSON: a comma before '}'", "remove it"],
    ),
    "a comma too many in a list": ('{"a": [1, 2, ]}\n', [":1: not JSON: a comma before ']'"]),
    "a comma inside a text is none": ('{"a": ",}", "b" 1}\n', [":1: not JSON: a colon is missing before `1}`"]),
    "an object over several lines": ('{\n  "a": 1\n}\n', [":1: not JSON: the line ends where the object begins"]),
    "no object": ("[1]\n", [":1: a row must be an object, got list"]),
    "cut off": ('{"a": 1}\n\n{"a": \n', [":3: not JSON"]),
    "not text": (b'{"a": "\xff"}\n', [":1: not UTF-8 text"]),
    "packed": (b"\x1f\x8b\x08\x00\x00\x00", [":1: not text but packed by gzip", "gunzip"]),
    "parquet by another name": (b"PAR1\x15\x04\n", [":1: not text but parquet"]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_malformed_line_is_named_and_nothing_is_skipped(tmp_path, mistake):
    content, parts = WRONG[mistake]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        list(read_records(file))
    assert str(caught.value).startswith(str(file))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rows.csv", "must end in .jsonl or .parquet"),
        ("none.jsonl", "no such file or directory"),
        ("rows.jsonl@[1]", r"write a slice as `file@\[a:b\]`"),
        ("empty", "no .jsonl or .parquet file in this directory"),
    ],
)
def test_a_missing_path_is_reported_with_its_setting(tmp_path, source, message):
    (tmp_path / "rows.csv").write_text("a\n1\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message) as caught:
        list(read_records(tmp_path / source, "dataset: path"))
    assert str(caught.value).startswith("dataset: path = ")


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(read_records(tmp_path / "rows.parquet"))
