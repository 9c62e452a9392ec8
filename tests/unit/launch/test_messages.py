"""The message after a user's mistake: one message with the place, the rule and what to do.

Every case is a real command: files in a directory, a verb, and the output on the console. No traceback,
no second message, and a status that is not 0. What is said of keys is in test_config_errors.py, test_config_mesh.py and
test_inference_messages.py, of records and arguments in unit/envs/test_dataset_env.py, and of what a dry run finds in
test_mistakes.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import forked
from processes.add_ons import skip_if_told

from stretto import cli
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import ScratchSection
from stretto.models.hub import random_model, save_hf

ENV = '[[orchestrator.env]]\nid = "sort-letters"\n'
SFT = '[model.scratch]\n[data]\ntype = "file"\nname = "rows.jsonl"\n'
RUN = 'max_steps = 1\nseq_len = 64\n[model]\nname = "model"\n'


def environment(name, args="", more=""):
    return RUN + more + f'[[env]]\nid = "{name}"\nargs = {{ {args} }}\n'


def hook(key):
    return RUN + f'[hooks]\n{key} = "own:function"\n[[env]]\nid = "sort-letters"\n'


def mine(init, tasks="TaskSource(lambda i: i)"):
    """A module with an environment `Mine`."""
    return (
        "from stretto.envs.base import SingleTurnEnv, TaskSource\n"
        "class Mine(SingleTurnEnv):\n"
        "    def __init__(self):\n"
        f"        self.name = 'mine'\n        {init}\n"
        f"    def tasks(self, split):\n        return {tasks}\n"
        "    def prompt(self, task):\n        return []\n"
        "    def score(self, task, text):\n        return 0.0\n"
    )


ROWS = '{"prompt": "a", "label": "b"}\n'

# name: (verb, config file, other files, parts of the message)
CASES: dict[str, tuple[str, str, dict[str, str], list[str]]] = {
    # -- configs --
    "a key that is misspelt": (
        "rl", "max_step = 3\n" + ENV, {}, ["c.toml:1: max_step: unknown key", "did you mean `max_steps`?"],
    ),
    "an interval of one eval": (
        "eval", '[eval]\ninterval = 5\nskip_first_step = true\n[[eval.env]]\nid = "sort-letters"\ninterval = 2\n', {},
        ["c.toml:2, ", "eval.interval = 5", "eval.skip_first_step = true", "eval.env.0.interval = 2",
         "do nothing with eval (`eval` evaluates once)"],
    ),
    "an eval that is resumed": (
        "eval", '[resume]\nstep = 3\n[[eval.env]]\nid = "sort-letters"\n', {},
        ["c.toml:1", "resume", "does nothing with eval (`eval` evaluates once)"],
    ),
    "an eval of a model and of engines that run": (
        "eval", 'model = "m"\n[client]\nbase_url = "http://gpu7:8000/v1"\n[[eval.env]]\nid = "sort-letters"\n', {},
        ["c.toml:3, c.toml:1", "client.base_url", "does nothing with model = ", "leave model out"],
    ),
    "a share of draws for an eval": (
        "eval", '[[eval.env]]\nid = "sort-letters"\nratio = 2.0\n', {}, ["eval.env.0.ratio: unknown key"],
    ),
    "an eval of sft that is never repeated": (
        "sft", 'max_steps = 1\n[eval]\nretrigger_on_resume = true\n[[eval.env]]\nid = "sort-letters"\n' + SFT, {},
        ["c.toml:3: eval.retrigger_on_resume = true is for `rl`"],
    ),
    "evals of sft without an environment": (
        "sft", "max_steps = 1\n[eval]\ninterval = 5\n" + SFT, {}, ["eval.env: no environment to evaluate; add one"],
    ),
    "an eval of sft after its end": (
        "sft", 'max_steps = 9\n[eval]\ninterval = 200\n[[eval.env]]\nid = "sort-letters"\n' + SFT, {},
        ["c.toml:3", "eval.interval = 200"],
    ),
    # -- data files of sft --
    "data that is not there": ("sft", "max_steps = 1\n" + SFT, {}, ["[data] name = 'rows.jsonl': no such file"]),
    "a comma too many": (
        "sft", "max_steps = 1\n" + SFT, {"rows.jsonl": '{"messages": [{"role": "user", "content": "a",}]}\n'},
        ["rows.jsonl:1: not JSON: a comma before '}'", "remove it"],
    ),
    "a step_loss_mask of two": (
        "sft", "max_steps = 1\n" + SFT,
        {"rows.jsonl": '{"messages": [{"role": "user", "content": "a", "step_loss_mask": 2}]}\n'},
        ["rows.jsonl:1: messages[0].step_loss_mask must be 1", "got 2"],
    ),
    # -- data files of runs --
    # -- environments --
    "a module that is not there": (
        "orchestrator", environment("my_env:Mine"), {}, ["environment 'my_env:Mine': no module 'my_env'"],
    ),
    "a class that is not in the module": (
        "orchestrator", environment("my_env:Mine"), {"my_env.py": "class Mien:\n    pass\n"},
        ["module 'my_env' has no 'Mine'; did you mean my_env:Mien?"],
    ),
    "an argument out of range": (
        "orchestrator", environment("arithmetic", "num_terms = 99"), {}, ["arithmetic", "num_terms = 99", "<= 16"],
    ),
    "an environment whose constructor fails": (
        "orchestrator", environment("my_env:Mine"), {"my_env.py": mine("self.rows = {}['a']")},
        ["environment 'my_env:Mine': ", "my_env.py:5 in __init__: KeyError: 'a'"],
    ),
    "an environment that cannot be called": (
        "orchestrator", environment("math:pi"), {}, ["environment 'math:pi' is an object of type float; name a class"],
    ),
    "tasks that fail": (
        "orchestrator", environment("my_env:Mine"), {"my_env.py": mine("pass", "open('no-such-file')")},
        ["environment 'my_env:Mine', tasks('train'): ", "my_env.py:7 in tasks: FileNotFoundError"],
    ),
    "tasks that are a list": (
        "orchestrator", environment("my_env:Mine"), {"my_env.py": mine("pass", "[1, 2]")},
        ["tasks('train') returned a list; return a TaskSource(make, num_tasks)"],
    ),
    "tasks that fail in an eval": (
        "eval", 'client = { api = "chat" }\n[[eval.env]]\nid = "my_env:Mine"\n',
        {"my_env.py": mine("pass", "open('no-such-file')")},
        ["environment 'my_env:Mine', tasks('eval'): ", "my_env.py:7 in tasks: FileNotFoundError"],
    ),
    "no tasks at all": (
        "orchestrator", environment("my_env:Mine"), {"my_env.py": mine("pass", "TaskSource(lambda i: i, 0)")},
        ["tasks('train'): num_tasks = 0; give at least 1, or None"],
    ),
    # -- hooks --
    "a hook that is not in its module": (
        "orchestrator", hook("sample_filter"), {"own.py": "def functoin(args, groups):\n    pass\n"},
        ["own.py has no 'function'; did you mean 'functoin'?"],
    ),
    "a hook whose module fails": (
        "orchestrator", hook("sample_filter"), {"own.py": "import json\nx = 1 / 0\n"}, ["own.py:2: ZeroDivisionError"],
    ),
    "a hook that is no function": (
        "orchestrator", hook("rollout_function"), {"own.py": "function = 3\n"}, ["is a int, not a function"],
    ),
    "credit of one environment in no module": (
        "orchestrator",
        RUN + '[[env]]\nid = "sort-letters"\nalgo = { type = "custom", import_path = "own:credit" }\n',
        {},
        ["orchestrator.env.0.algo.import_path = 'own:credit': no module 'own'"],
    ),
    "a penalty that no reply is long enough for": (
        "orchestrator",
        RUN + '[train.sampling]\nmax_completion_tokens = 6\n[[env]]\nid = "sort-letters"\n'
        'algo = { type = "grpo", overlong = { max_tokens = 40, buffer_tokens = 10 } }\n',
        {},
        ["orchestrator.env.0.algo.overlong.max_tokens = 40: the penalty would begin after 30 tokens",
         "sort-letters has one reply, of at most max_completion_tokens = 6; lower"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small but complete model directory."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_letters_tokenizer(directory / "tokenizer")
    policy = random_model(ScratchSection(), load_tokenizer(tokenizer).vocab_size, eos_token_id=1)
    save_hf(policy, directory / "model", tokenizer)
    return directory / "model"


@pytest.fixture
def place(tmp_path, monkeypatch, model):
    """A user's working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("own", "my_env"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    from stretto.base.foreign import load_object

    load_object.cache_clear()
    (tmp_path / "model").symlink_to(model)
    return tmp_path


