"""Whole runs whose engines get every k-th version (weight_broadcast.interval), and what cannot go with it."""

from __future__ import annotations

import json
import random

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, run_once, train
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics


def versions_of(run_dir):
    """Loaded versions in order, and by step the versions of its trained rollouts."""
    with LedgerReader(run_dir) as reader:
        loaded = reader.rows("SELECT DISTINCT version FROM versions WHERE state = 'loaded' ORDER BY version")
        rows = reader.rows("SELECT step, first_version, last_version FROM live_rollouts WHERE step IS NOT NULL")
    return [row["version"] for row in loaded], [(r["step"], r["first_version"], r["last_version"]) for r in rows]


def ends(seed, *, max_steps, start=0):
    rng = random.Random(seed)
    engine = FakeEngine(parrot(0.5), delay=lambda _: rng.lognormvariate(0.0, 1.0))
    delay = rng.choice([0.1, 1.0, 5.0])
    trainer = FakeTrainer(max_steps=max_steps, start=start, checkpoint_every=2, step_delay=lambda _: delay)
    return engine, trainer


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("level", "interval", "more"),
    [
        (1, 2, {}),
        (2, 2, {}),
        (2, 3, {"batch_order": "finished"}),
        (3, 4, {"token_batch_size": 40}),
        (4, 3, {"max_inflight_rollouts": 4}),
        (1, 2, {"deterministic": True, "sync_interval": 4}),
        (4, 2, {"oversampling_factor": 6.0}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_of_every_kth_version_and_no_older_than_the_level_allows(tmp_path, level, interval, more, seed):
    cfg = config(tmp_path, max_steps=11, max_async_level=level, weight_broadcast={"interval": interval}, **more)
    loop = train(cfg, *ends(seed, max_steps=11))
    assert loop.progress.step == 11
    loaded, rollouts = versions_of(cfg.run_dir)
    assert loaded == [*range(0, 11, interval), *([11] if 11 % interval else [])]
    assert all(first % interval == last % interval == 0 for _, first, last in rollouts)
    ahead = max(level, more.get("oversampling_factor", 0) - 1)
    assert max(step - 1 - first for step, first, _ in rollouts) <= ahead
    assert audit(cfg.run_dir) == []


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["stop_at", "kill_at"])
@pytest.mark.parametrize("seconds", [11.0, 13.0, 15.0, 17.0, 19.0])
def test_a_run_goes_on_from_any_phase_of_the_interval(tmp_path, kind, seconds):
    from fakes import CharRenderer

    settings = {"max_steps": 12, "max_async_level": 2, "weight_broadcast": {"interval": 3}}
    cfg = config(tmp_path, **settings)
    engine, trainer = ends(5, max_steps=12)
    trainer.step_delay = lambda _: 1.5
    run_once(cfg, engine, trainer, CharRenderer(), **{kind: seconds})
    step = cfg.run_dir.latest_complete_checkpoint()
    assert step is not None and 0 < step < 12
    if kind == "stop_at":
        assert versions_of(cfg.run_dir)[0][-1] == trainer.step == step, "engines have the last version"
    resumed = config(tmp_path, **settings, resume={})
    loop = train(resumed, *ends(6, max_steps=12, start=step))
    assert loop.progress.step == 12
    _, rollouts = versions_of(cfg.run_dir)
    assert {v for _, *versions in rollouts for v in versions if v % 3} <= {step}
    assert audit(cfg.run_dir) == []


def test_a_run_without_a_trainer_has_the_versions_of_one(tmp_path):
    cfg = config(tmp_path, max_steps=5, max_async_level=1, weight_broadcast={"interval": 2}, debug="rollouts")
    from stretto.orchestrator.alone import AbsentTrainer

    train(cfg, FakeEngine(parrot(0.5)), AbsentTrainer(1, 0, 5))
    assert versions_of(cfg.run_dir)[0] == [0, 2, 4, 5]


def test_evals_are_of_versions_that_engines_have(tmp_path):
    evals = {"interval": 4, "num_examples": 4, "env": [{"id": "fakes:EchoEnv"}]}
    cfg = config(tmp_path, max_steps=9, max_async_level=1, weight_broadcast={"interval": 2}, eval=evals)
    train(cfg, *ends(1, max_steps=9))
    rows = read_metrics(cfg.run_dir.metrics("orchestrator"))
    assert [row["step"] for row in rows if any(name.startswith("eval/") for name in row)] == [0, 4, 8, 9]


ONE = json.dumps([{"id": "sort-letters"}])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--orchestrator.max_async_level", "1"], r"interval = 3 .*max_async_level \+ 1 = 2 at most; lower it, or set"),
        (["--colocate", "{}"], r"interval = 3 .*max_async_level \+ 1 = 1 at most; lower it$"),
        (["--orchestrator.steering", "{}"], r"interval = 3 .*steering.min_level \+ 1 = 2 at most"),
        (["--orchestrator.eval.interval", "10"], r"eval.interval = 10 is the eval of .* use 9 or 12, or another"),
        (["--deterministic", "--ckpt.interval", "2"], r"ckpt.interval = 2: .* no engine gets them; use 3, or another"),
        pytest.param(
            ["--service", "http://127.0.0.1:1"],
            r"weight_broadcast.interval = 3 with \[service\]: .* every version",
            marks=needs("service"),
        ),
    ],
)
def test_what_waits_for_a_version_that_no_engine_gets_is_refused(words, message):
    level = (
        [] if {"--orchestrator.max_async_level", "--colocate"} & {*words} else ["--orchestrator.max_async_level", "2"]
    )
    given = ["--orchestrator.env", ONE, "--weight-broadcast.interval", "3", *level]
    with pytest.raises(ConfigError, match=message):
        load(RLConfig, [*given, *words])


def test_checkpoints_by_the_clock_are_of_versions_that_engines_get():
    given = ["--orchestrator.env", ONE, "--weight-broadcast.interval", "3", "--orchestrator.max_async_level", "2"]
    cfg = load(RLConfig, [*given, "--deterministic"])
    assert cfg.ckpt.interval == cfg.orchestrator_config().sync_interval == 21
