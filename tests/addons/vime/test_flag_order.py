"""The later of two values holds, with a note; harmless values are notes; a key goes to W&B and nowhere else."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from cases.vime import SPLIT, put_files, words_of

from stretto.base.errors import ConfigError
from stretto.cli import run_verb
from stretto.config.load import dump
from stretto_vime.flags.command import read_command
from stretto_vime.flags.groups import BY_NAME
from stretto_vime.flags.shape import SHAPES
from stretto_vime.flags.words import nearest


@pytest.fixture
def files(tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "key", "value", "said"),
    [
        ("--lr 1e-6 --lr 1e-5", "trainer.optim.lr", 1e-5, "--lr 1e-6 is not used: --lr 1e-5 comes after it"),
        ("--router-balance-abs-threshold 4 --router-balance-abs-threshold=8", "inference.router.extra",
         {"balance_abs_threshold": 8},
         "--router-balance-abs-threshold 4 is not used: --router-balance-abs-threshold=8"),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-size 1", "max_steps", 3,
         "--pipeline-model-parallel-size 4 is not used: --pipeline-model-parallel-size 1 comes after it"),
        ("--rollout-stop a --rollout-stop b c", "orchestrator.train.sampling.stop", ["b", "c"],
         "--rollout-stop a is not used"),
    ],
)  # fmt: skip
def test_the_last_of_two_values_holds_and_a_note_says_so(flags, key, value, said, files):
    command = read_command(words_of(files, SPLIT, flags))
    found = dump(command.config)
    for part in key.split("."):
        found = found[part]
    assert found == value and any(note.startswith(said) for note in command.notes), command.notes


def test_a_value_that_is_given_twice_the_same_is_no_note(files):
    twice = read_command(words_of(files, SPLIT, "--lr 1e-6 --lr 1e-6 --vllm-max-num-seqs 4 --vllm-max-num-seqs 4"))
    assert not any("not used" in note for note in twice.notes)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--megatron-config-path", "megatron: [{name: a, role: actor, overrides: {lr: 1e-5}}]"),
        ("--custom-config-path", "lr: 1e-5"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_wins_over_a_flag_that_was_typed(flag, text, is_first, files):
    (files / "file.yaml").write_text(text)
    words = [[flag, "file.yaml"], ["--lr", "1e-6"]]
    command = read_command(words_of(files, SPLIT, *chain(*(words if is_first else words[::-1]))))
    assert command.config.trainer.optim.lr == 1e-5
    [note] = [each for each in command.notes if each.startswith("--lr 1e-6 is not used: lr: 1e-")]
    assert note.endswith("of file.yaml comes after it")


@pytest.mark.parametrize(
    "word",
    [
        *("--mscale", "--v-head-dim", "--spec", "--deterministic-mode", "--moe-layer-freq", "--moe-router-dtype"),
        *("--moe-router-fusion", "--q-lora-rank", "--rotary-scaling-factor", "--mtp-spec", "--train-iters"),
    ],
)
def test_only_near_names_are_suggested(word):
    assert nearest(word, [name for name in BY_NAME if name != word]) is None


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--lrr", "--lr"),
        ("--kl-coeff", "--kl-coef"),
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--rollout-max-response-length", "--rollout-max-response-len"),
        ("--save-intervall", "--save-interval"),
    ],
)
def test_a_misspelt_flag_is_recognised(word, meant):
    assert nearest(word, BY_NAME) == meant


def test_the_key_of_wandb_goes_to_the_environment_and_into_no_file_or_message(files, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "other")
    monkeypatch.setenv("WANDB_BASE_URL", "other")
    own = "--use-wandb --wandb-key s3cret --wandb-host https://wandb.example.org --wandb-mode offline"
    command = read_command(words_of(files, SPLIT, own, "--custom-generate-function-path own.generate"))
    assert command.environment == {"WANDB_API_KEY": "s3cret", "WANDB_BASE_URL": "https://wandb.example.org"}
    assert "s3cret" not in json.dumps(dump(command.config), default=str) + " ".join(command.notes)
    assert run_verb("vime", words_of(files, SPLIT, own, "--print-config")) == 0
    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    with pytest.raises(ConfigError) as caught:
        read_command(words_of(files, SPLIT, own, "--wandb-key s3cret2 --lr x --nonsense 3"))
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in " ".join(read_command(words_of(files, SPLIT, own, "--wandb-key s3cret2")).notes)


@pytest.mark.parametrize(
    ("config", "known"),
    [
        ({"model_type": "glm4_moe", "use_qk_norm": True}, True),
        ({"model_type": "glm4_moe", "use_qk_norm": False}, False),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, True),
        ({"model_type": "glm_moe_dsa", "kv_lora_rank": 512}, True),
        ({"model_type": "qwen3_moe"}, True),
        ({"model_type": "qwen2"}, False),
        ({"model_type": "of_tomorrow"}, None),
    ],
)
def test_norms_of_queries_and_keys_are_compared_where_they_are_known(config, known):
    assert SHAPES["--qk-layernorm"].value(config) is known


def test_the_width_of_a_head_is_not_compared_with_that_of_latent_attention():
    shape = {"hidden_size": 7168, "num_attention_heads": 128}
    assert SHAPES["--kv-channels"].value(shape) == 56
    assert SHAPES["--kv-channels"].value(shape | {"kv_lora_rank": 512, "head_dim": 64}) is None


def test_rows_are_as_long_as_the_flag_says_and_evals_do_not_lengthen_them(files):
    own = "--rollout-max-response-len 8192 --max-tokens-per-gpu 9216 --eval-max-response-len 16384 --eval-interval 2"
    words = words_of(files, SPLIT, own, "--eval-prompt-data a rows.jsonl --context-parallel-size 2")
    at = words.index("--rollout-max-context-len")
    cfg = read_command([*words[:at], *words[at + 2 :]]).config
    assert cfg.row_tokens == 2 * 9216
    assert (cfg.orchestrator.eval.sampling.max_completion_tokens or 0) == 16384 <= cfg.seq_len
    short = read_command([*words, "--max-tokens-per-gpu", "256", "--eval-max-response-len", "256",
                          "--rollout-max-response-len", "256"]).config  # fmt: skip
    assert short.row_tokens == 512 < short.seq_len == 1024


@pytest.mark.parametrize("bound", ["", "--vllm-max-model-len 8192"])
def test_without_a_size_of_passes_rows_are_not_as_long_as_the_model_takes(files, bound):
    words = words_of(files, SPLIT, bound)  # as scripts with --micro-batch-size 1, without --use-dynamic-batch-size
    at = words.index("--rollout-max-context-len")
    cfg = read_command([*words[:at], *words[at + 2 :]]).config
    assert cfg.row_tokens == 256 < cfg.seq_len == (8192 if bound else 40960)
    assert read_command(words).config.row_tokens == 1024


@pytest.mark.parametrize("correction", ["", "--use-tis", "--use-tis --custom-tis-function-path own.tis"])
def test_a_clip_range_that_does_nothing_is_a_note(correction, files):
    assert read_command(words_of(files, SPLIT, "--eps-clip 0.2 --eps-clip-high 0.28", correction)).config


def test_the_flags_of_a_key_stand_after_its_whole_address(files):
    names = read_command(words_of(files, SPLIT, "--vllm-router-ip 10.0.0.9 --vllm-router-port 3000")).names
    said = names.reword("inference.router.address = http://10.0.0.9:3000: nobody answers; see its log")
    assert said == (
        "inference.router.address = http://10.0.0.9:3000 (--vllm-router-ip 10.0.0.9, --vllm-router-port 3000): "
        "nobody answers; see its log"
    )
