"""[inference] as a command line and an environment for vLLM; does not import vLLM.

Our own keys become vLLM's options. `vllm_extra` adds other options and may override a default of ours, but no option
on which training relies. On a CPU the options are those with which vLLM started fastest in measurements: no
compilation, one process, one thread, a small cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.config.flags import option_of
from stretto.config.sections.inference import CPU_CACHE_TOKENS, KEY_VAR, InferenceSection
from stretto.config.sections.model import dtype_on
from stretto.data.model_file import read_model_file
from stretto_vllm.plan.adapters import DRAFTS, missing_room, num_experts
from stretto_vllm.plan.flags import VLLM
from stretto_vllm.plan.models import CPU_BLOCK_SIZE, ServedModel

BYTES = {"float32": 4, "bfloat16": 2}
WEIGHTS_BACKEND = "stretto"
"""Name of our engine in vLLM's registry of weight transfers."""
PATCHES_VAR = "STRETTO_PATCHES"
"""Functions in patches/, as `module.function`, that plugin.py calls in every vLLM process."""
COMPUTES_POLICY = "policy.compute_policy_adapter"
"""The patch with which vLLM's own LoRA computes the run's adapter."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM has kernels."""
BACKEND_OPTION = "all2all_backend"
WAITING_VAR = "STRETTO_MAX_WAITING"
"""Requests that may wait in one server process; see guard.py."""
OPEN_BYTES_VAR = "STRETTO_MAX_OPEN_BYTES"
"""Bytes of the bodies of open requests; see guard.py."""
WORKER = "stretto_vllm.worker.WorkerExtension"


@dataclass(frozen=True)
class Command:
    """Words after `vllm serve`, and environment variables to set before vLLM is imported."""

    words: tuple[str, ...]
    env: dict[str, str]


def build_command(section: InferenceSection, directory: Path, *, is_cpu: bool) -> Command:
    """The command that serves the model in `directory` as `section` says.

    Raises: ConfigError for an option that vLLM does not have or that the user may not set, and for a setting that
    vLLM does not support on a CPU.
    """
    extra = section.vllm_extra
    if BACKEND_OPTION in extra and not _spreads_experts(section, directory):
        extra = {name: value for name, value in extra.items() if name != BACKEND_OPTION}
    for name in section.vllm_extra:
        VLLM.refuse_reserved(name, f"inference.vllm_extra.{name}")
    overridden = {option_of(name) for name in extra}
    words: list[str] = []
    for name, value in _options(section, directory, is_cpu=is_cpu).items():
        if option_of(name) not in overridden:
            words += VLLM.arguments(name, value, "inference")
    for name, value in extra.items():
        words += VLLM.arguments(name, value, f"inference.vllm_extra.{name}")
    return Command(tuple(words), _environment(section, is_cpu=is_cpu))


