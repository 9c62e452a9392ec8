"""Trainer and engines that take turns: the plan has both on the same GPUs; what contradicts that is refused."""

from __future__ import annotations

import pytest
from cases import plans

from stretto.base.errors import ConfigError
from stretto.launch.plan import plan as planning
from stretto.launch.plan.table import gpu_sum


@pytest.fixture
def config(tmp_path, monkeypatch):
    return plans.loader(tmp_path, monkeypatch, plans.TOML + "[colocate]\n", num_gpus=4)


def test_both_have_the_same_gpus_in_synchronous_steps_and_engines_can_sleep(config):
    cfg = config(
        "--deployment.num-train-gpus 4 --inference.parallel.tp 2 --inference.deployment.num-replicas 2"
    )
    assert cfg.orchestrator.max_async_level == 0 and cfg.inference.enable_sleep_mode
    plan = planning.plan(cfg, cfg.run_dir)
    devices = {spec.name: spec.devices for spec in plan.processes if spec.devices}
    assert devices["inference_0"] == ("0", "1") and devices["trainer_1"] == ("1",)
    assert gpu_sum(plan) == "4 trainer + 4 inference = 4, 4 of them shared"
    assert plan.config.inference.gpu_memory_utilization == cfg.inference.gpu_memory_utilization
    assert plan.config.trainer_config().colocate == plan.config.orchestrator_config().colocate is not None


def test_who_keeps_its_memory_leaves_the_engine_half_of_it(config):
    cfg = config("--deployment.num-train-gpus 1 --colocate.offload-train false")
    assert planning.plan(cfg, cfg.run_dir).config.inference.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--orchestrator.max-async-level 1", "engines sleep while the trainer trains; use 0"),
        ("--orchestrator.oversampling-factor 2", "orchestrator.max_async_level = 0 forbids it"),
        ("--colocate.offload-train false --colocate.offload-rollout false", "nobody puts memory away"),
        ("--no-inference", "with [colocate] the run starts its engines"),
        (
            "--inference.device cpu --inference.engine vllm",
            'vLLM has no sleep mode on a CPU; use engine = "embedded"',
        ),
        ("--model.lora.rank 4", "which level 2 drops; use 1"),
        ("--deployment.type multi_node", "trainer and engines of several machines have their own"),
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
