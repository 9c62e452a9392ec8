"""Warnings about learning that goes wrong: each once, none for a run that learns."""

from __future__ import annotations

import math
import random

import pytest

from stretto_doctor.diagnosis import WINDOW, Diagnosis

GOOD = {
    "loss/mean": 0.1,
    "reward/mean": 0.2,
    "optim/grad_norm": 1.0,
    "groups/zero_signal_share": 0.4,
    "mismatch_kl/mean": 0.01,
    "completion/truncated_share": 0.05,
    "entropy/mean": 1.0,
    "tokens_per_s": 1000.0,
}


def warnings_of(rows) -> list[str]:
    diagnosis = Diagnosis(max_completion_tokens=2)
    return [text for row in rows for text in diagnosis.add(GOOD | row)]


def noisy(mean: float, rng: random.Random) -> dict[str, float]:
    return {"reward/mean": mean + rng.gauss(0, 0.03)}


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_gets_no_warning(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        noisy(0.2 + 0.7 * i / 300, rng) | {"entropy/mean": 1.0 / (1 + i / 20), "tokens_per_s": rng.uniform(700, 1300)}
        for i in range(300)
    ]
    assert warnings_of(rows) == []
    diagnosis = Diagnosis()
    for row in rows:
        diagnosis.add(GOOD | row)
    assert diagnosis.verdict().endswith("improved")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"groups/zero_signal_share": 1.0}, "100% of the groups have equal rewards"),
        ({"mismatch_kl/mean": 2.0}, "mismatch KL of the first batch is 2 nats per token"),
        ({"completion/truncated_share": 0.9}, "90% of the replies are truncated at max_completion_tokens = 2"),
        ({"loss/mean": math.nan}, "loss/mean is nan"),
        ({"reward/mean": math.inf}, "reward/mean is inf"),
        ({"clip/share": math.nan}, "the metric clip/share is nan at step 1"),
        ({"groups/unaccounted": 2.0}, "step 1: 2 groups are neither trained, dropped, failed nor waiting"),
        (
            {"canary/tolerance": 1e-3, "mismatch_kl/age/0": 1e-4},
            "trained version itself has sampled have a mismatch KL of 0.0001 nats, and rounding explains 1e-06",
        ),
        ({"advantage/group_sum": 0.5}, "step 1: the advantages of a group add up to 0.5 of their magnitude"),
    ],
)
def test_each_kind_gives_one_warning(bad: dict[str, float], words: str) -> None:
    [text] = [text for text in warnings_of([bad] * 50) if words in text]
    assert text


@pytest.mark.parametrize(("reward", "asked"), [(0.0, "wrong label"), (1.0, "not look at the reply")])
def test_a_reward_that_all_rollouts_share_is_named_with_what_to_ask(reward: float, asked: str) -> None:
    diagnosis = Diagnosis(max_completion_tokens=2)
    row = GOOD | {"groups/zero_signal_share": 1.0, "reward/mean": reward, "reward/std": 0.0}
    [text] = [text for _ in range(9) for text in diagnosis.add(row) if "of the groups have equal rewards" in text]
    assert f"Every rollout has the reward {reward:g}. " in text and asked in text
    assert diagnosis.verdict().endswith(f"likely: every rollout has the reward {reward:g}")


def test_a_reward_that_does_not_change_gives_a_warning_after_a_while() -> None:
    rng = random.Random(3)
    rows = [noisy(0.2, rng) for _ in range(150)]
    assert not warnings_of(rows[:90])
    [text] = warnings_of(rows)
    assert "has not risen beyond its noise" in text


def test_a_reward_that_falls_gives_a_warning_and_the_verdict_names_the_likely_reason() -> None:
    rng = random.Random(4)
    rows = [noisy(0.5, rng) for _ in range(20)] + [noisy(0.05, rng) | {"mismatch_kl/mean": 9.0} for _ in range(40)]
    texts = warnings_of(rows)
    assert any("the reward has fallen from 0.5" in text for text in texts), texts
    diagnosis = Diagnosis()
    for row in rows:
        diagnosis.add(GOOD | row)
    assert ": fell; likely: batches came from policies that were too far" in diagnosis.verdict()


def test_a_policy_that_moves_too_far_at_the_start_is_named_with_its_steps() -> None:
    """The first batches count: mean rewards of the first and last fifth are equal here."""
    rewards = [0.45, 0.43, 0.16, *[0.32] * 37]
    mismatches = [1e-6, 0.28, 0.52, 0.15, 0.11, *[0.02] * 35]
    rows = [{"reward/mean": r, "mismatch_kl/mean": k} for r, k in zip(rewards, mismatches)]
    [text] = warnings_of(rows)[:1]
    assert "the policy moved too far in step 2" in text and "trainer.scheduler.warmup_steps" in text
    assert not any("disagree" in text or "far from the one" in text for text in warnings_of(rows))
    diagnosis = Diagnosis()
    for row in rows:
        diagnosis.add(GOOD | row)
    assert "training reward 0.440 -> 0.320" in diagnosis.verdict()
    assert diagnosis.verdict().endswith("likely: the policy moved too far in steps 2 to 5")


