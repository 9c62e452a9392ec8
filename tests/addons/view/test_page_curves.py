"""Curves of the page, and the metrics file that they are read from while it grows."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np

from stretto.monitors.file import MetricsFile, MetricsTail, newest_row, newest_rows, read_metrics
from stretto.monitors.file import _merged as merged_rows
from stretto_view.page import curves


def test_thinned_curves_keep_their_extremes() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=10_000)
    values[1234], values[7777] = 50.0, -50.0
    rows = {"orchestrator": [{"step": n, "time": 3600.0 * n, "reward/mean": v} for n, v in enumerate(values)]}
    found = curves.curve(rows, "reward/mean", points=200)
    assert len(found["x"]) == len(found["y"]) == len(found["smooth"]) <= 202
    assert max(found["y"]) == 50.0 and min(found["y"]) == -50.0 and found["num_rows"] == 10_000
    assert found["x"][0] == 0 and found["x"][-1] == 9999 and found["last"] == values[-1]
    hours = curves.curve(rows, "reward/mean", axis="time", points=200)
    assert hours["x"] == found["x"]


def test_smoothing_is_the_centred_mean_of_what_is_finite() -> None:
    y = [1.0, float("nan"), 3.0, 5.0, 7.0]
    rows = {"trainer": [{"step": n, "time": 0.0, "loss/mean": v} for n, v in enumerate(y)]}
    found = curves.curve(rows, "loss/mean", smooth=0.4)
    assert found["y"] == [1.0, None, 3.0, 5.0, 7.0]
    assert found["smooth"] == [1.0, 2.0, 4.0, 5.0, 6.0]


def test_a_metric_of_two_files_is_taken_from_the_first_and_tokens_are_an_axis() -> None:
    rows = {
        "orchestrator": [{"step": n, "time": 0.0, "time/step": 1.0, "progress/tokens": 10.0 * n} for n in range(3)],
        "trainer": [{"step": n, "time": 0.0, "time/step": 2.0, "loss/mean": 0.5} for n in range(4)],
    }
    assert curves.curve(rows, "time/step")["y"] == [1.0] * 3
    assert curves.curve(rows, "loss/mean", axis="tokens")["x"] == [
        0.0,
        10.0,
        20.0,
    ]  # step 3 has no number of tokens yet
    assert curves.curve(rows, "nothing/of it")["y"] == []
    names = [row["name"] for row in curves.names(rows)]
    assert names[0] == "loss/mean" and set(names) == {"time/step", "progress/tokens", "loss/mean"}


def test_tokens_are_those_of_the_whole_run_and_not_of_one_process() -> None:
    rows = {
        "orchestrator": [
            {"step": n, "time": 0.0, "progress/tokens": 10.0 * n, "progress/total_tokens": 90.0 * n} for n in (1, 2)
        ],
        "trainer": [{"step": n, "time": 0.0, "loss/mean": 0.5, "progress/total_tokens": 7.0} for n in (1, 2)],
    }
    assert curves.curve(rows, "loss/mean", axis="tokens")["x"] == [10.0, 20.0]
    sft = {"sft": [{"step": n, "time": 0.0, "nll/mean": 0.5, "batch/tokens": 100} for n in (1, 2, 3)]}
    assert curves.curve(sft, "nll/mean", axis="tokens")["x"] == [100.0, 200.0, 300.0]


def test_a_metrics_file_is_read_on_as_it_grows_as_if_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not tail.refresh() and tail.rows() == []
    for resumed, steps in ((None, range(1, 6)), (3, range(4, 8)), (None, range(2, 4))):
        file = MetricsFile(path, resumed_step=resumed)
        for step in steps:
            file.log(step, {"reward/mean": step / 10})
            assert tail.refresh() and tail.rows() == read_metrics(path)
        file.close()
    assert [row["step"] for row in tail.rows()] == [1, 2, 3]
    with path.open("a") as half:
        half.write('{"step": 4, "rew')
    assert not tail.refresh() and [row["step"] for row in tail.rows()] == [1, 2, 3]
    assert newest_row(path, "no/such")["step"] == 3
    file = MetricsFile(path, resumed_step=3)
    file.log(2, {"eval/greedy": 1.0})  # of an earlier version, and later
    file.close()
    assert newest_row(path, "reward/mean").items() >= {"step": 3, "reward/mean": 0.3}.items()
    path.write_text('{"step": 9, "time": 0.0}\n')
    assert tail.refresh() and [row["step"] for row in tail.rows()] == [9]


def test_rows_do_not_change_in_the_hand_of_who_has_them(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(1, {"reward/mean": 0.5})
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    tail.refresh()
    [held] = tail.rows()
    file.log(1, {"loss/mean": 2.0})
    file.close()
    assert tail.refresh() and "loss/mean" not in held
    assert {"reward/mean": 0.5, "loss/mean": 2.0}.items() <= tail.rows()[0].items()


def test_rows_in_memory_are_bounded_and_lose_no_peak_and_no_token(tmp_path: Path) -> None:
    num_steps, max_rows, peaks = 20_000, 1200, {3_000: 50.0, 11_111: -50.0, 19_990: 40.0}
    file = MetricsFile(tmp_path / "sft.jsonl")
    tail, most = MetricsTail(tmp_path / "sft.jsonl", max_rows=max_rows), 0
    for step in range(1, num_steps + 1):
        values = {"nll/mean": peaks.get(step, step % 7 / 7), "batch/tokens": 100 + step % 3}
        file.log(step, values | ({"eval/mean": float(step)} if step % 1000 == 0 else {}))
        if step % 500 == 0:
            tail.refresh()
            most = max(most, len(tail.rows()))
    file.close()
    whole, own = {"sft": read_metrics(tmp_path / "sft.jsonl")}, {"sft": tail.rows()}
    assert len(whole["sft"]) == num_steps and most <= max_rows
    found, expected = (curves.curve(rows, "nll/mean", axis="tokens") for rows in (own, whole))
    assert {50.0, -50.0, 40.0} <= {*found["y"]} and found["last"] == expected["last"]
    assert found["x"][0] == expected["x"][0] and found["x"][-1] == expected["x"][-1]
    assert [row["step"] for row in own["sft"][-400:]] == [*range(num_steps - 399, num_steps + 1)]
    assert {row["eval/mean"] for row in own["sft"] if "eval/mean" in row} >= {1000.0, 20_000.0}
    assert len(own["sft"]) > max_rows // 4 and curves.names(own) == curves.names(whole)


def test_a_resume_takes_back_rows_that_were_merged(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    tail = MetricsTail(path, max_rows=1200)
    for resumed, last in ((None, 5000), (2000, 4000)):
        file = MetricsFile(path, resumed_step=resumed)
        for step in range((resumed or 0) + 1, last + 1):
            file.log(step, {"loss/mean": float(step), "progress/tokens": float(step)})
        file.close()
        tail.refresh()
        rows = tail.rows()
        assert rows[-1]["step"] == last and len(rows) <= 1200
        assert all(row["progress/tokens"] == row["step"] for row in rows)


def test_a_row_for_several_has_of_each_metric_the_value_that_a_look_at_all_of_them_finds() -> None:
    rng = random.Random(3)

    def value() -> float | str:
        return rng.choice([rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0), rng.randrange(5), math.nan, math.inf, "text"])

    for _ in range(50):
        sizes = [rng.randrange(1, 5) for _ in range(10)]
        rows = [
            {"step": step, "time": float(step), **{key: value() for key in "abc" if rng.random() < 0.7}}
            for step in range(sum(sizes))
        ]
        numbers = {key: [row[key] for row in rows if isinstance(row.get(key), int | float)] for key in "abc"}
        means = {key: np.mean([x for x in own if math.isfinite(x)] or [math.nan]) for key, own in numbers.items()}
        for size, found in zip(sizes, merged_rows(rows, sizes)):
            group, rows = rows[:size], rows[size:]
            assert found["step"] == group[-1]["step"] and found["time"] == group[-1]["time"]
            for key in "abc":
                own = [row[key] for row in group if key in row]
                away = [abs(x - means[key]) if isinstance(x, int | float) and not math.isnan(x) else -1.0 for x in own]
                assert (key in found) == bool(own)
                if own:
                    wanted = own[away.index(max(away))]
                    assert found[key] is wanted or found[key] == wanted or math.isnan(found[key])


def test_the_newest_rows_are_the_last_of_all_rows_also_of_runs_that_were_resumed(tmp_path: Path) -> None:
    rng = random.Random(5)
    for number in range(60):
        path, reached = tmp_path / f"{number}.jsonl", 0
        for incarnation in range(rng.randrange(1, 5)):
            resumed = rng.choice([None, rng.randrange(reached + 1)]) if incarnation else None
            file = MetricsFile(path, resumed_step=resumed)
            step = rng.randrange(reached + 1) if resumed is None else resumed
            for _ in range(rng.randrange(30)):
                step += 1
                file.log(step, {"a": rng.random(), **({"b": math.nan} if rng.random() < 0.2 else {})})
                if rng.random() < 0.1:
                    file.log(max(1, step - rng.randrange(3)), {"eval": 1.0})
            reached = max(reached, step)
            file.close()
        for num in (1, 5, 20, 200):
            assert str(newest_rows(path, num)) == str(sorted_keys(read_metrics(path)[-num:], newest_rows(path, num)))
    assert newest_rows(tmp_path / "none.jsonl", 5) == []


def sorted_keys(rows: list[dict[str, float]], order: list[dict[str, float]]) -> list[dict[str, float]]:
    """The rows with their keys in the order of other rows."""
    assert [row.keys() for row in rows] == [row.keys() for row in order]
    return [{key: row[key] for key in other} for row, other in zip(rows, order)]
