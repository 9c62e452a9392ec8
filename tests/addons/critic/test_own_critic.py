"""A critic on ranks of its own: over the real wire, in another thread of this process."""

from __future__ import annotations

import threading

import pytest
import torch
from critic_cases import build_critic
from ports import free_port
from processes.add_ons import needs
from tiny import build_learner, pack, scored

from stretto.base.errors import ENDED_FIRST, ConfigError, DataError, EngineError
from stretto.base.paths import RunDir
from stretto.config.root import TrainerConfig
from stretto.config.sections.algorithm import GaeAdvantages, PpoLoss
from stretto.config.sections.trainer import CkptSection, CriticPlacement, CriticSection
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state import checkpoint
from stretto.trainer.updates import Updates
from stretto_critic import wire
from stretto_critic.ranks import CriticProcess
from stretto_critic.wire import RemoteCritic, Roles, open_wire

MESH = Mesh.single_rank(torch.device("cpu"))


def config(directory, **changes) -> TrainerConfig:
    section = CriticSection(
        placement=CriticPlacement(port=free_port()), num_critic_only_steps=1, lr_warmup_steps=2, lr=3e-2
    )
    return TrainerConfig(
        output_dir=directory, run={"name": "run"}, critic=section, ckpt=CkptSection(is_async=False),
        loss=PpoLoss(), advantages=GaeAdvantages(gamma=0.9, lambd=0.8), **changes,
    )  # fmt: skip


class OtherThread(threading.Thread):
    """The critic's process; `error` is what ended it."""

    def __init__(self, cfg: TrainerConfig, step: int = 0) -> None:
        super().__init__(daemon=True)
        self.cfg, self.error = cfg, None
        self.critic = build_critic(cfg.critic)
        self.process = CriticProcess(cfg, self.critic, cfg.output_dir)
        self.process.critic.step = step
        self.start()

    def run(self) -> None:
        try:
            self.process.run(open_wire(self.cfg, MESH, is_critic=True))
        except Exception as error:
            self.error = error


def connected(cfg: TrainerConfig) -> RemoteCritic:
    remote = RemoteCritic(cfg, MESH)
    remote.connect()
    return remote


def tensors(module):
    return [p.detach().clone() for p in module.parameters()]


def rotated(docs, by):
    return [pack(docs[by:]), pack(docs[:by])]


@pytest.mark.heavy
@pytest.mark.parametrize("changes", [{}, {"updates_per_step": 2, "epochs_per_step": 2}])
def test_its_weights_and_the_policys_are_those_of_a_critic_on_shared_ranks(changes, tmp_path):
    cfg, docs = config(tmp_path, **changes), scored()
    shared = build_learner(loss=PpoLoss(), valuer=build_critic(cfg.critic))
    other = OtherThread(cfg)
    remote = connected(cfg)
    remote.begin(0)
    learner = build_learner(loss=PpoLoss(), valuer=remote)
    by_shared, by_own = Updates(shared, cfg), Updates(learner, cfg)
    for by in (3, 1, 2):
        expected, found = by_shared.train(rotated(docs, by)), by_own.train(rotated(docs, by))
        waits = {name: found.pop(name) for name in ("time/wait_for_values", "time/wait_for_critic")}
        assert found == expected and all(wait >= 0 for wait in waits.values())
    remote.save()
    remote.flush()
    assert remote.has_saved(3) and not remote.has_saved(2)
    remote.end()
    other.join(30)
    assert other.error is None and not other.is_alive()
    for ours, theirs in ((learner.policy, shared.policy), (other.critic.module, shared.valuer.module)):
        for one, two in zip(tensors(ours), tensors(theirs)):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
    saver = checkpoint.Saver(cfg.run_dir, is_async=False, on_written=lambda step: None)
    saver.save(learner)
    _check_either_placement_loads(cfg, shared)


HALVES = """
def second_half(args, rollout_id, rollout_data):
    for mask in rollout_data["loss_masks"]:
        mask[: len(mask) // 2] = 0
"""


@pytest.mark.heavy
@needs("vime")
def test_tokens_that_a_users_function_masks_are_not_the_critics_either(tmp_path, monkeypatch):
    name = f"halves_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(HALVES)
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = config(tmp_path, hooks={"data_postprocess": f"{name}:second_half"})
    shared = build_learner(loss=PpoLoss(), valuer=build_critic(cfg.critic))
    other = OtherThread(cfg)
    remote = connected(cfg)
    remote.begin(0)
    learner = build_learner(loss=PpoLoss(), valuer=remote)
    for by in (3, 1):
        batch = rotated(scored(), by)
        expected, found = Updates(shared, cfg).train(batch), Updates(learner, cfg).train(batch)
        assert {name: found[name] for name in expected} == expected
    remote.end()
    other.join(30)
    assert other.error is None
    for one, two in zip(tensors(other.critic.module), tensors(shared.valuer.module)):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def _check_either_placement_loads(cfg, shared):
    """A checkpoint of one placement continues in the other."""
    here = build_learner(loss=PpoLoss(), valuer=build_critic(cfg.critic))
    checkpoint.load(cfg.run_dir, here, 3)
    assert all(map(torch.equal, tensors(here.valuer.module), tensors(shared.valuer.module)))
    of_shared = RunDir(cfg.output_dir / "shared")
    checkpoint.Saver(of_shared, is_async=False, on_written=lambda step: None).save(shared)
    alone = build_critic(cfg.critic)
    checkpoint.load(of_shared, alone, 3)
    assert alone.step == 3
    assert all(map(torch.equal, tensors(alone.module), tensors(shared.valuer.module)))
    checkpoint.load(of_shared, build_learner(loss=PpoLoss(), valuer=RemoteCritic(cfg, MESH)), 3)
    with pytest.raises(DataError, match=r"there is no \[trainer.critic\]"):
        checkpoint.load(cfg.run_dir, build_learner(loss=PpoLoss()), 3)


@pytest.mark.heavy
def test_a_role_that_ends_is_named_to_the_other(tmp_path):
    cfg = config(tmp_path)
    other = OtherThread(cfg)
    remote = connected(cfg)
    remote.begin(0)
    remote._wire._group.shutdown()
    del remote
    other.join(30)
    assert isinstance(other.error, EngineError) and f"trainer {ENDED_FIRST}" in str(other.error)


def test_roles_that_continue_from_different_steps_are_refused(tmp_path):
    cfg = config(tmp_path)
    OtherThread(cfg, step=7)
    remote = connected(cfg)
    with pytest.raises(ConfigError, match=r"critic .*step 7, .*trainer .*step 5"):
        remote.begin(5)


def test_a_critic_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "JOIN_TIMEOUT_S", 0.2)
    with pytest.raises(Exception, match=r"critic did not connect to 127\.0\.0\.1"):
        open_wire(config(tmp_path), MESH, is_critic=False)


def test_every_rank_of_the_policy_has_one_of_the_critics():
    roles = Roles(4, 2, 2)
    assert [roles.critic_of(rank) for rank in range(4)] == [4, 5, 4, 5]
    assert [roles.policies_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    names = [roles.name(index) for index in range(6)]
    assert names == ["trainer_0", "trainer_2", "trainer_4", "trainer_6", "critic_0", "critic_2"]
    staged = Roles(2, 1, 2, num_stages=2)
    assert [staged.name(index) for index in range(3)] == ["trainer_0", "trainer_2", "critic_0"]
    assert Roles(1, 1, 1, num_stages=2).name(1) == "critic_0"
    assert Roles(1, 1, 1).name(0) == "trainer" and Roles(1, 1, 1).name(1) == "critic"
