"""Rows as tables of other libraries, records as files, and how far a run is as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto_python.given.records import Records, columns_of, is_records
from stretto_python.progress import Progress
from stretto_python.rows import LazyRows, Rows

ROWS = [{"step": 1, "ids": np.arange(2)}, {"step": 2, "loss": 0.5}]


def test_rows_become_tables_in_which_a_missing_value_is_empty() -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    rows = Rows(ROWS)
    assert isinstance(rows, list) and list(rows.to_pandas().columns) == ["step", "ids", "loss"]
    table = rows.to_dataset()
    assert isinstance(table, datasets.Dataset) and table["loss"][:] == [None, 0.5] and table["ids"][0] == [0, 1]
    assert pandas.isna(rows.to_pandas()["loss"][0])


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigError, match="a table of polars need it: pip install polars"):
        Rows(ROWS).to_polars()


def test_lazy_rows_are_read_when_they_are_asked_for() -> None:
    read = []

    def reader(rows):
        for row in rows:
            read.append(row["step"])
            yield {**row, "text": str(row["step"])}

    rows = LazyRows([{"step": step} for step in range(100)], reader)
    assert len(rows) == 100 and read == []
    assert rows[-1]["text"] == "99" and next(iter(rows))["text"] == "0" and read == [99, 0]
    assert [row["step"] for row in rows[2:4] + rows[:1]] == [2, 3, 0]
    assert repr(rows) == "<100 rows: step, text>" and len(list(rows)) == 100


def test_records_of_any_kind_are_lines_with_every_column(tmp_path: Path) -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    rows = [{"prompt": "a", "n": np.int64(1)}, {"prompt": "b", "more": [1]}]
    whole = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    for given in (rows, tuple(rows), datasets.Dataset.from_list(whole), pandas.DataFrame(whole)):
        assert is_records(given) and columns_of(given, "dataset")[:2] == ["prompt", "n"]
        records = Records.of(given, "dataset")
        records.write(tmp_path / "rows.jsonl")
        first, second = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
        assert first["n"] == 1 and list(first) == list(second) == records.columns
    assert not is_records("train.jsonl") and not is_records(["a.jsonl", "b.jsonl"])
    assert columns_of(str(tmp_path / "rows.jsonl"), "dataset") == ["prompt", "n"]


def test_records_that_are_no_text_are_refused_with_their_place(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="dataset, record 1: prompt: a object is no JSON"):
        Records.of([{"prompt": "a"}, {"prompt": object()}], "dataset").write(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="dataset has the splits train; give one of them"):
        Records.of(datasets.DatasetDict(train=datasets.Dataset.from_list([{"a": 1}])), "dataset")


def test_a_picture_grows_with_the_metrics(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine")
    run.configs.mkdir(parents=True)
    run.config("run").write_text('{"max_steps": 4}')
    run.metrics("orchestrator").parent.mkdir()
    progress = Progress(run, is_own=True)
    progress.refresh()
    progress.state, progress.lines = "running", ["loading <model>"]
    assert progress.svg() == "" and "loading &lt;model&gt;" in progress._repr_html_()
    with run.metrics("orchestrator").open("a") as file:
        file.write('{"step": 0, "eval/x/sampled/mean": 0.1}\n{"step": 1, "reward/mean": 0.25}\n')
        file.flush()
        progress.refresh()
        assert progress.svg().count("<circle") == 1
        file.write('{"step": 2, "reward/mean": 0.75, "eval/x/sampled/mean": 0.5}\n')
    progress.refresh()
    assert "step 2 of 4" in progress.title() and "held out, sampled 0.100 -> 0.500" in repr(progress)
    assert "width:50.0%" in progress._repr_html_() and progress.left_s() is not None
