"""Trained replies are samples of the policy: top_p and the like are replayed or refused, greedy turns skipped."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from fakes import EchoEnv, FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from turns import TellingEngine, Turns, play_turns

from stretto.base.errors import EnvError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.orchestrator.batch import samples_of
from stretto.orchestrator.rollout.player import Player
from stretto.orchestrator.run.pipeline import trained_player
from stretto.records.rollout import RolloutStatus
from stretto.vime import Sample
from stretto.vime.convert import sample_of


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"top_k": 20}, "top_k = 20"),
        ({"min_p": 0.1, "top_k": 5}, "top_k = 5, min_p = 0.1"),
    ],
)
def test_a_turn_that_is_cut_and_trained_fails_with_the_reason(turn, words):
    [rollout] = play_turns(Turns({}, turn))
    assert rollout.status is RolloutStatus.FAILED
    assert f"is sampled with {words}:" in rollout.error and "[orchestrator.train.replay]" in rollout.error


@pytest.mark.parametrize(
    "turn",
    [{"top_p": 1.0}, {"top_k": -1}, {"top_k": 0}, {"temperature": 0, "top_p": 0.9}, {"top_p": 0.9, "other": True}],
)
def test_a_turn_that_cuts_nothing_or_is_not_trained_may_be_played(turn):
    [rollout] = play_turns(Turns({}, turn))
    assert rollout.status is RolloutStatus.FINISHED, rollout.error


def test_rollouts_that_are_not_learned_from_are_sampled_as_one_likes():
    [rollout] = play_turns(Turns({"top_p": 0.9}, {"temperature": 0}), is_learned=False)
    assert rollout.status is RolloutStatus.FINISHED and rollout.branches[0].is_greedy is None
    assert len(play_turns(EchoEnv(), is_learned=False, sampling=SamplingSection(top_p=0.5))) == 1


@pytest.mark.parametrize("env", [EchoEnv(), Turns({}, {})], ids=["group", "turns"])
def test_what_was_left_to_draw_from_comes_with_the_tokens(env):
    engine = TellingEngine(parrot(1.0))
    rollouts = play_turns(env, engine, members=3, sampling=SamplingSection(top_p=0.9), max_support=64)
    assert {request.sampling.top_k for request in engine.requests} == {64}, "a bound for the wire"
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.FINISHED, rollout.error
        for branch in rollout.branches:
            parts = branch.support.lists()
            assert len(parts) == len(branch.token_ids)
            for token, is_sampled, part in zip(branch.token_ids.tolist(), branch.is_sampled, parts):
                assert part == ([token, 46] if is_sampled else [])
        assert all(sample.support is not None for sample in samples_of(rollout, 1.0))


def test_a_turn_keeps_its_own_top_k_as_far_as_it_can_be_replayed():
    engine = TellingEngine(parrot(1.0))
    [rollout] = play_turns(Turns({"top_k": 8}, {}, {"min_p": 0.1}), engine, max_support=64)
    assert [request.sampling.top_k for request in engine.requests] == [8, None, 64]
    [branch] = rollout.branches
    assert (branch.support.sizes > 0).sum() == branch.is_sampled.sum() - len("def.")
    [rollout] = play_turns(Turns({"top_k": 65}), max_support=64)
    assert "top_k = 65, more than orchestrator.train.replay.max_tokens = 64" in rollout.error


@pytest.mark.parametrize("env", [EchoEnv(), Turns({})], ids=["group", "turns"])
def test_an_engine_that_does_not_say_what_was_left_is_named(env):
    [rollout] = play_turns(env, FakeEngine(parrot(1.0)), sampling=SamplingSection(top_p=0.9), max_support=64)
    assert rollout.status is RolloutStatus.FAILED
    assert "inference.enable_return_sampling_mask = true" in rollout.error


# -- greedy turns --


def test_tokens_of_a_greedy_turn_are_not_trained():
    [rollout] = play_turns(Turns({}, {"temperature": 0}, {}))
    [branch] = rollout.branches
    [sample] = samples_of(rollout, 1.0)
    assert "".join(chr(i) for i in branch.token_ids[branch.is_greedy]) == "def."
    assert (sample.loss_mask == (branch.is_sampled & ~branch.is_greedy)).all()
    assert sample.loss_mask.sum() == len("abc.def.") and not sample.advantages[branch.is_greedy].any()
    assert rollout.num_sampled_tokens == len("abc.def.def."), "they were sampled all the same"
    shown = sample_of(rollout, "")
    assert shown.loss_mask == sample.loss_mask[-shown.response_length :].astype(int).tolist()


def test_a_rollout_whose_every_turn_is_greedy_fails_with_the_reason():
    [rollout] = play_turns(Turns({"temperature": 0}, {"temperature": 0}))
    assert rollout.status is RolloutStatus.FAILED and "all its replies are greedy" in rollout.error
    [rollout] = play_turns(Turns({"temperature": 0, "other": True}, {}))
    assert rollout.status is RolloutStatus.FINISHED


def test_a_teachers_greedy_turn_is_learned_by_cross_entropy():
    [rollout] = play_turns(Turns({}, {"temperature": 0}))
    frozen = msgspec.structs.replace(rollout.branches[0], is_frozen=True)
    [sample] = samples_of(msgspec.structs.replace(rollout, branches=(frozen,)), 0.0)
    assert (sample.ce_weights > 0).sum() == len("abc.def.") and sample.support is None


def test_only_players_of_trained_environments_require_logprobs(tmp_path):
    teacher = {"base_url": "http://127.0.0.1:9/v1"}
    envs = [
        {"id": "sort-letters"},
        {"id": "reverse-text", "algo": {"type": "sft", "teacher": teacher}, "sampling": {"top_p": 0.9}},
    ]
    cfg = config(tmp_path, env=envs, train={"replay": {"max_tokens": 32}})
    player = Player(engine=None, renderer=None, sampling=cfg.train.sampling, seq_len=10)
    assert not player.is_learned, "as evals play"
    first, second = (trained_player(player, cfg, name) for name in ("sort-letters", "reverse-text"))
    assert (first.is_learned, first.max_support, second.is_learned) == (True, 32, False)


# -- samples that functions bring along --


def test_a_sample_that_grows_and_shrinks_keeps_what_it_was_drawn_from():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens([3], [-1.0])
    sample.append_response_tokens([4, 5], [-1.0, -2.0], sampling_mask=[[4, 9], [5]])
    sample.append_response_tokens([6], trainable=False)
    assert sample.rollout_top_p_token_ids == [4, 9, 5]
    assert sample.rollout_top_p_token_lengths == [0, 2, 1, 0]
    sample.strip_last_output_tokens(2)
    assert (sample.rollout_top_p_token_ids, sample.rollout_top_p_token_lengths) == ([4, 9], [0, 2])
    sample.check()
    with pytest.raises(EnvError, match="sampling_mask of 1"):
        sample.append_response_tokens([4, 5], [-1.0, -2.0], sampling_mask=[[4]])
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_a_run_with_cuts_ships_what_was_left_to_draw_from(tmp_path):
    cfg = config(tmp_path, train={"sampling": {"top_p": 0.9}, "replay": {"max_tokens": 16}}, max_steps=2)
    engine, trainer = TellingEngine(parrot(0.5)), FakeTrainer(max_steps=2)
    train(cfg, engine, trainer)
    assert {request.sampling.top_k for request in engine.requests} == {16}
    for mb in (mb for step in trainer.batches for batch in step for mb in batch.micro_batches):
        sizes = mb.support.sizes
        assert (sizes[mb.loss_mask] == 2).all() and not sizes[~mb.loss_mask].any()
        assert np.array_equal(mb.support.ids[::2], mb.token_ids[mb.loss_mask])
