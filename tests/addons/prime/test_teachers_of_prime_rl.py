"""Keys of prime-rl's algorithms mean what they mean there: a model that samples, ECHO's filter; others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.algorithm import EchoAlgo
from stretto.config.sections.distill import SftAlgo

ENV = '[[orchestrator.train.source]]\nid = "sort-letters"\n'
SOURCE = '[orchestrator.algo.sampling.source]\nname = "Big/Teacher"\nbase_url = ["http://t:8000/v1"]\n'


def read(folder: Path, text: str) -> RLConfig:
    (folder / "theirs.toml").write_text(text + ENV)
    return load(RLConfig, ["@", str(folder / "theirs.toml")])


@pytest.mark.parametrize("algo", ["", '[orchestrator.algo]\ntype = "sft"\n'])
def test_a_model_that_samples_is_the_teacher_that_plays(tmp_path: Path, algo: str) -> None:
    found = read(tmp_path, algo + SOURCE).orchestrator.algo
    assert isinstance(found, SftAlgo) and found.teacher is not None
    assert (found.teacher.model, found.teacher.base_url) == ("Big/Teacher", ["http://t:8000/v1"])


def test_a_source_may_be_of_one_environment(tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_text(
        ENV
        + '[orchestrator.train.source.algo]\ntype = "sft"\nsampling.source.name = "T"\nsampling.source.base_url = "u"\n'
    )
    algo = load(RLConfig, ["@", str(tmp_path / "theirs.toml")]).orchestrator.env[0].algo
    assert isinstance(algo, SftAlgo) and algo.teacher is not None and algo.teacher.model == "T"


def test_the_policy_as_source_is_what_there_is_without_one(tmp_path: Path) -> None:
    assert read(tmp_path, 'orchestrator.algo.sampling.source = "policy"\n') == read(tmp_path, "")


def test_echo_is_given_the_function_that_chooses_messages(tmp_path: Path) -> None:
    algo = read(tmp_path, '[orchestrator.algo]\ntype = "echo"\nfilter.import_path = "mine:chosen"\n').orchestrator.algo
    assert isinstance(algo, EchoAlgo) and algo.filter == "mine:chosen"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('orchestrator.algo = { type = "grpo", sampling = { source = { name = "T" } } }', "it belongs to type"),
        ('orchestrator.algo = { type = "echo", filter = { kwargs = { a = 1 } } }', "bind others in your module"),
        ("inference.use_pd_kv_transfer = true", 'deployment.type = "disaggregated"'),
        ("data.fake.batch_size = 2", "--bench"),
    ],
)
def test_what_is_not_here_is_refused_with_what_to_write(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"theirs.toml:1: .*{words}"):
        read(tmp_path, f"{line}\n")
