"""Plans of a run over several machines: processes, nodes, and addresses."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.check.nodes import find_node_rank
from stretto.config.load import load
from stretto.config.root import OrchestratorConfig, RLConfig, TrainerConfig
from stretto.launch.plan import plan as planning
from stretto.launch.plan.nodes import plan_nodes

# The last example of disaggregation in the documents: 3 x (2 x 2 + 1 x 2) inference nodes, 4 trainer nodes.
TOML = """
max_steps = 5
[model]
name = "PrimeIntellect/INTELLECT-3"
[orchestrator]
batch_size = 64
group_size = 8
[[orchestrator.env]]
id = "sort-letters"
[weight_broadcast]
type = "collective"
[deployment]
type = "multi_node"
num_train_nodes = 4
num_infer_nodes = 6
num_infer_replicas = 3
[inference]
enable_expert_parallel = true
[inference.parallel]
tp = 2
[inference.deployment]
type = "disaggregated"
num_prefill_nodes = 2
num_decode_nodes = 2
num_prefill_replicas = 2
num_decode_replicas = 1
"""


def config(tmp_path: Path, *words: str, text: str = TOML) -> RLConfig:
    file = tmp_path / "rl.toml"
    file.write_text(text)
    return load(RLConfig, ["@", str(file), "--output-dir", str(tmp_path / "out"), *words])


@pytest.mark.heavy
@needs("routers", "vllm")
def test_the_example_of_the_documents_has_eighteen_inference_nodes_and_three_routers(tmp_path):
    cfg = config(tmp_path, "--dry-run")
    plan = plan_nodes(cfg, cfg.run_dir)
    assert plan.hosts == tuple(f"node-{i}" for i in range(22))
    planning.write(plan, tmp_path / "written")
    for cls in (RLConfig, TrainerConfig, OrchestratorConfig):  # what each process is started from
        assert load(cls, ["@", str(tmp_path / "written" / "configs" / "run.json"), "--dry-run"])
    by_node = {node: [spec.name for spec in plan.processes if spec.node == node] for node in range(22)}
    assert by_node[0] == ["orchestrator", *(f"trainer_{rank}" for rank in range(8))]
    assert by_node[3] == [f"trainer_{rank}" for rank in range(24, 32)]
    assert [by_node[node] for node in (4, 5, 10, 21)] == [
        ["inference_0", "router_0"],
        ["inference_1"],
        ["inference_6", "router_1"],
        ["inference_17"],
    ]
    client = plan.config.orchestrator.client
    assert client.base_url == [f"http://node-{node}:8000/v1" for node in (4, 10, 16)]
    assert client.admin_base_url[:5:4] == ["http://node-4:8100/v1", "http://node-8:8200/v1"]
    assert len(client.admin_base_url) == 18 and client.split_samples
    assert plan.config.control.host == plan.config.rollout_transport.host == "node-0"
    assert plan.config.weight_broadcast.host == "node-0"


@needs("routers", "vllm")
def test_ranks_meet_at_the_first_node_and_see_one_gpu_each(tmp_path):
    cfg = config(tmp_path, "--dry-run")
    [spec] = [spec for spec in plan_nodes(cfg, cfg.run_dir).processes if spec.name == "trainer_13"]
    assert spec.node == 1 and spec.devices == ("5",)
    wanted = {
        "RANK": "13",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "32",
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "5",
    }
    assert wanted.items() <= spec.env.items()


@needs("routers", "vllm")
def test_each_engine_process_has_its_own_config_and_listens_at_its_address(tmp_path):
    cfg = config(tmp_path, "--dry-run")
    plan = plan_nodes(cfg, cfg.run_dir)
    planning.write(plan, cfg.run_dir.path)
    [spec] = [spec for spec in plan.processes if spec.name == "inference_8"]  # of the second replica
    own = json.loads(Path(spec.argv[-1]).read_text())
    assert own["server"] == own["server"] | {"host": "node-12", "port": 8100}
    assert own["deployment"]["type"] == "single_node" and own["engine"] == "vllm"
    assert own["vllm_extra"]["data_parallel_address"] == "node-12"
    assert own["vllm_extra"]["all2all_backend"] == "deepep_high_throughput"
    assert spec.ports == {"http": 8100, "data_parallel_rpc": 29550, "nixl": 5602}
    assert spec.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "node-12" and spec.env["STRETTO_HOLD"] == "1"
    written = json.loads(cfg.run_dir.plan.read_text())
    assert written["hosts"][12] == "node-12"
    assert [p["node"] for p in written["processes"] if p["name"] == "router_1"] == [10]


@needs("routers", "vllm")
def test_wide_expert_parallelism_gives_each_node_its_ranks(tmp_path):
    text = TOML.partition("[deployment]")[0] + (
        '[deployment]\ntype = "multi_node"\n[inference]\nenable_expert_parallel = true\n'
        "[inference.parallel]\ntp = 2\ndp = 8\n"
        '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\n'
    )
    cfg = config(tmp_path, "--deployment.hosts", "a", "b", "c", text=text)
    plan = plan_nodes(cfg, cfg.run_dir)
    assert [(s.name, s.node) for s in plan.processes if s.role != "trainer"] == [
        ("orchestrator", 0),
        ("inference_0", 1),
        ("inference_1", 2),
        ("router", 1),
    ]
    assert plan.config.orchestrator.client.base_url == "http://b:8000/v1"


def test_one_engine_per_replica_needs_no_router(tmp_path):
    text = TOML.partition("[deployment]")[0] + '[deployment]\ntype = "multi_node"\nnum_infer_replicas = 2\n'
    cfg = config(tmp_path, "--deployment.hosts", "a", "b", "c", text=text)
    plan = plan_nodes(cfg, cfg.run_dir)
    client = plan.config.orchestrator.client
    assert client.base_url == ["http://b:8000/v1", "http://c:8000/v1"] and not client.split_samples
    assert not any(spec.role == "router" for spec in plan.processes)


@needs("routers", "vllm")
def test_given_ports_and_hosts_are_kept(tmp_path):
    words = ("--control.host", "10.9.9.9", "--weight-broadcast.port", "3333", "--inference.server.host", "0.0.0.0")
    cfg = config(tmp_path, "--dry-run", *words)
    plan = plan_nodes(cfg, cfg.run_dir)
    assert plan.config.control.host == "10.9.9.9" and plan.config.weight_broadcast.port == 3333
    assert all(engine.section.server.host == "0.0.0.0" for engine in plan.engines.engines)
    assert plan.config.orchestrator.client.base_url[0] == "http://node-4:8000/v1"


@pytest.mark.parametrize("host", ["a", "gpu_1.local", "10.0.0.1", "fd00::1", "fe80::1%eth0"])
def test_names_and_addresses_are_hosts(tmp_path, host):
    assert host in config(tmp_path, "--deployment.hosts", *map(str, range(21)), host).deployment.hosts


def test_a_node_finds_its_number(monkeypatch):
    hosts = ["198.51.100.1", "127.0.0.1", "198.51.100.2"]
    assert find_node_rank(2, hosts, "deployment.node_rank") == 2
    assert find_node_rank(None, hosts, "deployment.node_rank") == 1
    assert find_node_rank(None, ["198.51.100.1", socket.gethostname()], "deployment.node_rank") == 1
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert find_node_rank(None, hosts, "deployment.node_rank") == 0
