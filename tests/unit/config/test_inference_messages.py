"""Wrong [inference] sections: each gives one line that says where, what, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.config import complaints

WRONG = {
    # values
    "no such engine": ('engine = "vlm"', 'engine = "vlm": must be "auto" or "embedded" or "vllm"; did you mean "vllm"'),
    "no such type of numbers": ('dtype = "fp16"', 'must be "auto" or "float32" or "bfloat16"'),
    "no such device": ('device = "gpu"', 'must be "auto" or "cpu" or "cuda"'),
    "a port beyond the last": ("server.port = 70000", "server.port = 70000: must be less than or equal to 65535"),
    "a port that is a word": ('server.port = "http"', "must be a valid integer"),
    "no tensor parallelism at all": ("parallel.tp = 0", "parallel.tp = 0: must be greater than 0"),
    "more memory than there is": ("gpu_memory_utilization = 1.5", "must be less than or equal to 1"),
    "a cache of less than a block": ("kv_cache_tokens = 8", "kv_cache_tokens = 8 is less than one block"),
    "a cache too small for one sequence": ("kv_cache_tokens = 128\nmax_model_len = 256",
        "cannot hold one sequence of max_model_len = 256"),
    "a step too small for its sequences": ("max_num_batched_tokens = 8\nmax_num_seqs = 16",
        "cannot hold one token of each of max_num_seqs = 16"),
    "restarts below none": ("max_restarts = -1", "must be greater than or equal to 0"),
    # keys
    "a key that is nearly one": ("gpu_memory_utilisation = 0.5", "did you mean `gpu_memory_utilization`"),
    "a key of a section below": ("tp = 2", "parallel.tp"),
    "a table where a value belongs": ("[model]\nnme = 2", "nme"),
    "a value where a table belongs": ("parallel = 2", "a table is needed"),
    # drafts
    "no such way to draft": ('[speculation]\nmethod = "ngarm"', 'did you mean "ngram"'),
    "drafts of vLLM in the embedded engine": ('engine = "embedded"\n[speculation]\nmethod = "mtp"',
        'speculation.method = "mtp": the embedded engine does not support this'),
    "a lookup that is too long": ("[speculation]\nprompt_lookup_max = 40", "looks for at most 16 equal tokens"),
    "lookups the wrong way round": ("[speculation]\nprompt_lookup_min = 5\nprompt_lookup_max = 4",
        "prompt_lookup_min = 5 is above speculation.prompt_lookup_max = 4"),
    "no such router": ('router.type = "envoy"', 'must be "vllm" or "dynamo" or "llm-d"'),
    "a port of no router": ('router = "None"\ndeployment.router_port = 9000', "there is no router"),
    # what the embedded engine has not
    "tensor parallelism embedded": ('engine = "embedded"\nparallel.tp = 2',
        "the embedded engine does not support this"),
    "data parallelism embedded": ('engine = "embedded"\nparallel.dp = 2', "parallel.dp = 2: the embedded engine"),
    "experts spread, embedded": ('engine = "embedded"\nenable_expert_parallel = true', "the embedded engine"),
    "overlap embedded": ('engine = "embedded"\nenable_dbo = true', "enable_dbo = true: the embedded engine"),
    "vLLM's options embedded": ('engine = "embedded"\n[vllm_extra]\nheadless = true', "the embedded engine"),
    "offload embedded": ('engine = "embedded"\n[kv_cache_offload]\ntype = "native"\ncpu.num_bytes = 10',
        'kv_cache_offload = "native": the embedded engine'),
    "several nodes embedded": ('engine = "embedded"\n[deployment]\ntype = "multi_node"',
        'deployment.type = "multi_node": the embedded engine'),
    # shapes
    "no such shape": ('[deployment]\ntype = "multinode"', 'did you mean "multi_node"'),
    "a key of another shape": ('[deployment]\ntype = "single_node"\nnum_nodes = 2', "num_nodes"),
    "no replica": ("deployment.num_replicas = 0", "must be greater than 0"),
    "no such policy": ('router.policy = "hash"', "must be"),
    "experts that move and are not spread": ("enable_eplb = true", "set enable_expert_parallel = true"),
    # offload
    "offload to disk alone": ('[kv_cache_offload]\ntype = "native"\ndisk.path = "/kv"',
        "kv_cache_offload.cpu: required and missing"),
    "no such offload": ('[kv_cache_offload]\ntype = "lmcache"', 'type = "lmcache": must be "native" or "mooncake"'),
    "offload of nothing": ('[kv_cache_offload]\ntype = "native"\ncpu.num_bytes = 0', "must be greater than 0"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_section_is_one_line_with_its_place(mistake: str, tmp_path: Path) -> None:
    toml, expected = WRONG[mistake]
    (line,) = complaints(
        tmp_path, toml if mistake == "a table where a value belongs" else 'model = "m"\n' + toml, "", "inference"
    )
    assert expected in line and "c.toml:" in line, line
