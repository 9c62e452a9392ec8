"""Wrong [inference] sections: each gives one line that says where, what, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import InferenceConfig

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
    "a cache too small for one sequence": (
        "kv_cache_tokens = 128\nmax_model_len = 256",
        "cannot hold one sequence of max_model_len = 256",
    ),
    "a step too small for its sequences": (
        "max_num_batched_tokens = 8\nmax_num_seqs = 16",
        "cannot hold one token of each of max_num_seqs = 16",
    ),
    "restarts below none": ("max_restarts = -1", "must be greater than or equal to 0"),
    # keys
    "a key that is nearly one": ("gpu_memory_utilisation = 0.5", "did you mean `gpu_memory_utilization`"),
    "a key of a section below": ("tp = 2", "parallel.tp"),
    "a table where a value belongs": ("[model]\nnme = 2", "nme"),
    "a value where a table belongs": ("parallel = 2", "a table is needed"),
    # drafts
    "no such way to draft": ('[speculation]\nmethod = "ngarm"', 'did you mean "ngram"'),
    "a draft model that is not given": (
        'engine = "vllm"\n[speculation]\nmethod = "eagle3"',
        "drafts with a model of its own; give speculation.model",
    ),
    "a draft model for copies": ('engine = "vllm"\n[speculation]\nmethod = "ngram"\nmodel = "x"', "does nothing with"),
    "a tree for runs of tokens": (
        'engine = "vllm"\n[speculation]\nmethod = "ngram"\nsuffix_decoding_max_tree_depth = 4',
        "it has no tree of replies",
    ),
    "lookups for a draft model": (
        'engine = "vllm"\n[speculation]\nmethod = "mtp"\nprompt_lookup_min = 2',
        "it does not copy",
    ),
    "drafts of vLLM in the embedded engine": (
        'engine = "embedded"\n[speculation]\nmethod = "mtp"',
        'speculation.method = "mtp": the embedded engine does not support this',
    ),
    "a lookup that is too long": ("[speculation]\nprompt_lookup_max = 40", "looks for at most 16 equal tokens"),
    "lookups the wrong way round": (
        "[speculation]\nprompt_lookup_min = 5\nprompt_lookup_max = 4",
        "prompt_lookup_min = 5 is above speculation.prompt_lookup_max = 4",
    ),
    "two places that say how to draft": (
        'engine = "vllm"\n[speculation]\nmethod = "ngram"\n[vllm_extra]\nspeculative_config = { method = "ngram" }',
        "says how to draft, and so does speculation",
    ),
    "drafts of a tensor parallelism of their own": (
        'engine = "vllm"\n[speculation]\nmethod = "eagle"\nmodel = "x"\ndraft_tensor_parallel_size = 3',
        "must be 1 or parallel.tp = 1",
    ),
    "masks of tokens that were drafted": (
        'engine = "vllm"\nenable_return_sampling_mask = true\n[speculation]\nmethod = "ngram"',
        "leave one of them out",
    ),
    "masks of tokens that were drafted by the vLLM that a key asks for": (
        'enable_return_sampling_mask = true\n[speculation]\nmethod = "mtp"',
        "enable_return_sampling_mask = true with speculation: what vLLM returns for a token that was drafted",
    ),
    "experts of tokens that vLLM's own option drafts": (
        'enable_return_routed_experts = true\n[vllm_extra]\nspeculative_config = { method = "ngram" }',
        "enable_return_routed_experts = true with vllm_extra.speculative_config: what vLLM returns",
    ),
    "masks of tokens that one group drafts": (
        'enable_return_sampling_mask = true\n[deployment]\ntype = "groups"\n[[deployment.groups]]\nnum_engines = 1\n'
        "overrides = { speculative-config = '{}' }",
        "with deployment.groups.0.overrides.speculative-config: what vLLM returns",
    ),
    "drafts that one group has otherwise": (
        '[speculation]\nmethod = "ngram"\n[deployment]\ntype = "groups"\n[[deployment.groups]]\nnum_engines = 1\n'
        "overrides = { speculative_config = '{}' }",
        "says how to draft, and so does speculation",
    ),
    "drafts that one side has otherwise": (
        '[speculation]\nmethod = "ngram"\n[deployment]\ntype = "disaggregated"\n'
        "[deployment.decode_vllm_overrides]\nspeculative_config = '{}'",
        "says how to draft, and so does speculation",
    ),
    # options of vLLM
    "an option vLLM has not": ("[vllm_extra]\nmax_modle_len = 2", "did you mean --max-model-len"),
    "a switch with a number": ("[vllm_extra]\nheadless = 3", "--headless is a switch and takes true or false"),
    "an option with no such choice": ('[vllm_extra]\nall2all_backend = "x"', "--all2all-backend takes one of"),
    "a value that is only true": ("[vllm_extra]\nmax_logprobs = true", "takes a value, not true"),
    "a wrong value of a key that vLLM has too": (
        "[vllm_extra]\nmax_model_len = true",
        "max_model_len = true: integer > 0 or None is needed",
    ),
    "a key and its option that differ": (
        "parallel.tp = 2\n[vllm_extra]\ntensor_parallel_size = 4",
        "parallel.tp = 2 but vllm_extra.tensor_parallel_size = 4; give it once, as parallel.tp",
    ),
    "an option that is a key, in dashes": (
        "[vllm_extra]\ntensor-parallel-size = 4",
        "the key is parallel.tp; give it there",
    ),
    "logprobs of another distribution": (
        '[vllm_extra]\nlogprobs_mode = "raw_logprobs"',
        "vllm_extra.logprobs_mode is not yours to set: the trainer needs the logprobs of the distribution",
    ),
    "several processes that serve": ("[vllm_extra]\napi_server_count = 4", "one process serves HTTP"),
    "a part of an engine, of several": (
        "[vllm_extra]\ndata_parallel_start_rank = 2\n[deployment]\nnum_replicas = 2",
        "vllm_extra.data_parallel_start_rank = 2 follows from inference.deployment where there are several",
    ),
    "another way for caches to travel": (
        '[vllm_extra]\nkv_transfer_config = "{}"\n[deployment]\ntype = "disaggregated"',
        "travel by NIXL",
    ),
    # the router
    "an option the router has not": ("[router.extra]\nqueue_sise = 3", "did you mean --queue-size"),
    "a router's number that is a word": (
        '[router.extra]\nqueue_size = "abc"',
        'router.extra.queue_size: --queue-size takes an integer, not "abc"',
    ),
    "an option of another policy": (
        '[router]\npolicy = "round_robin"\n[router.extra]\nbalance_abs_threshold = 0',
        'router.extra.balance_abs_threshold does nothing with router.policy = "round_robin"; use "cache_aware"',
    ),
    "an address that is none": ('router.address = "nonsense"', "is not an address; write it like"),
    "no such router": ('router.type = "envoy"', 'must be "vllm" or "dynamo" or "llm-d"'),
    "a policy of another router": (
        'router.type = "dynamo"\nrouter.policy = "consistent_hash"',
        'router.policy = "consistent_hash" is no policy of router.type = "dynamo"; it has kv, session_affinity,',
    ),
    "a policy of Dynamo's": ('router.policy = "kv"', 'is no policy of router.type = "vllm"; it has consistent_hash,'),
    "a frontend that runs elsewhere": (
        'router.type = "dynamo"\nrouter.address = "http://r:1"',
        "cannot take these engines; leave the address out",
    ),
    "prefill and decode behind Dynamo": (
        'router.type = "dynamo"\n[deployment]\ntype = "disaggregated"',
        'Dynamo divides prefill and decode among workers of its own only; use "vllm"',
    ),
    "adapters behind Dynamo": ('router.type = "dynamo"\n[lora]\nmax_loras = 2', "none of its adapters"),
    "what the plan says to Dynamo": (
        'router.type = "dynamo"\n[router.extra]\nrouter_mode = "random"',
        "router.extra.router_mode follows from inference.router.policy",
    ),
    "a policy for a router that runs": (
        'router.address = "http://r:1"\nrouter.policy = "round_robin"',
        "the router that runs there has its own",
    ),
    "a Python for vllm-router": ('router.interpreter = "/p"', "only Dynamo has a Python of its own"),
    "a port of a router elsewhere": (
        'router.address = "http://r:1"\ndeployment.router_port = 9000',
        "no router is started",
    ),
    "a port of no router": ('router = "None"\ndeployment.router_port = 9000', "there is no router"),
    # what the embedded engine has not
    "tensor parallelism embedded": (
        'engine = "embedded"\nparallel.tp = 2',
        "the embedded engine does not support this",
    ),
    "data parallelism embedded": ('engine = "embedded"\nparallel.dp = 2', "parallel.dp = 2: the embedded engine"),
    "experts spread, embedded": ('engine = "embedded"\nenable_expert_parallel = true', "the embedded engine"),
    "overlap embedded": ('engine = "embedded"\nenable_dbo = true', "enable_dbo = true: the embedded engine"),
    "vLLM's options embedded": ('engine = "embedded"\n[vllm_extra]\nheadless = true', "the embedded engine"),
    "offload embedded": (
        'engine = "embedded"\n[kv_cache_offload]\ntype = "native"\ncpu.num_bytes = 10',
        'kv_cache_offload = "native": the embedded engine',
    ),
    "several nodes embedded": (
        'engine = "embedded"\n[deployment]\ntype = "multi_node"',
        'deployment.type = "multi_node": the embedded engine',
    ),
    # shapes
    "no such shape": ('[deployment]\ntype = "multinode"', 'did you mean "multi_node"'),
    "a key of another shape": ('[deployment]\ntype = "single_node"\nnum_nodes = 2', "num_nodes"),
    "no replica": ("deployment.num_replicas = 0", "must be greater than 0"),
    "several nodes without a router": (
        'router = "None"\n[deployment]\ntype = "multi_node"',
        'deployment.type = "multi_node" has several engines, and clients need one address; keep the router',
    ),
    "disaggregated without a router": (
        'router = "None"\n[deployment]\ntype = "disaggregated"',
        "only a router can tell which one reads",
    ),
    "no such policy": ('router.policy = "hash"', "must be"),
    "wide experts that do not divide": (
        'enable_expert_parallel = true\nparallel.dp = 3\n[deployment]\ntype = "multi_node"',
        "parallel.dp = 3 is divided among deployment.num_nodes = 2 nodes",
    ),
    "more GPUs than a node has": (
        'parallel.tp = 4\nparallel.dp = 4\n[deployment]\ntype = "multi_node"',
        "need 16 GPUs and a node has deployment.gpus_per_node = 8",
    ),
    "a degree that does not divide a node": (
        'parallel.tp = 3\n[deployment]\ntype = "disaggregated"',
        "parallel.tp = 3 does not divide the GPUs of a node",
    ),
    "two engines on one port": (
        '[deployment]\ntype = "disaggregated"\nis_local = true\nprefill_port = 8200',
        "deployment.prefill_port = deployment.decode_port = 8200: give each its own",
    ),
    "experts that move and are not spread": ("enable_eplb = true", "set enable_expert_parallel = true"),
    "prompts read elsewhere and router replay": (
        'enable_return_routed_experts = true\n[deployment]\ntype = "disaggregated"',
        "the engine that writes a reply never saw the experts of its prompt; drop one of the two",
    ),
    "a wide engine beyond its nodes": (
        'enable_expert_parallel = true\nparallel.tp = 4\nparallel.dp = 8\n[deployment]\ntype = "multi_node"',
        "parallel: tp 4 x dp 8 over 2 nodes need 16 GPUs and a node has deployment.gpus_per_node = 8",
    ),
    "a pipeline beyond its node": (
        'parallel.tp = 8\nparallel.pp = 2\n[deployment]\ntype = "multi_node"',
        "parallel: tp 8 x pp 2 need 16 GPUs and a node has deployment.gpus_per_node = 8",
    ),
    # offload
    "offload to disk alone": (
        '[kv_cache_offload]\ntype = "native"\ndisk.path = "/kv"',
        "kv_cache_offload.cpu: required and missing",
    ),
    "no such offload": ('[kv_cache_offload]\ntype = "lmcache"', 'type = "lmcache": must be "native" or "mooncake"'),
    "offload of nothing": ('[kv_cache_offload]\ntype = "native"\ncpu.num_bytes = 0', "must be greater than 0"),
    "offload and router replay": (
        'enable_return_routed_experts = true\n[kv_cache_offload]\ntype = "native"\ncpu.num_bytes = 10',
        "comes without its experts; drop one of the two",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_section_is_one_line_with_its_place(mistake: str, tmp_path: Path) -> None:
    toml, expected = WRONG[mistake]
    path = tmp_path / "infer.toml"
    path.write_text(toml if mistake == "a table where a value belongs" else 'model = "m"\n' + toml)
    with pytest.raises(ConfigError) as caught:
        load(InferenceConfig, ["@", str(path)], verb="inference")
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 1, lines
    assert expected in lines[0], lines[0]
    assert "infer.toml:" in lines[0]
