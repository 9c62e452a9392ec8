import math
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config.root import OrchestratorConfig
from stretto.config.section import tag_of
from stretto.config.sections.algorithm import Algo
from stretto.config.sections.curriculum import (
    AdvantageGate,
    GibberishFilter,
    RepetitionFilter,
    RewardGate,
    ZeroAdvantageFilter,
)
from stretto.orchestrator.groups.filters import (
    apply_filters,
    assess_group,
    is_gibberish,
    is_repetitive,
    longest_run,
    mean_reward,
    undo_filters,
)
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task

TASK = Task(env="echo", task_id="t", data={})


def rollout(member, reward=0.0, *, ids=(7, 8), logprobs=(-1.0, -1.0), sampled=None, status="finished"):
    branch = Branch(
        token_ids=np.array(ids, np.int32),
        is_sampled=np.array([True] * len(ids) if sampled is None else sampled),
        logprobs=np.array(logprobs, np.float32),
        temperature=1.0,
        versions=(VersionSpan(0, 0, len(ids)),),
    )
    return Rollout(
        rollout_id=f"g0.{member}", group_id=0, member=member, task=TASK, reward=reward, branches=(branch,),
        status=RolloutStatus(status),
    )  # fmt: skip


def group(*rewards, advantages=None, **each):
    rollouts = tuple(rollout(member, reward, **each) for member, reward in enumerate(rewards))
    return Group(group_id=0, task=TASK, rollouts=rollouts, advantages=tuple(advantages or [0.0] * len(rewards)))


def test_rollouts_that_were_cut_are_not_trained_and_their_rewards_stay_in_the_mean(tmp_path):
    """mask_truncated_completions: the others' advantages are as if they were trained; alone they make no group."""
    cfg = OrchestratorConfig(env=[{"id": "fakes:EchoEnv", "name": "echo"}], mask_truncated_completions=True)
    cut = msgspec.structs.replace(rollout(1, 0.0), status=RolloutStatus.TRUNCATED)
    played = Group(group_id=0, task=TASK, rollouts=(rollout(0, 1.0), cut), advantages=(0.0, 0.0))
    verdict = assess_group(played, cfg)
    assert verdict.group.advantages == (0.5, -0.5) and verdict.rejected is None and verdict.has_signal
    assert [each.is_counted for each in verdict.group.rollouts] == [True, False]
    assert undo_filters(verdict.group).rollouts == played.rollouts and verdict.flags == {"truncated": 1}
    whole = assess_group(msgspec.structs.replace(played, rollouts=(cut, cut)), cfg)
    assert whole.rejected == "filter truncated"
    off = assess_group(played, OrchestratorConfig(env=cfg.env))
    assert all(each.is_counted for each in off.group.rollouts) and not off.flags


# -- filters against slow references --


def slow_gibberish(rollout, section, vocab_size):
    for branch in rollout.branches:
        for token, logprob, sampled in zip(branch.token_ids, branch.logprobs, branch.is_sampled):
            is_rare = sampled and token > section.token_id_threshold
            if is_rare and logprob < -math.log(vocab_size) - section.logprob_offset:
                return True
    return False


def slow_repetition(rollout, section):
    for branch in rollout.branches:
        count = 0
        for logprob, sampled in zip(branch.logprobs, branch.is_sampled):
            if not sampled:
                continue
            count = count + 1 if float(logprob) > math.log(section.prob_threshold) else 0
            if count >= section.window:
                return True
    return False


tokens = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from([0.0, -0.001, -0.5, -4.0, -6.0, -9.0]), st.booleans()), max_size=30
)


@pytest.mark.heavy
@settings(max_examples=60)
@given(tokens, st.integers(1, 6), st.integers(0, 20), st.floats(0, 3))
def test_filters_flag_what_their_slow_references_flag(tokens, window, threshold, offset):
    ids, logprobs, sampled = zip(*tokens) if tokens else ((), (), ())
    one = rollout(0, ids=ids, logprobs=logprobs, sampled=np.array(sampled, bool))
    repetition = RepetitionFilter(window=window, prob_threshold=0.9)
    assert is_repetitive(one, repetition) == slow_repetition(one, repetition)
    gibberish = GibberishFilter(token_id_threshold=threshold, logprob_offset=offset)
    assert is_gibberish(one, gibberish, 50) == slow_gibberish(one, gibberish, 50)


