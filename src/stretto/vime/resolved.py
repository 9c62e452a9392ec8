"""The other way round: a run's resolved config -> the value of every flag, which user functions read as `args`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto.vime.flags.groups import BY_NAME

Config = Mapping[str, Any]
ENV = "orchestrator.env.0.args"
PATHS: dict[str, str] = {
    "hf_checkpoint": "model.name",
    "prompt_data": f"{ENV}.path",
    "data_source_path": f"{ENV}.data_source",
    "input_key": f"{ENV}.input_key",
    "label_key": f"{ENV}.label_key",
    "metadata_key": f"{ENV}.metadata_key",
    "tool_key": f"{ENV}.tool_key",
    "apply_chat_template": f"{ENV}.apply_chat_template",
    "rollout_shuffle": f"{ENV}.shuffle",
    "rollout_max_prompt_len": f"{ENV}.max_prompt_tokens",
    "custom_generate_function_path": f"{ENV}.generate",
    "group_rm": f"{ENV}.group_reward",
    "reward_key": f"{ENV}.reward_key",
    "num_rollout": "max_steps",
    "n_samples_per_prompt": "orchestrator.group_size",
    "num_steps_per_rollout": "trainer.updates_per_step",
    "rollout_max_context_len": "seq_len",
    "rollout_max_response_len": "orchestrator.train.sampling.max_completion_tokens",
    "rollout_top_p": "orchestrator.train.sampling.top_p",
    "rollout_function_path": "orchestrator.hooks.rollout_function",
    "eval_function_path": "orchestrator.hooks.eval_function",
    "dynamic_sampling_filter_path": "orchestrator.hooks.dynamic_sampling_filter",
    "mask_offpolicy_in_partial_rollout": "orchestrator.mask_offpolicy_in_partial_rollout",
    "eval_interval": "orchestrator.eval.interval",
    "n_samples_per_eval_prompt": "orchestrator.eval.group_size",
    "skip_eval_before_train": "orchestrator.eval.skip_first_step",
    "eval_temperature": "orchestrator.eval.sampling.temperature",
    "eval_top_p": "orchestrator.eval.sampling.top_p",
    "eval_top_k": "orchestrator.eval.sampling.top_k",
    "eval_max_response_len": "orchestrator.eval.sampling.max_completion_tokens",
    "eps_clip": "trainer.loss.clip_low",
    "eps_clip_high": "trainer.loss.clip_high",
    "eps_clip_c": "trainer.loss.clip_dual",
    "entropy_coef": "trainer.loss.entropy_coef",
    "kl_loss_coef": "trainer.loss.reference_kl.coef",
    "use_rollout_logprobs": "trainer.loss.use_rollout_logprobs",
    "tis_clip": "trainer.loss.correction.weights.high",
    "tis_clip_low": "trainer.loss.correction.weights.low",
    "normalize_advantages": "orchestrator.algo.whiten",
    "gamma": "trainer.advantages.gamma",
    "lambd": "trainer.advantages.lambd",
    "kl_coef": "trainer.advantages.kl_coef",
    "value_clip": "trainer.critic.value_clip",
    "critic_load": "trainer.critic.load",
    "critic_save": "trainer.critic.save",
    "critic_lr": "trainer.critic.lr",
    "critic_lr_warmup_iters": "trainer.critic.lr_warmup_steps",
    "num_critic_only_steps": "trainer.critic.num_critic_only_steps",
    "context_parallel_size": "model.cp",
    "expert_model_parallel_size": "model.ep",
    "recompute_granularity": "model.ac.mode",
    "actor_num_gpus_per_node": "deployment.num_train_gpus",
    "actor_num_nodes": "deployment.num_train_nodes",
    "num_gpus_per_node": "deployment.gpus_per_node",
    "rollout_num_gpus": "deployment.num_infer_gpus",
    "lr": "trainer.optim.lr",
    "seed": "seed",
    "save_interval": "trainer.ckpt.interval",
    "use_wandb": "monitors.wandb",
    "use_tensorboard": "monitors.tensorboard",
}
"""Flags that stand for one key, though they are not copied to it as they are."""


def resolved(config: Config) -> dict[str, Any]:
    """The value of every flag by attribute: what the config says, and vime's default where it says nothing."""
    values = {flag.attribute: flag.default for flag in BY_NAME.values()}
    values |= {"seed": 1234, "start_rollout_id": 0}
    for flag in BY_NAME.values():
        if flag.is_copied and flag.keys:
            _take(values, flag.attribute, find(config, flag.keys[0]))
    for name, path in PATHS.items():
        found = find(config, path)
        _take(values, name, bool(found) if name in ("use_wandb", "use_tensorboard") else found)
    for name, value in _computed(config).items():
        _take(values, name, value)
    return values


