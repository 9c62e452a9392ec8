"""Losses and credit by import path: typed inputs, the same result as ours, and one clear message for a mistake."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from tiny import build_learner, documents, gradients, pack

from stretto.algorithms.custom import custom_credit
from stretto.base.errors import ConfigError
from stretto.base.foreign import load_object
from stretto.config.sections.algorithm import CustomAlgo, CustomLoss, GspoLoss, RlooAlgo
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.records.rollout import Group, Rollout, RolloutStatus, Task

OWN = """
import torch
from stretto.algorithms.custom import CreditInputs, LossInputs, LossOutputs

def gspo(inputs: LossInputs, *, low, high):
    mean = inputs.samples.mean(inputs.logprobs - inputs.behavior_logprobs, inputs.is_member)
    ratio = inputs.samples.spread(mean).exp()
    loss = -torch.minimum(ratio * inputs.advantages, ratio.clamp(1 - low, 1 + high) * inputs.advantages)
    return LossOutputs(loss, {"ratio": ratio})

def rloo(inputs: CreditInputs):
    counted = inputs.rewards[inputs.is_counted]
    return [reward - (counted.sum() - reward) / (len(counted) - 1) for reward in inputs.rewards]

def total(inputs):
    return inputs.logprobs.sum()

def frozen(inputs):
    return inputs.logprobs.detach()

def broken(inputs):
    return 1 / 0

def endless(inputs):
    return [float("inf") for _ in inputs.rewards]

not_a_function = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's in the working directory; its name, new for every test."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def group(rewards, failed=()):
    task = Task(env="e", task_id="0", data={})
    rollouts = tuple(
        Rollout(
            rollout_id=f"g0.{i}",
            group_id=0,
            member=i,
            task=task,
            status=RolloutStatus.FAILED if i in failed else RolloutStatus.FINISHED,
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    )
    return Group(group_id=0, task=task, rollouts=rollouts)


def test_a_loss_of_ones_own_trains_like_the_same_loss_of_ours(user_module):
    ours = GspoLoss(clip_low=0.3, clip_high=0.4)
    theirs = CustomLoss(import_path=f"{user_module}:gspo", kwargs={"low": 0.3, "high": 0.4}, reduction=ours.reduction)
    results = []
    for loss in (ours, theirs):
        learner = build_learner(loss=loss)
        learner.forward_backward([pack(documents())])
        results.append((gradients(learner), learner.optim_step()))
    for name, gradient in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], gradient)
    assert results[1][1]["loss/mean"] == pytest.approx(results[0][1]["loss/mean"])
    assert results[1][1]["ratio/mean"] > 0


def test_custom_credit_gives_the_same_as_ours_and_failed_members_nothing(user_module):
    played = group([1.0, 0.0, 0.25, 9.0], failed=[3])
    ours, theirs = (assign_advantages(played, a) for a in (RlooAlgo(), CustomAlgo(import_path=f"{user_module}:rloo")))
    assert theirs[0].advantages == pytest.approx(ours[0].advantages) and theirs[1] is ours[1] is True
    assert theirs[0].advantages[3] == 0
    assert not assign_advantages(group([1.0, 1.0]), CustomAlgo(import_path=f"{user_module}.rloo"))[1]


@pytest.mark.parametrize(
    ("attr", "kwargs", "message"),
    [
        ("total", {}, r"loss is of shape \(\); return a tensor of shape \(\d+,\), one value per token"),
        ("frozen", {}, "the loss has no gradient"),
        ("broken", {}, r"own_\w+\.py:22: ZeroDivisionError: division by zero"),
        ("gspo", {"low": 1}, r"missing a required argument: 'high'; it is defined as gspo\(inputs"),
        ("not_a_function", {}, "is a int, not a function"),
        ("gsop", {}, r"has no 'gsop'; did you mean 'gspo'\?"),
    ],
)
def test_a_mistake_in_a_loss_says_what_and_where(user_module, attr, kwargs, message):
    with pytest.raises(ConfigError, match=message) as caught:
        learner = build_learner(loss=CustomLoss(import_path=f"{user_module}:{attr}", kwargs=kwargs))
        learner.forward_backward([pack(documents())])
    assert str(caught.value).startswith("trainer.loss.import_path = ")


def test_mistakes_in_credit_say_what_is_expected(user_module):
    played = group([1.0, 0.0])
    for attr, message in (
        ("broken", r"orchestrator\.algo\.import_path = .*own_\w+\.py:22: ZeroDivisionError"),
        ("endless", "advantages must be finite"),
        ("total", "AttributeError"),
    ):
        with pytest.raises(ConfigError, match=message):
            assign_advantages(played, CustomAlgo(import_path=f"{user_module}:{attr}"))
    short = msgspec.structs.replace(played, rollouts=played.rollouts[:1])
    from stretto.algorithms.custom import CreditInputs

    inputs = CreditInputs(np.ones(3), np.ones(3, bool), short)
    (load_object(f"{user_module}:rloo", "x").__globals__)["two"] = lambda inputs: [1.0, 2.0]
    with pytest.raises(ConfigError, match="each of the 3 members"):
        custom_credit(CustomAlgo(import_path=f"{user_module}:two"), inputs)


def test_paths_that_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import what_is_not_there\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "does_not_load.py").write_text("x = 1\nraise ValueError('no')\n")
    for path, message in (
        ("nothing", "write it as `module:attr`"),
        ("no_such_module:x", "no module 'no_such_module' on the Python path"),
        ("needs_more:x", r"needs_more\.py:1: No module named 'what_is_not_there'"),
        ("leaves:x", r"leaves\.py:2: SystemExit: it called sys\.exit\(3\); what a script does"),
        ("does_not_load:x", r"does_not_load\.py:2: ValueError: no"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_object(path, "here")
