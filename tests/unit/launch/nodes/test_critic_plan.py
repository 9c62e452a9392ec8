"""Where a critic on ranks of its own is: on one machine, on the trainer's nodes, or behind them; what is refused."""

from __future__ import annotations

import pytest
from cases import plans
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.launch.plan import plan as planning
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.table import gpu_sum, table

PPO = """
[trainer.loss]
type = "ppo"
[trainer.advantages]
type = "gae"
[trainer.critic]
lr = 1e-5
"""
TOML = plans.TOML.replace("group_size = 8", 'group_size = 1\nalgo = { type = "ppo" }') + PPO
WIDE = "--deployment.type multi_node --deployment.gpus_per_node 4 --inference.deployment.num_replicas 4"


@pytest.fixture
def config(tmp_path, monkeypatch):
    return plans.loader(tmp_path, monkeypatch, TOML, num_gpus=16)


def places(plan):
    return {spec.name: (spec.node, spec.devices) for spec in plan.processes if spec.role in ("trainer", "critic")}


@needs("routers")
def test_actor_critic_and_rollout_add_up(config):
    counts = "--deployment.num-train-gpus 4 --deployment.num-critic-gpus 4 --deployment.num-infer-gpus 8"
    cfg = config(f"{counts} --inference.deployment.num-replicas 8")
    plan = planning.plan(cfg, cfg.run_dir)
    assert gpu_sum(plan) == "4 trainer + 4 critic + 8 inference = 16"
    assert "gpus     4 trainer + 4 critic + 8 inference = 16" in table(plan)
    assert places(plan)["critic_0"] == (0, ("12",)) and places(plan)["trainer_3"] == (0, ("11",))
    first, lead = (next(spec for spec in plan.processes if spec.name == name) for name in ("critic_0", "trainer_0"))
    assert first.env["WORLD_SIZE"] == "4" and first.env["MASTER_PORT"] != lead.env["MASTER_PORT"]
    assert first.argv[3] == "critic" and lead.ports["critic"] == plan.config.critic_placement.port
    assert first.threads == lead.threads


def test_without_gpus_its_ranks_are_counted_by_workers(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cfg = config("--orchestrator.num-train-workers 2 --trainer.critic.placement.num-workers 2")
    plan = planning.plan(cfg, cfg.run_dir)
    assert places(plan).keys() == {"trainer_0", "trainer_1", "critic_0", "critic_1"} and gpu_sum(plan) is None


@needs("routers", "vllm")
def test_over_several_machines_it_is_beside_the_trainer_or_behind_it(config):
    beside = plan_nodes(cfg := config(f"{WIDE} --deployment.critic_gpus_per_node 2"), cfg.run_dir)
    assert places(beside)["critic_1"] == (0, ("5",)) and places(beside)["trainer_3"] == (0, ("3",))
    assert {spec.node for spec in beside.processes if spec.role == "inference"} == {1}
    assert beside.config.critic_placement.host == "node-0" and beside.config.num_nodes == 2
    behind = plan_nodes(cfg := config(f"{WIDE} --deployment.num_critic_nodes 1"), cfg.run_dir)
    assert places(behind)["critic_3"] == (1, ("3",)) and behind.config.num_nodes == 3
    critic = next(spec for spec in behind.processes if spec.name == "critic_0")
    assert (critic.env["MASTER_ADDR"], critic.env["MASTER_PORT"]) == ("node-1", "29501")
    assert {spec.node for spec in behind.processes if spec.role == "inference"} == {2}


@needs("critic")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--orchestrator.num-train-workers 4 --trainer.critic.placement.num-workers 3",
         "does not divide orchestrator.num_train_workers = 4: each of its ranks has the batches of as many of the "
         "policy's; valid: 1, 2, 4"),
        ("--trainer.critic.placement.num-workers 2 --deployment.num-critic-gpus 1 --deployment.num-train-gpus 2",
         "deployment.num_critic_gpus gives 1 GPUs; give 2"),
        ("--critic-gpu-ids 0,1 --trainer-gpu-ids 1,2", "share GPU 1, and both compute at once"),
        ("--trainer.critic.optim.type adamw --trainer.critic.optim.lr 1e-4", "trainer.critic.lr = 1e-05 beside"),
        (f"{WIDE} --deployment.critic_gpus_per_node 0", "both on GPUs, or both on CPUs"),
        (f"{WIDE} --deployment.num_critic_nodes 1 --trainer.critic.placement.num-workers 2",
         "its 1 nodes of 4 GPUs make 4 ranks; leave num_workers out"),
        ("--trainer.critic None --deployment.num-critic-gpus 1 --orchestrator.algo.type grpo --trainer.advantages None",
         "deployment.num_critic_gpus does nothing without [trainer.critic.placement]"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(words, said, config):
    with pytest.raises(ConfigError) as caught:
        config(words)
    assert said in str(caught.value), caught.value


def test_too_few_gpus_name_the_way_back_to_shared_ranks(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cfg = config("--trainer.critic.placement.num-workers 1").model_copy(update={"dry_run": False})
    with pytest.raises(ConfigError, match=r"critic takes 1 GPUs.*trainer\.critic\.placement"):
        planning.plan(cfg, cfg.run_dir)
