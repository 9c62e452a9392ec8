"""Flags about the shape of mixtures and latent attention are compared with config.json, per family."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases.vime import CONFIG, SPLIT, put_files, put_megatron, words_of
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto_vime.cli import _write_state
from stretto_vime.flags.command import read_command
from stretto_vime.flags.shape import SHAPES

MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "num_hidden_layers": 6, "n_routed_experts": 16, "num_experts_per_tok": 8,
    "first_k_dense_replace": 2, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "use_qk_norm": True,
    "partial_rotary_factor": 0.5, "attention_bias": True, "norm_topk_prob": True,
}  # fmt: skip
LATENT = GLM | {
    "model_type": "deepseek_v3", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
SAID = {
    "qwen3_moe": (MOE, """
        --num-experts 8 --moe-router-topk 2 --moe-router-score-function softmax --moe-ffn-hidden-size 768
        --moe-layer-freq '[1, 1, 1, 1]' --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-aux-loss-coeff 0
        --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --qk-layernorm
        --position-embedding-type rope --rotary-percent 1.0 --use-flash-attn --no-rope-fusion
        --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1"""),
    "glm4_moe": (GLM, """
        --num-experts 16 --moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8
        --moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0]*2+[1]*4 --add-qkv-bias --rotary-percent 0.5
        --qk-layernorm --moe-router-group-topk 1 --moe-router-num-groups 1"""),
    "deepseek_v3": (LATENT, """
        --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
        --v-head-dim 128 --kv-channels 128 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
        --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-layer-freq '([0]*2+[1]*4)' --enable-experimental
        --moe-shared-expert-overlap --no-position-embedding --add-qkv-bias"""),
    "glm4": ({"model_type": "glm4", "attention_bias": True}, """
        --post-self-attn-layernorm --post-mlp-layernorm --rotary-interleaved --add-qkv-bias
        --spec vime_plugins.models.glm4 get_glm_spec"""),
    "qwen3_next": ({"model_type": "qwen3_next", "decoder_sparse_step": 1, "num_experts": 8}, """
        --apply-layernorm-1p --attention-output-gate --moe-shared-expert-gate --num-experts 8
        --spec some.models.qwen3_next get_spec"""),
    "a family of tomorrow": ({"model_type": "of_tomorrow", "moe_num_experts": 64}, """
        --num-experts 64 --moe-router-score-function sigmoid --qk-layernorm --attention-output-gate
        --moe-shared-expert-gate --moe-router-enable-expert-bias --moe-router-bias-update-rate 0"""),
    "all heads have keys of their own": ({"num_key_value_heads": 32}, "--group-query-attention --num-query-groups 32"),
    "positions of pictures": ({"model_type": "qwen3_vl"}, "--position-embedding-type mrope"),
}  # fmt: skip
"""By name: what config.json has besides, and flags that say the same."""

WRONG = {
    "a pattern of layers": (GLM, "--moe-layer-freq [0]*3+[1]*3", "(there [0, 0, 1, 1, 1, 1])"),
    "a pattern that is none": (GLM, "--moe-layer-freq dense", "--moe-layer-freq dense (there [0, 0"),
    "every second layer": (MOE, "--moe-layer-freq 2", "--moe-layer-freq 2 (there [1, 1, 1, 1])"),
    "scores": (MOE, "--moe-router-score-function sigmoid", "sigmoid (there softmax)"),
    "a bias": (MOE, "--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias (there false)"),
    "no normalised gates": (MOE, "--moe-router-pre-softmax", "--moe-router-pre-softmax (there false)"),
    "a factor": (GLM, "--moe-router-topk-scaling-factor 1.5", "1.5 (there 2.5)"),
    "a rank": (LATENT, "--kv-lora-rank 256", "--kv-lora-rank 256 (there 512)"),
    "latent attention of nobody": (GLM, "--multi-latent-attention", "--multi-latent-attention (there false)"),
    "a scale": (LATENT, "--mscale 0.7", "--mscale 0.7 (there 1.0)"),
    "a gate of nobody": (GLM, "--moe-shared-expert-gate", "--moe-shared-expert-gate (there false)"),
    "a loss of experts": (MOE, "--moe-aux-loss-coeff 0.001", "--moe-aux-loss-coeff 0.001: the loss is that of the"),
    "tokens that are dropped": (MOE, "--moe-expert-capacity-factor 1.0", "no token is dropped"),
    "another balance": (MOE, "--moe-router-load-balancing-type sinkhorn", "sinkhorn: must be aux_loss or"),
    "8-bit products of another kind": (MOE, "--fp8-format hybrid --fp8-recipe delayed", "use e4m3 and blockwise"),
    "norms of nobody": ({}, "--post-mlp-layernorm", "--post-mlp-layernorm (there false)"),
    "positions that are learned": ({}, "--position-embedding-type learned_absolute", "(there rope)"),
}  # fmt: skip


@pytest.fixture
def read(tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")

    def command(config, flags):
        (tmp_path / "Qwen3-4B" / "config.json").write_text(json.dumps(CONFIG | config))
        return read_command([*words_of(tmp_path, SPLIT), *shlex.split(flags)])

    return command


@pytest.mark.parametrize("name", SAID)
def test_a_script_of_a_family_says_what_its_config_does(name, read):
    config, flags = SAID[name]
    command = read(config, flags)
    assert command.config.model.moe_bias_update_rate is None


@pytest.mark.parametrize("name", WRONG)
def test_a_flag_that_config_json_contradicts_is_told(name, read):
    config, flags, said = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        read(config, flags)
    assert said in str(caught.value)


def test_a_bias_of_experts_moves_as_fast_as_the_flag_says(read):
    flags = "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.002"
    assert read(GLM, flags).config.model.moe_bias_update_rate == 0.002
    assert read(GLM, "--moe-router-enable-expert-bias").config.model.moe_bias_update_rate == 1e-3


def test_products_in_8_bits_are_those_of_the_model(read):
    assert read({}, "--fp8-format e4m3 --fp8-recipe blockwise").config.model.fp8 is True


@pytest.mark.parametrize("name", SHAPES)
def test_a_config_that_says_nothing_contradicts_no_flag(name):
    assert SHAPES[name].value({}) in (None, 0)
    assert SHAPES[name].value({"model_type": "of_tomorrow", "moe_layers": 3}) in (None, False)


@pytest.mark.heavy
def test_two_commands_that_need_the_same_checkpoint_convert_it_once(tmp_path):
    cases = Path(__file__).parents[2] / "cases" / "megatron"
    place = shutil.copytree(cases / "dense.torch_dist", tmp_path / "c") / "iter_0000003"
    target = tmp_path / "c" / "hugging_face" / place.name
    code = "import sys; from pathlib import Path as P; from stretto_vime.cli import _convert; "
    code += "_convert({P(sys.argv[1]): P(sys.argv[2])}, P(sys.argv[3]), is_dry_run=False)"
    words = [sys.executable, "-c", code, str(place), str(target), str(cases / "dense")]
    both = [subprocess.Popen(words) for _ in range(2)]
    assert [each.wait(timeout=60) for each in both] == [0, 0]
    assert {path.name for path in target.parent.iterdir()} == {".lock", place.name}


def test_a_checkpoint_of_megatrons_is_where_training_starts_and_no_runs_own_directory(tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mg" / "iter_0000009").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--save mg: checkpoints of Megatron's are there; give the run"):
        read_command(words_of(tmp_path, SPLIT, "--load mg --save mg"))
    command = read_command(words_of(tmp_path, SPLIT, "--load mg --save runs/a"))
    assert command.config.model.name == "mg/hugging_face/iter_0000009"
    assert command.conversions == {Path("mg/iter_0000009"): Path("mg/hugging_face/iter_0000009")}


def test_the_optimizer_of_a_checkpoint_of_megatrons_is_loaded_where_any_mesh_can_read_it(tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    cases = Path(__file__).parents[2] / "cases" / "megatron"
    for name in ("dense.torch_dist_optim", "dense.torch_tp2", "dense.torch_dist"):
        shutil.copytree(cases / name, tmp_path / name)
    place = Path("dense.torch_dist_optim/iter_0000002")
    run = Path("dense.torch_dist_optim/hugging_face/iter_0000002.state")
    command = read_command(words_of(tmp_path, SPLIT, "--load dense.torch_dist_optim --save runs/a"))
    assert command.states == {place: run}
    assert command.config.resume.dir == run and command.config.resume.skip_progress
    assert any("begins with the moments of its optimizer" in note for note in command.notes)
    dry = read_command(words_of(tmp_path, SPLIT, "--load dense.torch_dist_optim --save runs/a --dry-run"))
    assert dry.states == {place: run} and dry.config.resume is None
    marker = RunDir(tmp_path / "runs" / "b").complete_marker(3)
    marker.parent.mkdir(parents=True)
    marker.touch()
    with pytest.raises(ConfigError, match=r"--save runs/b: runs/b has a run .* of step 3; continue it with --load"):
        read_command(words_of(tmp_path, SPLIT, "--load dense.torch_dist_optim --save runs/b"))

    for more in ("--no-load-optim", "--finetune"):
        command = read_command(words_of(tmp_path, SPLIT, f"--load dense.torch_dist_optim --save runs/a {more}"))
        assert command.states == {} and command.config.resume is None
        assert not any("optimizer" in note and "begins" in note for note in command.notes)
    said = {
        "--load dense.torch_tp2": "--dist-ckpt-optim-fully-reshardable",
        "--load dense.torch_dist": "it has no state of an optimizer",
        "--load dense.torch_dist_optim --lora-rank 4": "adapters are trained",
    }
    for words, why in said.items():
        command = read_command(words_of(tmp_path, SPLIT, f"{words} --save runs/a"))
        assert command.states == {} and command.config.resume is None
        assert any("the optimizer begins anew: " in note and why in note for note in command.notes), command.notes


@pytest.mark.parametrize("made", ["iter_0000002", "iter_0000002.state"])
def test_what_was_made_of_an_iteration_that_was_written_again_is_not_used(made, tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "mg"
    shutil.copytree(Path(__file__).parents[2] / "cases" / "megatron" / "dense.torch_dist_optim", checkpoint)
    there = checkpoint / "hugging_face" / made
    marker = RunDir(there).complete_marker(2) if made.endswith("state") else there / "config.json"
    marker.parent.mkdir(parents=True)
    marker.write_text("{}")
    words = words_of(tmp_path, SPLIT, "--load mg --save runs/a")
    assert read_command(words).states
    later = marker.stat().st_mtime + 10
    os.utime(checkpoint / "iter_0000002" / ".metadata", (later, later))
    said = rf"--load mg: mg/hugging_face/{made} was made of mg/iter_0000002 before that was written again; delete it"
    with pytest.raises(ConfigError, match=said):
        read_command(words)


@needs("families")
def test_degrees_that_megatron_does_not_have_for_a_model_are_left_to_the_own_trainer(tmp_path, monkeypatch):
    put_files(tmp_path)
    put_megatron(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    experts = {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True}
    (tmp_path / "Qwen3-4B" / "config.json").write_text(json.dumps(CONFIG | experts | {"rms_norm_eps": 1e-6}))
    for more, why in (
        ("--context-parallel-size 2", "cp = 2: Megatron does not split tokens"),
        ("--expert-tensor-parallel-size 2", "etp = 2: Megatron does not divide experts with biases"),
        ("--expert-model-parallel-size 2", None),
    ):
        command = read_command(words_of(tmp_path, SPLIT, "--train-backend megatron", more))
        notes = [note for note in command.notes if note.startswith("--train-backend megatron: stretto's own trainer")]
        assert command.config.trainer.backend == ("megatron" if why is None else "fsdp")
        assert (why is None and not notes) or why in notes[0], command.notes


def test_the_state_of_an_optimizer_is_written_once_and_checked_by_a_dry_run(tmp_path):
    cases = Path(__file__).parents[2] / "cases" / "megatron"
    place, run = cases / "dense.torch_dist_optim" / "iter_0000002", tmp_path / "there" / "iter_0000002.state"
    _write_state(place, run, cases / "dense", is_dry_run=True)
    assert not run.exists()
    for _ in range(2):
        _write_state(place, run, cases / "dense", is_dry_run=False)
    assert RunDir(run).complete_checkpoints() == [2]
    with pytest.raises(ConfigError, match=r"its optimizer's state cannot be loaded: .* give --no-load-optim"):
        _write_state(place, run, cases / "moe", is_dry_run=True)
