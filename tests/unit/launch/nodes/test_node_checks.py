"""What a node refuses before it starts anything: each message names the node. The network's part is tests/cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto import cli
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import in_url, is_ipv6
from stretto.check import nodes as node_checks
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.plan import LaunchPlan

RL = """
[model]
name = "org/Model"
[[orchestrator.env]]
id = "sort-letters"
[deployment]
type = "multi_node"
num_train_nodes = 2
hosts = ["a", "b", "c"]
"""


def plan(folder: Path, *words: str) -> LaunchPlan:
    (folder / "rl.toml").write_text(RL)
    cfg = load(RLConfig, ["@", str(folder / "rl.toml"), "--output-dir", str(folder), *words])
    return plan_nodes(cfg, cfg.run_dir)


def test_too_few_gpus_are_said_by_the_node_that_has_them(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = plan(tmp_path, "--deployment.infer-gpus-per-node", "4")
    for node, needed in ((1, 8), (2, 4)):
        own = [spec for spec in found.processes if spec.node == node]
        words = f"node {node}, {found.hosts[node]}: its processes take {needed} GPUs, and this machine shows 2 GPUs"
        with pytest.raises(ConfigError, match=words):
            num_gpus = node_checks.num_gpus(own)
            node_checks.check_num_gpus(num_gpus, node, found.hosts[node], "deployment.gpus_per_node")
    node_checks.check_num_gpus(2, 0, "a", "deployment.gpus_per_node")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    node_checks.check_num_gpus(0, 0, "a", "deployment.gpus_per_node")
    with pytest.raises(ConfigError, match=r"node 1, b: .*1 GPU, .*no GPU"):
        node_checks.check_num_gpus(1, 1, "b", "deployment.gpus_per_node")


@needs("routers", "vllm")
def test_gpus_that_are_not_used_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert node_checks.unused_gpus(4) is None and node_checks.unused_gpus(0) is None
    note = "note: this machine shows 4 GPUs, and 2 of them are used; to use more, raise a degree of parallel or"
    words = ["--model", "org/Model", "--deployment.num-replicas", "2", "--output-dir", str(tmp_path), "--dry-run"]
    for more, is_said in (([], True), (["--parallel.tp", "2"], False), (["--device", "cpu"], False)):
        assert cli.main(["inference", *words, *more]) == 0
        assert (note in capsys.readouterr().err) == is_said, more


def test_names_that_nobody_knows_are_named_with_their_nodes():
    hosts = ["localhost", "127.0.0.1", "gpu-17.invalid", "gpu-18.invalid"]
    words = r"deployment.hosts: node 0, localhost, cannot reach node 2, gpu-17.invalid \(its name is not known here: .*"
    with pytest.raises(ConfigError, match=words + r"\); node 3, gpu-18.invalid"):
        node_checks.check_others(hosts, 0, "deployment.hosts")
    node_checks.check_others(hosts, 1, "deployment.hosts")  # the first one alone is needed there
    node_checks.check_others(hosts[:1], 0, "deployment.hosts")
    with pytest.raises(ConfigError, match=r"node 1, b, cannot reach node 0, gpu-17.invalid"):
        node_checks.check_others(["gpu-17.invalid", "b"], 1, "hosts")


def test_a_run_directory_that_is_not_shared_is_said_by_the_node_that_does_not_see_it(tmp_path):
    first, second = RunDir(tmp_path / "first" / "run"), RunDir(tmp_path / "second" / "run")
    first.path.mkdir(parents=True)
    node_checks.announce(first, ["a", "b"])
    node_checks.check_shared(first, ["a", "b"], 1, "why", 0)
    words = f"node 1, b: {second} is not the run directory of the first node, a, after 0 s: weights are files there"
    with pytest.raises(ConfigError, match=words):
        node_checks.check_shared(second, ["a", "b"], 1, "weights are files there", 0)
    second.path.mkdir(parents=True)  # what another run has left there is no reason to believe it
    node_checks.announce(second, ["b", "a"])
    with pytest.raises(ConfigError, match="is not the run directory"):
        node_checks.check_shared(second, ["a", "b"], 1, "why", 0)
    second.nodes.write_text("{")
    with pytest.raises(ConfigError, match="is not the run directory"):
        node_checks.check_shared(second, ["a", "b"], 1, "why", 0)


@pytest.mark.parametrize(
    ("words", "node", "why"),
    [
        ([], 1, "its part of a checkpoint"),
        (["--ckpt", "None"], 1, None),
        ([], 2, None),
        (["--weight-broadcast.type", "filesystem"], 2, "weights are files"),
        (["--ckpt", "None", "--rollout-transport.type", "filesystem"], 1, "batches are files"),
    ],
)
def test_a_node_needs_the_shared_directory_for_what_it_does_there(tmp_path, words, node, why):
    found = plan(tmp_path, *words)
    given = node_checks.needs_shared(found.config, [spec for spec in found.processes if spec.node == node])
    assert given is None if why is None else why in given


def test_what_the_first_node_announces_is_no_run_in_itself(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    node_checks.announce(run, ["a", "b"])
    assert json.loads(run.nodes.read_text()) == {"hosts": ["a", "b"]}
    from stretto.base import rundir

    assert not rundir.is_used(run)


def test_ipv6_addresses_stand_in_urls_as_they_must(tmp_path):
    hosts = ["fd00::1", "fd00::2", "fd00::3"]
    found = plan(tmp_path, "--deployment.hosts", *hosts)
    cfg = found.config
    assert cfg.orchestrator.client.base_url == "http://[fd00::3]:8000/v1"
    assert cfg.control.host == cfg.weight_broadcast.host == "fd00::1"
    [engine] = [spec for spec in found.engines.engines]
    assert engine.section.server.host == "fd00::3", "what listens takes it as it is"
    assert in_url("[::1]") == "[::1]" and in_url("::1") == "[::1]" and in_url("10.0.0.1") == "10.0.0.1"
    assert is_ipv6("::1") and not is_ipv6("127.0.0.1") and not is_ipv6("gpu-17.invalid")