def _options(section: InferenceSection, directory: Path, *, is_cpu: bool) -> dict[str, object]:
    """vLLM's options for `section`, by the names of its settings; None for vLLM's own default."""
    has_vision = False
    if (directory / "config.json").is_file():  # for GPUs the model may be on other machines only
        model = ServedModel.of(directory)
        model.check()
        has_vision = model.has_vision
    # vLLM's number includes the running requests of all ranks.
    max_queued = section.server.max_waiting_requests + section.max_num_seqs * section.parallel.dp
    return {
        "model": str(directory),
        "served_model_name": section.served_model_name or section.model,
        "host": section.server.host,
        "port": section.server.port,
        "dtype": dtype_on(section.dtype, is_gpu=not is_cpu),
        "max_model_len": section.max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "max_num_batched_tokens": section.max_num_batched_tokens,
        "max_num_queued_reqs": max_queued,
        "enable_prefix_caching": section.enable_prefix_caching,
        "tensor_parallel_size": section.parallel.tp,
        "pipeline_parallel_size": section.parallel.pp if section.parallel.pp > 1 else None,
        "data_parallel_size": section.parallel.dp if section.parallel.dp > 1 else None,
        # A single HTTP process has all adapters and can abort all requests; a headless node has no HTTP process.
        "api_server_count": None if section.vllm_extra.get("headless") is True else 1,
        "enable_expert_parallel": _spreads_experts(section, directory) or None,
        "enable_return_routed_experts": section.enable_return_routed_experts or None,
        "return_sampling_mask": section.enable_return_sampling_mask or None,
        "enable_sleep_mode": (section.enable_sleep_mode and not is_cpu) or None,
        "enable_dbo": section.enable_dbo or None,
        "enable_eplb": section.enable_eplb or None,
        "seed": section.seed,
        # Training needs token routes, logprobs of the processed distribution, no sampling defaults from the
        # model's files, and weights by our transports.
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": WEIGHTS_BACKEND},
        "worker_extension_cls": WORKER,
        "mm_device_do_normalize": False if has_vision else None,  # our pixels are normalised already
        "disable_uvicorn_access_log": True,
        "log_error_stack": False,  # for refused requests; the development routes turn it on
        "speculative_config": _drafts(section),
        **_adapter_options(section, is_cpu=is_cpu),
        **(_on_cpu(section, directory) if is_cpu else _on_gpu(section)),
    }


def _spreads_experts(section: InferenceSection, directory: Path) -> bool:
    """Whether experts are spread over ranks: as set, else if an all-to-all backend is set."""
    if section.enable_expert_parallel is not None:
        return section.enable_expert_parallel
    return BACKEND_OPTION in section.vllm_extra and has_experts(directory)


def has_experts(directory: Path) -> bool:
    """Whether the model in a directory is a mixture of experts."""
    return num_experts(read_model_file(directory)) > 0


def _adapter_options(section: InferenceSection, *, is_cpu: bool) -> dict[str, object]:
    """vLLM's options for [inference.lora].

    There is one slot more than named adapters: for the adapter of the run, if vLLM computes it; else for the reason in
    patches/adapters.py, which also says why the output head has none.
    """
    if (lora := section.lora) is None:
        return {}
    if is_cpu and "experts" in lora.target_modules:
        raise ConfigError(
            "inference.lora.target_modules: on a CPU vLLM serves no adapters of experts; remove `experts`, or use "
            'inference.engine = "embedded"'
        )
    if "lm_head" in lora.target_modules:
        raise ConfigError(
            "inference.lora.target_modules: the output head, lm_head, cannot have an adapter: with one, vLLM fails "
            "when log-probabilities of prompts are requested; remove it"
        )
    if (fault := missing_room(section)) is not None:
        raise ConfigError(f"inference.lora: vLLM cannot serve adapters so: {fault}")
    num_slots = lora.max_loras + 1
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_cpu_loras": num_slots + lora.max_loras,  # also unloaded ones whose requests are running
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= lora.max_lora_rank),
        "lora_target_modules": list(lora.target_modules),
        # Adapters of experts are stacked in PEFT's files, and some families have a layer for one tensor per expert.
        "enable_mixed_moe_lora_format": True if "experts" in lora.target_modules else None,
    }


def _drafts(section: InferenceSection) -> dict[str, object] | None:
    """vLLM's options for [inference.speculation], whose keys have vLLM's names."""
    if section.speculation is None:
        return None
    given = section.speculation.given
    if (number := DRAFTS.get(section.speculation.method)) is not None:
        given = {"num_speculative_tokens": number} | given
    return given


