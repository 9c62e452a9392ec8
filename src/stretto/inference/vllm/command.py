"""[inference] as a command line and an environment of vLLM's: pure data, without vLLM.

First-class keys become their options, `vllm_extra` any other, in place of a default of ours where it names one; what
training relies on nobody else may set. On a CPU the options are those with which vLLM
was measured to start fastest there: no compilation, one process, one thread, a small cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.config.inference import InferenceSection
from stretto.config.vllm_flags import arguments, option_of

CPU_BLOCK_SIZE = 32
"""vLLM's CPU attention takes multiples of 32 only."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_CACHE_TOKENS = 65_536
BYTES = {"float32": 4, "bfloat16": 2}
WEIGHTS_BACKEND = "stretto"
"""Name of our engine in vLLM's registry of weight transfers."""
CHOICES_VARIABLE = "STRETTO_ROUTED_EXPERTS"
"""Set: choices.py captures which experts tokens take."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those vLLM has kernels for."""
PLAIN_EXPERTS_VARIABLE = "STRETTO_PLAIN_EXPERTS"
"""Set: there are adapters, none of them of experts; see adapters.py."""
WORKER = "stretto.inference.vllm.worker.WorkerExtension"


@dataclass(frozen=True)
class Command:
    """Words after `vllm serve`, and variables to set before vLLM is imported."""

    words: tuple[str, ...]
    env: dict[str, str]


def command(section: InferenceSection, directory: Path, *, is_cpu: bool) -> Command:
    """The vLLM server of a section for the model in `directory`.

    Raises: ConfigError for an option that vLLM does not have or that is not the user's to set, and for what
    vLLM cannot run on a CPU.
    """
    own = _on_cpu(section, directory) if is_cpu else _on_gpu(section)
    own = {
        "model": str(directory),
        "served_model_name": section.served_model_name or section.model,
        "host": section.server.host,
        "port": section.server.port,
        "dtype": section.dtype,
        "max_model_len": section.max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "max_num_batched_tokens": section.max_num_batched_tokens,
        "enable_prefix_caching": section.enable_prefix_caching,
        "tensor_parallel_size": section.parallel.tp,
        "data_parallel_size": section.parallel.dp if section.parallel.dp > 1 else None,
        "enable_expert_parallel": section.enable_expert_parallel or None,
        "enable_return_routed_experts": section.enable_return_routed_experts or None,
        "enable_dbo": section.enable_dbo or None,
        "enable_eplb": section.enable_eplb or None,
        "seed": section.seed,
        # What training needs of it: token routes, logprobs of what was sampled from, no sampling defaults
        # that come from the model's files, weights by our transports.
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": WEIGHTS_BACKEND},
        "worker_extension_cls": WORKER,
        "disable_uvicorn_access_log": True,
        **_adapters(section, is_cpu=is_cpu),
        **own,
    }
    for name in section.vllm_extra:
        if (reason := OURS.get(option_of(name))) is not None:
            raise ConfigError(f"inference.vllm_extra.{name} is not yours to set: {reason}; leave it out")
    given = {option_of(name) for name in section.vllm_extra}
    line: list[str] = []
    for name, value in own.items():
        if option_of(name) not in given:
            line += arguments(name, value, "inference")
    for name, value in section.vllm_extra.items():
        line += arguments(name, value, f"inference.vllm_extra.{name}")
    env = _environment(section, is_cpu=is_cpu)
    return Command(tuple(line), env)


OURS = {
    "--enable-scale-out": "rollouts use the token routes",
    "--logprobs-mode": "the trainer needs the logprobs of the distribution that was sampled from",
    "--weight-transfer-config": "new weights come by the transport that [weight_broadcast] names",
    "--worker-extension-cls": "new weights and the liveness check need stretto's",
    "--model": "the key is inference.model",
    "--host": "the key is inference.server.host",
    "--port": "the key is inference.server.port",
    "--api-key": "the key is inference.api_key",
    "--enable-lora": "the section is inference.lora",
    "--max-loras": "the key is inference.lora.max_loras",
    "--max-cpu-loras": "as many are held as inference.lora.max_loras allows",
    "--max-lora-rank": "the key is inference.lora.max_lora_rank",
    "--lora-target-modules": "the key is inference.lora.target_modules",
    "--lora-modules": "adapters are loaded by /v1/load_lora_adapter, which checks them",
}
"""Options nobody else may set, and why."""


