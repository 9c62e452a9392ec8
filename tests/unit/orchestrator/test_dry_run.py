"""What a dry run checks: the user's functions and files, and meshes that a model cannot have."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import forked
from processes.add_ons import needs

from stretto import dry_run as screens
from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.check.code import check_user_code
from stretto.check.models import check_model
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.model import ModelSection, VisionSection
from stretto.orchestrator.dry_run import preview

MOE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_experts": 6,
}
DENSE = {key: value for key, value in MOE.items() if key != "num_experts"} | {"model_type": "qwen3"}


def dry_run(verb: str, directory: Path, *words: str) -> tuple[int, str]:
    done = forked.run(
        [sys.executable, "-m", "stretto", verb, *words, "--output-dir", str(directory), "--dry-run"],
        timeout=120,
        cwd=directory,
    )
    return done.returncode, done.stderr


def of(tmp_path: Path, **args) -> RLConfig:
    return load(RLConfig, ["--orchestrator.env", json.dumps([{"id": "dataset", "args": args}])])


@pytest.mark.parametrize(
    ("family", "vlm", "words"),
    [
        ("qwen3_vl", None, r"a qwen3_vl has a vision tower; add \[trainer.model.vlm\]"),
        ("qwen3", VisionSection(), r"\[trainer.model.vlm\] is for models with a vision tower .* this is a qwen3;"),
        ("mistral", VisionSection(), r"this is a model of text; leave it out"),
        ("qwen3_vl", VisionSection(), None),
        ("qwen3", None, None),
    ],
)
def test_a_vision_tower_and_its_section_belong_together(family, vlm, words, tmp_path):
    numbers = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    nested = {"text_config": numbers} if family == "qwen3_vl" else numbers
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | nested))
    section = ModelSection(name=str(tmp_path), vlm=vlm)
    if words is None:
        check_model(section, 2, "trainer.model")
        return
    with pytest.raises(ConfigError, match=words):
        check_model(section, 2, "trainer.model")


def test_images_of_another_family_are_refused_as_what_they_are(tmp_path):
    config = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelSection(name=str(tmp_path), vlm=VisionSection())
    with pytest.raises(ConfigError, match="qwen2_5_vl has a vision tower"):
        check_model(model, 1, "model")


def test_a_config_with_a_text_for_a_table_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": "qwen3"}))
    with pytest.raises(ConfigError, match="text_config = 'qwen3' must be a table"):
        check_model(ModelSection(name=str(tmp_path), vlm=VisionSection()), 2, "trainer.model")


def test_a_dry_run_reads_the_first_record_and_imports_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = tmp_path / "rows.jsonl"
    good.write_text('{"prompt": "2 + 2", "label": "4"}\nnot JSON, which only a run would meet\n')
    (tmp_path / "mine_checked.py").write_text("def reward(args, sample):\n    return 1.0\n")
    check_user_code(of(tmp_path, path=f"{good}@[0:1]", reward="mine_checked:reward").orchestrator)
    with pytest.raises(ConfigError, match=r"dataset: path = .*nowhere.jsonl"):
        check_user_code(of(tmp_path, path=str(tmp_path / "nowhere.jsonl")).orchestrator)
    with pytest.raises(ConfigError, match=r"reward = 'mine_checked:rewrd'.*'reward'"):
        check_user_code(of(tmp_path, path=f"{good}@[0:1]", reward="mine_checked:rewrd").orchestrator)


def test_the_label_of_the_first_record_is_shown_beside_its_prompt(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "label": "4", "id": "7"}\n')
    for key, label in (("label", "4"), ("id", "7")):
        cfg = of(tmp_path, path=str(tmp_path / "rows.jsonl"), reward="exact", label_key=key)
        [task] = preview(cfg.orchestrator_config()).tasks
        assert f"the first is train-0 with the label '{label}'" in task.about


ENVS = """
from stretto.envs.base import RolloutResult, SingleTurnEnv, TaskSource
from stretto.records.rollout import Task


