"""Every flag that acts does something: in the config of the run, in its processes' variables, or by a refusal."""

from __future__ import annotations

import json
import shlex

import pytest
from cases.vime import CONFIG, SPLIT, put_files, put_megatron, words_of
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import dump
from stretto_vime.flags.command import read_command
from stretto_vime.flags.groups import BY_NAME
from stretto_vime.flags.resolved import find
from stretto_vime.flags.shape import SHAPES

ENV, EVAL, ALGO, LOSS = "orchestrator.env.0.args", "orchestrator.eval", "orchestrator.algo", "trainer.loss"
SAMPLING, CRITIC, HOOKS = "orchestrator.train.sampling", "trainer.critic", "orchestrator.hooks"
PPO = "--advantage-estimator ppo"
PLUS = "--advantage-estimator reinforce_plus_plus --normalize-advantages"
EVALS = "--eval-interval 2 --eval-prompt-data a rows.jsonl"
KL = "--use-kl-loss --kl-loss-coef 0.1 --ref-load Qwen3-4B --kl-loss-type k3"
TEACHER = "--opd-type megatron --opd-teacher-load Qwen3-4B"
TURNS = "--colocate --actor-num-gpus-per-node 4"
TWO_NODES = "--actor-num-gpus-per-node 8 --rollout-num-gpus 8"
MEGATRON = "--train-backend megatron"
STAGES = f"{MEGATRON} --pipeline-model-parallel-size 2"
# fmt: off
EFFECTS: dict[str, tuple[str, str, dict[str, object]]] = {
    "--dry-run": ("", "", {"dry_run": True}),
    "--print-config": ("", "", {"print_config": True}),
    # -- GPUs
    "--actor-num-nodes": (TWO_NODES, "2", {"deployment.num_train_nodes": 2}),
    "--actor-num-gpus-per-node": ("", "2", {"deployment.num_train_gpus": 2}),
    "--rollout-num-gpus": ("", "2", {"deployment.num_infer_gpus": 2, "inference.deployment.num_replicas": 1}),
    "--rollout-num-gpus-per-engine": ("", "4", {"inference.parallel.tp": 4, "inference.deployment.num_replicas": 1}),
    "--num-gpus-per-node": ("", "4", {"deployment.type": "multi_node"}),
    "--prefill-num-servers": ("", "1", {"inference.deployment.type": "disaggregated",
                                        "inference.deployment.num_prefill_replicas": 1}),
    "--colocate": ("--actor-num-gpus-per-node 4", "", {"colocate.offload_train": True,
                                                       "colocate.offload_rollout": True}),
    "--offload": (TURNS, "", {"colocate.offload_train": True}),
    "--offload-train": (TURNS, "", {"colocate.offload_train": True}),
    "--offload-rollout": (TURNS, "", {"colocate.offload_rollout": True}),
    "--no-offload": (TURNS, "", {"refused": "no process would free memory"}),
    "--no-offload-train": (TURNS, "", {"colocate.offload_train": False}),
    "--no-offload-rollout": (TURNS, "", {"colocate.offload_rollout": False}),
    "--critic-num-nodes": (f"{PPO} --actor-num-nodes 2 {TWO_NODES}", "1", {"deployment.num_critic_nodes": 1}),
    "--critic-num-gpus-per-node": (f"{PPO} --rollout-num-gpus 2", "2", {"deployment.num_critic_gpus": 2}),
    "--train-env-vars": ("", "'{\"A\": \"b\"}'", {"trainer.env_vars": {"A": "b"}}),
    # -- model and mesh
    "--custom-model-provider-path": ("", "a.b", {"trainer.hooks.model": "a.b"}),
    "--tensor-model-parallel-size": ("", "2", {"model.tp": 2}),
    "--context-parallel-size": ("", "2", {"model.cp": 2, "model.cp_style": "ring"}),
    "--expert-model-parallel-size": ("", "2", {"model.ep": 2}),
    "--expert-tensor-parallel-size": ("--expert-model-parallel-size 2", "2", {"model.ep": 4}),
    "--train-backend": ("", "megatron", {"trainer.backend": "megatron"}),
    "--pipeline-model-parallel-size": (MEGATRON, "2", {"trainer.megatron.pp": 2}),
    "--decoder-first-pipeline-num-layers": (STAGES, "16", {"trainer.megatron.first_stage_layers": 16}),
    "--decoder-last-pipeline-num-layers": (STAGES, "16", {"trainer.megatron.last_stage_layers": 16}),
    "--virtual-pipeline-model-parallel-size": (STAGES, "3", {"trainer.megatron.virtual_stages": 3}),
    "--num-layers-per-virtual-pipeline-stage": (STAGES, "6", {"trainer.megatron.virtual_stages": 3}),
    "--sequence-parallel": ("--tensor-model-parallel-size 2", "", {"model.sequence_parallel": True}),
    "--recompute-granularity": ("", "full", {"model.ac.mode": "full"}),
    "--recompute-method": ("--recompute-granularity full --recompute-num-layers 3", "block",
                           {"model.ac.num_blocks": 3}),
    "--recompute-num-layers": ("--recompute-granularity full --recompute-method uniform", "4",
                               {"model.ac.group_size": 4}),
    "--optimizer-cpu-offload": ("", "", {"model.optim_cpu_offload": True}),
    "--moe-enable-deepep": ("--expert-model-parallel-size 2", "", {"model.ep_comm_backend": "deepep"}),
    "--moe-router-bias-update-rate": ("--moe-router-enable-expert-bias", "0.002",
                                      {"model.moe_bias_update_rate": 0.002}),
    "--moe-router-load-balancing-type": ("", "sinkhorn", {"refused": "must be aux_loss or"}),
    "--fp8-format": ("--fp8-recipe blockwise", "e4m3", {"model.fp8": True}),
    "--fp8-recipe": ("--fp8-format e4m3 --fp8-recipe blockwise", "tensorwise", {"refused": "use e4m3 and blockwise"}),
    # -- optimizer
    "--optimizer": ("", "muon", {"trainer.optim.type": "muon"}),
    "--lr": ("", "1e-5", {"trainer.optim.lr": 1e-5}),
    "--lr-decay-style": ("", "cosine", {"trainer.scheduler.type": "cosine"}),
    "--min-lr": ("", "1e-8", {"trainer.scheduler.min_lr": 1e-8}),
    "--lr-warmup-iters": ("", "2", {"trainer.scheduler.warmup_steps": 2}),
    "--lr-warmup-fraction": ("", "0.4", {"trainer.scheduler.warmup_steps": 1}),
    "--lr-decay-iters": ("", "7", {"refused": "the schedule ends with the run"}),
    "--weight-decay": ("", "0.2", {"trainer.optim.weight_decay": 0.2}),
    "--adam-beta1": ("", "0.8", {"trainer.optim.betas1": 0.8}),
    "--adam-beta2": ("", "0.95", {"trainer.optim.betas2": 0.95}),
    "--adam-eps": ("", "1e-6", {"trainer.optim.eps": 1e-6}),
    "--clip-grad": ("", "0.5", {"trainer.optim.max_norm": 0.5}),
    "--lora-rank": ("", "4", {"model.lora.rank": 4}),
    "--lora-alpha": ("--lora-rank 4", "32", {"model.lora.alpha": 32}),
    "--lora-dropout": ("--lora-rank 4", "0.1", {"model.lora.dropout": 0.1}),
    "--target-modules": ("--lora-rank 4", "q_proj v_proj", {"model.lora.target_modules": ["q_proj", "v_proj"]}),
    # -- checkpoints
    "--hf-checkpoint": ("", "other", {"model.name": "other"}),
    "--load": ("--save runs/b", "runs/a", {"resume.dir": "runs/a"}),
    "--ref-load": ("", "weights", {"model.name": "weights"}),
    "--ref-ckpt-step": ("--ref-load mg", "3", {"model.name": "mg/hugging_face/iter_0000003"}),
    "--save": ("", "runs/b", {"output_dir": "runs", "run.name": "b", "ckpt.is_async": False}),
    "--save-interval": ("--save runs/b", "5", {"ckpt.interval": 5}),
    "--ckpt-step": ("--save runs/b --load runs/a", "2", {"resume.step": 2}),
    "--async-save": ("--save runs/b", "", {"ckpt.is_async": True}),
    "--no-save-optim": ("--save runs/b", "", {"ckpt.skip_optimizer": True}),
    "--no-load-optim": ("--save runs/b --load runs/a", "", {"refused": "which is continued exactly"}),
    "--finetune": ("--save runs/b --load runs/a", "", {"refused": "which is continued exactly"}),
    "--save-hf": ("--save runs/b", "x", {"ckpt.weights.save_adapter_separately": False}),
    # -- data
    "--prompt-data": ("", "rows.jsonl@[0:2]", {f"{ENV}.path": "rows.jsonl@[0:2]"}),
    "--input-key": ("", "question", {f"{ENV}.input_key": "question"}),
    "--label-key": ("", "answer", {f"{ENV}.label_key": "answer"}),
    "--metadata-key": ("", "extra", {f"{ENV}.metadata_key": "extra"}),
    "--tool-key": ("", "functions", {f"{ENV}.tool_key": "functions"}),
    "--apply-chat-template": ("without --apply-chat-template", "", {f"{ENV}.apply_chat_template": True}),
    "--apply-chat-template-kwargs": ("", "'{\"enable_thinking\": false, \"a\": 1}'", {
        "orchestrator.renderer.enable_thinking": False, "orchestrator.renderer.settings": {"a": 1}}),
    "--rollout-shuffle": ("", "", {f"{ENV}.shuffle": True}),
    "--data-source-path": ("without --prompt-data", "my.Source", {f"{ENV}.data_source": "my.Source"}),
    # -- rollouts
    "--num-rollout": ("", "5", {"max_steps": 5}),
    "--num-epoch": ("without --num-rollout", "3", {"max_steps": 6}),
    "--rollout-batch-size": ("", "2", {"orchestrator.batch_size": 8}),
    "--n-samples-per-prompt": ("", "8", {"orchestrator.group_size": 8, "orchestrator.batch_size": 32}),
    "--global-batch-size": ("", "8", {"trainer.updates_per_step": 2}),
    "--num-steps-per-rollout": ("", "4", {"trainer.updates_per_step": 4}),
    "--max-tokens-per-gpu": ("", "512", {"orchestrator.row_tokens": 512}),
    "--rollout-temperature": ("", "0.7", {f"{SAMPLING}.temperature": 0.7}),
    "--rollout-top-p": ("", "0.9", {f"{SAMPLING}.top_p": 0.9, "orchestrator.train.replay.max_tokens": 1024}),
    "--rollout-top-k": ("", "20", {f"{SAMPLING}.top_k": 20}),
    "--rollout-max-context-len": ("", "2048", {"seq_len": 2048}),
    "--rollout-max-prompt-len": ("", "100", {f"{ENV}.max_prompt_tokens": 100}),
    "--rollout-max-response-len": ("", "300", {f"{SAMPLING}.max_completion_tokens": 300}),
    "--rollout-seed": ("", "7", {"seed": 7}),
    "--rollout-stop": ("", "a b", {f"{SAMPLING}.stop": ["a", "b"]}),
    "--rollout-stop-token-ids": ("", "1 2", {f"{SAMPLING}.stop_token_ids": [1, 2]}),
    "--over-sampling-batch-size": ("--partial-rollout", "12", {"orchestrator.oversampling_factor": 3}),
    "--partial-rollout": ("", "", {"orchestrator.max_async_level": 1}),
    "--mask-offpolicy-in-partial-rollout": ("--partial-rollout", "", {
        "orchestrator.mask_offpolicy_in_partial_rollout": True}),
    "--update-weights-interval": ("train_async.py", "2", {
        "weight_broadcast.interval": 2, "orchestrator.max_async_level": 2}),
    # -- functions
    "--rollout-function-path": ("", "a.b", {f"{HOOKS}.rollout_function": "a.b"}),
    "--eval-function-path": (EVALS, "a.b", {f"{HOOKS}.eval_function": "a.b"}),
    "--custom-generate-function-path": ("", "a.b", {f"{ENV}.generate": "a.b"}),
    "--custom-rm-path": ("", "a.b", {f"{ENV}.reward": "a.b"}),
    "--dynamic-sampling-filter-path": ("", "a.b", {f"{HOOKS}.dynamic_sampling_filter": "a.b"}),
    "--buffer-filter-path": ("", "a.b", {f"{HOOKS}.buffer_filter": "a.b"}),
    "--rollout-sample-filter-path": ("", "a.b", {f"{HOOKS}.sample_filter": "a.b"}),
    "--custom-reward-post-process-path": ("", "a.b", {f"{HOOKS}.reward_post_process": "a.b"}),
    "--custom-convert-samples-to-train-data-path": ("", "a.b", {f"{HOOKS}.convert_samples_to_train_data": "a.b"}),
    "--rollout-all-samples-process-path": ("", "a.b", {f"{HOOKS}.all_samples_process": "a.b"}),
    "--rollout-sample-hook-path": ("", "a.b c.d", {f"{ENV}.sample_hooks": ["a.b", "c.d"]}),
    "--rollout-data-postprocess-path": ("", "a.b", {"trainer.hooks.data_postprocess": "a.b"}),
    "--custom-rollout-log-function-path": ("", "a.b", {f"{HOOKS}.rollout_log": "a.b"}),
    "--custom-eval-rollout-log-function-path": (EVALS, "a.b", {f"{HOOKS}.eval_log": "a.b"}),
    "--custom-config-path": ("", "own.yaml", {"trainer.optim.lr": 1e-3, f"{ENV}.hook_args": {"mine": 1}}),
    # -- rewards
    "--rm-type": ("", "f1", {f"{ENV}.reward": "f1"}),
    "--group-rm": ("--custom-rm-path a.b", "", {f"{ENV}.group_reward": True}),
    "--reward-key": ("--custom-rm-path a.b", "score", {f"{ENV}.reward_key": "score"}),
    "--rm-url": ("--rm-type remote_rm", "http://x", {f"{ENV}.hook_args": {"rm_url": "http://x"}}),
    # -- evals
    "--eval-reward-key": (f"{EVALS} --custom-rm-path a.b", "score", {f"{EVAL}.env.0.args.reward_key": "score"}),
    "--eval-interval": ("--eval-prompt-data a rows.jsonl", "3", {f"{EVAL}.interval": 3}),
    "--eval-prompt-data": (EVALS, "b rows.jsonl c rows.jsonl", {f"{EVAL}.env.0.name": "b", f"{EVAL}.env.1.name": "c"}),
    "--n-samples-per-eval-prompt": (EVALS, "3", {f"{EVAL}.group_size": 3}),
    "--eval-input-key": (EVALS, "question", {f"{EVAL}.env.0.args.input_key": "question"}),
    "--eval-label-key": (EVALS, "answer", {f"{EVAL}.env.0.args.label_key": "answer"}),
    "--eval-tool-key": (EVALS, "functions", {f"{EVAL}.env.0.args.tool_key": "functions"}),
    "--eval-temperature": (EVALS, "0.5", {f"{EVAL}.sampling.temperature": 0.5}),
    "--eval-top-p": (EVALS, "0.8", {f"{EVAL}.sampling.top_p": 0.8}),
    "--eval-top-k": (EVALS, "5", {f"{EVAL}.sampling.top_k": 5}),
    "--eval-max-response-len": (EVALS, "99", {f"{EVAL}.sampling.max_completion_tokens": 99}),
    "--eval-max-prompt-len": (EVALS, "77", {f"{EVAL}.env.0.args.max_prompt_tokens": 77}),
    "--eval-max-context-len": (EVALS, "2048", {"refused": "evals take as many tokens as training"}),
    "--eval-min-new-tokens": (EVALS, "3", {f"{EVAL}.sampling.min_tokens": 3}),
    "--skip-eval-before-train": (EVALS, "", {f"{EVAL}.skip_first_step": True}),
    "--eval-config": ("--eval-interval 2", "evals.yaml", {f"{EVAL}.env.0.name": "of_a_file"}),
    # -- algorithm
    "--advantage-estimator": ("", "gspo", {f"{LOSS}.type": "gspo"}),
    "--loss-type": ("--custom-loss-function-path a.b", "custom_loss", {"trainer.hooks.loss": "a.b"}),
    "--calculate-per-token-loss": ("", "", {f"{LOSS}.reduction": "token"}),
    "--normalize-advantages": ("", "", {f"{ALGO}.whiten": True}),
    "--disable-grpo-std-normalization": ("", "", {f"{ALGO}.normalize_std": False}),
    "--disable-rewards-normalization": ("", "", {"refused": "compares a group's rewards"}),
    "--eps-clip": ("--global-batch-size 8", "0.1", {f"{LOSS}.clip_low": 0.1, f"{LOSS}.clip_high": 0.1}),
    "--eps-clip-high": ("--global-batch-size 8", "0.3", {f"{LOSS}.clip_high": 0.3, f"{LOSS}.clip_low": 0.2}),
    "--eps-clip-c": ("--global-batch-size 8", "3", {f"{LOSS}.clip_dual": 3}),
    "--entropy-coef": ("", "0.01", {f"{LOSS}.entropy_coef": 0.01}),
    "--use-kl-loss": ("--kl-loss-coef 0.1 --ref-load Qwen3-4B", "", {f"{LOSS}.reference_kl.coef": 0.1}),
    "--kl-loss-coef": (KL, "0.2", {f"{LOSS}.reference_kl.coef": 0.2}),
    "--kl-loss-type": (KL, "low_var_kl", {f"{LOSS}.reference_kl.estimator": "low_var"}),
    "--disable-compute-advantages-and-returns": ("", "", {"refused": "needs advantages"}),
    "--deterministic-mode": ("", "", {"trainer.is_deterministic": True}),
    "--use-opd": (TEACHER, "", {"trainer.advantages.type": "shaped", "trainer.advantages.kl_model": "Qwen3-4B",
                                "orchestrator.algo.type": "grpo"}),
    "--opd-type": ("--use-opd --rm-url http://10.0.0.7:8100/inference/v1/generate", "vllm", {
        "orchestrator.algo.type": "opd", "orchestrator.teacher.base_url": "http://10.0.0.7:8100/v1",
        "trainer.advantages": None, f"{ENV}.hook_args": None}),
    "--opd-kl-coef": (f"--use-opd {TEACHER}", "0.5", {"trainer.advantages.kl_coef": 0.5}),
    "--opd-teacher-load": ("--use-opd --opd-type megatron", "Qwen3-4B", {"trainer.advantages.kl_model": "Qwen3-4B"}),
    "--opd-teacher-ckpt-step": ("--use-opd --opd-type megatron --opd-teacher-load mg", "3",
                                {"trainer.advantages.kl_model": "mg/hugging_face/iter_0000003"}),
    "--multimodal-keys": ("", "'{\"image\": \"pictures\"}'", {f"{ENV}.image_key": "pictures"}),
    "--use-unbiased-kl": (KL, "", {f"{LOSS}.reference_kl.is_unbiased": True}),
    "--use-rollout-logprobs": ("", "", {f"{LOSS}.use_rollout_logprobs": True}),
    "--use-tis": ("", "", {f"{LOSS}.correction.weights.high": 2}),
    "--tis-clip": ("--use-tis", "3", {f"{LOSS}.correction.weights.high": 3}),
    "--tis-clip-low": ("--use-tis", "0.5", {f"{LOSS}.correction.weights.low": 0.5}),
    "--custom-tis-function-path": ("--use-tis", "a.b", {"trainer.hooks.tis": "a.b", f"{LOSS}.correction": None}),
    "--use-routing-replay": ("", "", {"refused": "experts are replayed as the engine chose them"}),
    "--use-rollout-routing-replay": ("", "", {"trainer.enable_router_replay": True}),
    "--custom-loss-function-path": ("--loss-type custom_loss --custom-loss-function-path a.b", "c.d", {
        "trainer.hooks.loss": "c.d"}),
    "--custom-advantage-function-path": ("", "a.b", {"trainer.hooks.advantages": "a.b"}),
    "--custom-pg-loss-reducer-function-path": ("", "a.b", {"trainer.hooks.pg_loss_reducer": "a.b"}),
    "--gamma": (PLUS, "0.9", {"trainer.advantages.gamma": 0.9}),
    "--lambd": (PPO, "0.9", {"trainer.advantages.lambd": 0.9}),
    "--kl-coef": (f"{PLUS} --ref-load Qwen3-4B", "0.1", {"trainer.advantages.kl_coef": 0.1}),
    "--value-clip": (f"{PPO} --global-batch-size 8", "0.3", {f"{CRITIC}.value_clip": 0.3}),
    "--critic-load": (PPO, "other", {f"{CRITIC}.load": "other"}),
    "--critic-save": (f"{PPO} --save runs/b", "c", {f"{CRITIC}.save": "c"}),
    "--critic-lr": (PPO, "1e-4", {f"{CRITIC}.lr": 1e-4}),
    "--critic-lr-warmup-iters": (PPO, "2", {f"{CRITIC}.lr_warmup_steps": 2}),
    "--num-critic-only-steps": (PPO, "1", {f"{CRITIC}.num_critic_only_steps": 1}),
    "--megatron-config-path": (PPO, "roles.yaml", {"trainer.optim.lr": 2e-6, f"{CRITIC}.optim.max_norm": 0.5}),
    "--custom-megatron-init-path": ("", "a.b", {"trainer.hooks.init": "a.b"}),
    "--custom-megatron-before-log-prob-hook-path": ("", "a.b", {"trainer.hooks.before_log_prob": "a.b"}),
    "--custom-megatron-before-train-step-hook-path": ("", "a.b", {"trainer.hooks.before_train_step": "a.b"}),
    # -- engines
    "--vllm-gpu-memory-utilization": ("", "0.5", {"inference.gpu_memory_utilization": 0.5}),
    "--vllm-max-model-len": ("", "1100", {"inference.max_model_len": 1100}),
    "--vllm-enable-expert-parallel": ("", "", {"inference.enable_expert_parallel": True}),
    "--vllm-data-parallel-size": ("", "2", {"inference.parallel.dp": 2, "inference.parallel.tp": 1}),
    "--vllm-pipeline-parallel-size": ("", "2", {"inference.parallel.pp": 2, "inference.parallel.tp": 1}),
    "--vllm-trust-remote-code": ("", "", {"model.trust_remote_code": True}),
    "--vllm-server-concurrency": ("", "8", {"orchestrator.max_inflight_rollouts": 16}),
    "--vllm-router-ip": ("--vllm-router-ip a --vllm-router-port 9", "b", {"inference.router.address": "http://b:9"}),
    "--vllm-router-port": ("--vllm-router-ip a --vllm-router-port 9", "8", {"inference.router.address": "http://a:8"}),
    "--vllm-router-request-timeout-secs": ("", "60", {"orchestrator.client.timeout_s": 60}),
    "--vllm-weight-transfer-timeout-sec": ("", "60", {"weight_broadcast.timeout_s": 60}),
    "--vllm-config": ("", "models.yaml", {"inference.max_model_len": 1100, "orchestrator.client.name": "policy"}),
    "--vllm-enable-deterministic-inference": ("", "", {"inference.env_vars": {"VLLM_BATCH_INVARIANT": "1"}}),
    "--router-policy": ("", "round_robin", {"inference.router.policy": "round_robin"}),
    "--update-weight-transport": ("", "disk", {"weight_broadcast.type": "filesystem"}),
    "--update-weight-mode": ("--update-weight-transport disk", "delta", {
        "weight_broadcast.delta.directory": "/dev/shm"}),
    "--update-weight-local-checkpoint-dir": ("--update-weight-transport disk --update-weight-mode delta", "/x", {
        "weight_broadcast.delta.directory": "/x"}),
    "--custom-update-weight-post-write-path": ("--update-weight-transport disk", "a.b", {
        "trainer.hooks.post_write": "a.b"}),
    # -- logs
    "--use-wandb": ("", "", {"is_there": "monitors.wandb"}),
    "--wandb-project": ("--use-wandb", "p", {"monitors.wandb.project": "p"}),
    "--wandb-group": ("--use-wandb", "g", {"monitors.wandb.name": "g"}),
    "--wandb-team": ("--use-wandb", "t", {"monitors.wandb.entity": "t"}),
    "--wandb-mode": ("--use-wandb", "offline", {"monitors.wandb.offline": True}),
    "--wandb-key": ("", "k", {"variable": ("WANDB_API_KEY", "k")}),
    "--wandb-host": ("", "h", {"variable": ("WANDB_BASE_URL", "h")}),
    "--use-tensorboard": ("", "", {"is_there": "monitors.tensorboard"}),
    "--debug-rollout-only": ("", "", {"orchestrator.debug": "rollouts"}),
    "--debug-train-only": ("", "", {"refused": "needs --load-debug-rollout-data"}),
    "--save-debug-rollout-data": ("", "a/{rollout_id}.pt", {f"{HOOKS}.save_samples": "a/{rollout_id}.pt"}),
    "--load-debug-rollout-data": ("", "a/{rollout_id}.pt", {"orchestrator.debug": "training", "inference": None}),
    "--load-debug-rollout-data-subsample": ("--load-debug-rollout-data a.pt", "0.5", {
        f"{HOOKS}.args.load_debug_rollout_data_subsample": 0.5}),
    "--save-debug-train-data": ("", "x", {"trainer.enable_token_export": True}),
    "--dump-details": ("", "x", {"trainer.enable_token_export": True}),
    "--record-memory-history": ("", "", {"trainer.memory_profiler_path": "."}),
    "--memory-snapshot-dir": ("--record-memory-history", "x", {"trainer.memory_profiler_path": "x"}),
}
# fmt: on
"""By flag: the program, or flags before it (`without` some of the others), its value, and keys of the config that have
these values with it and, one at least, others without it. `refused` stands for a message, `variable` for one of the
processes, and `is_there` for a section that is there only with the flag."""
SAME_EITHER_WAY = {"--offload", "--offload-train", "--offload-rollout"}
"""Flags that ask for what --colocate does by itself; what they rule out is a clash."""