@given(st.lists(st.booleans(), max_size=40))
def test_the_longest_run_is_the_longest_word_of_a_text(flags):
    text = "".join("x" if flag else " " for flag in flags)
    assert longest_run(np.array(flags, bool)) == max(map(len, text.split()), default=0)


def test_by_hand_a_rare_token_below_chance_is_gibberish():
    section = GibberishFilter()  # -log(150000) - 2 = -13.92
    assert is_gibberish(rollout(0, ids=(5, 100_001), logprobs=(-20.0, -14.0)), section, 150_000)
    assert not is_gibberish(rollout(0, ids=(5, 100_001), logprobs=(-20.0, -13.9)), section, 150_000)
    assert not is_gibberish(rollout(0, ids=(5, 100_000), logprobs=(-20.0, -20.0)), section, 150_000)
    given_text = rollout(0, ids=(5, 100_001), logprobs=(-1.0, -20.0), sampled=np.array([True, False]))
    assert not is_gibberish(given_text, section, 150_000)


# -- what is left of a group --


def test_an_enforced_filter_drops_rollouts_and_keeps_their_rewards_in_the_baseline():
    before = group(0.0, 1.0, 1.0, advantages=[-0.67, 0.33, 0.33])
    looping = rollout(1, 1.0, logprobs=(0.0, 0.0))
    before = msgspec.structs.replace(before, rollouts=(before.rollouts[0], looping, before.rollouts[2]))
    verdict = apply_filters(before, {}, [RepetitionFilter(window=2, enforce=True)])
    assert verdict.rejected is None and verdict.flags == {"repetition": 1}
    assert [r.dropped_by for r in verdict.group.rollouts] == [None, "repetition", None]
    assert [r.is_counted for r in verdict.group.rollouts] == [True, False, True]
    assert verdict.group.advantages == before.advantages
    assert mean_reward(verdict.group) == pytest.approx(2 / 3)
    assert undo_filters(verdict.group) == before


def test_a_monitoring_filter_counts_and_changes_nothing():
    before = group(0.0, 1.0, logprobs=(0.0, 0.0), advantages=[-0.5, 0.5])
    verdict = apply_filters(before, {}, [RepetitionFilter(window=2)])
    assert verdict.flags == {"repetition": 2} and verdict.group is before and verdict.rejected is None


def test_a_group_without_a_remaining_rollout_is_rejected_by_the_filter():
    verdict = apply_filters(group(1.0, 1.0), {}, [ZeroAdvantageFilter()])
    assert verdict.rejected == "filter zero_advantage"
    assert [str(r.status) for r in verdict.group.rollouts] == ["finished"] * 2


def test_gates_reject_by_their_range_and_check_counted_members_only():
    dynamic = {"dynamic": AdvantageGate()}
    assert apply_filters(group(1.0, 1.0), dynamic, []).rejected == "gate dynamic"
    assert apply_filters(group(0.0, 1.0, advantages=[-0.5, 0.5]), dynamic, []).rejected is None
    tight = {"tight": AdvantageGate(reject_min=-0.1, reject_max=0.1)}
    assert apply_filters(group(0.5, 0.6, advantages=[-0.05, 0.05]), tight, []).rejected == "gate tight"
    easy = {"hard": RewardGate(), "easy": RewardGate(reject_min=0.9, reject_max=1.0)}
    assert apply_filters(group(1.0, 1.0), easy, []).rejected == "gate easy"
    assert apply_filters(group(0.0, 0.0), easy, []).rejected == "gate hard"
    assert apply_filters(group(0.0, 1.0), easy, []).rejected is None
    failed = Group(
        group_id=0, task=TASK, rollouts=(rollout(0, 1.0), rollout(1, 0.0, status="failed")), advantages=(0.0, 9.0)
    )
    assert apply_filters(failed, dynamic, []).rejected == "gate dynamic"
    assert apply_filters(failed, easy, []).rejected == "gate easy"


