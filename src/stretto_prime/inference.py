"""prime-rl's keys of inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stretto.config.spelling import NO_DEFAULT, KeyPath, Nothing, Row, Table, all_same, idle, moved, old, refused, same
from stretto_prime.run import BROADCAST_TYPES, NO_EXPERIMENTS
from stretto_vllm.plan.flags import VLLM_KEYS


def options(defaults: Mapping[str, Any]) -> tuple[Row, ...]:
    """Options of vLLM by name, with their defaults in prime-rl."""
    return tuple(moved(name, value, VLLM_KEYS.get(name, f"vllm_extra.{name}")) for name, value in defaults.items())


PARSERS = {"auto": Nothing, "None": Nothing, None: Nothing}
TOOLS = (("vllm_extra.enable_auto_tool_choice", True),)
FP32 = ("vLLM's routers compute in the model's dtype; the canary and mismatch_kl show how far engine and trainer are "
        "apart; leave it out")  # fmt: skip
FP32_HEAD = "the output head always computes in float32, as the trainer's; leave it out"
PICKER = "llm-d's picker at router.address has weights of its own (llmd.eppConfig of the Helm chart)"
LORA = (
    moved("enable_lora", False, "lora", "`rl` turns it on where the trainer has an adapter",
          values={True: {}, False: Nothing}),
    moved("max_loras", 8, "lora.max_loras"),
    idle("max_cpu_loras", 100, "as many are held as lora.max_loras allows"),
    moved("max_lora_rank", None, "lora.max_lora_rank"),
    moved("lora_target_modules", None, "lora.target_modules"),
)  # fmt: skip
MODEL_ROWS = (
    *options({"dtype": "auto", "max_model_len": None, "enforce_eager": False}),
    moved("trust_remote_code", False, "vllm_extra.trust_remote_code", values={False: Nothing}),
    moved("chat_template", None, "vllm_extra.chat_template", "for the chat routes; rollouts are rendered before",
          values={"None": Nothing, None: Nothing}),
    moved("tool_call_parser", "auto", "vllm_extra.tool_call_parser", "for the chat routes; rollouts are parsed by the "
          "renderer", values=PARSERS, sets=TOOLS),
    moved("reasoning_parser", "auto", "vllm_extra.reasoning_parser", "as tool_call_parser", values=PARSERS),
    refused("rope_scaling", None, "put it into the model's config.json, which trainer and engines read"),
)  # fmt: skip
VLLM = Table("inference.vllm", "InferenceSection", (
    moved("model", NO_DEFAULT, "model", "without `[model] name` it names the trained model too"),
    *MODEL_ROWS,
    moved("tensor_parallel_size", 1, "parallel.tp"),
    moved("data_parallel_size", 1, "parallel.dp", "an engine takes as many GPUs as tp x dp; without it "
          "`num_infer_gpus` / tp"),
    *options({"data_parallel_size_local": None, "data_parallel_rpc_port": 13345}),
    idle("api_server_count", 1, "one process serves HTTP"),
    *options({"seed": 0, "gpu_memory_utilization": 0.9, "enable_prefix_caching": None, "quantization": None}),
    *LORA,
    *options({"enable_expert_parallel": False, "all2all_backend": "allgather_reducescatter", "enable_eplb": False,
              "enable_dbo": False, "enable_return_routed_experts": False}),
    moved("logprobs_mode", "processed_logprobs", "vllm_extra.logprobs_mode", values={"processed_logprobs": Nothing}),
), below="vllm")  # fmt: skip
VLLM_OTHERS = Table("inference.vllm", "InferenceSection", (
    *(moved(option, NO_DEFAULT, key) for option, key in VLLM_KEYS.items()),
    moved("", NO_DEFAULT, "vllm_extra"),
), below="vllm", is_listed=False)  # fmt: skip
INFERENCE = Table("inference", "InferenceSection", (
    same("server.host", None, "an engine of `rl` over several machines listens where they reach it"),
    same("server.port", 8000),
    refused("server.liveness_timeout_seconds", 30, "write orchestrator.client.liveness_timeout_s", unless=()),
    same("use_deep_gemm", False),
    refused("use_pd_kv_transfer", False, 'caches travel where deployment.type = "disaggregated" says so'),
    refused("enable_fp32_lm_head", True, FP32_HEAD),
    refused("enable_fp32_router_logits", True, FP32, unless=(False,)),
    moved("backend_port", NO_DEFAULT, "deployment.backend_port"),
    moved("weight_broadcast.type", "filesystem", "/weight_broadcast.type", values=BROADCAST_TYPES),
    moved("output_dir", "outputs", "/output_dir"),
    moved("dry_run", False, "/dry_run"),
    moved("slurm", None, "/slurm"),
    *all_same({"env_vars": {}, "log": NO_DEFAULT}),
    *old(
        moved("model.name", NO_DEFAULT, "model"),
        *(replace(row, theirs=f"model.{row.theirs}") for row in MODEL_ROWS),
        *all_same({"parallel.tp": 1, "parallel.dp": 1}),
        *LORA,
        *options({"all2all_backend": "allgather_reducescatter", "data_parallel_size_local": None,
                  "data_parallel_rpc_port": 13345}),
        idle("api_server_count", 1, "one process serves HTTP"),
        *all_same({"gpu_memory_utilization": 0.9, "enable_expert_parallel": False, "enable_eplb": False,
                   "enable_dbo": False, "enable_return_routed_experts": False, "enable_prefix_caching": None,
                   "vllm_extra": {}, "seed": 0}),
        NO_EXPERIMENTS,
    ),
))  # fmt: skip
INFERENCE_ALONE = Table("inference", "InferenceConfig", (
    refused("weight_broadcast.type", "filesystem", "engines take what the trainer sends; leave it out",
            unless=("filesystem", "nccl", "collective", "shm", "ipc")),
), is_listed=False)  # fmt: skip
ROUTER = Table("inference.router", "RouterSection", (
    same("type", "vllm-router", "`vllm-router` is \"vllm\"", values={"vllm-router": "vllm"}),
    same("policy", "consistent_hash"),
    idle("scorers", NO_DEFAULT, PICKER),
    idle("prefill_scorer_overrides", NO_DEFAULT, PICKER),
    idle("decode_scorer_overrides", {}, PICKER),
    idle("non_cached_tokens", 16, PICKER),
    idle("decode_sidecar_port", 8300, PICKER),
))  # fmt: skip
OFFLOAD = Table("inference.kv_cache_offload", "InferenceSection", (
    *all_same({"type": "native", "cpu.num_bytes": NO_DEFAULT, "disk.path": None, "device_name": None}),
    *old(moved("cpu_bytes", 1_000_000_000, "kv_cache_offload.cpu.num_bytes")),
), below="kv_cache_offload")  # fmt: skip
DEPLOYMENT = Table("inference.deployment", "InferenceSection", (
    *all_same({"type": "single_node", "gpus_per_node": 8, "num_nodes": 2}),
    moved("prefill_nodes_per_replica", 1, "deployment.num_prefill_nodes"),
    moved("decode_nodes_per_replica", 1, "deployment.num_decode_nodes"),
    *all_same({"num_prefill_replicas": 1, "num_decode_replicas": 1, "prefill_port": 8100, "decode_port": 8200}),
    moved("prefill_env_vars", {}, "deployment.prefill_env_overrides"),
    moved("decode_env_vars", {}, "deployment.decode_env_overrides"),
    *all_same({"prefill_vllm_overrides": {}, "decode_vllm_overrides": {}}),
    *old(
        same("num_replicas", 1),
        same("num_prefill_nodes", 1, "of one engine, as their page on inference says"),
        *all_same({"num_decode_nodes": 1, "router_port": 8000, "backend_port": 8100}),
        moved("router", NO_DEFAULT, "router"),
        moved("router_policy", "consistent_hash", "router.policy"),
        *all_same({"prefill_env_overrides": {}, "decode_env_overrides": {}}),
    ),
), below="deployment")  # fmt: skip
SIDES = (("num_prefill_nodes", "num_prefill_replicas"), ("num_decode_nodes", "num_decode_replicas"))


def nodes_of_one(values: Mapping[KeyPath, Any]) -> dict[KeyPath, int]:
    """Nodes of one engine, if a file of 0.6 counts those of all engines of a side.

    It does so if deployment.num_infer_nodes is the sum of both sides as given, and not of nodes x engines.
    """
    at = ("inference", "deployment")
    total = values.get(("deployment", "num_infer_nodes"))
    given = [[values.get((*at, key), 1) for key in side] for side in SIDES]
    if not all(isinstance(each, int) and each > 0 for side in given for each in side):
        return {}
    is_total = sum(nodes for nodes, _ in given) == total and all(nodes % engines == 0 for nodes, engines in given)
    if not is_total or sum(nodes * engines for nodes, engines in given) == total:
        return {}
    return {(*at, key): nodes // engines for (key, _), (nodes, engines) in zip(SIDES, given) if engines > 1}


TABLES = (
    INFERENCE, VLLM, VLLM_OTHERS, INFERENCE_ALONE, ROUTER, OFFLOAD, DEPLOYMENT,
)  # fmt: skip
