"""What a dry run learns from one rollout with a dummy reply, and from the lengths that it has rendered."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from stretto.base.errors import ConfigError, EnvError
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.orchestrator.dry_run import FirstTask, preview
from stretto.orchestrator.lengths import limits_of

ENVS = """
import urllib.request

from stretto.envs.base import RolloutResult, SingleTurnEnv, TaskSource
from stretto.records.rollout import Task


class Scored(SingleTurnEnv):
    name = "scored"

    def __init__(self, score="1.0", length=1, is_drawn=False, task_id="{i}", num_tasks=None):
        self.code, self.length, self.is_drawn = score, length, is_drawn
        self.task_id, self.num_tasks = task_id, num_tasks

    def tasks(self, split):
        make = lambda i: Task(env=self.name, task_id=self.task_id.format(i=i), data={"i": i})
        return TaskSource(make, self.num_tasks)

    def prompt(self, task):
        self.length += self.is_drawn
        return "a" * self.length

    def score(self, task, text):
        return eval(self.code)


class Asking:
    name = "asking"

    def __init__(self, num_questions):
        self.num_questions = num_questions

    def tasks(self, split):
        return TaskSource(lambda i: Task(env=self.name, task_id=str(i), data={}), None)

    async def rollout(self, task, ctx):
        messages = []
        for _ in range(self.num_questions):
            messages.append({"role": "user", "content": "a"})
            messages.append((await ctx.chat(messages)).message)
        return RolloutResult(reward=1.0)
"""


@pytest.fixture
def look(tmp_path, monkeypatch):
    """A function that previews an environment with arguments, by a model of letters that is in a directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.py").write_text(ENVS)
    build_letters_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 150}))

    def look(*words: str, env: str = "scores:Scored", **args) -> FirstTask:
        section = json.dumps([{"id": env, "name": "mine", "args": args}])
        words = ("--orchestrator.env", section, "--model.name", "model", *words)
        cfg = load(RLConfig, list(words))
        [task], missing, _ = preview(cfg.orchestrator_config(), limits_of(cfg))
        assert not missing
        return task

    return look


def test_a_healthy_environment_is_played_and_has_nothing_to_say(look):
    task = look()
    assert task.is_played and not task.notes


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ("{}['gold']", r"score: .* KeyError: 'gold'"),
        ("float('nan')", "its reward is nan"),
        ("'good'", "its reward is 'good'"),
        ("None", "its reward is None"),
        ("__import__('os')._exit(3)", r"score: .*called os\._exit\(3\)"),
    ],
)
def test_a_score_that_fails_in_a_run_fails_in_the_dry_run(look, score, words):
    with pytest.raises(EnvError, match=words) as caught:
        look(score=score)
    assert "played with the reply" in str(caught.value)


def test_a_server_that_runs_only_in_a_run_is_not_an_error(look):
    task = look(score="urllib.request.urlopen('http://127.0.0.1:9/x', timeout=5)")
    assert not task.is_played
    assert "NOT PLAYED to its end" in task.notes[0] and "URLError" in task.notes[0]


def test_an_error_that_only_names_a_missing_server_is_a_fault_of_the_code(look):
    with pytest.raises(EnvError, match="ConnectionError is what it says"):
        look(score="{}['ConnectionError is what it says, TimeoutError too']")


def test_a_prompt_that_is_drawn_anew_is_said(look):
    task = look(is_drawn=True)
    assert any("differs when it is made twice" in note for note in task.notes)


def test_different_tasks_with_one_id_are_said(look):
    assert any("tasks 0 and 1 have the same task_id" in note for note in look(task_id="same").notes)
    assert not look(task_id="same", num_tasks=1).notes


def test_turns_of_which_each_begins_a_branch_are_said(look):
    thinking = ("--orchestrator.renderer.enable-thinking", "true")
    [note] = look(*thinking, env="scores:Asking", num_questions=2).notes
    assert note.startswith("environment mine: qwen3 shows earlier replies without their thoughts once the user speaks")
    assert 'settings.thinking_retention = "all"' in note
    assert not look(*thinking, env="scores:Asking", num_questions=1).notes
    kept = (*thinking, "--orchestrator.renderer.settings", '{"thinking_retention": "all"}')
    assert not look(*kept, env="scores:Asking", num_questions=2).notes
    assert not look(env="scores:Asking", num_questions=2).notes


def test_a_prompt_without_room_for_a_reply_names_the_smallest_limit_by_its_key(look):
    with pytest.raises(ConfigError, match=r"prompt of \d+ tokens .*seq_len = 30"):
        look("--seq-len", "30", length=40)
    with pytest.raises(ConfigError, match=r"no room .* in max_position_embeddings of model/config.json = 150"):
        look(length=200)


def test_a_reply_that_will_be_cut_is_said_with_the_limit_that_cuts_it(look):
    words = ("--seq-len", "400", "--orchestrator.train.sampling.max-completion-tokens", "140")
    [note] = look(*words, length=30).notes
    assert "replies are cut after" in note and "max_position_embeddings of model/config.json = 150" in note
    assert not look(*words[:3], "50", length=30).notes


@pytest.mark.heavy
def test_a_score_that_blocks_is_told_with_file_and_line(look):
    notes = " ".join(look(score="__import__('time').sleep(2.5) or 1.0").notes)
    assert re.search(r"\S+:\d+ in \S+ has blocked the event loop for \d\.\d s", notes), notes
    assert "num_workers" in notes


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ('[{"role": "user", "content": 7}]', "[0].content must be text, got 7; write str(...)"),
        ('[{"role": "usr", "content": "a"}]', "[0].role must be one of"),
        ("5", "return a text, or a list of messages"),
    ],
)
@pytest.mark.parametrize("name", ["render", "prompt_ids"])
def test_what_an_environment_renders_by_itself_is_checked(look, tmp_path, name, messages, said):
    module = f"own_{name}_{abs(hash(messages))}"
    (tmp_path / f"{module}.py").write_text(
        "from scores import Scored\n"
        "class Own(Scored):\n"
        "    def __init__(self, run):\n"
        "        super().__init__()\n"
        "        self.run = run\n"
        "    def prompt(self, task):\n"
        f"        return str(self.run.{name}({messages}))\n"
    )
    with pytest.raises(EnvError) as raised:
        look(env=f"{module}:Own")
    assert said in str(raised.value) and f"messages of run.{name}" in str(raised.value)
    assert f"{module}.py:7 in prompt" in str(raised.value)


SIGNALLED = """
import os, signal
from stretto import signals
from stretto.base.foreign import exits_are_errors

signals.start_command()
with exits_are_errors():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # what a user's function may do
        print("caught", error)
print("goes on")
"""


@pytest.mark.heavy
def test_ctrl_c_ends_a_rollout_that_is_tried_whatever_the_users_code_catches():
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, ""), done
