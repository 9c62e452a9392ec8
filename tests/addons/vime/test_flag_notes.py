"""Values that are equal to what happens anyway, or harmless, are notes and no errors; a note is true of the config."""

from __future__ import annotations

import json
import re

import pytest
from cases.vime import CONFIG, SPLIT, put_files, put_megatron, words_of

from stretto.base.errors import ConfigError
from stretto.config.load import dump
from stretto_megatron.backend import find_python
from stretto_vime.flags.command import Command, read_command
from stretto_vime.flags.groups import BY_NAME
from stretto_vime.flags.resolved import find

REFERENCE = "--ref-load Qwen3-4B --use-kl-loss"
NOTED = {
    "the default estimator of a divergence": (f"{REFERENCE} --kl-loss-coef 0.001",
        "--kl-loss-type k1: its gradient is zero on average", {"trainer.loss.reference_kl.estimator": "k1"}),
    "the same estimator, typed": (f"{REFERENCE} --kl-loss-coef 0.001 --kl-loss-type k1",
        "--kl-loss-type k1: its gradient is zero on average", {"trainer.loss.reference_kl.coef": 0.001}),
    "the size of an engine by vLLM's name": ("--vllm-tensor-parallel-size 2",
        "--vllm-tensor-parallel-size 2 sets nothing: it is --rollout-num-gpus-per", {"inference.parallel.tp": 2}),
    "what an engine's ranks leave": ("--rollout-num-gpus-per-engine 4 --vllm-data-parallel-size 2 "
                                     "--vllm-tensor-parallel-size=2", "--vllm-tensor-parallel-size=2 sets nothing",
        {"inference.parallel.tp": 2, "inference.parallel.dp": 2}),
    "the seed by vLLM's name": ("--rollout-seed 7 --vllm-seed 7", "--vllm-seed 7 sets nothing", {"seed": 7}),
    "the model by vLLM's name": ("--vllm-model {dir}/Qwen3-4B", "sets nothing: it is --hf-checkpoint", {}),
    "the type that is usual": ("--vllm-dtype bfloat16", "--vllm-dtype bfloat16 sets nothing", {}),
    "how an engine starts processes": ("--vllm-distributed-executor-backend ray", "processes are its own", {}),
    "log-probabilities as they are": ("--vllm-logprobs-mode processed_logprobs", "sets nothing", {}),
    "one node of an engine": ("--vllm-nnodes 1", "--vllm-nnodes 1 sets nothing: nodes follow", {}),
    "ranks of experts among those of a token": ("--tensor-model-parallel-size 2 --expert-model-parallel-size 4",
        "--expert-model-parallel-size 4: model.ep is 2 (ranks of TP", {"model.ep": 2}),
    "ranks of experts that are all": (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4",
        "", {"model.ep": 4, "model.tp": 2, "model.sequence_parallel": True}),
    "tokens that nobody shares": (
        "--sequence-parallel", "--sequence-parallel does nothing with --tensor-model-parallel-size 1 (the",
        {"model.sequence_parallel": False}),
    "stages": ("--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 17",
        "--pipeline-model-parallel-size 2, --decoder-last-pipeline-num-layers 17: every rank has all layers",
        {"model.tp": 1}),
    "layers of a stage that is not there": ("--virtual-pipeline-model-parallel-size 2",
        "--virtual-pipeline-model-parallel-size 2: every rank has all layers", {"model.tp": 1}),
    "types of state of Megatron": ("--train-backend megatron --use-precision-aware-optimizer",
        "--use-precision-aware-optimizer is not passed on: the optimizer's state is float32", {}),
    "an adapter that takes turns": ("--colocate --lora-rank 8", "", {
        "colocate.sleep_level": 1, "colocate.offload_rollout": True, "model.lora.rank": 8}),
    "weights that take turns": ("--colocate", "", {"colocate.sleep_level": 2}),
    "a builder of vime's plug-ins": (
        "--custom-model-provider-path vime_plugins.models.some.model_provider --tensor-model-parallel-size 2",
        "model_provider: each family has modules of its own", {"trainer.hooks.model": None, "model.tp": 2}),
    "a teacher that is served": (
        "--use-opd --opd-type vllm --custom-rm-path vime.rollout.on_policy_distillation.reward_func "
        "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards "
        "--rm-url http://10.0.0.7:8100/v1/", "--use-opd, --opd-type vllm: the run asks the teacher itself", {
            "orchestrator.algo.type": "opd", "orchestrator.teacher.base_url": "http://10.0.0.7:8100/v1",
            "orchestrator.hooks.reward_post_process": None, "orchestrator.env.0.args.reward": "math"}),
    "stages of Megatron": (
        "--train-backend megatron --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 16 "
        "--expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2 --attention-softmax-in-fp32", "", {
            "trainer.backend": "megatron", "trainer.megatron.pp": 2, "trainer.megatron.last_stage_layers": 16,
            "trainer.megatron.etp": 1, "model.ac": None, "trainer.megatron.overrides": {
                "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2,
                "attention_softmax_in_fp32": True}}),
    "kernels of Megatron": ("--train-backend megatron --attention-backend flash --moe-grouped-gemm",
        "--moe-grouped-gemm, --attention-backend flash are not passed on", {"trainer.backend": "megatron"}),
    "Megatron that takes turns": ("--train-backend megatron --lora-rank 8",
        "stretto's own trainer trains, with the same results: --lora-rank 8 is of its own",
        {"trainer.backend": "fsdp", "trainer.megatron": None, "model.lora.rank": 8}),
    "split experts": ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2: an expert is whole",
        {"model.ep": 2}),
    "blocks of no method": ("--recompute-granularity full --recompute-num-layers 4",
        "--recompute-num-layers 4 does nothing without --recompute-method", {"model.ac.group_size": 1}),
    "layers that nobody trains": ("--mtp-num-layers 1", "--mtp-num-layers 1: layers that predict several", {}),
    "layers that somebody trained": ("--enable-mtp-training", "--enable-mtp-training: layers that predict several", {}),
    "how batches travel": ("--rollout-data-transport queue", "batches travel as [rollout_transport] says", {}),
    "a directory of versions": ("--update-weight-disk-dir /x", "versions are written to RUN/broadcasts", {}),
    "how without what": ("--recompute-method uniform",
        "--recompute-method uniform does nothing without --recompute-granularity", {"model.ac": None}),
    "a bound of no weight": ("--tis-clip 3", "--tis-clip 3 does nothing without --use-tis",
        {"trainer.loss.correction": None}),
    "a critic of nobody": ("--critic-lr 1e-5 --num-critic-only-steps 1", "--critic-lr 1e-5 does nothing with",
        {"trainer.critic": None, "trainer.scheduler.decay_steps": 3}),
    "GPUs of nobody's critic": ("--critic-num-gpus-per-node 4", "--critic-num-gpus-per-node 4 does nothing with",
        {"deployment.num_critic_gpus": None}),
    "a save of nobody's critic": ("--critic-save x", "--critic-save x does nothing", {"trainer.critic": None}),
    "a discount of nothing": ("--gamma 0.9", "--gamma 0.9 does nothing with", {"trainer.advantages": None}),
    "a price that is not paid": ("--kl-coef 0.1", "--kl-coef 0.1 does nothing with --advantage-estimator grpo",
        {"trainer.advantages": None}),
    "a weight of no divergence": ("--kl-loss-coef 0.1", "--kl-loss-coef 0.1 does nothing without --use-kl-loss",
        {"trainer.loss.reference_kl": None}),
    "a loss that is not chosen": ("--custom-loss-function-path my.loss", "does nothing with --loss-type policy_loss",
        {"trainer.hooks.loss": None}),
    "two rewards": ("--custom-rm-path my.reward", "--rm-type math is not used: --custom-rm-path my.reward rewards",
        {"orchestrator.env.0.args.reward": "my.reward"}),
    "one reward for a group": ("--group-rm", "--group-rm does nothing without --custom-rm-path",
        {"orchestrator.env.0.args.group_reward": None}),
    "turns of nobody": ("--offload-train", "--offload-train does nothing without --colocate", {"colocate": None}),
    "a rate that does not fall": ("--lr-decay-style constant --min-lr 1e-7 --lr-decay-iters 9",
        "--min-lr 1e-7 does nothing with --lr-decay-style constant", {"trainer.scheduler.type": "constant"}),
    "moments of no moment": ("--optimizer sgd --adam-beta1 0.8", "--adam-beta1 0.8 does nothing with --optimizer sgd",
        {"trainer.optim.type": "sgd"}),
    "masks without what they mask": ("--mask-offpolicy-in-partial-rollout", "does nothing without --partial-rollout",
        {"orchestrator.mask_offpolicy_in_partial_rollout": False}),
    "an adapter's size without one": ("--lora-alpha 32 --target-modules q_proj", "--lora-alpha 32 does nothing",
        {"model.lora": None}),
    "a group's name without its log": ("--wandb-group g", "--wandb-group g does nothing without --use-wandb",
        {"monitors.wandb": None}),
    "a directory for snapshots of nothing": ("--memory-snapshot-dir snapshots",
        "--memory-snapshot-dir snapshots does nothing without --record-memory-history", {}),
    "a copy of nothing": ("--update-weight-local-checkpoint-dir x", "does nothing with",
        {"weight_broadcast.delta": None}),
    "a share of no files": ("--load-debug-rollout-data-subsample 0.5", "does nothing without", {}),
    "functions of evals that are not there": ("--eval-function-path a.b --custom-eval-rollout-log-function-path a.c",
        "--eval-function-path a.b does nothing without --eval-prompt-data, the data", {
            "orchestrator.eval": None, "orchestrator.hooks.eval_function": None, "orchestrator.hooks.eval_log": None}),
    "a function of evals that no interval makes": (
        "--eval-prompt-data a rows.jsonl --eval-function-path a.b",
        "--eval-prompt-data a rows.jsonl is not used without --eval-interval", {"orchestrator.eval": None}),
    "a first eval of nothing": ("--skip-eval-before-train", "does nothing without --eval-prompt-data",
        {"orchestrator.eval": None}),
    "vime's own tests": ("--ci-test --ci-save-grad-norm x", "--ci-test: it is of vime's own tests", {}),
    "random states of weights": ("--no-load-rng", "--no-load-rng: a run that is continued draws", {}),
    "a reference that is one process with a critic": (
        "--colocate --advantage-estimator ppo --critic-num-nodes 1 --critic-num-gpus-per-node 4", "",
        {"trainer.critic.placement": None}),
    "a source of prompts that reads a file": ("--data-source-path my.Source", "is read only by --data-source-path",
        {"orchestrator.env.0.args.path": None}),
    "a template's variables": ("--rm-type random --apply-chat-template-kwargs={}", "", {}),
    "the length of an eval": ("--eval-max-context-len 1024", "", {"seq_len": 1024}),
    "the start": ("--start-rollout-id 0", "", {}),
    "both replays": ("--use-routing-replay --use-rollout-routing-replay", "", {"trainer.enable_router_replay": True}),
    "two warm-ups of which one is none": ("--lr-warmup-iters 0 --lr-warmup-fraction 0.4", "",
        {"trainer.scheduler.warmup_steps": 1}),
}  # fmt: skip
"""By name: flags after a command that is right, the beginning or a part of a note, and keys of the config."""


