"""The value of every flag in a run's resolved config; user functions read them as `args`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto_vime.flags.groups import BY_NAME

Config = Mapping[str, Any]
ENV = "orchestrator.env.0.args"
OTHER_KEYS = {
    "actor_num_nodes": "deployment.num_train_nodes",
    "num_gpus_per_node": "deployment.gpus_per_node",
    "seed": "seed",
    "save_interval": "trainer.ckpt.interval",
}
"""Flags whose value is that of a key of a resolved config, though it is not the first that they set."""


def resolved(config: Config) -> dict[str, Any]:
    """The value of every flag by attribute: what the config says, and vime's default where it says nothing."""
    values = {flag.attribute: flag.default for flag in BY_NAME.values()}
    values |= {"seed": 1234, "start_rollout_id": 0}
    known: dict[str, Any] = {}
    for flag in BY_NAME.values():
        if flag.is_value_of_key:
            found = find(config, flag.keys[0])
            is_section = flag.kind == "switch" and isinstance(found, Mapping)  # on if it is there, even empty
            known[flag.attribute] = True if is_section else found
    known |= {name: find(config, key) for name, key in OTHER_KEYS.items()} | _computed(config)
    return values | {name: value for name, value in known.items() if value is not None}


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
        "critic_lr": get("trainer.critic.lr") or get("trainer.critic.optim.lr"),
        "save": get("run_dir"),
    }
