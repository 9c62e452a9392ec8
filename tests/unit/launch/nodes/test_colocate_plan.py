"""Trainer and engines that take turns: the plan has both on the same GPUs; what contradicts that is refused."""

from __future__ import annotations

import pytest
from cases import plans
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.launch.plan import plan as planning
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.table import engine_sum, gpu_sum

NODES = (
    "--deployment.type multi_node --deployment.num-train-nodes 2 --deployment.num-infer-replicas 2 "
    "--deployment.gpus-per-node 4 --inference.parallel.tp 4 "
)


@pytest.fixture
def config(tmp_path, monkeypatch):
    return plans.loader(tmp_path, monkeypatch, plans.TOML + "[colocate]\n", num_gpus=4)


@needs("routers")
def test_both_have_the_same_gpus_in_synchronous_steps_and_engines_can_sleep(config):
    cfg = config("--deployment.num-train-gpus 4 --inference.parallel.tp 2 --inference.deployment.num-replicas 2")
    assert cfg.orchestrator.max_async_level == 0 and cfg.inference.enable_sleep_mode
    plan = planning.plan(cfg, cfg.run_dir)
    devices = {spec.name: spec.devices for spec in plan.processes if spec.devices}
    assert devices["inference_0"] == ("0", "1") and devices["trainer_1"] == ("1",)
    assert gpu_sum(plan) == "4 trainer + 4 inference = 4, 4 of them shared"
    assert plan.config.inference.gpu_memory_utilization == cfg.inference.gpu_memory_utilization
    assert plan.config.trainer_config().colocate == plan.config.orchestrator_config().colocate is not None


def test_every_node_of_the_trainer_has_its_ranks_and_engines_on_the_same_gpus(config):
    cfg = config(NODES)
    assert cfg.num_nodes == 2 and cfg.weight_broadcast.type == "filesystem"
    plan = plan_nodes(cfg, cfg.run_dir)
    assert plan.hosts == ("node-0", "node-1")
    assert [(spec.node, spec.devices) for spec in plan.processes if spec.role == "inference"] == [
        (0, ("0", "1", "2", "3")),
        (1, ("0", "1", "2", "3")),
    ]
    assert gpu_sum(plan) == "8 trainer + 8 inference = 8, 8 of them shared"
    waiting = [spec.name for spec in plan.processes if spec.waits_for_devices]
    assert waiting == [f"trainer_{rank}" for rank in range(4)]
    assert not any(spec.imports_early for spec in plan.processes if spec.waits_for_devices)


@needs("routers", "vllm")
def test_an_engine_over_all_nodes_takes_turns_with_the_trainer_there(config):
    shape = "--inference.deployment.type multi_node --inference.deployment.num-nodes 2 "
    shape += "--inference.deployment.nodes-per-engine 2 --inference.deployment.gpus-per-node 4 "
    cfg = config(NODES.replace("replicas 2", "replicas 1").replace("tp 4", "tp 8") + shape)
    plan = plan_nodes(cfg, cfg.run_dir)
    assert [spec.node for spec in plan.processes if spec.role == "inference"] == [0, 1]
    assert engine_sum(plan) == "1 x 8 (over 2 nodes) = 8 GPUs"


def test_who_keeps_its_memory_leaves_the_engine_half_of_it(config):
    cfg = config("--deployment.num-train-gpus 1 --colocate.offload-train false")
    assert planning.plan(cfg, cfg.run_dir).config.inference.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--orchestrator.max-async-level 1", "engines sleep while the trainer trains; use 0"),
        ("--orchestrator.oversampling-factor 2", "orchestrator.max_async_level = 0 forbids it"),
        ("--colocate.offload-train false --colocate.offload-rollout false", "no process would free memory"),
        ("--no-inference", "with [colocate] the run starts its engines"),
        pytest.param(
            "--inference.device cpu --inference.engine vllm",
            'vLLM has no sleep mode on a CPU; use engine = "embedded"',
            marks=needs("vllm"),
        ),
        ("--model.lora.rank 4", "which level 2 drops; use 1"),
        (NODES + "--deployment.num-infer-replicas 1", "engines take 1 x 1 = 1 nodes, those of the trainer; give 1"),
        (
            NODES + "--inference.parallel.tp 2 --inference.parallel.dp 1",
            "the trainer takes deployment.gpus_per_node = 4 GPUs of a node and",
        ),
        (NODES + "--weight-broadcast.type collective", "NCCL connects no two processes of one GPU"),
        (NODES + "--weight-broadcast.type shm", "shared memory ends at one machine"),
    ],
)
def test_what_contradicts_turns_is_refused(words, said, config):
    with pytest.raises(ConfigError) as caught:
        config(words)
    assert said in str(caught.value), caught.value


def test_different_numbers_of_gpus_are_refused(config):
    cfg = config("--deployment.num-train-gpus 2 --inference.parallel.tp 1")
    with pytest.raises(ConfigError, match="the trainer takes 2 GPUs and the engines 1"):
        planning.plan(cfg, cfg.run_dir)