def prepare(place: Path, toml: str, files: dict[str, str | None]) -> None:
    (place / "c.toml").write_text(toml)
    for name, text in files.items():
        if text is None:
            (place / name).unlink()
        else:
            (place / name).write_text(text)


def check(output: str, parts: list[str]) -> None:
    for part in parts:
        assert part in output, output
    assert "Traceback" not in output and "pydantic" not in output
    assert len(re.findall(r"^error: ", output, re.M)) == 1, output


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_one_mistake_is_one_message_and_no_traceback(place, capsys, case):
    verb, toml, files, parts = CASES[case]
    prepare(place, toml, files)
    code = cli.main([verb, "@", "c.toml"])
    said = capsys.readouterr()
    skip_if_told(said.err)
    assert code not in (0, None)
    check(said.err + said.out, parts)
    assert not list(place.glob("outputs/*/checkpoints")) and not list(place.glob("outputs/*/weights"))


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["a comma too many", "a hook whose module fails", "a key that is misspelt"])
def test_the_installed_command_says_the_same(place, case):
    verb, toml, files, parts = CASES[case]
    prepare(place, toml, files)
    source = str(Path(cli.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "stretto", verb, "@", "c.toml"],
        cwd=place,
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
    )
    skip_if_told(done.stderr)
    assert done.returncode not in (0, None)
    check(done.stderr + done.stdout, parts)


PROMPT = mine("pass", "TaskSource(lambda i: Task(env='mine', task_id=str(i), data={}))").replace(
    "return []", "return task.data['question']"
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (
            {"my_env.py": "from stretto.records.rollout import Task\n" + PROMPT},
            ["environment my_env:Mine, task 0, prompt: ", "my_env.py:10 in prompt: KeyError: 'question'"],
        ),
        ({"my_env.py": mine("pass", "open('no-such-file')")}, ["my_env.py:7 in tasks: FileNotFoundError"]),
    ],
)
def test_a_fault_of_the_users_code_is_found_before_engine_and_trainer_do_anything(place, files, parts):
    prepare(place, environment("my_env:Mine").replace("[[env]]", "[[orchestrator.env]]"), files)
    done = forked.run(
        [sys.executable, "-m", "stretto", "rl", "@", "c.toml", "--run.name", "x"],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])},
        timeout=120,
    )
    assert done.returncode not in (0, None)
    check(done.stderr + done.stdout, parts)
    for role in ("inference", "trainer"):
        assert (place / "outputs" / "x" / "logs" / f"{role}.log").read_text() == ""