@pytest.fixture
def files(tmp_path, monkeypatch):
    put_files(tmp_path)
    put_megatron(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    return tmp_path


def read(files, *parts: str) -> Command:
    """The command of these flags behind one that is right."""
    return read_command(words_of(files, SPLIT, *parts))


@pytest.mark.heavy
@pytest.mark.parametrize("name", NOTED)
def test_what_is_harmless_or_equal_is_a_note(name, files):
    flags, said, keys = NOTED[name]
    command = read(files, flags)
    assert not said or any(said in note for note in command.notes), command.notes
    config = dump(command.config)
    assert {key: find(config, key) for key in keys} == keys


@pytest.mark.heavy
def test_a_flag_that_is_met_in_another_way_is_told_unless_it_asks_for_the_usual(files):
    told = [flag for flag in BY_NAME.values() if flag.is_told]
    values = {"integer": "3", "number": "0.5", "text": "other", "list": "other"}
    assert len(told) >= 20
    for flag in told:
        value = str(flag.choices[-1]) if flag.choices else values.get(flag.kind, "")
        known = {"--load-debug-rollout-data", flag.name}
        notes = read(files, f"--recompute-granularity full {flag.name} {value}").notes
        assert [note for note in notes if note.startswith(f"{flag.name} {value}".strip() + ":")], known
        for usual in flag.allowed:
            notes = read(files, f"--recompute-granularity full {flag.name} {usual}").notes
            assert not [note for note in notes if note.startswith(flag.name)], flag.name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--vllm-tensor-parallel-size 4",
            "--vllm-tensor-parallel-size 4 is not yours to set: it is --rollout-num-gpus",
        ),
        ("--vllm-seed 8", "--vllm-seed 8 is not yours to set: it is --rollout-seed"),
        ("--vllm-dtype float16", "--vllm-dtype float16 is not yours to set"),
        ("--vllm-model other", "--vllm-model other is not yours to set: it is --hf-checkpoint"),
        ("--vllm-logprobs-mode raw_logprobs", "--vllm-logprobs-mode raw_logprobs is not yours to set"),
        ("--vllm-enable-lora", "--vllm-enable-lora is not yours to set: it is --lora-rank"),
        ("--vllm-nnodes 2", "--vllm-nnodes 2 is not yours to set: nodes follow"),
        ("--eval-max-context-len 4096", "--eval-max-context-len 4096: evals take as many tokens as training"),
        ("--use-routing-replay", "--use-routing-replay: experts are replayed as the engine chose them"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.4", "both say how long the rate rises"),
        ("--colocate --advantage-estimator ppo --critic-num-nodes 2", "the critic takes its turn with the actor"),
    ],
)
def test_a_contradiction_stays_an_error(flags, said, files):
    with pytest.raises(ConfigError) as caught:
        read(files, flags)
    assert said in str(caught.value)


