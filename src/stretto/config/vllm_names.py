"""vLLM's names of our keys of [inference]."""

from __future__ import annotations

from stretto.config.spelling import NO_DEFAULT, Table, moved

_SAME_IN_VLLM = (
    "served_model_name", "dtype", "max_model_len", "gpu_memory_utilization", "block_size", "max_num_seqs",
    "max_num_batched_tokens", "enable_prefix_caching", "enable_return_routed_experts", "enable_expert_parallel",
    "enable_sleep_mode", "enable_dbo", "enable_eplb", "enforce_eager", "seed",
)  # fmt: skip
VLLM_KEYS = {
    "tensor_parallel_size": "parallel.tp",
    "pipeline_parallel_size": "parallel.pp",
    "data_parallel_size": "parallel.dp",
    "return_sampling_mask": "enable_return_sampling_mask",
    **{key: key for key in _SAME_IN_VLLM},
}
"""Options of vLLM that are keys of [inference], also when given in vllm_extra: each has one value."""
VLLM_EXTRA = Table("inference.vllm_extra", "InferenceSection", (
    *(moved(option, NO_DEFAULT, key) for option, key in VLLM_KEYS.items()),
), below="vllm_extra", is_listed=False)  # fmt: skip
FLAGS = Table("inference", "InferenceSection", (
    *(moved(option, NO_DEFAULT, key) for option, key in VLLM_KEYS.items() if "." in key),
    moved("host", NO_DEFAULT, "server.host"),
    moved("port", NO_DEFAULT, "server.port"),
), is_listed=False)  # fmt: skip
TABLES = (VLLM_EXTRA, FLAGS)
