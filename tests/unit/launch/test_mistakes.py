"""Mistakes that newcomers make: the answer to each says where it is, what is wrong, and what to do.

Every case is a command that is typed, with `--dry-run` where that finds the mistake. What goes wrong in files and
environments while they are used is in test_messages.py.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes.add_ons import skip_if_told

from stretto import cli
from stretto.base.foreign import load_object
from stretto.base.paths import RunDir
from stretto.orchestrator.state import run_checkpoint

RUN = '[[orchestrator.env]]\nid = "sort-letters"\n'


def own(more: str = "", base: str = "SingleTurnEnv") -> str:
    """A module with an environment `Mine`."""
    home = {"SingleTurnEnv": "base", "ToolEnv": "multi_turn"}[base]
    arguments = {"SingleTurnEnv": "task, text", "ToolEnv": "episode"}[base]
    return (
        f"from stretto.envs.base import TaskSource\nfrom stretto.envs.{home} import {base}\n"
        f"from stretto.records.rollout import Task\nclass Mine({base}):\n    name = 'mine'\n"
        "    def tasks(self, split):\n"
        "        return TaskSource(lambda i: Task(env='mine', task_id=str(i), data={'q': i}))\n"
        "    def prompt(self, task):\n        return 'x'\n"
        f"    def score(self, {arguments}):\n        return 1.0\n{more}"
    )


FILES = {
    "ok.toml": "max_steps = 4\n" + RUN,
    "broken.toml": "max_steps = 4\nrun.name = abc\n" + RUN,
    "null.toml": "max_steps = None\n" + RUN,
    "rows.jsonl": '{"prompt": "a", "label": "b"}\n',
    "text.jsonl": '{"text": "a"}\n',
    "rewards_m.py": "def trl(completions, **kwargs):\n    return [1.0]\n\ndef string(args, sample):\n    return 1.0\n",
    "syntax_m.py": "import json\nclass Mine(:\n    pass\n",
    "envs_m.py": "class NotEnv:\n    pass\n",
    "moved_m.py": "from stretto.envs import SingleTurnEnv\n",
    "absent_m.py": "import a_package_of_nobody\n",
    "exits_m.py": "import sys\nsys.exit(3)\n",
    "score_m.py": "def score(prompt, completion):\n    return 1.0\n",
    "tools_m.py": own("    def tools(self, task):\n        return []\n", "ToolEnv"),
    "twice_m.py": own().replace("task_id=str(i)", "task_id='a'"),
    "raises_m.py": own().replace("return 'x'", "return task.data['x']"),
    "yaml.toml": "max_steps = 4\nclean: true\n" + RUN,
    "comma.toml": "max_steps = 4,\n" + RUN,
    "quotes.toml": "[model]\nname = \u201cmodel\u201d\n" + RUN,
    "open.toml": "max_steps = 4\n[model]\nname = 'model\n" + RUN,
    "windows.toml": '[model]\nname = "C:\\models"\n' + RUN,
    "slashes.toml": "max_steps = 4\n// clean = true\n" + RUN,
    "within.toml": "[rl]\nmax_steps = 4\n" + RUN,
    "names.toml": 'max_steps = 4\n[orchestrator]\nenv = ["sort-letters"]\n',
    "warm.toml": 'max_steps = 4\n[model.scratch]\n[data]\nname = "rows.jsonl"\n',
    "run.yaml": "max_steps: 4\n",
    "single.jsonl": "{'prompt': 'a', 'label': 'b'}\n",
    "python.jsonl": '{"prompt": "a", "label": None}\n',
    "two.jsonl": '{"prompt": "a", "label": "b"}{"prompt": "a", "label": "b"}\n',
    "cut.jsonl": '{"prompt": "a", "label": "b"\n',
    "number.jsonl": '{"prompt": 5, "label": "b"}\n',
    "sharegpt.jsonl": '{"prompt": [{"from": "human", "value": "a"}], "label": "b"}\n',
    "alpaca.jsonl": '{"instruction": "a", "output": "b"}\n',
    "asked.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    "thought.jsonl": '{"messages": [{"role": "user", "content": "a"}, '
    '{"role": "assistant", "reasoning_content": "so", "content": "b"}]}\n',
    "rows.jsonl.gz": "",
    "tables/rows.csv": "prompt,label\na,b\n",
}


def env(env_id: str, **args) -> str:
    return "--orchestrator.env " + json.dumps([{"id": env_id, "args": args}], separators=(",", ":"))


OWN = ("rewards", "syntax", "envs", "score", "tools", "twice", "raises")
OK = "rl @ ok.toml"
# name: (command, where, what, what to do)
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "a section of another verb": (f"{OK} --data.type preference", "--data.type", "unknown flag", "it is one of `sft`"),
    "a list of GPUs": (f"{OK} --gpu-ids 1,2", "--gpu-ids 1,2", "unknown flag", "did you mean --trainer-gpu-ids?"),
    "TRL's colocate": (f"{OK} --vllm-mode colocate", "--vllm-mode", "unknown flag", "did you mean --colocate?"),
    "a reward model that writes text": (
        f"{OK} --models.rm.model outputs/warm/weights/latest " + env("dataset", path="rows.jsonl", reward="models.rm"),
        "[models.rm] model = 'outputs/warm/weights/latest'",
        "orchestrator.env.0 has it score replies", "give a reward model"),
    "a frozen model that is not there": (
        f"{OK} --models.rm.model ./none " + env("dataset", path="rows.jsonl", reward="models.rm"),
        "models.rm: NOT FOUND", "'./none': no such directory", "give a directory with config.json"),
    "a hub with a typo": (f"{OK} " + env("openenvv:http://127.0.0.1:9"),
        "'openenvv:http://127.0.0.1:9'", "no environment", "did you mean 'openenv:http://127.0.0.1:9'?"),
    "a hub's server that does not answer": (f"{OK} " + env("openenv:http://127.0.0.1:9"),
        "openenv:http://127.0.0.1:9", "does not answer: connection refused;", "start it, or correct the id"),
    "an agent without its program": (f"{OK} " + env("agent", path="rows.jsonl"),
        "environment 'agent'", "missing a required argument: 'command'", "hook_args=None. Change `args`."),
    "an agent with a word that nobody replaces": (
        f"{OK} " + env("agent", command=["true", "{promt}"], path="rows.jsonl"),
        "agent: command", "{promt} is not replaced", "did you mean {prompt}?"),
    "a text without quotes": ("rl @ broken.toml", "broken.toml:2", "`run.name = abc`", "a text has quotes"),
    "a null": ("rl @ null.toml", "null.toml:1", "TOML has no null", 'write max_steps = "None"'),
    "a comma too many in a flag": ('rl --orchestrator.env [{"id":"sort-letters"},]',
        "--orchestrator.env", "a comma before ']' (character 23)", "remove it"),
    "a model that is not on this machine": (f"{OK} --model.name Qwen/Qwen3-0.6B",
        "model ", "'Qwen/Qwen3-0.6B': no such directory", "`hf download Qwen/Qwen3-0.6B`"),
    "a run as a model": (f"{OK} --model.name outputs/warm",
        "[model] name = 'outputs/warm'", "no config.json", "did you mean outputs/warm/weights/latest?"),
    "a key that a resume changes": (f"{OK} --run.name there --resume",
        "outputs/there (a resumed run)", "changed: max_steps: 9 -> 4", ""),
    "a directory that is no model": (f"{OK} --model.name empty",
        "[model] name = 'empty'", "no config.json", "safetensors and tokenizer"),
    "rows that are not there": (f"rl {env('dataset', path='rwos.jsonl')}",
        "dataset: path = 'rwos.jsonl'", "no such file", "Did you mean 'rows.jsonl'?"),
    "rows that are nowhere": (f"rl {env('dataset', path='nothing-like-it.parquet')}",
        "dataset: path = 'nothing-like-it.parquet'", "no such file", "Relative paths"),
    "a data set of the Hub as a path": (f"rl {env('dataset', path='openai/gsm8k')}",
        "dataset: path = 'openai/gsm8k[train]'", "data set of the Hub", "hf download openai/gsm8k"),
    "a key that records do not have": (f"rl {env('dataset', path='rows.jsonl', input_key='promt')}",
        "rows.jsonl:1", "no 'promt' (input_key)", "did you mean 'prompt'?"),
    "a reward function with a typo": (f"rl {env('dataset', path='rows.jsonl', reward='rewards_m:strin')}",
        "dataset: reward = 'rewards_m:strin'", "has no 'strin'", "did you mean 'string'?"),
    "a reward function of TRL": (f"rl {env('dataset', path='rows.jsonl', reward='rewards_m:trl')}",
        "dataset: reward = 'rewards_m:trl'", "trl(completions, **kwargs)", "`def reward(args, sample)`"),
    "an argument that an environment does not have": (f"rl {env('sort-letters', num_leters=3)}",
        "environment 'sort-letters'", "'num_leters'", "its arguments are"),
    "a class that is no environment": (f"rl {env('envs_m:NotEnv')}",
        "'envs_m:NotEnv'", "lacks name, tasks or rollout", "SingleTurnEnv or MultiTurnEnv"),
    "a syntax error": (f"rl {env('syntax_m:Mine')}", "syntax_m.py:2", "SyntaxError: invalid syntax", "mend that line"),
    "an environment with a typo": (f"rl {env('sort-leters')}",
        "'sort-leters'", "no environment", "did you mean 'sort-letters'?"),
    "names of TRL": (f"{OK} --learning_rate 1e-5 --num_generations 8 --use_peft",
        "--learning_rate 1e-5", "unknown flag", "did you mean --trainer.optim.lr?"),
    "a name of nobody": (f"{OK} --wobble 3", "--wobble 3", "unknown flag", "`--help WORD` searches"),
    "a data file of TRL": (f"{OK} --dataset_name rows.jsonl",
        "--dataset_name rows.jsonl", "unknown flag", "did you mean --orchestrator.env.0.args.path?"),
    "a data file of verl": (f"{OK} data.train_files=rows.jsonl",
        "data.train_files=rows.jsonl", "unexpected word", "did you mean --orchestrator.env.0.args.path rows.jsonl?"),
    "GPUs as verl counts them": (f"{OK} trainer.n_gpus_per_node=2",
        "trainer.n_gpus_per_node=2", "unexpected word", "did you mean --deployment.num-train-gpus 2?"),
    "a rate that is far too high": (f"{OK} --trainer.optim.lr 1.0",
        "--trainer.optim.lr 1.0", "far above what AdamW takes", "lower it"),
    "a tracker that is not installed": (f"{OK} --monitors.trackio",
        "[monitors.trackio]", "package trackio", "pip install 'stretto[trackio]'"),
    "rows of another kind": ("sft --data.name text.jsonl --max-steps 1 --model.scratch",
        "text.jsonl:1", "`messages`, or `prompt` and `completion`", "named by data.input_key"),
    "a flag with one dash": (f"{OK} -max-steps 10", "-max-steps 10", "unexpected word", "did you mean --max-steps 10?"),
    "a dash of a text processor": (f"{OK} \u2014max-steps 10",
        "\u2014max-steps 10", "unexpected word", "--max-steps 10?"),
    "keys after --set": (f"{OK} --set max_steps=10", "--set max_steps=10", "a key is a flag itself", "--max-steps 10"),
    "a file after --config": ("rl --config ok.toml", "1 problem", "unknown flag", "given as `@ ok.toml`"),
    "only the @ is wrong": ("rl ok.toml", "1 problem", "ok.toml", "`@ ok.toml`"),
    "a value for a switch": (f"{OK} --clean maybe", "--clean maybe", "takes no value but true or false", "--no-clean"),
    "an item without its number": (f"{OK} --orchestrator.env.id sort-letters",
        "--orchestrator.env.id", "is a list, its first item is 0", "--orchestrator.env.0.id"),
    "a name in the place of a table": (f"{OK} --orchestrator.env sort-letters",
        "--orchestrator.env sort-letters", "a table is needed", "--orchestrator.env.0.id ..."),
    "names in the place of tables": ("rl @ names.toml", "names.toml:3", "a table is needed", "[[orchestrator.env]] id"),
    "a model as one word": (f"{OK} --model model", "--model model", "a table is needed", "--model.name ..."),
    "a line of YAML": ("rl @ yaml.toml", "yaml.toml:2", "not valid TOML", "write clean = true"),
    "a comma at the end of a line": ("rl @ comma.toml", "comma.toml:1", "not valid TOML", "remove the comma"),
    "quotes of a text processor": ("rl @ quotes.toml", "quotes.toml:2", "not valid TOML", "not the straight ones"),
    "a quote that is not closed": ("rl @ open.toml", "open.toml:3", "a quote is not closed", "`name = 'model`"),
    "a path of Windows": ("rl @ windows.toml", "windows.toml:2", "a backslash", "single quotes"),
    "a comment of C": ("rl @ slashes.toml", "slashes.toml:2", "not valid TOML", "a comment begins with #"),
    "keys in a table of the verb": ("rl @ within.toml", "within.toml:1", "rl: unknown key", "remove [rl]"),
    "a file of YAML": ("rl @ run.yaml", "run.yaml", "not a .toml or .json file", "write it as TOML"),
    "a file of sft for rl": ("rl @ warm.toml", "1 problem", "data: unknown key", "is one for `sft`"),
    "Python's quotes in rows": (f"rl {env('dataset', path='single.jsonl')}",
        "single.jsonl:1", "a text in single quotes", "write double quotes"),
    "Python's None in rows": (f"rl {env('dataset', path='python.jsonl')}",
        "python.jsonl:1", "None (character 26) is Python", "write null"),
    "two records in a line": (f"rl {env('dataset', path='two.jsonl')}",
        "two.jsonl:1", "more follows after its end", "one object on each line"),
    "a record that breaks off": (f"rl {env('dataset', path='cut.jsonl')}",
        "cut.jsonl:1", "it ends too early", "close what is open"),
    "a number as prompt": (f"rl {env('dataset', path='number.jsonl')}",
        "number.jsonl:1", "'prompt' must be text", "got 5; write it as text"),
    "messages of ShareGPT": (f"rl {env('dataset', path='sharegpt.jsonl')}",
        "sharegpt.jsonl:1: prompt[0]", "has no role; it has from, value", "rename from to role"),
    "rows of Alpaca": ("sft --data.name alpaca.jsonl --max-steps 1 --model.scratch", "alpaca.jsonl:1",
        "it has instruction, output", 'data.input_key = "instruction" and data.output_key = "output"'),
    "rows without a reply": ("sft --data.name asked.jsonl --max-steps 1 --model.scratch",
        "asked.jsonl:1", "no message of assistant", '{"role": "assistant", "content": "..."}'),
    "thoughts that the template does not show": (
        "sft --data.name thought.jsonl --max-steps 1 --model.scratch --renderer.template chatml",
        "thought.jsonl:1: not trained", "does not show the thought", "write it into the content"),
    "a packed file": (f"rl {env('dataset', path='rows.jsonl.gz')}",
        "rows.jsonl.gz", "must end in .jsonl", "gunzip -k rows.jsonl.gz"),
    "a directory of tables": (f"rl {env('dataset', path='tables')}",
        "'tables'", "it has rows.csv", "tables/rows.csv > tables/rows.jsonl"),
    "a class from another module": (f"rl {env('moved_m:Mine')}", "moved_m.py:1",
        "cannot import name 'SingleTurnEnv' from 'stretto.envs'",
        "write `from stretto.envs.base import SingleTurnEnv`"),
    "a package that is not there": (f"rl {env('absent_m:Mine')}",
        "absent_m.py:1", "No module named 'a_package_of_nobody'", "install its package"),
    "a module that exits": (f"rl {env('exits_m:Mine')}",
        "exits_m.py:2", "it called sys.exit(3)", "`if __name__ == '__main__':`"),
    "tools as a method": (f"rl {env('tools_m:Mine')}",
        "environment 'tools_m:Mine': Mine.tools", "got a method", "`self.tools = [self.add]`"),
    "tasks of one name": (f"rl {env('twice_m:Mine')}",
        "tasks 0 and 1 have the same task_id, 'a'", "take them for one task", "str(index)"),
    "a prompt that raises": (f"rl {env('raises_m:Mine')}", "raises_m.py:9 in prompt", "KeyError: 'x'", ""),
    "an output_dir that cannot be": (f"{OK} --output-dir /proc/nothing",
        "cannot use /proc/nothing/", "there is no such file", "another output_dir"),
    "a class after a dot": (f"rl {env('envs_m.NotEnv')}",
        "'envs_m.NotEnv'", "no environment", "did you mean 'envs_m:NotEnv'?"),
    "a file without its class": (f"rl {env('envs_m.py')}", "'envs_m.py'", "no environment", "'envs_m.py:NotEnv'?"),
    "a reward function as an environment": (f"rl {env('score_m:score')}",
        "'score_m:score'", "missing a required argument", 'id = "dataset"'),
    "a reward file without its function": (f"rl {env('dataset', path='rows.jsonl', reward='score_m.py')}",
        "dataset: reward = 'score_m.py'", "name the object in it", "'score_m.py:score'"),
    "a beginning that is not there": (f"{OK} --resume.dir nowhere", "resume.dir", "there is no directory", "nowhere"),
    "nothing to resume": (f"{OK} --resume", "--resume", "there is no run 'sort-letters-", "Check run.name"),
}  # fmt: skip
STARTED = {
    "GPUs that are not there": (f"{OK} --trainer-gpu-ids 0 --model.name model",
        "trainer_gpu_ids", "GPU 0, but this machine shows 0", "CUDA_VISIBLE_DEVICES"),
    "a model directory that is not there": (f"{OK} --model.name outputs/none/weights/latest",
        "[model] name = 'outputs/none/weights/latest'", "no such directory", "`sft @ ...`"),
    "a frozen model that is not there": (
        f"{OK} --model.name model --models.rm.model outputs/none/weights " + env("dataset", path="rows.jsonl"),
        "models.rm: model 'outputs/none/weights'", "no such directory, and no directory outputs/none;",
        "give a directory with config.json"),
    "an adapter as a model": (f"{OK} --model.name adapter",
        "no config.json in that directory", "an adapter of PEFT", "merge_and_unload()"),
    "the adapter beside a model": (f"{OK} --model.name model/lora_adapters",
        "no config.json in that directory", "did you mean model?", ""),
    "a checkpoint as a model": (f"{OK} --model.name outputs/warm/checkpoints/step_2",
        "no config.json in that directory", "did you mean outputs/warm/weights/latest?", ""),
    "a run of the same name": (f"{OK} --model.name model --run.name there",
        "run 'there' exists in outputs/there", "checkpoints", "--resume from step 1"),
}  # fmt: skip


CONFIG = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory without GPUs, trackers and hub models, whose own modules are imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trackio" else real(name))
    (tmp_path / "tables").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    there = tmp_path / "outputs" / "there" / "checkpoints" / "step_1"
    (there / "trainer").mkdir(parents=True)
    values = {"schema": 2, "num_bytes": {}, "cursor": {}, "optim": "adamw"}
    (there / "trainer" / "state.json").write_text(json.dumps(values))
    run_checkpoint.save(RunDir(there.parents[1]), run_checkpoint.Progress(step=1))
    (there.parents[1] / "configs").mkdir()
    (there.parents[1] / "configs" / "run.json").write_text('{"max_steps": 9}')
    warm = tmp_path / "outputs" / "warm" / "weights" / "latest"
    warm.mkdir(parents=True)
    (warm / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "outputs" / "warm" / "checkpoints" / "step_2").mkdir(parents=True)
    for adapter in ("adapter", "model/lora_adapters"):
        (tmp_path / adapter).mkdir()
        (tmp_path / adapter / "adapter_config.json").write_text("{}")
    load_object.cache_clear()
    yield tmp_path
    for name in [each for each in sys.modules if each.partition("_m")[0] in OWN]:
        sys.modules.pop(name, None)


def told(words: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    """What a command that starts nothing says."""
    cli.main(words)
    said = capsys.readouterr()
    return " ".join(f"{said.err} {said.out} {caplog.text}".split())


@pytest.mark.heavy
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_place_reason_and_remedy(mistake, place, capsys, caplog):
    command, *parts = MISTAKES[mistake]
    words = command.split()
    text = told([*words, "--dry-run"], capsys, caplog)
    skip_if_told(text)
    for part in parts:
        assert " ".join(part.split()) in text, f"{part!r} is not in: {text}"
    assert "Traceback" not in text and "pydantic" not in text


@pytest.mark.parametrize("mistake", STARTED)
def test_so_is_one_that_is_found_when_a_run_would_start(mistake, place, capsys, caplog):
    command, *parts = STARTED[mistake]
    text = told(command.split(), capsys, caplog)
    skip_if_told(text)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
    assert "Traceback" not in text and "pydantic" not in text


def test_a_port_in_use_names_its_key_and_the_way_to_find_its_owner(place, capsys, caplog):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        text = told(f"{OK} --dry-run --control.port {port}".split(), capsys, caplog)
    assert f"--control.port {port}" in text or f"control.port = {port}" in text
    assert "ss -ltnp" in text and "another" in text