def test_engines_that_repeat_themselves_have_the_variable_of_it(files):
    cfg = read(files, "--vllm-enable-deterministic-inference").config
    assert cfg.inference.env_vars == {"VLLM_BATCH_INVARIANT": "1"}
    assert read(files).config.inference.env_vars == {}


def test_variables_of_the_actor_are_the_trainers(files):
    cfg = read(files, '--train-env-vars \'{"NCCL_DEBUG": "INFO"}\'').config
    assert cfg.trainer.env_vars == {"NCCL_DEBUG": "INFO"} and cfg.inference.env_vars == {}


def test_checkpoints_without_an_optimizer_are_continued_without_one(files):
    done = files / "runs" / "a" / "checkpoints" / "step_2"
    done.mkdir(parents=True)
    (done / "COMPLETE").write_text("")
    places = "--load runs/a --save runs/a"
    assert read(files, places, "--no-save-optim --no-load-optim").config.ckpt.skip_optimizer is True
    with pytest.raises(ConfigError, match="--no-load-optim: --load runs/a is a run, which is continued exactly"):
        read(files, places, "--no-load-optim")
    assert read(files, "--no-load-optim --load Qwen3-4B").config.model.name == "Qwen3-4B"


@pytest.mark.parametrize("reward", ["math", "dapo", "boxed_f1", "deepscaler"])
def test_a_reward_without_labels_is_zero_and_a_note_says_so(reward, files):
    words = words_of(files, SPLIT, f"--rm-type {reward} --eval-interval 2 --eval-prompt-data rows.jsonl")
    at = words.index("--label-key")
    del words[at : at + 2]
    command = read_command(words)
    assert any("every reward is 0" in note for note in command.notes)
    [env], [evals] = command.config.orchestrator.env, command.config.orchestrator.eval.env
    assert env.args["reward"] == evals.args["reward"] == "stretto.envs.rewards.builtin.unlabelled"
    command = read_command([*words, "--eval-label-key", "label"])
    [evals] = command.config.orchestrator.eval.env
    assert (evals.args["reward"], evals.args["label_key"]) == (reward, "label")