def wrong_credit(inputs):
    raise ValueError("no idea")


def config(**settings):
    return OrchestratorConfig.model_validate({"env": [{"id": "fakes:EchoEnv", "name": "echo"}]} | settings)


def test_a_custom_credit_that_raises_fails_its_group_with_file_and_line():
    cfg = config(algo={"type": "custom", "import_path": "test_filters:wrong_credit"})
    verdict = assess_group(group(0.0, 1.0), cfg)
    assert verdict.has_failed and not verdict.has_signal
    error = verdict.group.rollouts[0].error
    assert error.startswith("ConfigError") and "test_filters.py" in error and "ValueError: no idea" in error


OTHERWISE = {
    "hierarchical_grpo": {"episode_agents": ["solver"]},
    "custom": {"import_path": "test_filters:wrong_credit"},
    "opd": {"teacher": {"base_url": "http://127.0.0.1:1/v1"}},
    "sft": {"teacher": {"base_url": "http://127.0.0.1:1/v1"}},
}


@pytest.mark.parametrize("kind", [tag_of(section) for section in get_args(get_args(Algo)[0])])
def test_a_group_that_failed_as_a_whole_has_no_signal_whatever_its_credit(kind):
    cfg = config(algo={"type": kind} | OTHERWISE.get(kind, {}))
    lost = [msgspec.structs.replace(r, branches=(), error="lost") for r in group(0.0, 1.0, status="failed").rollouts]
    verdict = assess_group(msgspec.structs.replace(group(0.0, 1.0), rollouts=tuple(lost)), cfg)
    assert verdict.has_failed and not verdict.has_signal and verdict.rejected is None
    assert verdict.group.advantages == (0.0, 0.0) and verdict.group.rollouts[0].error == "lost"


def test_a_group_of_untrained_agents_has_no_signal_by_role():
    mute = [
        msgspec.structs.replace(r, branches=tuple(msgspec.structs.replace(b, is_trained=False) for b in r.branches))
        for r in group(0.0, 1.0).rollouts
    ]
    cfg = config(algo={"type": "hierarchical_grpo", "episode_agents": ["solver"]})
    verdict = assess_group(msgspec.structs.replace(group(0.0, 1.0), rollouts=tuple(mute)), cfg)
    assert not verdict.has_signal and verdict.group.advantages == (0.0, 0.0)


def test_assessing_again_gives_the_same():
    cfg = config(filters=[{"type": "repetition", "window": 2, "enforce": True}])
    mixed = group(0.0, 1.0, 1.0)
    mixed = msgspec.structs.replace(mixed, rollouts=(*mixed.rollouts[:2], rollout(2, 1.0, logprobs=(0.0, 0.0))))
    once = assess_group(mixed, cfg)
    assert once.group.rollouts[2].dropped_by == "repetition" and once.has_signal
    assert assess_group(once.group, cfg) == once


def test_a_truncated_rollout_that_a_filter_dropped_is_truncated_when_its_group_is_assessed_again():
    cut = group(0.0, 1.0, 1.0)
    looping = rollout(2, 1.0, logprobs=(0.0, 0.0), status="truncated")
    cut = msgspec.structs.replace(cut, rollouts=(*cut.rollouts[:2], looping))
    once = assess_group(cut, config(filters=[{"type": "repetition", "window": 2, "enforce": True}]))
    assert once.group.rollouts[2].dropped_by == "repetition"
    again = assess_group(once.group, config())  # a resumed run whose filters are others
    assert [str(r.status) for r in again.group.rollouts] == ["finished", "finished", "truncated"]
    assert again.group.rollouts[2].dropped_by is None
    assert undo_filters(once.group).rollouts == cut.rollouts
