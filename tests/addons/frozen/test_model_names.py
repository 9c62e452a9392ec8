"""Environments call frozen models by names of their own, so that the same code has another judge in each."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from cases.config import ENV, complaints
from fakes import CharRenderer, FakeEngine, parrot
from test_model_client import Judge, served

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import EvalConfig, RLConfig
from stretto.config.sections.distill import FrozenModelPlace
from stretto.config.sections.orchestrator import EnvSection, SamplingSection
from stretto.envs.base import RunInfo
from stretto.orchestrator.build import build_env, model_names
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto_frozen.clients import open_models

HERE = Path(__file__).parent
WORDS = ["--models.big.base_url", "https://h/v1", "--models.small.base_url", "https://h/v1"]


@pytest.mark.parametrize("num_workers", [None, pytest.param(1, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("env_id", ["judge_envs:Judged", "judge_envs:JudgedTurns"])
def test_each_environment_has_the_judge_that_its_table_names(env_id, num_workers, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    judges = {"big": Judge("0.75"), "small": Judge("0.25")}
    sections = [
        EnvSection(id=env_id, name=f"by-{name}", models={"judge": name}, num_workers=num_workers) for name in judges
    ]

    async def run():
        async with AsyncExitStack() as stack:
            urls = {name: await stack.enter_async_context(served(judge)) for name, judge in judges.items()}
            places = {name: FrozenModelPlace(base_url=url, model=name, max_retries=0) for name, url in urls.items()}
            models, rewards = open_models(places, stack), []
            settings = {"max_retries": 0, "models": models, "model_names": model_names(*sections)}
            player = Player(FakeEngine(parrot(1.0)), CharRenderer(), SamplingSection(), seq_len=4000, **settings)
            for section in sections:
                env = build_env(section, run=RunInfo(models=models))
                if num_workers:
                    stack.push_async_callback(env.close)
                [rollout] = (await player.play(env, Draw(0, env.tasks("train").task(0), 1, version=0))).rollouts
                assert rollout.error is None
                rewards.append(rollout.reward)
            return rewards

    assert asyncio.run(run()) == [0.75, 0.25]
    assert {judge.bodies[0]["model"] for judge in judges.values()} == {"big", "small"}


def test_a_name_that_leads_to_no_model_is_refused():
    envs = '[{"id": "sort-letters", "models": {"judge": "huge"}}]'
    with pytest.raises(ConfigError, match=r"orchestrator.env.0.models.judge.*huge.*it has big, small"):
        load(RLConfig, ["--orchestrator.env", envs, *WORDS], verb="rl")
    with pytest.raises(ConfigError, match=r"eval.env.0.models.judge.*huge.*\[models.huge\]"):
        load(EvalConfig, ["--eval.env", envs, "--model", "x"], verb="eval")
    load(RLConfig, ["--orchestrator.env", envs.replace("huge", "big"), *WORDS], verb="rl")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (
            "--models.rm.base-url localhost:9000",
            'models.rm.base_url = "localhost:9000" is not an address; write it like',
        ),
        (
            "--orchestrator.algo.type opd --orchestrator.teacher.base-url gpu7",
            'orchestrator.teacher.base_url = "gpu7" is not an address',
        ),
    ],
)
def test_addresses_of_other_models_are_addresses(key: str, told: str, tmp_path: Path) -> None:
    lines = complaints(tmp_path, ENV, key)
    assert any(told in line for line in lines), lines
