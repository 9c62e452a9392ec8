"""Configs of runs on a training service: the short flag, what follows from it, and what does not go with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import dump, load
from stretto.config.root import RLConfig, TrainerConfig
from stretto.config.sections.run import name_at_service
from stretto.launch.plan.plan import plan
from stretto_service.runs.bridge import parts
from stretto_service.runs.client import spec_of

URL = "http://gpu.example:8700"
BASE = """
max_steps = 3
[model.lora]
rank = 4
[[orchestrator.env]]
id = "sort-letters"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rl.toml"
    path.write_text(BASE)
    return path


def loaded(file: Path, *words: str) -> RLConfig:
    return load(RLConfig, ["@", str(file), "--service", URL, *words])


def test_a_service_takes_the_place_of_engines_and_trainer(file: Path, tmp_path: Path) -> None:
    cfg = loaded(file, "--output-dir", str(tmp_path), "--run.name", "a+b", "--service.token-var", "MINE")
    assert cfg.inference is None and cfg.ckpt is not None and cfg.ckpt.weights is None
    assert cfg.orchestrator.client.api_key_var == "MINE"
    found = plan(cfg, cfg.run_dir)
    assert [spec.role for spec in found.processes] == ["orchestrator", "trainer"]
    assert not any(spec.devices for spec in found.processes)
    assert found.batch is not None and "as trees" not in str(found.batch), "the service's device is not known"
    assert found.config.orchestrator.client.base_url == f"{URL}/runs/a-b/engine"
    again = RLConfig.model_validate(dump(found.config))
    assert again.trainer_config().service == found.config.service
    spec = spec_of(cfg.trainer_config())
    assert (spec.name, spec.rank, spec.max_steps, spec.optim["type"]) == ("a-b", 4, 3, "adamw")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--inference.device", "cpu"], "inference"),
        (["--orchestrator.num-train-workers", "2"], "orchestrator.num_train_workers"),
        (["--model.tp", "2"], "model.tp"),
        (["--model.shared-prefixes", "tree"], "model.shared_prefixes"),
        (["--trainer.updates-per-step", "2"], "trainer.updates_per_step"),
        (["--trainer.epochs-per-step", "2"], "trainer.epochs_per_step"),
        (["--trainer.enable-token-export"], "trainer.enable_token_export"),
        (["--ckpt.weights"], "ckpt.weights"),
        (["--ckpt.skip-optimizer"], "ckpt.skip_optimizer"),
        (["--resume.dir", "elsewhere"], "resume.dir"),
        (["--trainer.hooks.init", "os:getcwd"], "trainer.hooks"),
        (["--trainer.memory-profiler-path", "snapshots"], "trainer.memory_profiler_path"),
    ],
)
def test_what_a_shared_trainer_does_not_have_is_refused(file: Path, words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(file, *words)
    assert f"{key}" in str(error.value) and "[service]" in str(error.value)


def test_an_adapter_and_an_address_are_needed(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"a service trains adapters; add \[model.lora\]"):
        loaded(file, "--model.lora", "None")
    with pytest.raises(ConfigError, match="is no address"):
        load(RLConfig, ["@", str(file), "--service", "gpu.example"])


def test_names_and_sections_of_a_process_alone(file: Path) -> None:
    assert name_at_service("a+b=c@d_e-f.g") == "a-b-c-d_e-f.g"
    cfg = load(TrainerConfig, ["@", str(file), "--service", URL])
    assert cfg.service is not None and cfg.service.url == URL


def test_micro_batches_are_sent_in_parts(file: Path) -> None:
    from stretto.records.sample import MicroBatch

    ones = np.ones(2000, np.float32)
    row = MicroBatch(
        token_ids=np.zeros(2000, np.int32),
        cu_seqlens=np.array([0, 2000], np.int32),
        loss_mask=ones > 0,
        logprobs=ones,
        advantages=2 * ones,
        temperatures=3 * ones,
        sample_ids=("a",),
        envs=("e",),
    )
    assert [len(part) for part in parts([row] * 5, 80_000)] == [2, 2, 1]
    assert [len(part) for part in parts([row] * 3, 1)] == [1, 1, 1]
