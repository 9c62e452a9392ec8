"""Shapes of inference as users of prime-rl write them: files of `rl` and words of `inference`, as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig
from stretto.launch.plan.engines import plan_engines
from stretto.launch.plan.nodes import plan_nodes
from stretto.verbs import _own_flags

MODEL = '[inference]\nmodel = "PrimeIntellect/INTELLECT-3"\n'
DISAGGREGATED = '[inference.deployment]\ntype = "disaggregated"\nnum_prefill_nodes = 2\nnum_decode_nodes = 2\n'
OFFLOAD = "[inference.kv_cache_offload.cpu]\nnum_bytes = 128_000_000_000\n"
DISK = '[inference.kv_cache_offload.disk]\npath = "/scratch/kv"\n'
FILES = {
    "single node": (
        "[inference]\nenable_expert_parallel = true\n[inference.parallel]\ntp = 2\ndp = 4\n"
        '[inference.deployment]\ntype = "single_node"\n'
    ),
    "a replica per node": MODEL + '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\n'
    "[inference.parallel]\ntp = 2\ndp = 4\n",
    "wide": MODEL + "enable_expert_parallel = true\n"
    '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\n[inference.parallel]\ntp = 2\ndp = 8\n',
    "disaggregated": DISAGGREGATED,
    "disaggregated, replicas": DISAGGREGATED + "num_prefill_replicas = 2\nnum_decode_replicas = 1\n",
    "headers": '[orchestrator.student.client.extra_headers_from_state]\nX-Session-ID = "trajectory_id"\n',
    "offload to memory": '[inference.kv_cache_offload]\ntype = "native"\n' + OFFLOAD,
    "offload to memory and disk": '[inference.kv_cache_offload]\ntype = "native"\n' + OFFLOAD + DISK,
    "a store of all nodes": '[inference.kv_cache_offload]\ntype = "mooncake"\n' + OFFLOAD + DISK,
    "environment of each side": '[inference.deployment]\ntype = "disaggregated"\n'
    'prefill_env_overrides = { VLLM_ENABLE_MOE_DP_CHUNK = "0", VLLM_DEEP_GEMM_WARMUP = "skip" }\n'
    'decode_env_overrides = { VLLM_DEEP_GEMM_WARMUP = "skip" }\n',
    "router replay": "[trainer]\nenable_router_replay = true\n[inference]\nenable_return_routed_experts = true\n",
    "requests under way": "[orchestrator]\nmax_inflight_requests = 64\n",
}
WHOLE = (
    '[deployment]\ntype = "multi_node"\nnum_train_nodes = 4\nnum_infer_nodes = 6\nnum_infer_replicas = 3\n'
    + FILES["disaggregated, replicas"]
)
ENV = ["--orchestrator.env", '[{"id": "sort-letters"}]', "--dry-run"]


def read(text: str, tmp_path: Path) -> RLConfig:
    path = tmp_path / "rl.toml"
    path.write_text(text)
    return load(RLConfig, ["@", str(path), *ENV], verb="rl")


@needs("prime")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs("routers") if "multi_node" in text or "disaggregated" in text else ())
        for name, text in FILES.items()
    ],
)
def test_a_file_is_taken_as_it_stands(name, tmp_path):
    cfg = read(FILES[name], tmp_path)
    hosts = [f"node-{node}" for node in range(cfg.inference.deployment.num_nodes)]
    assert plan_engines(cfg.inference, hosts).engines


@needs("routers")
def test_three_replicas_of_six_nodes_are_eighteen_and_three_routers(tmp_path):
    cfg = read(WHOLE, tmp_path)
    assert cfg.weight_broadcast.type == cfg.trainer_config().weight_broadcast.type == "collective"
    plan = plan_nodes(cfg, cfg.run_dir)
    assert len(plan.hosts) == 4 + 18 and len(plan.engines.routers) == 3
    assert {spec.node for spec in plan.processes if spec.role == "inference"} == set(range(4, 22))
    backends = [engine.section.vllm_extra["all2all_backend"] for engine in plan.engines.engines[:6]]
    assert backends == ["deepep_high_throughput"] * 4 + ["deepep_low_latency"] * 2
    assert all(engine.section.enable_expert_parallel is None for engine in plan.engines.engines)


@pytest.mark.parametrize("more", ["", " --data-parallel-start-rank 2 --headless"])
def test_the_words_of_both_nodes_of_an_engine_are_taken_as_they_stand(more):
    line = (
        "--data-parallel-size 4 --tensor-parallel-size 4 --data-parallel-size-local 2 "
        f"--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 5555{more}"
    )
    cfg = load(InferenceConfig, _own_flags("inference", line.split()), verb="inference")
    assert (cfg.parallel.tp, cfg.parallel.dp, cfg.vllm_extra["data_parallel_size_local"]) == (4, 4, 2)
    assert cfg.model == "Qwen/Qwen3-0.6B" and cfg.chosen_engine(has_gpu=False) == "vllm"
