"""Plans of engines on one node, and of the router in front of them."""

from __future__ import annotations

from cases.plans import planned_engines, summary, words_of_router
from processes.add_ons import needs


def test_a_single_node_is_one_engine_and_no_router():
    plan = planned_engines({"enable_expert_parallel": True, "parallel": {"tp": 2, "dp": 4}}, ["localhost"])
    assert summary(plan) == [("inference", 0, 8000, 2, 4, 8)]
    assert not plan.routers and not plan.stores
    assert plan.base_urls == plan.admin_urls == ("http://localhost:8000",)


@needs("routers")
def test_replicas_on_one_node_have_a_router_that_admin_calls_bypass():
    plan = planned_engines({"deployment": {"num_replicas": 2}, "parallel": {"tp": 2}}, ["10.0.0.1"])
    assert summary(plan) == [("inference_0", 0, 8100, 2, 1, 2), ("inference_1", 0, 8101, 2, 1, 2)]
    assert plan.base_urls == ("http://10.0.0.1:8000",)
    assert plan.admin_urls == ("http://10.0.0.1:8100", "http://10.0.0.1:8101")
    assert "--policy consistent_hash --worker-urls http://10.0.0.1:8100 http://10.0.0.1:8101" in words_of_router(plan)
    assert "--health-check-endpoint /admitted" in words_of_router(plan)


def test_without_a_router_the_orchestrator_spreads_rollouts_itself():
    plan = planned_engines({"deployment": {"num_replicas": 2}, "router": None}, ["h"])
    assert not plan.routers and plan.base_urls == plan.admin_urls == ("http://h:8000", "http://h:8001")


@needs("routers")
def test_a_running_router_is_used_and_none_is_started():
    plan = planned_engines({"deployment": {"num_replicas": 2}, "router": {"address": "http://r:9000"}}, ["h"])
    assert not plan.routers and plan.base_urls == ("http://r:9000",) and len(plan.admin_urls) == 2


@needs("routers")
def test_options_of_the_router_are_passed_on():
    router = {"policy": "round_robin", "extra": {"cb_failure_threshold": 3, "disable_retries": True}}
    plan = planned_engines({"deployment": {"num_replicas": 2}, "router": router}, ["h"])
    assert "--policy round_robin" in words_of_router(plan)
    assert words_of_router(plan).endswith("--cb-failure-threshold 3 --disable-retries")


@needs("routers")
def test_groups_of_keys_that_every_engine_has_need_no_vllm():
    groups = [{"overrides": {"max_num_seqs": 8}}, {"overrides": {"kv_cache_tokens": 4096}}]
    plan = planned_engines({"deployment": {"type": "groups", "groups": groups}, "engine": "embedded"}, ["h"])
    assert [e.section.max_num_seqs for e in plan.engines] == [8, 1024]
    assert plan.engines[1].section.kv_cache_tokens == 4096 and plan.engines[1].section.engine == "embedded"
