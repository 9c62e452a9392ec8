"""Plans of [inference.deployment] over nodes, of two kinds, with offload; impossible ones."""

from __future__ import annotations

import json
import re

import pytest
from cases.plans import planned_engines, summary, words_of_router
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.sections.engines import PEERS_VAR
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan.engines import plan_replicas

NODES = [f"node-{i}" for i in range(18)]


def test_an_engine_whose_ranks_are_on_other_machines_too_takes_the_gpus_of_its_own():
    whole = {"parallel": {"tp": 4, "dp": 4}, "engine": "vllm"}
    for extra, num_gpus in (
        ({}, 16),
        ({"data_parallel_size_local": 2}, 8),
        ({"data-parallel-size-local": 1, "headless": True}, 4),
        ({"nnodes": 2, "node_rank": 1}, 8),
        ({"nnodes": "two"}, 16),
    ):
        [engine] = planned_engines(whole | {"vllm_extra": extra}, ["localhost"]).engines
        assert engine.num_gpus == num_gpus, extra


@needs("routers")
def test_multi_node_without_expert_parallelism_is_one_engine_per_node():
    data = {"deployment": {"type": "multi_node", "num_nodes": 2}, "parallel": {"tp": 2, "dp": 4}}
    plan = planned_engines(data, NODES)
    assert summary(plan) == [("inference_0", 0, 8100, 2, 4, 8), ("inference_1", 1, 8100, 2, 4, 8)]
    assert all("data_parallel_size_local" not in e.section.vllm_extra for e in plan.engines)
    assert [router.node for router in plan.routers] == [0]
    assert plan.base_urls == ("http://node-0:8000",)
    assert "--worker-urls http://node-0:8100 http://node-1:8100" in words_of_router(plan)


@needs("routers")
def test_wide_expert_parallelism_is_one_engine_over_all_nodes():
    data = {
        "deployment": {"type": "multi_node", "num_nodes": 2},
        "enable_expert_parallel": True,
        "parallel": {"tp": 2, "dp": 8},
    }
    plan = planned_engines(data, NODES)
    assert summary(plan) == [("inference_0", 0, 8100, 2, 8, 8), ("inference_1", 1, 8100, 2, 8, 8)]
    assert [e.section.vllm_extra for e in plan.engines] == [
        {
            "data_parallel_size_local": 4,
            "data_parallel_start_rank": start,
            "data_parallel_address": "node-0",
            "data_parallel_rpc_port": 29550,
            "data_parallel_hybrid_lb": True,
        }
        for start in (0, 4)
    ]
    assert [e.env for e in plan.engines] == [{PEERS_VAR: f"http://node-{other}:8100"} for other in (1, 0)]


@needs("routers")
def test_nodes_of_an_engine_share_its_tensor_parallel_ranks_and_the_first_one_serves():
    data = {"deployment": {"type": "multi_node", "num_nodes": 4, "nodes_per_engine": 2}, "parallel": {"tp": 8, "pp": 2}}
    plan = planned_engines(data, NODES)
    assert [(e.name, e.node, e.num_gpus, e.num_nodes, e.is_served) for e in plan.engines] == [
        ("inference_0_0", 0, 8, 2, True),
        ("inference_0_1", 1, 8, 2, False),
        ("inference_1_0", 2, 8, 2, True),
        ("inference_1_1", 3, 8, 2, False),
    ]
    shared = {"nnodes": 2, "master_addr": "node-2", "master_port": 29550, "distributed_executor_backend": "mp"}
    assert plan.engines[2].section.vllm_extra == shared | {"node_rank": 0}
    assert plan.engines[3].section.vllm_extra == shared | {"node_rank": 1, "headless": True}
    assert plan.engines[3].env == {PEERS_VAR: "http://node-2:8100"}
    assert plan.admin_urls == ("http://node-0:8100", "http://node-2:8100")
    assert "--worker-urls http://node-0:8100 http://node-2:8100" in words_of_router(plan)


def test_one_engine_over_all_nodes_has_no_router():
    data = {"deployment": {"type": "multi_node", "num_nodes": 2, "nodes_per_engine": 2}, "parallel": {"tp": 16}}
    plan = planned_engines(data, NODES[:2])
    assert plan.base_urls == plan.admin_urls == ("http://node-0:8000",) and not plan.routers


