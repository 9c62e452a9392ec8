"""Ranks exchange typed values, and listen at the address of the first rank's network only."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import free_port, run_ranks

from stretto.base.errors import WireError
from stretto.base.process import TRAIN_NODES_VAR
from stretto.config.sections.transport import CollectiveWeights, ShmWeights
from stretto.trainer.ranks.mesh import process_group
from stretto.transports.weights import meeting_host
from stretto.transports.weights.store import create_store, find_address, find_interface


def test_values_arrive_and_other_things_are_refused(tmp_path: Path) -> None:
    run_ranks("exchange_runs.py", world_size=3, log=tmp_path / "log")


def test_batches_and_scores_reach_all_stages_of_a_pipeline(tmp_path: Path) -> None:
    run_ranks("exchange_runs.py", "stages", world_size=4, log=tmp_path / "log")


def test_ranks_listen_on_the_network_of_the_engines_and_wait_for_a_first_rank_that_starts_late(tmp_path: Path) -> None:
    try:
        own = find_address("198.51.100.1")
    except WireError:  # a machine without a network
        own = "127.0.0.1"
    run_ranks("exchange_runs.py", own, world_size=3, log=tmp_path / "log")


def test_the_network_of_the_engines_is_that_of_the_broadcast() -> None:
    assert meeting_host(CollectiveWeights(host="10.0.0.1")) == "10.0.0.1"
    assert meeting_host(CollectiveWeights()) is None and meeting_host(ShmWeights()) is None


def test_the_interface_is_that_of_the_route() -> None:
    assert find_interface(find_address("127.0.0.1")) == "lo"
    assert find_interface("192.0.2.77") is None


def test_a_foreign_address_or_no_route_is_a_message() -> None:
    with pytest.raises(WireError, match=r"cannot listen at 203\.0\.113\.9:29500"):
        create_store("203.0.113.9", 29500, 5.0, "the trainer's ranks")
    with pytest.raises(WireError, match=r"no route to no-such-host\.invalid"):
        find_address("no-such-host.invalid")


@pytest.mark.parametrize("agent_store", [None, "False"])
def test_a_rank_that_never_comes_is_named_with_its_node(
    monkeypatch: pytest.MonkeyPatch, agent_store: str | None
) -> None:
    if agent_store is not None:  # of a torchrun that leaves the store to the ranks
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
    group = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (group | {TRAIN_NODES_VAR: "node-a node-b", "GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    with (
        pytest.raises(WireError, match=r"1 \(node-a\), 2 \(node-b\), 3 \(node-b\) did not come"),
        process_group(60.0, join_timeout_s=1.0),
    ):
        pass


def test_a_rank_that_starts_again_does_not_join_the_group_it_was_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of a group that is about to end still answers, and would have it wait for who is gone."""
    port = free_port()
    store = create_store("127.0.0.1", port, 60.0, "the trainer's ranks")
    store.add("here/1", 1)
    group = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (group | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WireError, match="rank 1 was already in this group"), process_group(60.0):
        pass
