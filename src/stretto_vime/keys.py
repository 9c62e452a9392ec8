"""Vime's names of our keys."""

from __future__ import annotations

from stretto.config.spelling import NO_DEFAULT, Spelling, Table, moved

HOOKS = Table("orchestrator.hooks", "HooksSection", tuple(moved(theirs, NO_DEFAULT, ours) for theirs, ours in {
    "dynamic_sampling_filter_path": "dynamic_sampling_filter",
    "buffer_filter_path": "buffer_filter",
    "rollout_sample_filter_path": "sample_filter",
    "custom_reward_post_process_path": "reward_post_process",
    "custom_convert_samples_to_train_data_path": "convert_samples_to_train_data",
    "rollout_function_path": "rollout_function",
    "eval_function_path": "eval_function",
    "rollout_all_samples_process_path": "all_samples_process",
    "custom_rollout_log_function_path": "rollout_log",
    "custom_eval_rollout_log_function_path": "eval_log",
}.items()), is_listed=False)  # fmt: skip
TRAINER_HOOKS = Table("trainer.hooks", "TrainerHooksSection", tuple(moved(old, NO_DEFAULT, ours) for old, ours in {
    "custom_model_provider_path": "model",
    "custom_megatron_init_path": "init",
    "custom_megatron_before_log_prob_hook_path": "before_log_prob",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
    "custom_advantage_function_path": "advantages",
    "custom_tis_function_path": "tis",
    "custom_loss_function_path": "loss",
    "custom_pg_loss_reducer_function_path": "pg_loss_reducer",
    "custom_update_weight_post_write_path": "post_write",
    "rollout_data_postprocess_path": "data_postprocess",
}.items()), is_listed=False)  # fmt: skip
MODELS = Table("", "RLConfig", (moved("models.teacher", NO_DEFAULT, "teacher_inference"),), verb="rl", is_listed=False)
SPELLING = Spelling((HOOKS, TRAINER_HOOKS, MODELS))
