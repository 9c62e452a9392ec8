"""A run of `sft` that starts from a checkpoint of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from sft_runs import config as sft_config
from sft_runs import same_weights, undisturbed_threads_and_logging, weights  # noqa: F401

from stretto.base.errors import ConfigError, DataError
from stretto.config.root import OrchestratorConfig
from stretto.monitors.file import read_metrics
from stretto.orchestrator.state.resume import starting_point
from stretto_sft import training as sft

pytestmark = pytest.mark.heavy


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_an_sft_run_begun_at_a_checkpoint_ends_with_the_same_bits(tmp_path):
    whole = sft_config(tmp_path / "whole", ckpt={"interval": 3})
    sft.main(whole)
    before = contents(whole.run_dir.path)
    fork = sft_config(tmp_path / "fork", resume={"dir": str(whole.run_dir.checkpoint(3))})
    sft.main(fork)
    assert same_weights(weights(whole, 8), weights(fork, 8))
    assert contents(whole.run_dir.path) == before
    rows = read_metrics(fork.run_dir.metrics("sft"))
    assert [row["step"] for row in rows] == [4, 5, 6, 7, 8]
    assert fork.run_dir.complete_checkpoints() == [8]
    sft.main(sft_config(tmp_path / "fork", max_steps=9, resume={}))
    assert fork.run_dir.complete_checkpoints() == [8, 9]


def test_other_data_is_read_from_its_first_example(tmp_path):
    first = sft_config(tmp_path / "first", max_steps=2)
    sft.main(first)
    other = {"type": "environment", "id": "sort-letters", "num_rows": 41}
    resume = {"dir": str(first.run_dir.path)}
    fork = sft_config(tmp_path / "fork", resume=resume, data=other, max_steps=None, max_epochs=1)
    sft.main(fork)
    rows = read_metrics(fork.run_dir.metrics("sft"))
    assert [(row["step"], row["progress/total_samples"]) for row in rows] == [(3, 16), (4, 32), (5, 41)]


def test_a_run_of_the_other_verb_is_refused_and_its_weights_are_suggested(tmp_path):
    rl = config(tmp_path / "rl", max_steps=2)
    train(rl, FakeEngine(parrot(0.3)), FakeTrainer(max_steps=2, checkpoint_every=2))
    first = sft_config(tmp_path / "sft", max_steps=2)
    sft.main(first)
    begun = {"output_dir": tmp_path / "fork", "resume": {"dir": first.run_dir.path, "step": 2}}
    with pytest.raises(ConfigError, match=r"of an `sft` run.*model.name = .*weights/step_2"):
        starting_point(OrchestratorConfig.model_validate(rl.model_dump() | begun))
    values = first.run_dir.checkpoint(2) / "trainer" / "state.json"
    values.write_text(json.dumps(json.loads(values.read_text()) | {"cursor": {}}))
    with pytest.raises(ConfigError, match=r"of a run of `rl`.*model.name = .*weights/step_2"):
        sft.main(sft_config(tmp_path / "fork", resume={"dir": str(first.run_dir.path)}))


def test_another_model_is_named(tmp_path):
    first = sft_config(tmp_path / "first", max_steps=1)
    sft.main(first)
    scratch = dict(first.model.scratch.model_dump(), hidden_size=32)
    fork = sft_config(tmp_path / "fork", resume={"dir": str(first.run_dir.path)}, model={"scratch": scratch})
    with pytest.raises(DataError, match=r"first/run/checkpoints/step_1/trainer: .* hidden_size = 16"):
        sft.main(fork)
    assert not fork.run_dir.checkpoints.exists()
    shutil.rmtree(first.run_dir.checkpoint(1) / "trainer")
    with pytest.raises(DataError, match="cannot be read"):
        sft.main(sft_config(tmp_path / "again", resume={"dir": str(first.run_dir.path)}))