@needs("routers")
def test_readers_and_writers_have_their_own_degrees_and_nodes():
    """Four readers of 4 GPUs on two nodes, and a writer whose 16 are two more."""
    shape = {"type": "disaggregated", "num_prefill_replicas": 4, "num_prefill_per_node": 2, "prefill_tp": 4}
    plan = planned_engines({"deployment": shape | {"decode_tp": 16, "num_decode_nodes": 2}}, NODES[:4])
    assert [(e.name, e.node, e.section.server.port, e.section.parallel.tp, e.num_gpus) for e in plan.engines] == [
        ("prefill_0", 0, 8100, 4, 4),
        ("prefill_1", 0, 8101, 4, 4),
        ("prefill_2", 1, 8100, 4, 4),
        ("prefill_3", 1, 8101, 4, 4),
        ("decode_0_0", 2, 8200, 16, 8),
        ("decode_0_1", 3, 8200, 16, 8),
    ]
    assert {e.section.parallel.dp for e in plan.engines} == {1}
    assert len(plan.admin_urls) == 5 and "http://node-3:8200" not in words_of_router(plan)


@pytest.mark.parametrize(
    ("shape", "parallel", "message"),
    [
        ({"num_nodes": 3, "nodes_per_engine": 2}, {"tp": 16}, "num_nodes = 3 is no multiple of"),
        ({"nodes_per_engine": 2}, {"tp": 8, "dp": 2}, "nodes share the ranks of TP and PP"),
        ({"nodes_per_engine": 2}, {"tp": 3}, "tp 3 = 3 GPUs are not divided among"),
        ({"nodes_per_engine": 2}, {"tp": 32}, "tp 32 over 2 nodes need 16 GPUs and a node has"),
        ({}, {"tp": 16}, "let nodes share the ranks of an engine with"),
    ],
)
def test_engines_that_do_not_fit_their_nodes_are_refused(shape, parallel, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned_engines({"deployment": {"type": "multi_node"} | shape, "parallel": parallel}, NODES)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_prefill_replicas": 3, "num_prefill_per_node": 2, "prefill_tp": 4}, "3 engines leave a part of a node"),
        ({"decode_tp": 12, "num_decode_nodes": 2}, "give a multiple of 8"),
        ({"decode_tp": 16}, "num_decode_nodes = 2"),
        (
            {"prefill_tp": 4, "num_prefill_per_node": 4, "num_prefill_replicas": 4},
            "x 4 engines does not divide the GPUs of a node",
        ),
        ({"num_prefill_per_node": 2, "num_prefill_nodes": 2}, "an engine over several nodes shares none"),
    ],
)
def test_readers_and_writers_that_do_not_fit_their_nodes_are_refused(shape, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned_engines({"deployment": {"type": "disaggregated"} | shape}, NODES)


@needs("routers")
def test_groups_have_their_own_degrees_and_options_behind_one_router():
    groups = [
        {"num_engines": 2, "overrides": {"max_num_seqs": 8, "quantization": "fp8"}},
        {"tp": 4, "overrides": {"max-num-seqs": 96}},
    ]
    plan = planned_engines({"deployment": {"type": "groups", "groups": groups}, "max_model_len": 100}, ["h"])
    assert summary(plan) == [
        ("inference_0", 0, 8100, 1, 1, 1),
        ("inference_1", 0, 8101, 1, 1, 1),
        ("inference_2", 0, 8102, 4, 1, 4),
    ]
    sections = [engine.section for engine in plan.engines]
    assert [s.max_num_seqs for s in sections] == [8, 8, 96] and {s.max_model_len for s in sections} == {100}
    assert [s.vllm_extra for s in sections] == [{"quantization": "fp8"}] * 2 + [{}]
    assert {s.engine for s in sections} == {"vllm"}, "one needs it, so that all have it"
    assert "--worker-urls http://h:8100 http://h:8101 http://h:8102" in words_of_router(plan)
    assert plan.base_urls == ("http://h:8000",) and len(plan.admin_urls) == 3


@needs("routers")
def test_groups_fill_nodes_in_their_order_and_leave_what_they_say():
    groups = [{"tp": 16}, {"tp": 4, "idle_gpus": 2}, {"num_engines": 2}]
    plan = planned_engines({"deployment": {"type": "groups", "num_nodes": 3, "groups": groups}}, NODES[:3])
    assert [(e.name, e.node, e.first_gpu, e.num_gpus, e.section.server.port) for e in plan.engines] == [
        ("inference_0_0", 0, 0, 8, 8100),
        ("inference_0_1", 1, 0, 8, 8100),
        ("inference_1", 2, 0, 4, 8100),
        ("inference_2", 2, 6, 1, 8101),
        ("inference_3", 2, 7, 1, 8102),
    ]
    assert [e.section.vllm_extra.get("node_rank") for e in plan.engines] == [0, 1, None, None, None]
    assert len(plan.admin_urls) == 4


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"tp": 4}, {"tp": 8}, {"tp": 4}], "engine 1 takes 8 GPUs from GPU 4 of a node of 8 on, over its end"),
        ([{"tp": 12}, {"tp": 4}], "larger than a node, it has whole nodes; give it a multiple of 8"),
        ([{"tp": 8}, {"tp": 4}], "4 of the last node of 8 are left over; change num_engines, or say so: idle_gpus = 4"),
        ([{"tp": 8, "num_engines": 3}], "engines take 24 GPUs, 3 nodes of 8; give 3"),
    ],
)  # fmt: skip
def test_groups_that_do_not_fill_their_nodes_are_refused(groups, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned_engines({"deployment": {"type": "groups", "num_nodes": 2, "groups": groups}}, NODES)


@needs("routers")
def test_disaggregation_of_the_documents_spans_six_nodes():
    data = {
        "deployment": {
            "type": "disaggregated",
            "num_prefill_nodes": 2,
            "num_decode_nodes": 2,
            "num_prefill_replicas": 2,
            "num_decode_replicas": 1,
            "prefill_env_overrides": {"VLLM_ENABLE_MOE_DP_CHUNK": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"},
            "decode_env_overrides": {"VLLM_DEEP_GEMM_WARMUP": "skip"},
        },
        "enable_expert_parallel": True,
        "parallel": {"tp": 2},
    }
    plan = planned_engines(data, NODES[:6])
    assert [(e.name, e.role, e.node, e.section.server.port) for e in plan.engines] == [
        ("prefill_0_0", "prefill", 0, 8100),
        ("prefill_0_1", "prefill", 1, 8100),
        ("prefill_1_0", "prefill", 2, 8100),
        ("prefill_1_1", "prefill", 3, 8100),
        ("decode_0_0", "decode", 4, 8200),
        ("decode_0_1", "decode", 5, 8200),
    ]
    prefill, decode = plan.engines[2], plan.engines[5]
    assert prefill.section.parallel.dp == 8 and prefill.num_gpus == 8
    assert prefill.section.vllm_extra["data_parallel_address"] == "node-2"
    assert decode.section.vllm_extra["data_parallel_start_rank"] == 4
    assert prefill.section.vllm_extra["all2all_backend"] == "deepep_high_throughput"
    assert decode.section.vllm_extra["all2all_backend"] == "deepep_low_latency"
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert prefill.section.vllm_extra["kv_transfer_config"] == connector
    assert prefill.env["VLLM_ENABLE_MOE_DP_CHUNK"] == "0" and "VLLM_ENABLE_MOE_DP_CHUNK" not in decode.env
    assert {e.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for e in plan.engines} == {str(5600 + k) for k in range(6)}
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "node-2"
    line = words_of_router(plan)
    assert "--vllm-pd-disaggregation --kv-connector nixl" in line
    assert line.count("--prefill http://") == 4 and line.count("--decode http://") == 2


@needs("routers")
def test_replicas_of_the_whole_shape_have_a_router_each():
    shape = {"type": "disaggregated", "num_prefill_nodes": 2, "num_decode_nodes": 2, "num_prefill_replicas": 2}
    section = InferenceSection.model_validate({"model": "m", "deployment": shape})
    plan = plan_replicas(section, NODES, 3)
    assert len(plan.engines) == 18 and [e.node for e in plan.engines] == list(range(18))
    assert [(r.name, r.node) for r in plan.routers] == [(f"replica_{i}_router", 6 * i) for i in range(3)]
    assert plan.base_urls == tuple(f"http://node-{6 * i}:8000" for i in range(3))
    assert plan.engines[6].section.vllm_extra["data_parallel_address"] == "node-6"
    with pytest.raises(ConfigError, match="needs 24 nodes and there are 18"):
        plan_replicas(section, NODES, 4)


@needs("routers")
def test_the_simplest_disaggregation_has_two_nodes_per_side():
    data = {"deployment": {"type": "disaggregated", "num_prefill_nodes": 2, "num_decode_nodes": 2}}
    plan = planned_engines(data, NODES[:4])
    assert [e.node for e in plan.engines] == [0, 1, 2, 3]
    assert all(e.section.parallel.dp == 16 for e in plan.engines)


@needs("routers")
def test_disaggregation_can_be_tried_out_on_one_machine():
    data = {"deployment": {"type": "disaggregated", "is_local": True, "num_decode_replicas": 2}}
    plan = planned_engines(data, ["127.0.0.1"], is_cpu=True)
    assert [e.url(["127.0.0.1"]) for e in plan.engines] == [
        "http://127.0.0.1:8100",
        "http://127.0.0.1:8200",
        "http://127.0.0.1:8201",
    ]
    assert all(e.section.vllm_extra["kv_transfer_config"]["kv_buffer_device"] == "cpu" for e in plan.engines)


@pytest.mark.parametrize("disk", [None, {"path": "/scratch/kv"}])
def test_native_offload_is_a_connector_and_turns_prefix_caching_on(disk):
    offload = {"type": "native", "cpu": {"num_bytes": 128_000_000_000}, "disk": disk}
    plan = planned_engines({"kv_cache_offload": offload, "enable_prefix_caching": False}, ["h"])
    [engine] = plan.engines
    config = engine.section.vllm_extra["kv_transfer_config"]["kv_connector_extra_config"]
    assert config["cpu_bytes_to_use"] == 128_000_000_000 and engine.section.enable_prefix_caching
    tiers = [{"type": "fs", "root_dir": "/scratch/kv"}]
    assert config.get("secondary_tiers") == (tiers if disk else None)
    assert config.get("spec_name") == ("TieringOffloadingSpec" if disk else None)


@needs("routers")
def test_mooncake_has_one_store_for_all_engines():
    data = {
        "kv_cache_offload": {"type": "mooncake", "cpu": {"num_bytes": 1000}, "protocol": "tcp"},
        "deployment": {"type": "multi_node", "num_nodes": 2},
    }
    plan = planned_engines(data, NODES[:2])
    master, *parts = plan.stores
    assert master.node == 0 and master.argv[1:3] == ("-m", "mooncake.cli")
    assert [part.node for part in parts] == [0, 1] and parts[1].argv[1:3] == ("-m", "mooncake.cli_client")
    assert "-host=node-1" in parts[1].argv and "-global_segment_size=1000 B" in parts[1].argv
    configs = [json.loads(e.env["STRETTO_MOONCAKE"]) for e in plan.engines]
    assert configs[0] == configs[1] and configs[0]["master_server_address"] == "node-0:50051"
    assert "-rpc_address=node-0" in master.argv and "-metrics_host=node-0" in master.argv
    for each in (parts, plan.engines):
        assert [own.env["MC_TCP_BIND_ADDRESS"] for own in each] == ["node-0", "node-1"]
    assert all(
        e.section.vllm_extra["kv_transfer_config"]["kv_connector"] == "MooncakeStoreConnector" for e in plan.engines
    )


@needs("routers")
def test_disaggregation_and_offload_are_two_connectors_in_one():
    data = {"kv_cache_offload": {"type": "native", "cpu": {"num_bytes": 1000}}, "deployment": {"type": "disaggregated"}}
    config = planned_engines(data, NODES[:2]).engines[0].section.vllm_extra["kv_transfer_config"]
    assert config["kv_connector"] == "MultiConnector"
    inner = [c["kv_connector"] for c in config["kv_connector_extra_config"]["connectors"]]
    assert inner == ["NixlConnector", "OffloadingConnector"]


@pytest.mark.parametrize(
    ("data", "hosts", "message"),
    [
        ({"deployment": {"type": "multi_node", "num_nodes": 4}}, NODES[:2], "needs 4 nodes and there are 2"),
        ({"deployment": {"type": "disaggregated"}}, NODES[:1], "needs 2 nodes and there are 1 node"),
        (
            {"deployment": {"type": "disaggregated", "num_prefill_nodes": 2}, "parallel": {"dp": 5}},
            NODES,
            "dp = 5 is divided among inference.deployment.num_prefill_nodes = 2 nodes",
        ),
    ],
)
def test_an_impossible_deployment_is_refused(data, hosts, message):
    with pytest.raises(ConfigError, match=message):
        planned_engines(data, hosts)
