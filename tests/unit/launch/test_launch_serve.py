"""`inference` with several processes: the plan, the config of each process, and what is refused."""

from __future__ import annotations

import json
import socket

import pytest
from processes.add_ons import needs

from stretto import dry_run
from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import InferenceConfig
from stretto.launch.plan.serving import plan_serving
from stretto.launch.run.serve import main, planned, write


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def config(tmp_path, *words: str) -> InferenceConfig:
    return load(InferenceConfig, ["--model", "m", "--output-dir", str(tmp_path), *words])


@needs("routers")
def test_replicas_and_a_router_of_one_machine(tmp_path):
    cfg = config(tmp_path, "--deployment.num-replicas", "2")
    plan = plan_serving(cfg, cfg.run_dir)
    assert [(s.name, s.ports["http"]) for s in plan.processes] == [
        ("inference_0", 8100),
        ("inference_1", 8101),
        ("router", 8000),
    ]
    assert all("STRETTO_HOLD" not in spec.env for spec in plan.processes)
    write(plan, cfg, cfg.run_dir)
    own = load(InferenceConfig, ["@", str(cfg.run_dir.config("inference_1"))])
    assert own.server.port == 8101 and own.deployment.num_processes == 1


@needs("routers", "vllm")
def test_hosts_are_needed_except_in_a_dry_run(tmp_path):
    shape = ("--deployment.type", "multi_node", "--deployment.num-nodes", "2", "--parallel.tp", "2")
    with pytest.raises(ConfigError, match="give their addresses with --hosts"):
        plan_serving(config(tmp_path, *shape), config(tmp_path).run_dir)
    shown = planned(config(tmp_path, *shape, "--dry-run"))
    assert "1: node-1" in shown and "requests go to http://node-0:8000" in shown
    plan = plan_serving(config(tmp_path, *shape, "--hosts", "a", "b"), config(tmp_path).run_dir)
    assert [(s.name, s.node) for s in plan.processes] == [("inference_0", 0), ("inference_1", 1), ("router", 0)]
    with pytest.raises(ConfigError, match="needs 2 nodes and there are 1 node"):
        plan_serving(config(tmp_path, *shape, "--hosts", "a"), config(tmp_path).run_dir)


@needs("routers", "vllm")
def test_a_dry_run_of_several_processes_looks_at_the_model_and_at_ports(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "bert"}')
    words = ("--deployment.num-replicas", "2", "--model", str(tmp_path / "m"), "--dry-run")
    with pytest.raises(ConfigError, match="no hidden_size"):
        dry_run.inference(config(tmp_path, *words))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = dry_run.inference(config(tmp_path, *words[:2], "--server.port", str(port), "--dry-run"))
    assert "model   NOT FOUND" in shown and "inference_1" in shown
    assert "NOT READY" in shown and f"port {port}" in shown


@needs("vllm")
def test_one_engine_is_served_in_this_process_with_its_cache_connector(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ("--kv-cache-offload.type", "native", "--kv-cache-offload.cpu.num-bytes", "1000")
    own = main(config(tmp_path, *words))
    assert own.kv_cache_offload is None and own.engine == "vllm" and own.enable_prefix_caching
    connector = own.vllm_extra["kv_transfer_config"]
    assert connector["kv_connector"] == "OffloadingConnector"
    assert connector["kv_connector_extra_config"] == {"cpu_bytes_to_use": 1000}


@needs("vllm")
def test_a_cache_store_is_started_even_for_one_engine(tmp_path):
    words = ("--kv-cache-offload.type", "mooncake", "--kv-cache-offload.cpu.num-bytes", "1000")
    cfg = config(tmp_path, *words, "--kv-cache-offload.disk.path", "/scratch/kv")
    plan = plan_serving(cfg, cfg.run_dir)
    assert [spec.name for spec in plan.processes] == ["inference", "kv_store_0", "kv_store_1"]
    engine, master, part = plan.processes
    store = json.loads(engine.env["STRETTO_MOONCAKE"])
    assert store["enable_offload"] and store["mode"] == "standalone-store"
    assert "-enable_offload=true" in master.argv and "-enable_offload=true" in part.argv
    assert part.env["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] == "/scratch/kv"


@needs("routers")
def test_engines_get_only_the_visible_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    cfg = config(tmp_path, "--deployment.num-replicas", "2", "--parallel.tp", "2")
    plan = plan_serving(cfg, cfg.run_dir)
    assert [spec.devices for spec in plan.processes] == [("4", "5"), ("6", "7"), ()]
    cfg = config(tmp_path, "--deployment.num-replicas", "2", "--parallel.tp", "4")
    with pytest.raises(ConfigError, match=r"tp 4 x 2 engines take 8 GPUs, .*shows 4"):
        plan_serving(cfg, cfg.run_dir)


@needs("routers")
def test_a_router_port_gives_even_a_single_engine_a_router(tmp_path):
    cfg = config(tmp_path, "--deployment.router-port", "9000")
    plan = plan_serving(cfg, cfg.run_dir)
    assert [(s.name, s.ports["http"]) for s in plan.processes] == [("inference", 8100), ("router", 9000)]
    write(plan, cfg, cfg.run_dir)
    own = load(InferenceConfig, ["@", str(cfg.run_dir.config("inference"))])
    assert [spec.name for spec in plan_serving(own, own.run_dir).processes] == ["inference"]