def _adapters(section: InferenceSection, *, is_cpu: bool) -> dict[str, object]:
    """Options of [inference.lora]. Slots are one more than adapters, and the output head has none: adapters.py."""
    if (lora := section.lora) is None:
        return {}
    if is_cpu and "experts" in lora.target_modules:
        raise ConfigError(
            "inference.lora.target_modules: on a CPU vLLM serves no adapters of experts; leave `experts` out, or use "
            'inference.engine = "embedded"'
        )
    if "lm_head" in lora.target_modules:
        raise ConfigError(
            "inference.lora.target_modules: the output head, lm_head, has no adapter: with one, vLLM fails when "
            "log-probabilities of prompts are asked for. Leave it out"
        )
    return {
        "enable_lora": True,
        "max_loras": lora.max_loras + 1,
        "max_cpu_loras": lora.max_loras + 1,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= lora.max_lora_rank),
        "lora_target_modules": list(lora.target_modules),
    }


def _on_gpu(section: InferenceSection) -> dict[str, object]:
    own: dict[str, object] = {"gpu_memory_utilization": section.gpu_memory_utilization}
    if section.block_size is not None:
        own["block_size"] = section.block_size
    if section.enforce_eager:
        own["enforce_eager"] = True
    if section.kv_cache_tokens is not None:
        own["num_gpu_blocks_override"] = max(section.kv_cache_tokens // (section.block_size or 16), 1)
    return own


def _on_cpu(section: InferenceSection, directory: Path) -> dict[str, object]:
    block = section.block_size or CPU_BLOCK_SIZE
    if block % CPU_BLOCK_SIZE:
        raise ConfigError(
            f"inference.block_size = {block}: on a CPU vLLM takes multiples of {CPU_BLOCK_SIZE}; leave it out"
        )
    cache = _Cache.of(directory)
    if cache.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"{directory}: its attention heads have {cache.head_dim} dimensions; on a CPU vLLM takes "
            f'{", ".join(map(str, CPU_HEAD_DIMS))}. Use inference.engine = "embedded".'
        )
    tokens = section.kv_cache_tokens or CPU_CACHE_TOKENS
    own: dict[str, object] = {
        "block_size": block,
        "enable_return_routed_experts": None,  # of GPUs; choices.py does it here
        "kv_cache_memory_bytes": tokens * cache.numbers_per_token * BYTES[section.dtype],
        # A prompt that is read in parts takes a step back in its random numbers, which CPU generators cannot.
        "enable_chunked_prefill": False,
        "enforce_eager": True if section.enforce_eager is None else section.enforce_eager or None,
    }
    if section.parallel.tp == 1:
        own["distributed_executor_backend"] = "uni"
    return own


@dataclass(frozen=True)
class _Cache:
    """Shape of a model's keys and values."""

    head_dim: int
    numbers_per_token: int  # keys and values, all heads, all layers

    @classmethod
    def of(cls, directory: Path) -> _Cache:
        cfg = json.loads((directory / "config.json").read_text())
        heads = cfg.get("num_key_value_heads") or cfg["num_attention_heads"]
        head_dim = cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
        return cls(head_dim, 2 * cfg["num_hidden_layers"] * heads * head_dim)


def _environment(section: InferenceSection, *, is_cpu: bool) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, resume and update weights
        "VLLM_PLUGINS": "stretto",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    if section.lora is not None and "experts" not in section.lora.target_modules:
        env[PLAIN_EXPERTS_VARIABLE] = "1"
    if section.api_key is not None:
        env["VLLM_API_KEY"] = section.api_key  # not a word of the command line, which everybody can read
    if is_cpu:
        threads = section.num_threads or 1
        env |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": str(threads)}
        if section.enable_return_routed_experts:
            env[CHOICES_VARIABLE] = "1"
        if section.parallel.tp == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if section.parallel.dp == 1 else "1"
        else:
            # One core a worker, counted from the first: vLLM's own choice wants a NUMA node for each.
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(section.parallel.tp))
    return env
