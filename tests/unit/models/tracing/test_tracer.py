"""`--profile N`: the chosen steps alone are traced, into files that hold their operations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.traced import parse_steps, split_profile_flag
from stretto.models.tracing import tracer as trace
from stretto.models.tracing.tracer import Tracer


def operations(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_only_the_chosen_step_is_traced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tracer = Tracer(run, "trainer", frozenset({2}))
    for step, act in ((1, torch.exp), (2, torch.sinh), (3, torch.cosh)):
        with tracer.step(step):
            act(torch.ones(4))
    (file,) = run.profiles.iterdir()
    assert file.name == "trainer_step_2.json.gz"
    assert "aten::sinh" in operations(file) and "aten::exp" not in operations(file)


def test_a_step_that_raises_leaves_no_file_and_the_next_can_be_traced(tmp_path: Path) -> None:
    tracer = Tracer(RunDir(tmp_path), "trainer", frozenset({1, 2}))
    with pytest.raises(ZeroDivisionError), tracer.step(1):
        raise ZeroDivisionError
    with tracer.step(2):
        torch.ones(2).exp()
    assert [file.name for file in RunDir(tmp_path).profiles.iterdir()] == ["trainer_step_2.json.gz"]


def test_an_engine_is_traced_while_it_plays_the_step_and_not_for_long(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trace, "MOST_PASSES", 3)
    run = RunDir(tmp_path)
    tracer = Tracer(run, "inference-1", frozenset({2}))
    for version in (0, 0, 1, 1, 2, 2, 2, 2):
        tracer.before_pass(version)
        torch.ones(4).sinh()
    (file,) = run.profiles.iterdir()
    assert file.name == "inference-1_step_2.json.gz"
    names = [e.get("name") for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert names.count("aten::sinh") == 3


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog) -> None:
    (tmp_path / "profiles").write_text("a file")
    with Tracer(RunDir(tmp_path), "trainer", frozenset({1})).step(1):
        torch.ones(2)
    assert "no trace of step 1" in caplog.text


def test_steps_are_numbers_and_spans() -> None:
    assert parse_steps("3") == {3} and parse_steps("3,7") == {3, 7} and parse_steps(" 3-5 ") == {3, 4, 5}
    assert split_profile_flag(["@", "a", "--profile", "2", "--x"]) == (["@", "a", "--x"], "2")
    assert split_profile_flag(["--profile=4-5"]) == ([], "4-5") and split_profile_flag(["a"]) == (["a"], None)


@pytest.mark.parametrize("text", ["", "0", "x", "5-3", "1-100", "-1", "1,,2", "1-21"])
def test_other_texts_are_one_message(text: str) -> None:
    with pytest.raises(ConfigError, match=r"give steps such as|at most"):
        parse_steps(text)