def test_a_single_reply_is_enough_for_advantages_of_ones_own(files):
    with pytest.raises(ConfigError, match="every advantage would be 0"):
        read(files, "--n-samples-per-prompt 1")
    cfg = read(files, "--n-samples-per-prompt 1 --custom-reward-post-process-path my.advantages").config
    assert cfg.orchestrator.group_size == 1


def test_an_engines_limit_bounds_a_sample_where_nothing_else_does(files):
    words = words_of(files, SPLIT, "--vllm-max-model-len 6144 --max-tokens-per-gpu 20480")
    at = words.index("--rollout-max-context-len")
    assert read_command([*words[:at], *words[at + 2 :]]).config.seq_len == 6144


def test_where_there_is_no_megatron_core_the_own_trainer_trains(tmp_path, monkeypatch):
    put_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    if find_python() is not None:
        pytest.skip("this Python has Megatron-Core")
    command = read(tmp_path, "--train-backend megatron --pipeline-model-parallel-size 2")
    assert command.config.trainer.backend == "fsdp" and command.config.num_train_ranks == 4
    assert any("there is no Megatron-Core here (`make megatron` installs it)" in note for note in command.notes)
    assert any("every rank has all layers" in note for note in command.notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lora-rank 0", None),
        ("--lora-rank 8", "--lora-rank 8 is of its own"),
        ("--advantage-estimator ppo", None),
        ("--advantage-estimator ppo --critic-num-gpus-per-node 2", None),
    ],
)
def test_a_flag_that_megatron_does_not_have_gives_the_run_to_the_own_trainer(files, words, said):
    command = read(files, f"--train-backend megatron {words}")
    assert command.config.trainer.backend == ("megatron" if said is None else "fsdp")
    assert any(said in note for note in command.notes) if said else not any("own trainer" in n for n in command.notes)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr: 1e-5", None),
        ("clip_grad: 0.5", None),
        ("optimizer: sgd", "is of its own"),
        ("recompute_granularity: full", "Megatron's arguments are those of actor and critic"),
    ],
)
def test_a_critic_that_megatron_does_not_train_gives_the_run_to_the_own_trainer(files, override, said):
    roles = files / "roles.yaml"
    roles.write_text(f"megatron:\n  - {{name: default, role: critic, overrides: {{{override}}}}}\n")
    stages = "--train-backend megatron --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    command = read(files, f"{stages} --advantage-estimator ppo --megatron-config-path {roles}")
    cfg = command.config
    assert cfg.trainer.backend == ("megatron" if said is None else "fsdp")
    assert (cfg.num_train_ranks, cfg.num_critic_ranks) == (4, 4)
    if said is None:
        assert cfg.critic_placement.num_workers == 1 and not any("own trainer" in each for each in command.notes)
    else:
        key = override.partition(":")[0]
        assert any(f"{key}: " in note and said in note for note in command.notes), command.notes


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "--opd-type vllm needs --rm-url"),
        ("--rm-url http://t --custom-rm-path own.reward", "--custom-rm-path own.reward: --opd-type vllm learns from"),
        ("--rm-url http://t --opd-kl-coef 0.5", "--opd-kl-coef 0.5: with --opd-type vllm only 1.0 is there"),
        ("--rm-url http://t --advantage-estimator ppo", "--advantage-estimator ppo sums over the tokens"),
    ],
)
def test_what_a_served_teacher_cannot_have_is_refused(files, words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(files, f"--use-opd --opd-type vllm {words}")


def test_where_no_checkpoint_is_to_load_training_starts_from_the_reference(files):
    other = files / "other"
    other.mkdir()
    (other / "notes.txt").write_text("no weights")
    command = read(files, f"--load {other} --ref-load Qwen3-4B")
    assert command.config.model.name == "Qwen3-4B"
    said = f"--load {other}: no checkpoint is there; training starts from --ref-load Qwen3-4B"
    assert said in command.notes
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read(files, f"--load {other}")


def test_a_quantized_checkpoint_whose_engines_compute_otherwise_is_a_note(files):
    other = files / "four_bits"
    other.mkdir()
    quantization = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (other / "config.json").write_text(json.dumps(CONFIG | quantization))
    command = read(files, f"--hf-checkpoint {other} --ref-load Qwen3-4B")
    assert command.config.model.name == "Qwen3-4B"
    assert any("its weights are quantized (compressed-tensors), and engines compute" in each for each in command.notes)