class Ask(SingleTurnEnv):
    def __init__(self, prompt="say a", count=7):
        self.name, self.said, self.count = "ask", prompt, count

    def tasks(self, split):
        return TaskSource(lambda i: Task(env="ask", task_id=f"{split}-{i}", data={}), self.count)

    def prompt(self, task):
        return self.said if self.said != "raise" else {}["absent"]

    def score(self, task, text):
        return 1.0


class Own:
    prompt = "You are a guide."

    def __init__(self):
        self.name = "own"

    def tasks(self, split):
        return TaskSource(lambda i: Task(env="own", task_id=f"{split}-{i}", data={}))

    async def rollout(self, task, ctx):
        await ctx.chat([{"role": "user", "content": "a"}])
        return RolloutResult(reward=1.0)
"""


def test_the_first_task_of_an_environment_is_shown_as_the_model_will_see_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "previewed.py").write_text(ENVS)
    build_letters_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')

    def shown(template: str | None = None, **args) -> str:
        words = ["--orchestrator.env", json.dumps([{"id": "previewed:Ask", "name": "mine", "args": args}])]
        words += [] if template is None else ["--orchestrator.renderer.template", template]
        [task], missing, _ = preview(load(RLConfig, [*words, "--model.name", "model"]).orchestrator_config())
        assert not missing
        return f"{task.about}\n{task.prompt}"

    assert shown() == (
        "environment mine: tasks 7 to train on; the first is train-0, 17 tokens:\n"
        "<|im_start|>user\nsay a<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    with pytest.raises(EnvError, match=r"task train-0, prompt \(.*\[0\].tool_calls must be a list"):
        shown(prompt=[{"role": "assistant", "content": "a", "tool_calls": 5}])
    with pytest.raises(EnvError, match=r"task train-0, prompt \(.* is 3"):
        shown(prompt=3)
    hides = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
    with pytest.raises(EnvError, match=r"environment mine, task train-0, prompt: the chat template .* drops messages"):
        shown(hides, prompt=[{"role": "system", "content": "b"}, {"role": "user", "content": "a"}])
    with pytest.raises(EnvError, match=r"prompt: .*previewed.py:14 in prompt: KeyError: 'absent'"):
        shown(prompt="raise")
    with pytest.raises(ConfigError, match="num_tasks = 0"):
        shown(count=0)
    with pytest.raises(ConfigError, match="did you mean 'sort-letters'"):
        preview(of_env("sort-leters"))
    [task], _, _ = preview(of_env("sort-letters", num_workers=2))
    assert "worker processes" in task.about and not task.prompt
    [task], _, _ = preview(of_env("previewed:Own"))
    assert "whose prompt is made while it is played" in task.about
    [task], missing, _ = preview(of_env("sort-letters"))
    assert "not rendered" in task.about and task.prompt.startswith("user: ") and "no directory 'Qwen" in missing


def of_env(env_id: str, **more):
    return load(RLConfig, ["--orchestrator.env", json.dumps([{"id": env_id, **more}])]).orchestrator_config()


@pytest.mark.heavy
@needs("vime")
def test_the_command_line_says_so_with_status_2(tmp_path):
    env = json.dumps([{"id": "sort-letters"}])
    words = ("--orchestrator.env", env, "--orchestrator.hooks.sample-filter", "no_such_module:mark")
    code, message = dry_run("rl", tmp_path, *words)
    assert code == 2 and "orchestrator.hooks.sample_filter" in message and "no module 'no_such_module'" in message


@pytest.mark.parametrize(
    ("shape", "model", "message"),
    [
        (DENSE, {"ep": 8, "cp": 2}, r"\[trainer.model\] ep = 8, but the policy has no experts"),
        (DENSE, {"tp": 8}, "tp = 8 does not divide the 4 key and value heads of this model; valid: 1, 2, 4"),
        (DENSE, {"ep_comm_backend": "deepep"}, "this model has no experts"),
        (MOE, {"ep": 4}, r"ep = 4 must divide both dp_shard x cp = 8 ranks and the 6 experts; valid: 1, 2"),
        ({"model_type": "mixtral"}, {"cp": 2}, "cp = 2 cuts the tokens of a row, which only modules of our own"),
        ({"model_type": "mixtral"}, {"moe_use_grouped_mm": False}, "transformers computes this model family"),
    ],
)
def test_meshes_and_keys_that_a_model_cannot_have(tmp_path, shape, model, message):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    section = ModelSection(name=str(tmp_path), **model)
    with pytest.raises(ConfigError, match=message):
        check_model(section, 8, "trainer.model")
    check_model(ModelSection(name=str(tmp_path)), 8, "trainer.model")
    check_model(ModelSection(name="not/here", **model), 8, "trainer.model")


def test_a_half_known_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "intermediate_size": 8}))
    with pytest.raises(ConfigError, match=r"config.json: no value for num_attention_heads"):
        check_model(ModelSection(name=str(tmp_path)), 8, "trainer.model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", "8"),
        ("num_key_value_heads", [4]),
        ("num_key_value_heads", True),
        ("intermediate_size", 64.5),
        ("num_experts", -6),
        ("linear_num_key_heads", {"a": 1}),
        ("num_attention_heads_per_layer", 8),
        ("num_attention_heads_per_layer", [8, "8"]),
    ],
)
def test_a_shape_that_is_no_number_is_named(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps(MOE | {key: value}))
    with pytest.raises(ConfigError, match=rf"config.json: {key} = .* must be a whole number"):
        check_model(ModelSection(name=str(tmp_path)), 8, "trainer.model")


@needs("families")
def test_only_a_model_with_indexers_trains_them(tmp_path):
    section = ModelSection(name=str(tmp_path), indexer_kl_coeff=0.5)
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"model_type": "deepseek_v32"}))
    check_model(section, 8, "trainer.model")
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    with pytest.raises(ConfigError, match=r"indexer_kl_coeff = 0.5 has no effect: only deepseek_v32 and glm_moe_dsa"):
        check_model(section, 8, "trainer.model")


def test_a_mixture_that_is_not_ours_has_no_replay(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(ConfigError, match="enable_router_replay = true has no effect"):
        check_model(ModelSection(name=str(tmp_path)), 2, "trainer.model", has_replay=True)


@pytest.mark.heavy
@needs("vime")
def test_an_import_that_hangs_is_named_and_ctrl_c_ends_it(tmp_path):
    (tmp_path / "hanging_hooks.py").write_text("import time\ntime.sleep(1000)\n")
    words = ["--output-dir", str(tmp_path), "--orchestrator.env", json.dumps([{"id": "sort-letters"}])]
    words += ["--orchestrator.hooks.sample-filter", "hanging_hooks:mark", "--dry-run"]
    command = [sys.executable, "-m", "stretto", "rl", *words]
    with forked.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rl:
        too_late = threading.Timer(60, rl.kill)
        too_late.start()
        message = rl.stderr.readline()
        rl.send_signal(signal.SIGINT)
        too_late.cancel()
        output, rest = rl.communicate(timeout=60)
    assert "orchestrator.hooks.sample_filter = 'hanging_hooks:mark': the import of hanging_hooks: not" in message
    assert f"{tmp_path / 'hanging_hooks.py'}:2" in message
    assert (rl.returncode, output, rest) == (130, "", "interrupted\n")


@pytest.mark.heavy
def test_a_checkpoint_whose_orchestrators_half_is_damaged_is_refused(tmp_path):
    part = tmp_path / "run" / "checkpoints" / "step_2" / "trainer"
    part.mkdir(parents=True)
    (part / "state.json").write_text(json.dumps({"schema": 2, "num_bytes": {}, "cursor": {}, "optim": "adamw"}))
    (part.parent / "orchestrator.json").write_text('{"step": 2, ')
    (part.parent / "COMPLETE").touch()
    words = ["--orchestrator.env.0.id", "sort-letters", "--max-steps", "4", "--resume"]
    cfg = load(RLConfig, [*words, "--output-dir", str(tmp_path), "--run.name", "run"])
    with pytest.raises(DataError, match=r"step_2/orchestrator\.json: .*--clean"):
        screens.rl(cfg)
