"""Names of settings in TRL, verl, OpenRLHF and slime, for messages and `--help WORD`.

Other than the spellings of prime-rl, these names are not accepted; a message names the key.
"""

from __future__ import annotations

_TABLE = """
learning_rate actor_learning_rate -> trainer.optim.lr optim.lr
critic_learning_rate -> trainer.critic.lr
weight_decay l2 -> trainer.optim.weight_decay optim.weight_decay
max_grad_norm clip_grad grad_clip max_norm -> trainer.optim.max_norm optim.max_norm
lr_scheduler_type lr_scheduler lr_decay_style -> trainer.scheduler.type scheduler.type
warmup_ratio warmup_steps num_warmup_steps lr_warmup_ratio -> trainer.scheduler.warmup_steps scheduler.warmup_steps
num_generations n_samples_per_prompt rollout_n n -> orchestrator.group_size eval.group_size
per_device_train_batch_size train_batch_size -> orchestrator.batch_size batch_size
rollout_batch_size global_batch_size ppo_mini_batch_size generation_batch_size -> orchestrator.batch_size batch_size
num_train_epochs total_epochs num_epochs epochs -> max_epochs max_steps
total_training_steps num_rollout train_iters -> max_steps
beta kl_coef init_kl_coef kl_loss_coef -> trainer.loss.reference_kl.coef
epsilon clip_ratio clip_ratio_low eps_clip cliprange -> trainer.loss.clip_low
epsilon_high clip_ratio_high eps_clip_high -> trainer.loss.clip_high
scale_rewards norm_adv_by_std_in_grpo -> orchestrator.algo.normalize_std
num_generations_eval -> orchestrator.eval.group_size
generation_kwargs -> orchestrator.train.sampling
importance_sampling_level -> trainer.loss.type
delta -> trainer.loss.clip_dual
vllm_importance_sampling_correction -> trainer.loss.use_rollout_logprobs
shuffle_dataset -> orchestrator.env.0.args.shuffle data.shuffle
activation_offloading -> model.ac_offloading
assistant_only_loss -> loss_mask.assistant
completion_only_loss -> loss_mask.user
dataset_text_field -> data.input_key
pad_token eos_token -> tokenizer.name
chat_template_path -> orchestrator.renderer.template renderer.template
gradient_accumulation_steps -> orchestrator.batch_size batch_size
num_iterations ppo_epochs -> trainer.epochs_per_step
steps_per_generation -> trainer.updates_per_step
reward_weights -> orchestrator.env.0.args.rewards
metric_for_best_model -> orchestrator.eval.score_by
load_best_model_at_end -> orchestrator.eval.keep_best val.keep_best
early_stopping_patience -> orchestrator.eval.early_stop.patience val.early_stop.patience
logging_steps log_completions log_interval num_completions_to_print -> monitors.samples_interval
run_name experiment_name -> run.name
eval_dataset eval_path -> orchestrator.env.0.args.eval_path val.data
loss_type policy_loss -> trainer.loss.type
advantage_estimator adv_estimator -> orchestrator.algo.type
model_name_or_path pretrain hf_checkpoint model_id -> model.name model
model_name -> model.name model
betas adam_beta1 adam_betas -> trainer.optim.betas1 optim.betas1
advantage advantages_type -> orchestrator.algo
environment environments env_id -> orchestrator.env
every save_every -> ckpt.interval
temp -> orchestrator.train.sampling.temperature
data.path data.file data.files data.data_path val.data.path -> data.name
dataset_name train_files prompt_data dataset -> orchestrator.env.0.args.path data.name
max_completion_length max_new_tokens response_length -> orchestrator.train.sampling.max_completion_tokens
max_response_length generate_max_len -> orchestrator.train.sampling.max_completion_tokens
rollout_max_response_len -> orchestrator.train.sampling.max_completion_tokens
max_prompt_length max_seq_length max_length -> seq_len
max_len -> inference.max_model_len seq_len
rollout_temperature -> orchestrator.train.sampling.temperature
save_steps save_freq save_interval save_strategy -> ckpt.interval
save_total_limit -> ckpt.keep_last
resume_from_checkpoint -> resume
eval_steps test_freq eval_interval -> orchestrator.eval.interval eval.interval
report_to logger use_wandb -> monitors.wandb
use_vllm -> inference.engine engine
vllm_gpu_memory_utilization -> inference.gpu_memory_utilization gpu_memory_utilization
vllm_mode vllm_colocate -> colocate
gpu_ids gpus devices cuda_visible_devices -> trainer_gpu_ids inference_gpu_ids
ref_model reference_model sync_ref_model -> model.name
vllm_tensor_parallel_size -> inference.parallel.tp
vllm_max_model_length vllm_max_model_len -> inference.max_model_len
rollout_num_gpus -> deployment.num_infer_gpus
actor_num_gpus_per_node nproc_per_node n_gpus_per_node num_gpus world_size -> deployment.num_train_gpus
num_ranks -> deployment.num_train_gpus
orchestrator.env.0.weight orchestrator.env.0.sampling_ratio orchestrator.env.0.share -> orchestrator.env.0.ratio
bf16 fp16 torch_dtype -> model.dtype
gradient_checkpointing recompute -> model.ac
lora_r lora_rank r -> model.lora.rank
use_peft use_lora peft_config -> model.lora
lora_alpha -> model.lora.alpha
torch_compile -> model.compile
fsdp deepspeed zero_stage -> deployment.num_train_gpus
data_seed -> seed
chat_template_kwargs -> orchestrator.renderer.enable_thinking renderer.enable_thinking
vllm_server_base_url vllm_server_host -> orchestrator.client.base_url
rollout_func generate_function -> orchestrator.env.0.args.generate
tensor_model_parallel_size tensor_parallel_size -> model.tp parallel.tp
context_parallel_size sequence_parallel_size -> model.cp
expert_model_parallel_size -> model.ep
reward_funcs reward_model custom_rm_path reward_function -> orchestrator.env.0.args.reward
update_interval update_weights_interval weight_sync_steps trigger_parameter_sync_step -> weight_broadcast.interval
async_steps max_staleness staleness -> orchestrator.max_off_policy_steps orchestrator.max_async_level
"""
_ROWS = [line.split(" -> ") for line in _TABLE.strip().splitlines()]
SYNONYMS = {name: tuple(paths.split()) for names, paths in _ROWS for name in names.split()}
"""By the last part of a name, or by two where the last alone means many things, in lower case with underscores: keys
of any verb that it may mean."""


def keys_meant(name: str) -> tuple[str, ...]:
    """Dotted paths of keys that a name of another framework means; () for an unknown name."""
    name = name.lower().replace("-", "_")
    return SYNONYMS.get(name) or SYNONYMS.get(name.rpartition(".")[2], ())
