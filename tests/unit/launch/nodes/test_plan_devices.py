"""check/devices.py: what needs a GPU is refused where the plan has none, before a process starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases.plans import config_builder, isolate
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig
from stretto.launch.plan import plan as planning
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.run.serve import plan_serving

OFFLOAD = ["--inference.kv-cache-offload.cpu.num-bytes", "1000000", "--inference.kv-cache-offload.type"]
NEED_A_GPU: list[Any] = [
    (["--model.fp8"], "fp8 = true needs a GPU"),
    (["--model.optim-cpu-offload"], "optim_cpu_offload = true"),
    (["--model.fsdp-cpu-offload"], "fsdp_cpu_offload = true"),
    (["--model.ac-offloading"], r"\[trainer.model.ac_offloading\]"),
    (["--model.ep-comm-backend", "deepep"], 'ep_comm_backend = "deepep" needs GPUs'),
    *(
        pytest.param([*words], rule, marks=needs("vllm"))
        for words, rule in (
            ([*OFFLOAD, "native"], 'kv_cache_offload.type = "native"'),
            (["--inference.engine", "vllm", "--inference.enable-sleep-mode"], "no sleep mode on a CPU"),
            (["--inference.engine", "vllm", "--inference.use-deep-gemm"], "use_deep_gemm = true"),
            (["--inference.engine", "vllm", "--inference.block-size", "48"], "multiples of 32"),
        )
    ),
]
NODES = ["--deployment.type", "multi_node", "--deployment.num-train-nodes", "1", "--deployment.num-infer-nodes", "1"]


@pytest.fixture(autouse=True)
def isolated_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RLConfig]:
    return config_builder(tmp_path)


@pytest.mark.parametrize(("words", "rule"), NEED_A_GPU)
def test_a_plan_on_the_cpu_refuses_what_needs_a_gpu(config, words: Sequence[str], rule: str) -> None:
    cfg = config(*words)
    with pytest.raises(ConfigError, match=rule):
        planning.plan(cfg, cfg.run_dir)


@pytest.mark.parametrize(("words", "rule"), NEED_A_GPU)
def test_a_plan_with_gpus_accepts_it_though_this_machine_has_none(config, words: Sequence[str], rule: str) -> None:
    counted = ["--deployment.num-train-gpus", "1", "--deployment.num-infer-gpus", "1", "--dry-run"]
    cfg = config(*words, *counted)
    assert all(spec.devices for spec in planning.plan(cfg, cfg.run_dir).processes if spec.role == "trainer")


@needs("routers", "vllm")
@pytest.mark.parametrize(("words", "rule"), NEED_A_GPU)
def test_nodes_are_judged_by_the_gpus_that_the_deployment_counts(config, words: Sequence[str], rule: str) -> None:
    with_gpus = config(*words, *NODES, "--deployment.gpus-per-node", "1", "--dry-run")
    plan_nodes(with_gpus, with_gpus.run_dir)
    without = config(*words, *NODES, "--deployment.gpus-per-node", "0", "--inference.device", "cpu", "--dry-run")
    with pytest.raises(ConfigError, match=rule):
        plan_nodes(without, without.run_dir)


@needs("vllm")
def test_an_engine_that_is_told_to_run_on_the_cpu_is_judged_so_beside_a_trainer_with_gpus(config) -> None:
    cfg = config(*OFFLOAD, "native", "--inference.device", "cpu", "--dry-run",
                 "--deployment.num-train-gpus", "1")  # fmt: skip
    with pytest.raises(ConfigError, match="kv_cache_offload"):
        planning.plan(cfg, cfg.run_dir)


@needs("vllm")
def test_a_store_that_needs_no_gpu_is_accepted_on_the_cpu(config) -> None:
    cfg = config(*OFFLOAD, "mooncake", "--inference.kv-cache-offload.protocol", "tcp")
    planning.plan(cfg, cfg.run_dir)


@needs("vllm")
def test_inference_alone_refuses_it_too(tmp_path: Path) -> None:
    cfg = load(
        InferenceConfig,
        [OFFLOAD[0].replace("inference.", ""), "1", "--kv-cache-offload.type", "native", "--output-dir", str(tmp_path)],
    )
    with pytest.raises(ConfigError, match="kv_cache_offload"):
        plan_serving(cfg, cfg.run_dir)


def test_a_gpu_that_trainer_and_engine_share_is_named_once(config) -> None:
    cfg = config("--trainer-gpu-ids", "0", "--inference-gpu-ids", "0", "--inference.gpu-memory-utilization", "0.4",
                 "--dry-run")  # fmt: skip
    assert any(note.startswith("this run asks for GPU 0, and") for note in planning.plan(cfg, cfg.run_dir).notes)
