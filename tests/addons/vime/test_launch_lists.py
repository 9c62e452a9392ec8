"""Flags of public launch scripts are plans as they stand, with models in their real sizes."""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stretto.config.load import dump
from stretto_vime.cli import vime
from stretto_vime.flags.command import read_command
from stretto_vime.flags.resolved import find

CASES = Path(__file__).parents[2] / "cases"
LAUNCHES = tomllib.loads((CASES / "vime_launches.toml").read_text())
START = "--ref-load MEGATRON/{model} --load RUNS/{model}/ --save RUNS/{model}/ --save-interval 20"
FILES = {
    "with_tool.py": "async def generate(args, sample, sampling_params):\n    return sample\n\n\n"
    "async def reward_func(args, sample):\n    return {'score': 1.0}\n",
    "correct.py": "def weights(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):\n"
    "    return pg_loss, loss_masks, {}\n",
    "DATA/mis.yaml": "mis_mode: truncate\n",
}
ROWS = [
    {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "label": str(n + 1),
     "messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(64)
]  # fmt: skip


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with the prompts and functions that the lists name, on a machine with 8 GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    (tmp_path / "DATA").mkdir()
    for name in ("dapo-math-17k", "aime-2024"):
        (tmp_path / "DATA" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "DATA" / "openhermes.parquet")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def words_of(directory: Path, name: str) -> list[str]:
    """The words of a list; its model and a tiny checkpoint of Megatron's are put where it names them."""
    run = LAUNCHES["runs"][name]
    model = run["model"]
    (directory / "HF" / model).mkdir(parents=True)
    (directory / "HF" / model / "config.json").write_text(json.dumps(LAUNCHES["models"][model]["config"]))
    shutil.copytree(CASES / "megatron" / "dense.torch_dist", directory / "MEGATRON" / model)
    program, flags = run["flags"].split(" ", 1)
    start = run.get("start", START).replace("{model}", model)
    text = f"{program} --hf-checkpoint HF/{model} {start} {LAUNCHES['models'][model]['flags']} {flags} --dry-run"
    for group, meant in LAUNCHES["groups"].items():
        text = text.replace(f"{{{group}}}", meant)
    return shlex.split(text)


@pytest.mark.heavy
@pytest.mark.parametrize("name", LAUNCHES["runs"])
def test_the_flags_of_a_launch_script_are_a_plan(name, directory, capsys):
    words = words_of(directory, name)
    cfg = dump(read_command(words).config)
    wanted = LAUNCHES["runs"][name].get("plan", {})
    assert {key: find(cfg, key) for key in wanted} == wanted
    assert vime(words) == 0
    said = capsys.readouterr()
    assert "nothing was started" in said.out and ("trains" in said.out)
    assert "KEY-OF-MINE" not in said.out + said.err