def find(config: Config, path: str) -> Any:
    """The value at a dotted path, in which numbers are indices; None if there is none."""
    at: Any = config
    for part in path.split("."):
        if isinstance(at, Mapping):
            at = at.get(part)
        elif isinstance(at, list) and part.isdigit() and int(part) < len(at):
            at = at[int(part)]
        else:
            return None
    return None if at == "None" else at


def _take(values: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        values[name] = value


def _engine_gpus(get: Callable[[str], Any]) -> tuple[int, int]:
    """GPUs of the first engine that takes new weights, and of all."""
    shape = "inference.deployment"
    kind, replicas = get(f"{shape}.type"), get("deployment.num_infer_replicas") or 1
    shards = (get("inference.parallel.pp") or 1) * (get("inference.parallel.dp") or 1)
    tp = get("inference.parallel.tp") or 1
    if kind == "disaggregated":
        sides = [
            (get(f"{shape}.num_{side}_replicas") or 1, (get(f"{shape}.{side}_tp") or tp) * shards)
            for side in ("prefill", "decode")
        ]
    elif kind == "multi_node":
        is_wide = get("inference.enable_expert_parallel") and (get(f"{shape}.nodes_per_engine") or 1) == 1
        nodes = get(f"{shape}.num_nodes") or 2
        sides = [(1 if is_wide else nodes // (get(f"{shape}.nodes_per_engine") or 1), tp * shards)]
    else:
        sides = [(get(f"{shape}.num_replicas") or 1, tp * shards)]
    return sides[0][1], replicas * sum(count * gpus for count, gpus in sides)


def _computed(config: Config) -> dict[str, Any]:
    """Flags that follow from several keys."""
    get: Callable[[str], Any] = lambda path: find(config, path)
    samples, size = get("orchestrator.batch_size"), get("orchestrator.group_size") or 1
    updates = get("trainer.updates_per_step") or 1
    algo, loss = get("orchestrator.algo.type"), get("trainer.loss.type")
    advantages = get("trainer.advantages.type")
    estimator = {"gspo": "gspo", "cispo": "cispo"}.get(loss, algo)
    if advantages == "gae":
        estimator = "ppo"
    per_engine, rollout_gpus = _engine_gpus(get)
    top_k, reward = get("orchestrator.train.sampling.top_k"), get(f"{ENV}.reward")
    is_function = isinstance(reward, str) and bool({":", "."} & set(reward))
    return {
        "rollout_batch_size": None if samples is None else samples // size,
        "global_batch_size": None if samples is None else samples // updates,
        "advantage_estimator": estimator,
        "calculate_per_token_loss": get("trainer.loss.reduction") == "token",
        "use_tis": get("trainer.loss.correction.weights") is not None,
        "use_kl_loss": get("trainer.loss.reference_kl") is not None,
        "rollout_top_k": -1 if top_k is None else top_k,
        "rollout_num_gpus": get("deployment.num_infer_gpus") or rollout_gpus,
        "rollout_num_gpus_per_engine": per_engine,
        "custom_rm_path": reward if is_function else None,
        "rm_type": None if is_function else reward,
        "over_sampling_batch_size": None if samples is None else samples // size,
        "save": get("run_dir"),
    }