def _on_gpu(section: InferenceSection) -> dict[str, object]:
    options: dict[str, object] = {"gpu_memory_utilization": section.gpu_memory_utilization}
    if dtype_on(section.dtype, is_gpu=True) == "bfloat16":
        # The trainer never rounds its logits; rounded logits would be another distribution.
        options["hf_overrides"] = {"head_dtype": "float32"}
    if section.block_size is not None:
        options["block_size"] = section.block_size
    if section.enforce_eager:
        options["enforce_eager"] = True
    if section.kv_cache_tokens is not None:
        options["num_gpu_blocks_override"] = max(section.kv_cache_tokens // (section.block_size or 16), 1)
    return options


def _on_cpu(section: InferenceSection, directory: Path) -> dict[str, object]:
    model = ServedModel.of(directory)
    model.check_on_cpu()
    block = section.block_size or CPU_BLOCK_SIZE
    if block % CPU_BLOCK_SIZE:
        raise ConfigError(
            f"inference.block_size = {block}: on a CPU vLLM supports multiples of {CPU_BLOCK_SIZE} only; remove it"
        )
    number_bytes = BYTES[dtype_on(section.dtype, is_gpu=False)]
    cache_bytes = (section.kv_cache_tokens or CPU_CACHE_TOKENS) * model.numbers_per_token * number_bytes
    options: dict[str, object] = {
        "block_size": block,
        "enable_return_routed_experts": None,  # for GPUs only; patches/choices.py replaces it on CPUs
        "return_sampling_mask": None,  # for GPUs only; patches/supports.py replaces it on CPUs
        "kv_cache_memory_bytes": cache_bytes,
        # For a prompt in chunks vLLM sets the random generator back, which CPU generators do not support.
        "enable_chunked_prefill": False,
        "enforce_eager": True if section.enforce_eager is None else section.enforce_eager or None,
    }
    if model.is_recurrent:
        # vLLM continues from the state of an earlier prompt only if it computes prompts in chunks.
        options["enable_prefix_caching"] = False
    if section.parallel.gpus_per_rank == 1:
        options["distributed_executor_backend"] = "uni"
    return options


def _environment(section: InferenceSection, *, is_cpu: bool) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, resume and update weights
        "VLLM_PLUGINS": "stretto",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        WAITING_VAR: str(section.server.max_waiting_requests),
    }
    if section.server.max_open_bytes is not None:
        env[OPEN_BYTES_VAR] = str(section.server.max_open_bytes)
    if section.use_deep_gemm:
        env |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}
    if section.api_key is not None:
        env[KEY_VAR] = section.api_key  # not on the command line, which every user of the machine can read
    if is_cpu:
        env |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": str(section.num_threads or 1)}
        if section.parallel.gpus_per_rank == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if section.parallel.dp == 1 else "1"
        else:
            # One core per worker, from the first core on: vLLM's own choice needs a NUMA node for each worker.
            num_workers = section.parallel.gpus_per_rank // section.vllm_extra.get("nnodes", 1)
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(num_workers)))
    return env | {PATCHES_VAR: " ".join(_patches(section, is_cpu=is_cpu))}


def _patches(section: InferenceSection, *, is_cpu: bool) -> Iterator[str]:
    yield "caches.follow_weights"
    if "Nixl" in str(section.vllm_extra.get("kv_transfer_config")):
        yield "leases.keep_leases_in_pauses"
    if section.lora is not None and "experts" not in section.lora.target_modules:
        yield "adapters.disable_expert_adapters"
    if section.lora is not None:
        yield "adapters.refuse_layers_without_adapters"
        yield "adapters.keep_adapters_in_updates"
        yield "adapters.schedule_as_many_as_loaded"
        yield COMPUTES_POLICY if section.lora.compute_policy is True else "adapters.keep_last_slot_empty"
    if section.enable_return_sampling_mask:
        yield "supports.return_supports_on_cpus" if is_cpu else "supports.return_supports_on_gpus"
    drafts = {"speculative_config", "spec_method", "spec_model"}
    if is_cpu and (section.speculation is not None or drafts & {name.replace("-", "_") for name in section.vllm_extra}):
        yield "drafts.expand_settings_on_cpus"
    if is_cpu:
        yield "routers.group_sigmoid_experts"
        if section.enable_return_routed_experts:
            yield "choices.return_choices_on_cpus"
        if section.parallel.dp > 1 or section.enable_expert_parallel:
            yield "experts.enable_experts_on_cpus"
        if section.parallel.pp > 1:
            yield "stages.allocate_stage_buffers"
