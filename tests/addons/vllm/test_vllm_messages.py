"""Wrong options, drafts and deployments of vLLM: each gives one line that says where, what, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.config import complaints

WRONG = {
    "a draft model that is not given": ('engine = "vllm"\n[speculation]\nmethod = "eagle3"',
        "drafts with a model of its own; give speculation.model"),
    "a draft model for copies": ('engine = "vllm"\n[speculation]\nmethod = "ngram"\nmodel = "x"', "does nothing with"),
    "a tree for runs of tokens": (
        'engine = "vllm"\n[speculation]\nmethod = "ngram"\nsuffix_decoding_max_tree_depth = 4',
        "it has no tree of replies"),
    "lookups for a draft model": ('engine = "vllm"\n[speculation]\nmethod = "mtp"\nprompt_lookup_min = 2',
        "it does not copy"),
    "two places that say how to draft": (
        'engine = "vllm"\n[speculation]\nmethod = "ngram"\n[vllm_extra]\nspeculative_config = { method = "ngram" }',
        "says how to draft, and so does speculation"),
    "drafts of a tensor parallelism of their own": (
        'engine = "vllm"\n[speculation]\nmethod = "eagle"\nmodel = "x"\ndraft_tensor_parallel_size = 3',
        "must be 1 or parallel.tp = 1"),
    "a draft model's parallelism beside lookups, where neither does anything": (
        'engine = "vllm"\n[speculation]\nprompt_lookup_min = 2\ndraft_tensor_parallel_size = 3',
        "it has no draft model"),
    "masks of tokens that were drafted": (
        'engine = "vllm"\nenable_return_sampling_mask = true\n[speculation]\nmethod = "ngram"',
        "leave one of them out"),
    "masks of tokens that were drafted by the vLLM that a key asks for": (
        'enable_return_sampling_mask = true\n[speculation]\nmethod = "mtp"',
        "enable_return_sampling_mask = true with speculation: what vLLM returns for a token that was drafted"),
    "experts of tokens that vLLM's own option drafts": (
        'enable_return_routed_experts = true\n[vllm_extra]\nspeculative_config = { method = "ngram" }',
        "enable_return_routed_experts = true with vllm_extra.speculative_config: what vLLM returns"),
    "masks of tokens that one group drafts": (
        'enable_return_sampling_mask = true\n[deployment]\ntype = "groups"\n[[deployment.groups]]\nnum_engines = 1\n'
        "overrides = { speculative-config = '{}' }",
        "with deployment.groups.0.overrides.speculative-config: what vLLM returns"),
    "drafts that one group has otherwise": (
        '[speculation]\nmethod = "ngram"\n[deployment]\ntype = "groups"\n[[deployment.groups]]\nnum_engines = 1\n'
        "overrides = { speculative_config = '{}' }", "says how to draft, and so does speculation"),
    "drafts that one side has otherwise": ('[speculation]\nmethod = "ngram"\n[deployment]\ntype = "disaggregated"\n'
        "[deployment.decode_vllm_overrides]\nspeculative_config = '{}'", "says how to draft, and so does speculation"),
    "an option vLLM has not": ("[vllm_extra]\nmax_modle_len = 2", "did you mean --max-model-len"),
    "a switch with a number": ("[vllm_extra]\nheadless = 3", "--headless is a switch and takes true or false"),
    "an option with no such choice": ('[vllm_extra]\nall2all_backend = "x"', "--all2all-backend takes one of"),
    "a value that is only true": ("[vllm_extra]\nmax_logprobs = true", "takes a value, not true"),
    "a wrong value of a key that vLLM has too": ("[vllm_extra]\nmax_model_len = true",
        "max_model_len = true: integer > 0 or None is needed"),
    "a key and its option that differ": ("parallel.tp = 2\n[vllm_extra]\ntensor_parallel_size = 4",
        "parallel.tp = 2 but vllm_extra.tensor_parallel_size = 4; give it once, as parallel.tp"),
    "an option that is a key, in dashes": ("[vllm_extra]\ntensor-parallel-size = 4",
        "the key is parallel.tp; give it there"),
    "logprobs of another distribution": ('[vllm_extra]\nlogprobs_mode = "raw_logprobs"',
        "vllm_extra.logprobs_mode is not yours to set: the trainer needs the logprobs of the distribution"),
    "several processes that serve": ("[vllm_extra]\napi_server_count = 4", "one process serves HTTP"),
    "a part of an engine, of several": ("[vllm_extra]\ndata_parallel_start_rank = 2\n[deployment]\nnum_replicas = 2",
        "vllm_extra.data_parallel_start_rank = 2 follows from inference.deployment where there are several"),
    "another way for caches to travel": (
        '[vllm_extra]\nkv_transfer_config = "{}"\n[deployment]\ntype = "disaggregated"', "travel by NIXL"),
    "several nodes without a router": ('router = "None"\n[deployment]\ntype = "multi_node"',
        'deployment.type = "multi_node" has several engines, and clients need one address; keep the router'),
    "disaggregated without a router": ('router = "None"\n[deployment]\ntype = "disaggregated"',
        "only a router can tell which one reads"),
    "wide experts that do not divide": (
        'enable_expert_parallel = true\nparallel.dp = 3\n[deployment]\ntype = "multi_node"',
        "parallel.dp = 3 is divided among deployment.num_nodes = 2 nodes"),
    "more GPUs than a node has": ('parallel.tp = 4\nparallel.dp = 4\n[deployment]\ntype = "multi_node"',
        "need 16 GPUs and a node has deployment.gpus_per_node = 8"),
    "a degree that does not divide a node": ('parallel.tp = 3\n[deployment]\ntype = "disaggregated"',
        "parallel.tp = 3 does not divide the GPUs of a node"),
    "two engines on one port": ('[deployment]\ntype = "disaggregated"\nis_local = true\nprefill_port = 8200',
        "deployment.prefill_port = deployment.decode_port = 8200: give each its own"),
    "prompts read elsewhere and router replay": (
        'enable_return_routed_experts = true\n[deployment]\ntype = "disaggregated"',
        "the engine that writes a reply never saw the experts of its prompt; drop one of the two"),
    "a wide engine beyond its nodes": (
        'enable_expert_parallel = true\nparallel.tp = 4\nparallel.dp = 8\n[deployment]\ntype = "multi_node"',
        "parallel: tp 4 x dp 8 over 2 nodes need 16 GPUs and a node has deployment.gpus_per_node = 8"),
    "a pipeline beyond its node": ('parallel.tp = 8\nparallel.pp = 2\n[deployment]\ntype = "multi_node"',
        "parallel: tp 8 x pp 2 need 16 GPUs and a node has deployment.gpus_per_node = 8"),
    "offload and router replay": (
        'enable_return_routed_experts = true\n[kv_cache_offload]\ntype = "native"\ncpu.num_bytes = 10',
        "comes without its experts; drop one of the two"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_section_is_one_line_with_its_place(mistake: str, tmp_path: Path) -> None:
    toml, expected = WRONG[mistake]
    (line,) = complaints(tmp_path, 'model = "m"\n' + toml, "", "inference")
    assert expected in line and "c.toml:" in line, line
