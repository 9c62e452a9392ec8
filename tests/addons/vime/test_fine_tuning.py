"""vime's flags with --loss-type sft_loss are runs of `sft`."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from cases.vime import put_files
from safetensors.torch import load_file
from sft_runs import undisturbed_threads_and_logging

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.root import SFTConfig
from stretto_vime.cli import vime
from stretto_vime.flags.command import read_command

__all__ = ["undisturbed_threads_and_logging"]
FLAGS = """
train_async.py --hf-checkpoint {model} --prompt-data rows.jsonl --input-key messages --rollout-shuffle
--rollout-function-path vime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --calculate-per-token-loss
--disable-compute-advantages-and-returns --debug-train-only --rollout-batch-size 8 --global-batch-size 4 --num-epoch 2
--lr 1e-2 --lr-decay-style cosine --min-lr 1e-3 --lr-warmup-fraction 0.25 --weight-decay 0.1 --adam-beta2 0.95
--max-tokens-per-gpu 256 --save runs/taught --save-interval 4 --save-hf x
"""
ROWS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "abc"}]} for n in range(16)
]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    put_files(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    return tmp_path


def words(*further: str, model: str = "Qwen3-4B") -> list[str]:
    return shlex.split(" ".join((FLAGS.format(model=model), *further)))


def test_flags_are_those_of_the_same_sft_config(directory):
    command = read_command(words("--tensor-model-parallel-size 2 --max-tokens-per-gpu 512 --rollout-temperature 0.5"))
    cfg = command.config
    assert isinstance(cfg, SFTConfig)
    assert (cfg.batch_size, cfg.max_steps, cfg.seq_len) == (4, 8, 512)
    assert (cfg.scheduler.type, cfg.scheduler.warmup_steps, cfg.scheduler.min_lr) == ("cosine", 2, 1e-3)
    assert (cfg.optim.lr, cfg.optim.betas2, cfg.optim.weight_decay) == (1e-2, 0.95, 0.1)
    assert (cfg.model.tp, cfg.deployment.num_train_gpus, cfg.data.input_key) == (2, 8, "messages")
    assert any("longer than 512 tokens are cut" in each for each in command.notes)
    assert any("--rollout-temperature 0.5 does nothing with --loss-type" in each for each in command.notes)


def test_nodes_are_those_of_a_cluster(directory):
    cfg = read_command(words("--actor-num-nodes 2 --actor-num-gpus-per-node 4")).config
    assert (cfg.deployment.num_train_nodes, cfg.deployment.gpus_per_node, cfg.num_ranks) == (2, 4, 8)
    assert cfg.ray is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--global-batch-size 3", "--global-batch-size 3: must divide --rollout-batch-size 8"),
        ("--prompt-data none.jsonl", "--prompt-data none.jsonl: no such file"),
        ("--rollout-function-path my.function", "conversations are read from --prompt-data"),
        ("--num-layers 3", "--num-layers 3 (there 36)"),
        ('--multimodal-keys \'{"image": "picture"}\'', "in the column images or image of --prompt-data; rename it"),
    ],
)
def test_what_cannot_be_is_said(flags, said, directory):
    with pytest.raises(ConfigError) as caught:
        read_command(words(flags))
    assert said in str(caught.value)


def test_the_column_of_images_that_is_found_anyway_is_no_note(directory):
    for column in ("images", "image"):
        command = read_command(words(f'--multimodal-keys \'{{"image": "{column}"}}\''))
        assert not any("--multimodal-keys" in note for note in command.notes)


@pytest.mark.heavy
def test_a_run_learns_its_conversations(directory):
    from stretto.chat.tokenizer import END_OF_TEXT, build_letters_tokenizer, load_tokenizer
    from stretto.config.sections.model import ScratchSection
    from stretto.models.hub import random_model, save_hf

    tokenizer = load_tokenizer(build_letters_tokenizer(directory / "tokenizer"))
    ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.token_id(END_OF_TEXT)}
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    save_hf(
        random_model(ScratchSection(**shape), tokenizer.vocab_size, **ids), directory / "m", directory / "tokenizer"
    )
    assert vime(words("--actor-num-gpus-per-node 0", model="m")) == 0
    run = RunDir(directory / "runs" / "taught")
    rows = [json.loads(line) for line in run.metrics("sft").read_text().splitlines()]
    losses = [row["loss/mean"] for row in rows if "loss/mean" in row]
    assert len(losses) == 8 and losses[-1] < losses[0]
    before, after = (load_file(path / "model.safetensors") for path in (directory / "m", run.weights_step(8)))
    assert all(not torch.equal(before[name], after[name]) for name in before)
