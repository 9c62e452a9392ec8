"""The plan of `sft`, and lengths that are read from a config's own data and environments."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.cli import main
from stretto.config.load import build, load
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.model import ScratchSection
from stretto.models.config import scratch_config
from stretto.orchestrator.build import build_scratch_renderer
from stretto_plan.costs import Costs, Measured
from stretto_plan.setup import build_setup
from stretto_plan.simulation.run import sft_times
from stretto_plan.workload import Numbers, example_lengths, prompt_lengths
from stretto_sft.rows import load_examples

SFT = "examples/sort_letters/sft.toml"
ROW_S = Measured(train=((1.0, 0.5), (2.0, 0.5)), update_s=0.25)
"""A row takes half a second, an update a quarter."""


def sft_config(*words: str) -> SFTConfig:
    return load(SFTConfig, ["@", SFT, *words], verb="sft")


@pytest.mark.heavy
def test_a_step_is_the_rows_of_the_slowest_rank_and_the_update() -> None:
    setup = build_setup(sft_config("--seq-len", "400", "--batch-size", "10"))
    times = sft_times(Costs(setup, measured=ROW_S), Numbers(100), steps=4)
    assert times.rows == 3 and times.tokens == 1000 and times.fill == pytest.approx(1000 / 1200)
    assert times.step_s == pytest.approx(3 * 0.5 + 0.25)
    words = ("--seq-len", "400", "--batch-size", "10", "--deployment.num-train-gpus", "2")
    two = sft_times(Costs(build_setup(sft_config(*words), gpu="H100"), measured=ROW_S), Numbers(100), steps=4)
    assert two.step_s == pytest.approx(2 * 0.5 + 0.25) and two.rank_idle == pytest.approx(0.25)


@pytest.mark.heavy
def test_lengths_of_examples_are_those_that_are_trained() -> None:
    cfg = sft_config()
    renderer = build_scratch_renderer(cfg.model.scratch, cfg.renderer)
    data = cfg.data.model_copy(update={"num_rows": 512})
    examples = load_examples(data, renderer, cfg.loss_mask, cfg.seq_len, cfg.seed).examples
    found = example_lengths(cfg)
    assert len(found.values) == 512
    assert np.mean(found.values) == pytest.approx(np.mean([len(e.token_ids) for e in examples]), rel=0.1)


def test_prompts_are_those_of_the_environment(tmp_path) -> None:
    vocab = load_tokenizer(build_letters_tokenizer(tmp_path)).vocab_size
    (tmp_path / "config.json").write_text(json.dumps(scratch_config(ScratchSection(), vocab).hf))
    values = {"model": {"name": str(tmp_path)}, "orchestrator": {"env": [{"id": "sort-letters"}]}}
    found = prompt_lengths(build(RLConfig, values))
    assert len(found.values) == 64 and 10 < found.mean < 30


def test_why_lengths_are_assumed_is_said(tmp_path) -> None:
    data = {"type": "file", "name": "somebody/rows"}
    values = {"model": {"scratch": {}}, "max_steps": 9, "data": data}
    assert "data set of the Hub" in example_lengths(build(SFTConfig, values))
    data["name"] = [str(tmp_path), "somebody/rows"]
    assert "somebody/rows is a data set of the Hub" in example_lengths(build(SFTConfig, values))
    data["name"] = str(tmp_path / "rows.jsonl")
    assert "rows.jsonl" in example_lengths(build(SFTConfig, values))


@pytest.mark.heavy
def test_sft_is_planned_by_the_verb(capsys) -> None:
    assert main(["plan", SFT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["time"]["rows"] >= 1 and found["time"]["steps"] == 110 and found["setup"]["engines"] == []
    assert [memory["process"] for memory in found["memory"]] == ["trainer rank"]
    assert main(["plan", SFT]) == 0
    text = capsys.readouterr().out
    assert "the first 512 of the data" in text and "110 steps" in text and "engine" not in text.split("assumptions")[0]


@pytest.mark.parametrize("flag", ["--reply-tokens", "--from"])
def test_flags_of_rl_are_refused_for_sft(flag, capsys) -> None:
    assert main(["plan", SFT, flag, "3"]) == 2
    assert f"{flag} is for `rl`" in capsys.readouterr().err
