"""Options of the router: passed on as they are typed, and refused with the nearest one where it has none."""

from __future__ import annotations

import pytest

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig
from stretto_routers.flags import ROUTER, arguments, read_installed, rewrite_router_flags

TYPED = ["--router-policy", "round_robin", "--router-cb-failure-threshold", "3", "--router-disable-retries"]


ROOTS = [
    (InferenceConfig, "", ["--model", "m"]),
    (RLConfig, "inference.", ["--orchestrator.env", '[{"id": "sort-letters"}]']),
]


@pytest.mark.parametrize(("root", "section", "others"), ROOTS)
def test_options_of_the_router_are_keys_of_its_section(root, section, others):
    cfg = load(root, rewrite_router_flags([*others, *TYPED], section))
    router = (cfg.inference if section else cfg).router
    assert router.policy == "round_robin"
    assert router.extra == {"cb_failure_threshold": 3, "disable_retries": True}


def test_an_option_that_begins_like_the_prefix_is_found_with_and_without_it():
    for word in ("--router-router-temperature", "--router-temperature"):
        assert rewrite_router_flags([word, "0.5"], "") == ["--router.extra.router_temperature", "0.5"]


def test_several_values_and_equal_signs():
    words = rewrite_router_flags(["--router-cors-allowed-origins", "a", "b", "--x", "1"], "")
    assert words == ["--router.extra.cors_allowed_origins", '["a","b"]', "--x", "1"]
    assert rewrite_router_flags(["--router-log-level=debug"], "") == ["--router.extra.log_level", '"debug"']
    assert arguments("cors_allowed_origins", ["a", "b"], "x") == ["--cors-allowed-origins", "a", "b"]
    assert arguments("disable_retries", False, "x") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--router-cb-failre-threshold", "3"], "did you mean --cb-failure-threshold"),
        (["--router-zzzzz", "3"], "has no option --zzzzz"),
        (["--router-port", "3"], "router_port"),
        (["--router-worker-urls", "http://a"], "engines come from inference.deployment"),
        (["--router-kv-connector", "nixl"], "NIXL"),
        (["--router-queue-size"], "takes a value"),
        (["--router-disable-retries=3"], "takes no value"),
    ],
)
def test_what_the_router_does_not_take_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        rewrite_router_flags(words, "")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("disable_retries", 3, "is a switch"),
        ("queue_size", True, "takes a value"),
        ("policy", "random", "the key is inference.router.policy"),
        ("helth_check_endpoint", "/x", "did you mean --health-check-endpoint"),
    ],
)
def test_extra_is_checked_as_flags_are(name, value, message):
    with pytest.raises(ConfigError, match=message):
        arguments(name, value, f"inference.router.extra.{name}")


def test_the_shipped_table_is_that_of_the_installed_router():
    pytest.importorskip("vllm_router")
    assert ROUTER.table == read_installed()
