"""[ray] without Ray: what it asks for, what is missing, and which machine is which node."""

from __future__ import annotations

import json
import random
import socket
import sys
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError, EngineError
from stretto.base.paths import RunDir
from stretto.cli import main
from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.launch.plan import nodes
from stretto.launch.plan.nodes import plan_nodes
from stretto_clusters.job import write_config
from stretto_clusters.ray import cluster
from stretto_clusters.ray.cluster import probe as probe_cluster
from stretto_clusters.ray.node import Node
from stretto_clusters.ray.placing import Bundle, Machine, Place, addresses, in_order, missing, plan_bundles, screen
from stretto_clusters.ray.run import main as run_on_ray
from stretto_clusters.ray.run import passed_env

RL = """
[model]
name = "org/Model"
[[orchestrator.env]]
id = "sort-letters"
[run]
name = "r"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_replicas = 2
[ray]
"""
FOUR = ["--deployment.infer-gpus-per-node", "4"]
SFT = "max_steps = 2\n[model]\nscratch = {}\n"
SFT += '[data]\ntype = "environment"\nid = "sort-letters"\n[run]\nname = "r"\n[ray]\n'


def rl(folder: Path, ray: str = "", *words: str) -> RLConfig:
    (folder / "rl.toml").write_text(RL + ray)
    return load(RLConfig, ["@", str(folder / "rl.toml"), "--output-dir", str(folder / "out"), *words])


def machine(number: int, **amounts: tuple[float, float]) -> Machine:
    """amounts: of each resource what there is, and what of it is free."""
    total, free = ({name: pair[i] for name, pair in amounts.items()} for i in (0, 1))
    return Machine(f"m{number}", f"10.0.0.{number}", total, free)


# -- what is asked for --


def test_each_node_claims_what_its_processes_take(tmp_path: Path) -> None:
    bundles = plan_bundles(rl(tmp_path, "resources = { h200 = 1 }", *FOUR))
    assert [bundle.claims for bundle in bundles] == [
        {"CPU": 9, "GPU": 8, "h200": 1},
        {"CPU": 8, "GPU": 8, "h200": 1},
        {"CPU": 4, "GPU": 4, "h200": 1},
        {"CPU": 4, "GPU": 4, "h200": 1},
    ]
    assert [bundle.processes for bundle in bundles][:3] == ["orchestrator, trainer x 8", "trainer x 8", "inference"]


@needs("routers", "vllm")
def test_trainer_and_rollout_gpus_add_up(tmp_path: Path) -> None:
    """Trainer 2 x 4, rollouts 8 in engines of 2: 16 GPUs, as vime counts them."""
    words = ["--deployment.gpus-per-node", "4", "--inference.parallel.tp", "2", "--deployment.num-infer-replicas", "1"]
    words += ["--inference.deployment.type", "multi_node", "--inference.deployment.num-nodes", "4"]
    bundles = plan_bundles(rl(tmp_path, "", *words))
    assert [bundle.claims.get("GPU") for bundle in bundles] == [4, 4, 2, 2, 2, 2]
    assert "CPU 17, GPU 16" in screen(rl(tmp_path, "", *words))
    one = tmp_path / "one.toml"
    one.write_text(
        RL.replace('type = "multi_node"\nnum_train_nodes = 2\nnum_infer_replicas = 2\n', "num_train_gpus = 4\n")
    )
    words = ["@", str(one), "--deployment.num-infer-gpus", "8", "--inference.parallel.tp", "8"]
    assert [bundle.claims for bundle in plan_bundles(load(RLConfig, words))] == [{"CPU": 12, "GPU": 12}]
    shared = [
        "@",
        str(one),
        "--trainer-gpu-ids",
        "0,1",
        "--inference-gpu-ids",
        "0,1",
        "--deployment.num-train-gpus",
        "None",
    ]
    shared += ["--inference.gpu-memory-utilization", "0.5", "--inference.parallel.tp", "2"]
    assert [bundle.claims for bundle in plan_bundles(load(RLConfig, shared))] == [{"CPU": 2, "GPU": 2}]


