"""`stretto push`: a real upload to a server with the Hub's API, and the card that is made from the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases.hub_site import TOKEN, open_hub
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto import __version__
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.model import ScratchSection
from stretto.models.hub import load_model, random_model, save_hf
from stretto_python.run import Run
from stretto_view.card import model_card
from stretto_view.push import push

pytestmark = pytest.mark.heavy

ARGS = {"path": ["openai/gsm8k:main[train]", "own.jsonl"], "x": "a|b", "api_key": "of mine"}
CONFIG = {
    "model": {"name": "Qwen/Qwen3-0.6B", "lora": {"rank": 4, "alpha": 8.0}},
    "tokenizer": {"name": None},
    "seq_len": 2048,
    "trainer": {"optim": {"type": "adamw", "lr": 1e-6}, "loss": {"type": "ipo"}},
    "orchestrator": {
        "algo": {"type": "rloo"},
        "batch_size": 8,
        "group_size": 4,
        "env": [{"id": "dataset", "name": "maths", "args": ARGS}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Five steps of an orchestrator with evals, and weights of two of them."""
    cfg = config(tmp_path_factory.mktemp("runs"), eval={"num_examples": 10, "interval": 5, "sampling": {}})
    train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5))
    run_dir: RunDir = cfg.run_dir
    run_dir.configs.mkdir()
    run_dir.config("run").write_text(json.dumps(CONFIG))
    tokenizer = build_letters_tokenizer(run_dir.tokenizer)
    for step in (2, 5):
        save_hf(random_model(ScratchSection(seed=step), 112), run_dir.weights_step(step), tokenizer)
    run_dir.link_latest_weights(5)
    return run_dir


def call(hub, run: RunDir, *words: str, **variables: str) -> tuple[int, str]:
    """Exit status and output of the verb in a process of its own, which knows this hub and no other."""
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(run.path / "home")}
    kept = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "push", str(run), *words],
        env=kept | own | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_what_is_uploaded_are_the_newest_weights_the_tokenizer_and_the_card(run, tmp_path):
    with open_hub(tmp_path) as hub:
        code, output = call(hub, run, "--repo-id", "lab/sorter", HF_TOKEN=TOKEN)
        assert code == 0 and f"uploaded to {hub.url}/lab/sorter" in output, output
        again, output = call(hub, run, "--repo-id", "lab/sorter", HF_TOKEN=TOKEN)
        assert again == 0 and hub.num_commits == 2 and hub.messages == [f"{run.path.name}: weights of step 5"] * 2
    stored = tmp_path / "models" / "lab" / "sorter"
    sent = {file.name: file.read_bytes() for file in run.weights_step(5).iterdir()}
    assert {file.name: file.read_bytes() for file in stored.iterdir()} == sent
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= sent.keys()
    loaded, trained = (load_model(path, dtype=torch.float32) for path in (stored, run.weights_step(5)))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trained.parameters()))


def test_without_a_name_the_repository_is_the_users_and_called_like_the_run(run, tmp_path):
    with open_hub(tmp_path) as hub:
        code, output = call(hub, run, HF_TOKEN=TOKEN)
        assert code == 0 and f"uploaded to {hub.url}/tester/{run.path.name}" in output, output


def test_who_may_not_write_gets_one_line(run, tmp_path):
    with open_hub(tmp_path) as hub:
        code, output = call(hub, run, "--repo-id", "lab/sorter")
        assert code == 2 and not hub.requests, output
        assert output == (
            "error: an upload needs a token of the Hub that may write: run `hf auth login`, or set HF_TOKEN\n"
        )
        code, output = call(hub, run, "--repo-id", "lab/sorter", HF_TOKEN="hf_of_another")
        assert code == 2 and output.startswith("error: --repo-id lab/sorter: the token may not write there"), output
        assert output.count("\n") == 1
        code, output = call(hub, run, "--repo-id", "lab/sorter", HF_TOKEN=TOKEN, HF_HUB_OFFLINE="1")
        assert code == 2 and output.startswith("error: HF_HUB_OFFLINE is set"), output


def test_a_dry_run_writes_the_card_and_lists_the_files(run, capsys):
    assert push([str(run), "--repo-id", "lab/sorter", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "nothing uploaded" in output
    for name in ("README.md", "config.json", "model.safetensors", "tokenizer.json"):
        assert f"  {name} " in output
    card = (run.weights_step(5) / "README.md").read_text()
    assert card == model_card(Run(run.path), "lab/sorter")


def test_the_card_says_what_was_trained_how_and_with_what_result(run):
    card = model_card(Run(run.path), "lab/sorter")
    head = card.split("---\n")[1]
    assert "base_model: Qwen/Qwen3-0.6B\n" in head and "datasets:\n- openai/gsm8k\n" in head and "- rloo\n" in head
    evals = {(row["version"], row["mode"]): row["mean"] for row in Run(run.path).evals()}
    for mode in ("sampled", "greedy"):
        row = f"| echo | {mode} | {evals[0, mode]:.3f} | {evals[5, mode]:.3f} | 10 | version 0 -> 5 |"
        assert row in card
    for line in (
        "| learning rate | 1e-06 |", "| algorithm | rloo |", "| loss | ipo |", "| steps | 5 |", "| group size | 4 |",
        f"| stretto | {__version__} |", "| adapter | LoRA, rank 4, alpha 8; merged into the weights |",
    ):  # fmt: skip
        assert line in card, line
    assert 'x = "a\\|b"' in card and 'from_pretrained("lab/sorter")' in card
    assert "None" not in card and "of mine" not in card


def test_a_run_without_weights_and_a_name_that_is_none_are_refused(run, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no weights to upload.* with ckpt\.weights\.interval"):
        push([str(tmp_path), "--dry-run"])
    with pytest.raises(ConfigError, match="write it as ORG/NAME"):
        push([str(run), "--repo-id", "a/b/c", "--dry-run"])


def test_the_card_of_batches_that_are_counted_in_tokens_says_how_many(run, tmp_path):
    copy = RunDir(Path(shutil.copytree(run.path, tmp_path / "copy")))
    resolved = json.loads(copy.config("run").read_text())
    resolved["orchestrator"] |= {"batch_size": 64, "token_batch_size": 5000}
    copy.config("run").write_text(json.dumps(resolved))
    card = model_card(Run(copy.path), "lab/sorter")
    assert "| rollouts per step | at most 64 |" in card and "| tokens per step | 5000 |" in card
