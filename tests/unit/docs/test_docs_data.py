"""docs/data.md holds: its records are read, its settings load, its functions run, every hook and argument has a row."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from cases.dataset import RUN, play, sampled_text
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from pages.blocks import text_of
from PIL import Image

from stretto.config.sections.hooks import HooksSection
from stretto.envs.base import RunInfo, load_environment
from stretto.envs.dataset import dataset
from stretto.envs.dataset_records import BY_RECORD, GIVEN
from stretto.vime.reward_types import RM_TYPES
from stretto_sft.rows import parse_row

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text()
CODE = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "my_hooks.py" in code]


def test_the_records_shown_are_read(tmp_path):
    prompt, conversation, shown = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.S))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(prompt) + "\n")
    env = load_environment("dataset", {"path": str(path), "reward": "math"}, run=RUN)
    assert env.tasks("train").task(0).data["label"] == "5"
    assert parse_row(conversation, "here").messages[1]["step_loss_mask"] == 0
    (tmp_path / "birds").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / shown["images"][0])
    path.write_text(json.dumps(shown) + "\n")
    env = load_environment("dataset", {"path": str(path)}, run=RunInfo())
    assert [part["type"] for part in env.tasks("train").task(0).data["prompt"][0]["content"]] == ["image", "text"]


def test_every_argument_and_every_hook_has_its_row():
    for name in set(inspect.signature(dataset).parameters) - {"run"}:
        assert f"\n- **`{name}`**" in PAGE
    for name in set(HooksSection.model_fields) - {"args"}:
        assert f"\n- **`hooks.{name}`**" in PAGE


VIME_FUNCTIONS = """
    rollout-function eval-function custom-generate-function custom-rm dynamic-sampling-filter buffer-filter
    rollout-sample-filter rollout-all-samples-process rollout-sample-hook custom-reward-post-process
    custom-convert-samples-to-train-data rollout-data-postprocess custom-advantage-function custom-loss-function
    custom-tis-function custom-pg-loss-reducer-function custom-rollout-log-function
    custom-eval-rollout-log-function data-source custom-model-provider custom-megatron-init
    custom-megatron-before-log-prob-hook custom-megatron-before-train-step-hook custom-update-weight-post-write
"""


def test_every_function_that_vime_takes_has_its_place_or_a_way_around():
    pages = text_of("docs/vime-flags.md") + text_of("docs/vime.md")
    for name in VIME_FUNCTIONS.split():
        assert f"`--{name}-path`" in pages, name


def test_the_functions_shown_run(tmp_path, monkeypatch):
    (tmp_path / "my_hooks.py").write_text("\n".join(CODE))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "word", "label": "word"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    args = {"path": str(tmp_path / "rows.jsonl"), "reward": "my_hooks:rm", "generate": "my_hooks:generate"}
    env = load_environment("dataset", args | {"hook_args": {"free_tokens": 90, "doubt": "Usure.A"}}, run=RUN)
    group, engine = play(env, members=3)
    assert engine.num_requests == 6
    for rollout in group.rollouts:
        assert sampled_text(rollout.branches[0]).count(".") == 2 and rollout.reward in (0.0, 1.0)
    hooks = {"dynamic_sampling_filter": "my_hooks:keep_mixed", "reward_post_process": "my_hooks:centred"}
    trainer = FakeTrainer(max_steps=2)
    train(config(tmp_path, hooks=hooks, max_steps=2), FakeEngine(parrot(0.5)), trainer)
    assert len(trainer.batches) == 2


def test_every_reward_by_name_has_its_row():
    rows = set(re.findall(r"^\| `([\w.]+)` \|", PAGE.partition("### Rewards by name")[2].partition("\n## ")[0], re.M))
    assert {*RM_TYPES, BY_RECORD, GIVEN, "exact", "models.NAME"} <= rows