@needs("routers", "sft", "vllm")
def test_sft_and_inference_are_placed_too(tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(SFT + "cpus_per_node = 3\n")
    cfg = load(SFTConfig, ["@", str(tmp_path / "sft.toml"), "--trainer-gpu-ids", "0,1"])
    assert [bundle.claims for bundle in plan_bundles(cfg)] == [{"CPU": 3, "GPU": 2}]
    words = ["@", str(tmp_path / "sft.toml"), "--deployment.type", "multi_node", "--deployment.num-train-nodes", "2"]
    bundles = plan_bundles(load(SFTConfig, [*words, "--deployment.gpus-per-node", "4"]))
    assert [bundle.claims for bundle in bundles] == [{"CPU": 3, "GPU": 4}] * 2
    words = ["--model", "m", "--ray.wait-s", "9", "--parallel.tp", "8", "--deployment.type", "multi_node"]
    bundles = plan_bundles(load(InferenceConfig, [*words, "--deployment.num-nodes", "3"]))
    assert [bundle.claims["GPU"] for bundle in bundles] == [8, 8, 8]


def test_the_plan_of_a_thousand_nodes_is_three_lines(tmp_path: Path) -> None:
    words = ["--deployment.num-train-nodes", "200", "--deployment.num-infer-replicas", "800"]
    shown = screen(rl(tmp_path, "", *words, "--orchestrator.batch-size", "3200")).splitlines()
    assert "1000 bundles" in shown[0] and shown[3].startswith("  nodes 200-999  CPU 8, GPU 8 each")


# -- what is missing --

EIGHT = [Bundle(node, {"CPU": 2.0, "GPU": 8.0}, "") for node in range(3)]


def test_what_fits_is_not_missing() -> None:
    free = [machine(n, CPU=(4, 4), GPU=(8, 8)) for n in range(1, 4)]
    assert missing(EIGHT, free, "STRICT_SPREAD") == ""
    large = [machine(1, CPU=(16, 16), GPU=(32, 24))]
    assert missing(EIGHT, large, "PACK") == "" == missing(EIGHT, large, "STRICT_PACK")
    assert missing(EIGHT, large, "STRICT_SPREAD").startswith("2 of 3 nodes of the plan have no machine")
    assert missing(EIGHT, free, "STRICT_PACK").startswith("3 of 3 nodes")


def test_what_is_missing_names_each_machine() -> None:
    machines = [machine(2, CPU=(4, 4), GPU=(8, 1)), machine(1, CPU=(4, 4), GPU=(8, 8))]
    text = missing(EIGHT[:2], machines, "STRICT_SPREAD")
    assert text == (
        "node 1 of the plan has no machine (CPU 2, GPU 8, STRICT_SPREAD): CPU 4 asked, 8 there, 8 free; GPU 16 asked, "
        "16 there, 9 free. The cluster: 10.0.0.1 has CPU 4 of 4 free, GPU 8 of 8 free; 10.0.0.2 has CPU 4 of 4 free, "
        "GPU 1 of 8 free"
    )
    assert missing(EIGHT, [], "PACK").endswith("The cluster: no machine")
    many = [machine(n, CPU=(1, 1)) for n in range(1, 13)]
    assert missing(EIGHT, many, "PACK").endswith("and 4 more machines")


# -- which machine is which node --


def test_the_same_machines_have_the_same_numbers_every_time() -> None:
    """Whatever Ray's order is; the trainer's nodes and those of inference each in the order of their addresses."""
    bundles = [*EIGHT[:2], Bundle(2, {"CPU": 1.0}, ""), Bundle(3, {"CPU": 1.0}, "")]
    rng = random.Random(1)
    for _ in range(20):
        trains, serves = ["10.0.0.10", "10.0.0.9"], ["10.0.0.2", "10.0.0.30"]
        rng.shuffle(trains)
        rng.shuffle(serves)
        placed = [Place(index, address, address) for index, address in enumerate(trains + serves)]
        rng.shuffle(placed)
        order = in_order(bundles, placed)
        assert [place.address for place in order] == ["10.0.0.9", "10.0.0.10", "10.0.0.2", "10.0.0.30"]
        assert addresses(order, 0) == [place.address for place in order]
    one = [Place(0, "m", "10.0.0.1", ("10", "11")), Place(1, "m", "10.0.0.1", ("2", "3"))]
    assert [place.gpus[0] for place in in_order(EIGHT[:2], one)] == ["2", "10"]


def test_nodes_on_one_machine_have_loopback_addresses_and_mixtures_are_refused() -> None:
    same = [Place(n, f"m{n}", "10.0.0.1") for n in range(3)]
    assert addresses(same, 0) == ["127.0.1.1", "127.0.1.2", "127.0.1.3"]
    assert addresses(same, 1)[0] == "127.0.2.1" and addresses(same[:1], 1) == ["10.0.0.1"]
    with pytest.raises(ConfigError, match=r"nodes 0, 1, 2 .*10.0.0.1, .*STRICT_SPREAD"):
        addresses([*same, Place(3, "m9", "10.0.0.9")], 0)


def test_gpus_are_those_that_the_machine_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = rl(tmp_path, "", "--deployment.gpus-per-node", "2", "--dry-run")
    processes = plan_nodes(cfg, cfg.run_dir).processes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    found = nodes.on_visible_gpus([spec for spec in processes if spec.node == 1])
    assert [spec.devices for spec in found] == [("5",), ("7",)]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in found] == ["5", "7"]
    [first] = nodes.on_visible_gpus([spec for spec in processes if spec.role == "orchestrator"])
    assert first.devices == () and first.env["CUDA_VISIBLE_DEVICES"] == ""


# -- what every node gets --


def test_nodes_load_the_config_without_the_section(tmp_path: Path) -> None:
    cfg = rl(tmp_path, "env = { MODE = 'x' }")
    run = RunDir(cfg.run_path.absolute())
    write_config(cfg, run, run.ray / "rl.json")
    words = ["@", str(run.ray / "rl.json"), "--deployment.hosts", "a", "b", "c", "d", "--deployment.node-rank", "2"]
    found = load(RLConfig, words)
    assert found.ray is None and found.run_path == tmp_path / "out" / "r" and found.deployment.node_rank == 2


