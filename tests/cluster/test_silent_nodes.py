"""A node of the trainer whose link is cut: nothing tells the others, and the run ends all the same, naming it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Host, network
from test_by_hand import DEADLINE_S, MOVED, PROGRAMS, SFT, model, until, verb

from stretto.base.paths import RunDir
from stretto.base.process import EXIT_LOST
from stretto.ledger.audit import audit
from stretto.monitors.file import read_metrics

__all__ = ["model"]
pytestmark = pytest.mark.cluster(*PROGRAMS, root=True)
LOST_AFTER_S = 4


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    (tmp_path / "network").mkdir()
    with network(3, tmp_path / "network", "si") as found:
        yield found


def has_steps(run: RunDir, role: str, number: int) -> bool:
    path = run.metrics(role)
    return path.exists() and max((row["step"] for row in read_metrics(path)), default=0) >= number


def test_ranks_of_sft_name_the_node_that_has_fallen_silent(hosts: list[Host], tmp_path: Path) -> None:
    """gloo alone would wait for half an hour, on both sides of the cut; the second node hears of it from the first."""
    (tmp_path / "sft.toml").write_text(SFT.replace("max_steps = 3", "max_steps = 1000000"))
    addresses = [host.address for host in hosts]
    words = ["@", tmp_path / "sft.toml", "--output-dir", tmp_path, "--deployment.hosts", *addresses]
    words += ["--deployment.lost-after-s", str(LOST_AFTER_S)]
    words += ["--deployment.num-train-nodes", "3", "--batch-size", "12"]
    nodes = [host.start([*verb("sft"), *words]) for host in hosts]
    until(lambda: has_steps(RunDir(tmp_path / "run"), "sft", 5), "step 5")
    hosts[2].set_link("down")
    outputs = [node.communicate(timeout=DEADLINE_S)[0] for node in nodes]
    codes = [node.returncode for node in nodes]
    assert (codes[0], codes[2]) == (EXIT_LOST, EXIT_LOST) and codes[1], outputs  # the second fails with the first
    silent = f"has been silent for {LOST_AFTER_S} s (deployment.lost_after_s)"
    assert f"error: node 2, {addresses[2]}, {silent}" in outputs[0]
    assert f"error: the first node, {addresses[0]}, {silent}" in outputs[2]


def test_a_run_names_the_trainers_node_that_has_fallen_silent_and_is_resumed_without_it(
    hosts: list[Host], model: Path, tmp_path: Path
) -> None:
    addresses = [host.address for host in hosts]
    (tmp_path / "rl.toml").write_text(
        f'seq_len = 256\noutput_dir = "{tmp_path}"\n[run]\nname = "run"\n[model]\nname = "{model}"\n'
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\ngpus_per_node = 0\n'
        f"lost_after_s = {LOST_AFTER_S}\nhosts = {json.dumps(addresses)}\n[ckpt]\ninterval = 2\n"
        '[inference]\ndevice = "cpu"\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n'
        "[orchestrator.train.sampling]\nmax_completion_tokens = 6\n" + MOVED
    )
    run, words = RunDir(tmp_path / "run"), [*verb("rl"), "@", tmp_path / "rl.toml"]
    nodes = [host.start(words) for host in hosts]
    until(lambda: run.latest_complete_checkpoint(), "checkpoint")
    hosts[1].set_link("down")
    outputs = [node.communicate(timeout=DEADLINE_S)[0] for node in nodes[:2]]
    assert [node.returncode for node in nodes[:2]] == [EXIT_LOST] * 2, outputs
    assert f"error: node 1, {addresses[1]}, has been silent" in outputs[0]
    nodes[2].terminate()
    nodes[2].communicate(timeout=DEADLINE_S)
    saved = run.latest_complete_checkpoint()
    assert saved is not None
    alone = [addresses[0], addresses[2]]
    more = ["--resume", "--deployment.num-train-nodes", "1", "--max-steps", str(saved + 2)]
    again = [host.start([*words, *more, "--deployment.hosts", *alone]) for host in (hosts[0], hosts[2])]
    output, _ = again[0].communicate(timeout=DEADLINE_S)
    assert again[0].returncode == 0, output
    assert audit(run) == [] and has_steps(run, "orchestrator", saved + 2)
