"""Flags of public launch scripts are plans as they stand, with models in their real sizes."""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from cases.vime import put_megatron
from PIL import Image
from processes.add_ons import needs, skip_if_told

from stretto.cli import main
from stretto.config.load import dump
from stretto_vime.flags.command import read_command
from stretto_vime.flags.resolved import find

CASES = Path(__file__).parents[2] / "cases"
LAUNCHES = tomllib.loads((CASES / "vime_launches.toml").read_text())
START = "--ref-load MEGATRON/{model} --load RUNS/{model}/ --save RUNS/{model}/ --save-interval 20"
OF_FAMILIES = ("deepseek", "moonlight", "kimi", "glm5", "gpt-oss", "qwen3.5", "minimax")
RUNS = [
    pytest.param(name, marks=needs("families") if name.startswith(OF_FAMILIES) else ()) for name in LAUNCHES["runs"]
]
FILES = {
    "with_tool.py": "async def generate(args, sample, sampling_params):\n    return sample\n\n\n"
    "async def reward_func(args, sample):\n    return {'score': 1.0}\n\n\n"
    "async def reward(args, sample):\n    return 1.0\n",
    "whole.py": "def generate_rollout(args, rollout_id, data_source, evaluation=False): ...\n\n\n"
    "async def reward(args, sample):\n    return 1.0\n\n\n"
    "def keeps(args, samples, **kwargs):\n    return True\n\n\n"
    "def see_all(args, all_groups, data_source): ...\n\n\n"
    "def see_samples(args, samples): ...\n\n\n"
    "def log(rollout_id, args, samples, extra_metrics, rollout_time):\n    return True\n",
    "correct.py": "def weights(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):\n"
    "    return pg_loss, loss_masks, {}\n",
    "DATA/mis.yaml": "mis_mode: truncate\n",
    "DATA/roles.yaml": "megatron:\n  - {name: default, role: actor, overrides: {lr: 1e-6}}\n"
    "  - {name: default, role: critic, overrides: {lr: 2e-5, clip_grad: 0.5}}\n",
    "DATA/evals.yaml": "eval:\n  defaults: {n_samples_per_eval_prompt: 4, max_response_len: 8192}\n  datasets:\n"
    "    - {name: aime, path: DATA/aime-2024.jsonl, rm_type: deepscaler, input_key: prompt, label_key: label}\n"
    "    - {name: short, path: DATA/aime-2024.jsonl, rm_type: math, input_key: prompt, label_key: label,"
    " max_response_len: 2048, temperature: 0.6}\n",
    "DATA/groups.yaml": "vllm:\n  - name: actor\n    server_groups:\n"
    "      - {worker_type: prefill, num_gpus: 16, num_gpus_per_engine: 8}\n"
    "      - {worker_type: decode, num_gpus: 48, num_gpus_per_engine: 16, overrides: {max_num_seqs: 96}}\n",
    "DATA/retail.jsonl": "".join(json.dumps({"index": n, "metadata": {"task": n}}) + "\n" for n in range(64)),
}
ROWS = [
    {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "label": str(n + 1),
     "messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(64)
]  # fmt: skip


def put_files(directory: Path) -> None:
    """The prompts, functions and YAML files that the lists name."""
    (directory / "DATA").mkdir()
    for name in ("dapo-math-17k", "aime-2024"):
        (directory / "DATA" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    searched = [{"prompt": row["prompt"], "reward_model": {"ground_truth": {"target": [row["label"]]}}} for row in ROWS]
    drawn = BytesIO()
    Image.new("RGB", (32, 32)).save(drawn, "PNG")
    picture = {"bytes": drawn.getvalue(), "path": None}
    question = "<image>What is it?"
    seen = [
        {"problem": question, "answer": row["label"], "images": [picture],
         "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": row["label"]}]}
        for row in ROWS
    ]  # fmt: skip
    for name, rows in (("openhermes", ROWS), ("nq", searched), ("geo3k", seen)):
        parquet.write_table(pa.Table.from_pylist(rows), directory / "DATA" / f"{name}.parquet")
    for name, text in FILES.items():
        (directory / name).write_text(text)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with the prompts and functions that the lists name, on a machine with 8 GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    put_files(tmp_path)
    return tmp_path


def config_and_flags(model: str) -> tuple[dict[str, Any], str]:
    """The config.json of a model, and the flags of its shape."""
    found = LAUNCHES["models"][model]
    if "like" not in found:
        return found["config"], found["flags"]
    config, flags = config_and_flags(found["like"])
    return config | found["config"], flags


def words_of(directory: Path, name: str) -> list[str]:
    """The words of a list; its model and a tiny checkpoint of Megatron's are put where it names them."""
    run = LAUNCHES["runs"][name]
    model = run["model"]
    (directory / "HF" / model).mkdir(parents=True)
    config, shape = config_and_flags(model)
    (directory / "HF" / model / "config.json").write_text(json.dumps(config))
    shutil.copytree(CASES / "megatron" / "dense.torch_dist", directory / "MEGATRON" / model)
    program, flags = run["flags"].split(" ", 1)
    start = run.get("start", START).replace("{model}", model)
    text = f"{program} --hf-checkpoint HF/{model} {start} {shape} {flags} --dry-run"
    for group, meant in LAUNCHES["groups"].items():
        text = text.replace(f"{{{group}}}", meant)
    return shlex.split(text)


@pytest.mark.heavy
@pytest.mark.parametrize("name", RUNS)
def test_the_flags_of_a_launch_script_are_a_plan(name, directory, capsys):
    words = words_of(directory, name)
    code = main(["vime", *words])
    said = capsys.readouterr()
    skip_if_told(said.err)
    assert code == 0 and "nothing was started" in said.out and "trains" in said.out, said.err
    cfg = dump(read_command(words).config)
    wanted = LAUNCHES["runs"][name].get("plan", {})
    assert {key: find(cfg, key) for key in wanted} == wanted
    assert "KEY-OF-MINE" not in said.out + said.err


@pytest.mark.heavy
@pytest.mark.parametrize("name", RUNS)
def test_where_megatron_core_is_it_trains_or_a_note_says_why_not(name, directory, monkeypatch):
    put_megatron(directory, monkeypatch)
    wanted = LAUNCHES["runs"][name].get("with_megatron")
    command = read_command([*words_of(directory, name), "--train-backend", "megatron"])
    cfg = dump(command.config)
    backend = "megatron" if wanted else "fsdp"
    assert cfg.get("trainer", {}).get("backend", "fsdp") == backend
    assert {key: find(cfg, key) for key in wanted or {}} == (wanted or {})
    said = "--train-backend megatron: stretto's own trainer trains", "--train-backend megatron does nothing with --loss"
    assert any(note.startswith(said) for note in command.notes) == (wanted is None)