@pytest.fixture
def read(tmp_path, monkeypatch):
    put_files(tmp_path)
    put_megatron(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    for name in ("other", "weights"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    for step in (3, 9):
        (tmp_path / "mg" / f"iter_000000{step}").mkdir(parents=True)
    done = tmp_path / "runs" / "a" / "checkpoints" / "step_2"
    done.mkdir(parents=True)
    (done / "COMPLETE").write_text("")
    (tmp_path / "own.yaml").write_text("lr: 1e-3\nmine: 1\n")
    (tmp_path / "evals.yaml").write_text("eval: {datasets: [{name: of_a_file, path: rows.jsonl}]}")
    (tmp_path / "roles.yaml").write_text(
        "megatron: [{name: a, role: actor, overrides: {lr: 2e-6}}, {name: a, role: critic, args: {clip_grad: 0.5}}]"
    )
    groups = "server_groups: [{num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_model_len: 1100}}]"
    (tmp_path / "models.yaml").write_text(f"vllm: [{{name: policy, {groups}}}]")

    def command(before, *after):
        first, _, rest = before.partition(" ")
        words, program = words_of(tmp_path, SPLIT), []
        if first == "train_async.py":
            program, before = [first], rest
        if first == "without":
            at = words.index(rest)
            count = 1 if BY_NAME[rest].kind == "switch" else 2
            words = [*words[:at], *words[at + count :]]
            before = ""
        return read_command([*program, *words, *shlex.split(before), *after])

    return command


def found(cfg, keys):
    """The values of keys in a config; of `is_there`, the key that it names if that is a section of the config."""
    config = dump(cfg) | {name: getattr(cfg, name) for name in ("dry_run", "print_config")}
    section = keys.get("is_there")
    there = section if section and find(config, section) is not None else None
    return {key: there if key == "is_there" else find(config, key) for key in keys}


def test_every_flag_that_acts_has_a_row_here():
    acting = {flag.name for flag in BY_NAME.values() if flag.state == "acts"}
    assert acting - set(SHAPES) == set(EFFECTS)


@pytest.mark.heavy
@pytest.mark.parametrize("name", EFFECTS)
def test_a_flag_has_its_effect(name, read):
    before, value, effects = EFFECTS[name]
    words = [name, *shlex.split(value)]
    if (said := effects.get("refused")) is not None:
        with pytest.raises(ConfigError) as caught:
            read(before, *words)
        assert name in str(caught.value) and str(said) in str(caught.value)
        return
    command = read(before, *words)
    if (variable := effects.get("variable")) is not None:
        assert tuple(command.environment.items()) == (variable,)
        return
    assert found(command.config, effects) == effects
    try:
        without = found(read(before).config, effects)
    except ConfigError:  # the flag is one that a command needs
        return
    assert (without == effects) == (name in SAME_EITHER_WAY), f"{name} changes none of {list(effects)}"


OF_FAMILIES = ("--moe-router-score-function", "--moe-shared-expert-gate")
"""Compared with what is known of a family of an add-on."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs("families") if name in OF_FAMILIES else ()) for name in SHAPES]
)
def test_a_flag_about_the_shape_is_compared(name, read, tmp_path):
    """A value that config.json contradicts is refused, wherever it says anything."""
    shape = SHAPES[name]
    known = {
        "model_type": "deepseek_v3", "head_dim": None, "kv_lora_rank": 5, "q_lora_rank": 5, "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 5, "v_head_dim": 5, "n_group": 5, "topk_group": 5, "routed_scaling_factor": 5.0,
        "partial_rotary_factor": 0.3, "n_routed_experts": 5, "num_experts_per_tok": 5, "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 5, "first_k_dense_replace": 5, "num_attention_heads": 64,
        "rope_scaling": {"factor": 5, "mscale": 5, "mscale_all_dim": 5, "type": "yarn", "beta_fast": 5, "beta_slow": 5,
                         "original_max_position_embeddings": 5},
        "sliding_window": 5, "swiglu_limit": 5, "full_attention_interval": 5, "linear_conv_kernel_dim": 5,
        "linear_key_head_dim": 5, "linear_value_head_dim": 5, "linear_num_key_heads": 5, "linear_num_value_heads": 5,
        "ssm_state_size": 5, "mamba_head_dim": 5, "n_groups": 5, "mamba_num_heads": 5, "index_n_heads": 5,
        "index_head_dim": 5, "index_topk": 5, "moe_latent_size": 5,
    }  # fmt: skip
    contradicting = {"--kv-channels": {"kv_lora_rank": None, "head_dim": 5}}
    switches = {
        "--swiglu": {"hidden_act": "gelu"}, "--disable-bias-linear": {"mlp_bias": True},
        "--untie-embeddings-and-output-weights": {"tie_word_embeddings": True},
        "--add-qkv-bias": {"kv_lora_rank": None},
        **{f"--post-{part}-layernorm": {"model_type": "qwen3"} for part in ("self-attn", "mlp")},
        "--qk-layernorm": {"use_qk_norm": False}, "--multi-latent-attention": {"kv_lora_rank": None},
        "--moe-shared-expert-gate": {}, "--moe-router-pre-softmax": {"scoring_func": "softmax", "norm_topk_prob": True},
        "--moe-router-enable-expert-bias": {"scoring_func": "softmax"}, "--use-rope-scaling": {"rope_scaling": None},
        **{name: {"swiglu_limit": None} for name in ("--quick-geglu", "--openai-gelu", "--squared-relu")},
    }  # fmt: skip
    never = {
        "--group-query-attention", "--use-rotary-position-embeddings", "--apply-layernorm-1p",
        "--attention-output-gate", "--use-gated-attention",
    }  # fmt: skip
    own = contradicting.get(name, {}) | switches.get(name, {})
    config = {key: value for key, value in (CONFIG | known | own).items() if value is not None}
    (tmp_path / "Qwen3-4B" / "config.json").write_text(json.dumps(config))
    typed = {"integer": "3", "number": "0.7", "text": "layernorm", "switch": ""}[shape.kind]
    typed = "3" if name == "--linear-attention-freq" else typed
    if name in never:
        assert shape.kind == "switch" and shape.value(config) in (True, None)
        return
    with pytest.raises(ConfigError, match=f"{name} ?{typed} [(]there "):
        read("", name, *shlex.split(typed))