def test_keys_are_passed_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "made-up")
    monkeypatch.setenv("VLLM_API_KEY", "also made-up")
    cfg = rl(tmp_path, 'pass_env = ["HF_TOKEN"]\nenv = { MODE = "x" }')
    assert passed_env(cfg) == {"MODE": "x", "HF_TOKEN": "made-up", "VLLM_API_KEY": "also made-up"}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"ray.pass_env: HF_TOKEN is not set"):
        passed_env(cfg)


# -- the cluster --


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "local"])
def test_a_variable_that_names_no_cluster_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # nobody could be asked
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS = {address} "):
        run_on_ray(rl(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_cluster_is_looked_for_at_addresses_of_both_kinds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe_cluster(f"127.0.0.1:{server.getsockname()[1]}")
    if socket.has_dualstack_ipv6():
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            probe_cluster(f"[::1]:{server.getsockname()[1]}")


def test_a_machine_that_cannot_write_the_log_says_so(tmp_path: Path) -> None:
    (tmp_path / "rl.json").write_text("{}")
    words = [sys.executable, "-m", "stretto", "rl", "@", str(tmp_path / "rl.json")]
    said = Node().start(words, {}, str(tmp_path / "gone" / "node_0.log"), str(tmp_path))
    assert said.startswith(f"cannot write {tmp_path}/gone/node_0.log as user ") and "No such file" in said


@needs("routers", "sft", "vllm")
def test_a_dry_run_shows_the_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sft.toml").write_text(SFT)
    words = ["@", str(tmp_path / "sft.toml"), "--output-dir", str(tmp_path), "--dry-run"]
    assert main(["sft", *words]) == 0
    shown = capsys.readouterr().out
    assert "Ray (RAY_ADDRESS, else this machine's cluster) would place 1 bundle, STRICT_SPREAD" in shown
    assert "no GPUs are named or counted" in shown and not (tmp_path / "r" / "ray").exists()
    words = [
        "--model",
        "m",
        "--ray.address",
        "h:6379",
        "--deployment.type",
        "multi_node",
        "--deployment.num-nodes",
        "2",
    ]
    assert main(["inference", *words, "--dry-run"]) == 0
    assert "Ray (h:6379) would place 2 bundles" in capsys.readouterr().out


@pytest.mark.parametrize("job", ["--ray.address h:6379", "--slurm"])
def test_ports_that_are_taken_here_are_not_told_of_a_run_on_other_machines(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = f"--run.name p --output-dir {tmp_path} --control.port {taken.getsockname()[1]} {job} --dry-run"
        assert main(["rl", *words.split(), "--orchestrator.env.0.id", "sort-letters"]) == 0
    assert "is taken" not in "".join(capsys.readouterr())


# -- status, stop --


def test_a_run_whose_command_is_gone_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "r")
    run.ray.mkdir(parents=True)
    run.launch.write_text(json.dumps({"by": "ray", "host": "head", "pid": 7, "job": "raysubmit_x"}))
    (run.ray / "state.json").write_text('{"state": "running", "text": "on 10.0.0.1", "restarts": 2}')
    (run.ray / "lock").write_text("7\n")
    assert main(["status", str(run)]) == 0
    assert (
        "ended: job raysubmit_x on head, which waited for it, is gone; it was running on Ray" in capsys.readouterr().out
    )
    assert main(["stop", str(run)]) == 0
    assert "is not running" in capsys.readouterr().out and not (run.ray / "stop").exists()


class FakeRay:
    """Ray with one call, whose result is an exception or a value."""

    class exceptions:
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {})
        GetTimeoutError = type("GetTimeoutError", (RayError,), {})
        ActorUnavailableError = type("ActorUnavailableError", (RayError,), {})
        ActorDiedError = type("ActorDiedError", (RayError,), {})

    def __init__(self, result: object) -> None:
        self.result = result
        self.poll = self
        self.remote = lambda: "call"

    def wait(self, calls: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return calls, []

    def get(self, call: str, timeout: float | None = None) -> object:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_node_whose_connection_breaks_is_lost_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = FakeRay.exceptions
    ray = FakeRay(errors.ActorUnavailableError("a connection broke"))
    node = cluster.RemoteNode(ray, ray, Place(0, "m", "10.0.0.1"), 0)
    assert node.poll() is None
    ray.result = ("a line\n", None)
    assert node.poll() == ("a line\n", None)
    ray.result = errors.ActorUnavailableError("a connection broke")
    monkeypatch.setattr(cluster, "UNREACHABLE_S", -1.0)
    with pytest.raises(cluster.NodeLost, match="a connection broke"):
        node.poll()
    with pytest.raises(cluster.NodeLost, match="a connection broke"):
        node.result("call", 1.0)
    ray.result = errors.ActorDiedError("the machine is gone")
    with pytest.raises(cluster.NodeLost, match="the machine is gone"):
        node.poll()
    ray.result = errors.RayTaskError("KeyError: 'x'")
    with pytest.raises(EngineError, match=r"the actor of node 0 \(10.0.0.1\) failed: KeyError"):
        node.poll()
