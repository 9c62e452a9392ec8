"""Wrong [inference.router] sections: each gives one line that says where, what, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.config import complaints

WRONG = {
    "an option the router has not": ("[router.extra]\nqueue_sise = 3", "did you mean --queue-size"),
    "a router's number that is a word": ('[router.extra]\nqueue_size = "abc"',
        'router.extra.queue_size: --queue-size takes an integer, not "abc"'),
    "an option of another policy": ('[router]\npolicy = "round_robin"\n[router.extra]\nbalance_abs_threshold = 0',
        'router.extra.balance_abs_threshold does nothing with router.policy = "round_robin"; use "cache_aware"'),
    "an address that is none": ('router.address = "nonsense"', "is not an address; write it like"),
    "a policy of another router": ('router.type = "dynamo"\nrouter.policy = "consistent_hash"',
        'router.policy = "consistent_hash" is no policy of router.type = "dynamo"; it has kv, session_affinity,'),
    "a policy of Dynamo's": ('router.policy = "kv"', 'is no policy of router.type = "vllm"; it has consistent_hash,'),
    "a frontend that runs elsewhere": ('router.type = "dynamo"\nrouter.address = "http://r:1"',
        "cannot take these engines; leave the address out"),
    "prefill and decode behind Dynamo": ('router.type = "dynamo"\n[deployment]\ntype = "disaggregated"',
        'Dynamo divides prefill and decode among workers of its own only; use "vllm"'),
    "adapters behind Dynamo": ('router.type = "dynamo"\n[lora]\nmax_loras = 2', "none of its adapters"),
    "what the plan says to Dynamo": ('router.type = "dynamo"\n[router.extra]\nrouter_mode = "random"',
        "router.extra.router_mode follows from inference.router.policy"),
    "a policy for a router that runs": ('router.address = "http://r:1"\nrouter.policy = "round_robin"',
        "the router that runs there has its own"),
    "a Python for vllm-router": ('router.interpreter = "/p"', "only Dynamo has a Python of its own"),
    "a port of a router elsewhere": ('router.address = "http://r:1"\ndeployment.router_port = 9000',
        "no router is started"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_section_is_one_line_with_its_place(mistake: str, tmp_path: Path) -> None:
    toml, expected = WRONG[mistake]
    (line,) = complaints(tmp_path, 'model = "m"\n' + toml, "", "inference")
    assert expected in line and "c.toml:" in line, line
