"""Several teachers of one environment: what the trainer gets is the weighted mean of what they say."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_teacher import FakeTeacher, worth

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task
from stretto_frozen.teachers import ScoringTeacher, alternatives_of, join_teachers


class Doubtful(FakeTeacher):
    """Finds every token three times as unlikely, in nats."""

    async def generate(self, request):
        [completion] = await super().generate(request)
        return [type(completion)(**{**_fields(completion), "prompt_logprobs": 3 * completion.prompt_logprobs})]


def _fields(completion):
    return {name: getattr(completion, name) for name in completion.__struct_fields__}


def branch_of(ids, is_trained=True):
    ids = np.array(ids, np.int32)
    sampled = np.arange(len(ids)) >= 2
    spans = (VersionSpan(0, 2, len(ids)),)
    logprobs = np.where(sampled, -0.5, 0.0).astype(np.float32)
    return Branch(
        token_ids=ids, is_sampled=sampled, logprobs=logprobs, temperature=1.0, versions=spans, is_trained=is_trained
    )


def scored(engines):
    task = Task(env="e", task_id="0", data={})
    branches = (branch_of([5, 6, 7, 8]), branch_of([1, 2, 3], is_trained=False), branch_of([9, 8, 7, 6, 5]))
    rollout = Rollout(
        rollout_id="g0.0", group_id=0, member=0, task=task, status=RolloutStatus.FINISHED, branches=branches
    )
    group = asyncio.run(ScoringTeacher(engines).annotate(Group(group_id=0, task=task, rollouts=(rollout,))))
    [rollout] = group.rollouts
    return rollout


def test_the_weights_are_relative_and_branches_that_are_not_trained_are_not_scored():
    rollout = scored({"one": (FakeTeacher(), 1.0), "other": (Doubtful(), 3.0)})
    for branch in rollout.branches:
        if branch.is_trained:
            expected = worth(branch.token_ids) * (0.25 + 3 * 0.75)
            np.testing.assert_allclose(branch.ref_logprobs, expected, rtol=1e-6)
        else:
            assert branch.ref_logprobs is None
    mean = np.concatenate([worth(b.token_ids)[b.is_sampled] for b in rollout.branches if b.is_trained]).mean()
    assert rollout.metrics["teacher_kl/one"] == pytest.approx(-0.5 - mean)
    assert rollout.metrics["teacher_kl/other"] == pytest.approx(-0.5 - 3 * mean)
    assert rollout.metrics["teacher_kl"] == pytest.approx(-0.5 - 2.5 * mean)


def test_one_teacher_is_passed_on_bit_by_bit_whatever_its_weight():
    rollout = scored({"one": (FakeTeacher(), 0.3)})
    assert (rollout.branches[0].ref_logprobs == worth(rollout.branches[0].token_ids)).all()
    assert set(rollout.metrics) == {"teacher_kl"}


MODELS = ["--models.big.base_url", "http://h/v1", "--models.small.model", "x", "--seq-len", "64"]


def rl(*words, env="{}"):
    return load(
        RLConfig, ["--orchestrator.env", f'[{{"id": "sort-letters", "algo": {env}}}]', *MODELS, *words], verb="rl"
    )


def test_teachers_are_models_of_the_run_with_weights_above_0():
    rl(env='{"type": "opd", "teachers": {"big": 1, "small": 0.5}}')
    rl(env='{"type": "sft", "teachers": {"big": 1}}')


@pytest.mark.parametrize(
    ("algo", "words", "message"),
    [
        ('{"type": "opd", "teachers": {"huge": 1}}', (), r"env.0.algo.teachers.huge.*it has big, small"),
        ('{"type": "opd", "teachers": {"big": 0}}', (), r"env.0.algo.teachers.big = 0.*above 0"),
        ('{"type": "sft", "teachers": {"big": 1, "small": 1}}', (), r"env.0.algo.teachers.*one model plays"),
        (
            '{"type": "opd", "teachers": {"small": 1}}',
            ("--models.small.max_model_len", "64"),
            r"models.small.max_model_len = 64 must be above seq_len = 64",
        ),
        (
            '{"type": "opd", "teachers": {"big": 1}, "teacher": {"base_url": "http://h/v1"}}',
            (),
            r"env.0.algo.teacher and .*teachers",
        ),
    ],
)
def test_teachers_that_cannot_teach_are_refused(algo, words, message):
    with pytest.raises(ConfigError, match=message):
        rl(*words, env=algo)


def test_the_token_itself_is_one_of_its_alternatives_and_there_once():
    tokens, at = np.array([5, 6, 7], np.int32), np.array([1, 2])
    top_ids = np.array([[0, 0], [6, 9], [8, 9]], np.int32)
    top = np.array([[0, 0], [-0.1, -3], [-1, -2]], np.float32)
    one = alternatives_of(tokens, at, np.array([0, -0.1, -4], np.float32), (top_ids, top), is_forward=True)
    assert one.positions.tolist() == [1, 2] and one.is_forward.all() and (one.weights == 1).all()
    assert one.ids.tolist() == [[[6, -1, 9]], [[7, 8, 9]]]
    np.testing.assert_allclose(one.logprobs, [[[-0.1, 0, -3]], [[-4, -1, -2]]], rtol=1e-6)
    both = join_teachers([one, one], np.array([0.25, 0.75]))
    assert both.ids.tolist() == [[[6, -1, 9]] * 2, [[7, 8, 9]] * 2] and both.weights.tolist() == [[0.25, 0.75]] * 2
