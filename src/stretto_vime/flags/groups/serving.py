"""Flags about engines and their router; `--vllm-*` and `--router-*` pass through to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stretto.base.errors import ConfigError
from stretto_vime.flags.flag import Flag, Setting, Values, copies, equal, noted, part
from stretto_vime.flags.groups.cluster import is_on_one_node
from stretto_vime.flags.placement import count_engines, group_settings, is_over_nodes, nodes_of_groups, shards

MOVED = {
    "tensor-parallel-size": "it is --rollout-num-gpus-per-engine",
    "model": "it is --hf-checkpoint",
    "served-model-name": "engines serve the policy under its own name",
    "tokenizer": "it is that of --hf-checkpoint",
    "seed": "it is --rollout-seed",
    "dtype": "it is the trainer's, model.dtype",
    "config": "write the options as --vllm-... flags",
    "enable-return-routed-experts": "it is --use-rollout-routing-replay",
    "logprobs-mode": "the trainer needs those of the distribution that was sampled from, processed_logprobs",
    "enable-lora": "it is --lora-rank",
    "max-lora-rank": "it is --lora-rank",
    "nnodes": "nodes follow from --rollout-num-gpus and --num-gpus-per-node",
    "node-rank": "nodes follow from --rollout-num-gpus and --num-gpus-per-node",
    "master-addr": "nodes follow from --rollout-num-gpus and --num-gpus-per-node",
    "master-port": "nodes follow from --rollout-num-gpus and --num-gpus-per-node",
    "distributed-executor-backend": "each engine's processes are its own",
    "data-parallel-backend": "each engine's processes are its own",
}
"""Options of vLLM that are not set by their own flag, and where they are set."""
ANYTHING = object()
SAME: dict[str, Callable[[Values], tuple[Any, ...]]] = {
    "tensor-parallel-size": lambda v: (each := v.rollout_num_gpus_per_engine, each // max(1, shards(v))),
    "model": lambda v: (v.hf_checkpoint,),
    "served-model-name": lambda v: (v.hf_checkpoint, [v.hf_checkpoint]),
    "tokenizer": lambda v: (v.hf_checkpoint,),
    "seed": lambda v: (v.rollout_seed,),
    "dtype": lambda v: ("auto", "bfloat16"),
    "enable-return-routed-experts": lambda v: (v.use_rollout_routing_replay,),
    "logprobs-mode": lambda v: ("processed_logprobs",),
    "enable-lora": lambda v: (v.lora_rank > 0,),
    "max-lora-rank": lambda v: (v.lora_rank,),
    "nnodes": lambda v: (max(1, v.rollout_num_gpus_per_engine // max(1, v.num_gpus_per_node)),),
    "distributed-executor-backend": lambda v: (ANYTHING,),
    "data-parallel-backend": lambda v: (ANYTHING,),
}  # fmt: skip
"""Which values of these options are what engines have anyway, so that a note is enough."""

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "vLLM and router": (
        copies("--vllm-gpu-memory-utilization", "number", None, "inference.gpu_memory_utilization",
               "Share of the GPU's memory for weights and cache."),
        copies("--vllm-max-model-len", "integer", None, "inference.max_model_len",
               "Longest prompt and reply that an engine takes."),
        copies("--vllm-enable-expert-parallel", "switch", False, "inference.enable_expert_parallel",
               "Spread experts over the engine's GPUs."),
        copies("--vllm-data-parallel-size", "integer", 1, "inference.parallel.dp",
               "Data-parallel ranks of an engine, of its GPUs."),
        copies("--vllm-pipeline-parallel-size", "integer", 1, "inference.parallel.pp",
               "Ranks of an engine that share its layers, of its GPUs."),
        copies("--vllm-trust-remote-code", "switch", False, "model.trust_remote_code",
               "Run the code of the checkpoint.", note="In the trainer, too."),
        part("--vllm-server-concurrency", "integer", 512, "orchestrator.max_inflight_rollouts",
             "Requests to one engine at the same time.",
             note="Times the number of engines; without this flag, the samples of the batches that are generated."),
        part("--vllm-router-ip", "text", None, "inference.router.address", "Address of a router that runs already."),
        part("--vllm-router-port", "integer", None, "inference.router.address", "Port of that router."),
        copies("--vllm-router-request-timeout-secs", "number", 14400,
               "orchestrator.client.timeout_s orchestrator.rollout_timeout_s", "Deadline of a request.",
               note="And of a whole sample, which has none in vime."),
        copies("--vllm-weight-transfer-timeout-sec", "number", 900, "weight_broadcast.timeout_s",
               "Longest wait for new weights."),
        equal("--vllm-weight-sync-mode", "text", "native", "How weights travel is --update-weight-transport.",
              "How weights travel."),
        equal("--vllm-weight-sync-packed", "switch", False, "Weights travel in buckets.", "Send weights in buckets."),
        equal("--no-vllm-weight-sync-packed", "switch", False, "Weights travel in buckets.",
              "Send each weight by itself."),
        part("--vllm-config", "text", None, "models inference", "YAML of models and server groups.",
             note="One model is updated; the others are [models.NAME]. Regular groups may differ in size and "
                  "options."),
        part("--vllm-enable-deterministic-inference", "switch", False, "inference.env_vars",
             "The same logits in every batch.",
             note="VLLM_BATCH_INVARIANT=1 of the engines; with --rollout-seed and no --partial-rollout draws are the "
                  "same."),
        part("--router-policy", "text", "cache_aware", "inference.router.policy", "How the router spreads requests.",
             note="One engine has a router only with this flag."),
    ),
    "Sending weights": (
        part("--update-weight-transport", "text", "nccl", "weight_broadcast.type", "How weights travel.",
             choices=("nccl", "disk"), note="On one node without this flag: shared memory."),
        part("--update-weight-mode", "text", "full", "weight_broadcast.delta", "All weights, or what changed.",
             choices=("full", "delta")),
        equal("--update-weight-buffer-size", "integer", 512 << 20, "Buckets are weight_broadcast.bucket_bytes.",
              "Bytes of a bucket."),
        noted("--update-weight-disk-dir", "text", None, "Versions are written to RUN/broadcasts.",
              "Directory of versions."),
        equal("--update-weight-disk-keep-files", "switch", False, "The newest versions are kept.", "Keep versions."),
        equal("--update-weight-delta-encoding", "text", "xor", "Changes are positions and values.",
              "Form of changes.", choices=("xor", "overwrite")),
        equal("--update-weight-delta-checksum", "text", "xxh3-128",
              "Versions are checked by the log-probabilities of fixed tokens.", "Checksum.",
              choices=("xxh3-128", "blake3", "adler32")),
        part("--update-weight-local-checkpoint-dir", "text", None, "weight_broadcast.delta.directory",
             "Where an engine's host keeps its copy."),
        copies("--custom-update-weight-post-write-path", "text", None, "trainer.hooks.post_write",
               "Function called after a version is written.",
               note="With --update-weight-transport disk. Its rollout_engines is empty: engines load by themselves."),
        equal("--check-weight-update-equal", "switch", False,
              "Every update is checked by the log-probabilities of fixed tokens.", "Check the first update."),
        noted("--release-train", "switch", False,
              "Trainers run as long as the run; with --colocate they free the GPUs' memory during rollouts.",
              "End the trainer's processes during rollouts."),
    ),
}
# fmt: on


def moved(flags: Values, name: str, value: Any, typed: str) -> str:
    """A note about an option of vLLM that another flag sets, to the same value.

    Raises: ConfigError for another value.
    """
    same = SAME[name](flags) if name in SAME else ()
    if value in same or ANYTHING in same:
        return f"{typed} sets nothing: {MOVED[name]}"
    raise ConfigError(f"{typed} is not yours to set: {MOVED[name]}; leave it out")


def settings(flags: Values) -> Iterator[Setting]:
    """The engines' limits, the router, the wire of weights, and models beside the policy.

    Raises: ConfigError for models that do not fit the node.
    """
    yield from _models(flags)
    engines = sum(each.number for each in count_engines(flags))
    if flags.has("--vllm-server-concurrency"):
        requests = flags.vllm_server_concurrency * engines
        yield Setting("orchestrator.max_inflight_rollouts", requests, ("--vllm-server-concurrency",))
    if flags.vllm_router_ip is not None:
        host = f"[{flags.vllm_router_ip}]" if ":" in flags.vllm_router_ip else flags.vllm_router_ip
        address = f"http://{host}:{flags.vllm_router_port}"
        yield Setting("inference.router.address", address, ("--vllm-router-ip", "--vllm-router-port"))
    if flags.has("--router-policy") or (engines > 1 and flags.vllm_router_ip is None):
        yield from flags.settings("--router-policy")
    if flags.has("--update-weight-transport"):
        kind = {"nccl": "collective", "disk": "filesystem"}[flags.update_weight_transport]
        yield Setting("weight_broadcast.type", kind, ("--update-weight-transport",))
    if flags.vllm_enable_deterministic_inference:
        source = ("--vllm-enable-deterministic-inference",)
        yield Setting("inference.env_vars.VLLM_BATCH_INVARIANT", "1", source)
    if flags.update_weight_mode == "delta":
        yield Setting("weight_broadcast.delta", {}, ("--update-weight-mode",))
        yield from flags.settings("--update-weight-local-checkpoint-dir")


def _models(flags: Values) -> Iterator[Setting]:
    """What --vllm-config says beyond the numbers of engines."""
    source = ("--vllm-config",)
    has_placeholders = any(group.worker_type == "placeholder" for model in flags.models for group in model.groups)
    total = sum(group.num_gpus for model in flags.models for group in model.groups)
    if has_placeholders and flags.colocate:
        raise ConfigError(
            f"{flags.given['--vllm-config']}, --colocate: on each GPU of the actor there is an engine; leave the "
            "placeholders out"
        )
    has_placeholders = has_placeholders and is_on_one_node(flags)
    for model in flags.models:
        at = "inference" if model.is_updated else f"models.{model.name}"
        for path, value in model.settings(at):
            yield Setting(path, value, source)
        if has_placeholders and model.gpu_ids:
            key = "inference_gpu_ids" if model.is_updated else f"{at}.gpu_ids"
            yield Setting(key, model.gpu_ids, source)
        if model.is_updated:
            yield Setting("orchestrator.client.name", model.name, source)
            continue
        yield Setting(f"{at}.model", model.path, source)
        if not is_on_one_node(flags) and is_over_nodes(flags, model):
            yield from nodes_of_groups(flags, model, at, flags.num_gpus_per_node)
            continue
        yield Setting(f"{at}.parallel.tp", model.engines[0].num_gpus_per_engine, source)
        if prefill := model.count("prefill"):
            yield Setting(f"{at}.deployment.type", "disaggregated", source)
            yield Setting(f"{at}.deployment.is_local", True, source)
            yield Setting(f"{at}.deployment.num_prefill_replicas", prefill, source)
            yield Setting(f"{at}.deployment.num_decode_replicas", model.count("decode"), source)
            for group in model.engines:
                yield Setting(f"{at}.deployment.{group.worker_type}_tp", group.num_gpus_per_engine, source)
        elif model.differs:
            yield from group_settings(model, at, 1, is_wide=False)
        elif model.count("regular") > 1:
            yield Setting(f"{at}.deployment.num_replicas", model.count("regular"), source)
    if has_placeholders and flags.actor_num_gpus_per_node:
        ids = list(range(total, total + flags.actor_num_gpus_per_node))
        yield Setting("trainer_gpu_ids", ids, source)