def test_an_engine_that_computes_something_else_is_told_from_a_policy_that_moved() -> None:
    [text] = warnings_of([{"mismatch_kl/mean": 0.4}] * 3)
    assert "before any update" in text and "Compare dtype" in text


def test_the_first_batch_of_a_resumed_run_is_none_before_any_update() -> None:
    diagnosis = Diagnosis(steps_before=4)
    [text] = [text for _ in range(3) for text in diagnosis.add(GOOD | {"mismatch_kl/mean": 0.4})]
    assert "the policy moved too far in step 5" in text
    late = Diagnosis(steps_before=400)
    assert [late.add(GOOD | {"mismatch_kl/mean": 0.4}) for _ in range(3)] == [[]] * 3


@pytest.mark.parametrize(("samples", "tokens", "is_told"), [(0.2, 0.5, True), (0.2, 0.99, False), (0.5, 0.8, False)])
def test_batches_that_are_worth_few_of_their_samples_are_told(samples, tokens, is_told) -> None:
    rows = [{"ess/rollouts": samples, "ess/tokens": tokens}] * 10
    assert any("a batch is worth 20% of its samples" in text for text in warnings_of(rows)) == is_told


def test_entropy_that_collapses_gives_a_warning_only_if_the_reward_has_not_risen() -> None:
    rng = random.Random(5)
    flat = [noisy(0.2, rng) | {"entropy/mean": max(1.0 - i / 20, 0.001)} for i in range(60)]
    assert any("entropy has fallen from 1 to 0.001" in text for text in warnings_of(flat))
    rising = [row | noisy(0.2 + i / 100, rng) for i, row in enumerate(flat)]
    assert not any("entropy" in text for text in warnings_of(rising))


def test_a_run_that_becomes_slow_gives_a_warning() -> None:
    rows = [noisy(0.2 + i / 100, random.Random(i)) for i in range(40)] + [
        noisy(0.6 + i / 100, random.Random(i)) | {"tokens_per_s": 100.0} for i in range(20)
    ]
    assert any("100 tokens/s, while this run usually has 1000" in text for text in warnings_of(rows))


def test_few_steps_have_no_verdict() -> None:
    diagnosis = Diagnosis()
    for _ in range(3):
        diagnosis.add(GOOD)
    assert diagnosis.verdict() is None and WINDOW > 3


def evaluated(rewards: list[float], *evals: dict[str, float]) -> tuple[list[str], str]:
    """Warnings of the evals, which are spread over the steps, and the verdict."""
    diagnosis, said = Diagnosis(), []
    for number, reward in enumerate(rewards):
        diagnosis.add(GOOD | {"reward/mean": reward})
        if number in (0, len(rewards) - 1):
            said += diagnosis.add_eval(evals[number > 0])
    return said, diagnosis.verdict()


def test_a_reward_that_rises_while_a_held_out_one_falls_is_said_to_pay_for_something_else() -> None:
    rising = [0.1 + 0.02 * step for step in range(40)]
    warned, verdict = evaluated(rising, {"own": 0.2, "asked": 0.5}, {"own": 0.9, "asked": 0.1})
    [text] = warned
    assert "asked 0.500 -> 0.100" in text and "own" not in text and "--best 3" in text
    assert ": improved, but held-out rewards have fallen" in verdict and "pay for something else" in verdict


@pytest.mark.parametrize(
    ("rewards", "after"),
    [([0.1 + 0.02 * step for step in range(40)], 0.45), ([0.5] * 40, 0.1)],
    ids=["noise of an eval", "a reward that does not rise"],
)
def test_other_falls_are_not_blamed_on_the_reward(rewards: list[float], after: float) -> None:
    warned, verdict = evaluated(rewards, {"asked": 0.5}, {"asked": after})
    assert warned == [] and "held-out" not in verdict


def test_a_rollout_that_is_computed_otherwise_when_it_is_read_again_gives_a_warning() -> None:
    exact, rounded, name = {"canary/tolerance": 1e-3}, {"canary/tolerance": 0.3}, "canary/rollout_error"
    for row in (exact | {name: 9e-4}, rounded | {name: 0.1}, {name: 1.0}, exact):
        assert warnings_of([row]) == []
    [text] = warnings_of([exact, exact | {name: 0.02}, exact | {name: 0.03}])
    assert text.startswith("step 2: ") and "0.02 nats" in text and "rounding explains 0.001" in text
    diagnosis = Diagnosis()
    for _ in range(20):
        diagnosis.add(exact | {name: 0.02, "reward/mean": 0.5})
    assert "likely: the engine samples by another distribution than it computes" in diagnosis.verdict()


def test_numerics_and_age_are_told_apart() -> None:
    """Older tokens are further away; the bound follows from the precision, and without a check there is none."""
    exact, rounded = {"canary/tolerance": 1e-3}, {"canary/tolerance": 0.3}
    for row in (
        exact | {"mismatch_kl/age/1": 0.05},
        rounded | {"mismatch_kl/age/0": 0.01},
        {"mismatch_kl/age/0": 0.05},
        exact | {"mismatch_kl/age/0": 0.05, "optim/updates": 2.0},  # the second is of the policy that the first made
        exact | {"mismatch_kl/age/0": 0.05, "optim/dropout": 0.1},
    ):
        assert warnings_of([row]) == []
