"""Credit per turn against formulas in plain Python, on random groups with branches, agents and lost members."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from stretto.base.errors import ConfigError
from stretto.config.sections.algorithm import (
    EchoAlgo,
    GrpoAlgo,
    PpoAlgo,
    RaeAlgo,
    ReturnsCredit,
    StatesCredit,
    ValuesCredit,
)
from stretto.config.sections.orchestrator import OrchestratorSection
from stretto.orchestrator.batch import pack, to_samples
from stretto.orchestrator.groups.advantages import Baselines, assign_advantages
from stretto.orchestrator.groups.filters import assess_group, is_flagged
from stretto.orchestrator.groups.turns import credit_turns
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, ScoredTurn, Task, TurnSpan
from stretto.trainer.updates import split_samples

TASK = Task(env="game", task_id="t", data={})


def branch(replies, agent="policy", *, is_trained=True, reward=None):
    """A branch with a prompt of two tokens before each reply; replies: (number of the turn, tokens)."""
    is_sampled, spans = [], []
    for turn, size in replies:
        is_sampled += [False] * 2
        spans.append(TurnSpan(turn, len(is_sampled), len(is_sampled) + size))
        is_sampled += [True] * size
    mask = np.array(is_sampled)
    return Branch(
        token_ids=np.arange(len(mask), dtype=np.int32),
        is_sampled=mask,
        logprobs=np.zeros(len(mask), np.float32),
        temperature=1.0,
        versions=(VersionSpan(0, 0, len(mask)),),
        agent=agent,
        is_trained=is_trained,
        reward=reward,
        turns=tuple(spans),
    )


def rollout(member, turns, branches, *, status=RolloutStatus.FINISHED, reward=0.0, agent_rewards=None):
    return Rollout(
        rollout_id=f"g0.{member}",
        group_id=0,
        member=member,
        task=TASK,
        status=status,
        branches=branches,
        turns=turns,
        num_turns=len(turns),
        reward=reward,
        agent_rewards=agent_rewards or {},
    )


def played(*members):
    return Group(group_id=0, task=TASK, rollouts=members)


def random_rollout(rng, member, *, has_branch_rewards):
    """A rollout of up to three agents, one of them not trained, whose turns lie in one or several branches."""
    fate = rng.random()
    reward = rng.choice([0.0, 1.0, rng.uniform(-2, 2)])
    if fate < 0.1:
        return rollout(member, (), (), status=RolloutStatus.FAILED)
    if fate < 0.2:  # the policy ran into a limit that the environment does not catch
        return rollout(member, (), (branch([(0, 2)]),), status=RolloutStatus.TRUNCATED)
    status = RolloutStatus.TRUNCATED if fate < 0.4 else RolloutStatus.FINISHED
    agents = ["policy"] if has_branch_rewards else rng.choice([["policy"], ["first", "second"], ["a", "b", "judge"]])
    owners = [rng.choice(agents) for _ in range(rng.randint(1, 6))]
    unvalued = rng.choice([None, None, *agents])
    turns = tuple(
        ScoredTurn(
            agent=agent,
            reward=rng.choice([0.0, rng.uniform(-1, 1)]),
            value=None if agent == unvalued and rng.random() < 0.7 else rng.uniform(-1, 1),
            state=rng.choice([None, "x", "y", "z"]),
        )
        for agent in owners
    )
    branches = []
    for agent in agents:
        numbers = [number for number, owner in enumerate(owners) if owner == agent]
        while numbers:  # a history that was rewritten begins a branch
            size = rng.randint(1, len(numbers))
            replies, numbers = [(n, rng.randint(1, 3)) for n in numbers[:size]], numbers[size:]
            own = rng.uniform(-1, 1) if has_branch_rewards else None
            branches.append(branch(replies, agent, is_trained=agent != "judge", reward=own))
    own_rewards = {agent: rng.uniform(-1, 1) for agent in agents if agent != "policy" and rng.random() < 0.7}
    return rollout(member, turns, tuple(branches), status=status, reward=reward, agent_rewards=own_rewards)


def random_group(rng):
    has_branch_rewards = rng.random() < 0.2
    size = rng.randint(2, 8)
    return played(*(random_rollout(rng, member, has_branch_rewards=has_branch_rewards) for member in range(size)))


# -- the reference --


@dataclass
class Step:
    member: int
    turn: int
    place: int  # in its chain
    state: str | None
    gain: float


def chains_by_comparison(group):
    """Lists of chains that are compared with each other; a chain is (member, numbers of turns, reward of its end)."""
    counted = [r for r in group.rollouts if r.status in ("finished", "truncated")]
    parts = [(r, b) for r in counted for b in r.branches if b.is_trained]
    if any(b.reward is not None for _, b in parts):
        chains = []
        for r, b in parts:
            end = b.reward if b.reward is not None else r.agent_rewards.get(b.agent, r.reward)
            if b.turns and r.turns:
                chains.append((r, [span.turn for span in b.turns], end))
        return [chains]
    found = []
    for agent in sorted({b.agent for _, b in parts}):
        chains = []
        for r in counted:
            numbers = [n for n, turn in enumerate(r.turns) if turn.agent == agent]
            if numbers:
                chains.append((r, numbers, r.agent_rewards.get(agent, r.reward)))
        found.append(chains)
    return found


def gains_of(r, numbers, end, section):
    """What the turns of a chain have gained, before any comparison."""
    rewards = [r.turns[n].reward for n in numbers]
    rewards[-1] += end
    if section.type == "values" and any(r.turns[n].value is None for n in numbers):
        return [0.0] * len(numbers)
    gains = []
    for k in range(len(numbers)):
        total = 0.0
        for j in range(k, len(numbers)):
            if section.type == "values":
                after = r.turns[numbers[j + 1]].value if j + 1 < len(numbers) else 0.0
                delta = rewards[j] + section.gamma * after - r.turns[numbers[j]].value
                total += (section.gamma * section.lambd) ** (j - k) * delta
            else:
                total += section.gamma ** (j - k) * rewards[j]
        gains.append(total)
    return gains


def reference(group, section):
    """Advantages of turns by member and number, with loops."""
    table = [[0.0] * len(r.turns) for r in group.rollouts]
    for chains in chains_by_comparison(group):
        steps = [
            Step(r.member, n, place, r.turns[n].state, gain)
            for r, numbers, end in chains
            for place, (n, gain) in enumerate(zip(numbers, gains_of(r, numbers, end, section)))
        ]
        for step in steps:
            if section.type == "values":
                table[step.member][step.turn] = section.weight * step.gain
                continue
            if section.type == "states":
                equal = [each.gain for each in steps if step.state is not None and each.state == step.state]
            else:
                equal = [each.gain for each in steps if each.place == step.place]
            if len(equal) < 2 or max(equal) == min(equal):
                continue
            mean = sum(equal) / len(equal)
            advantage = step.gain - mean
            if section.normalize_std:
                freedom = len(equal) - (section.normalize_std == "unbiased")
                advantage /= (sum((each - mean) ** 2 for each in equal) / freedom) ** 0.5 + 1e-6
            table[step.member][step.turn] = section.weight * advantage
    return table


def random_section(rng):
    common = {"weight": rng.choice([1.0, 0.3]), "gamma": rng.choice([0.0, 0.5, 0.95, 1.0])}
    if rng.random() < 0.34:
        return ValuesCredit(lambd=rng.choice([0.0, 0.7, 1.0]), **common)
    return rng.choice([ReturnsCredit, StatesCredit])(normalize_std=rng.choice([False, True, "unbiased"]), **common)


def has_what_it_needs(group, section):
    column = {"returns": "reward", "values": "value", "states": "state"}[section.type]
    turns = [turn for r in group.rollouts for turn in r.turns if r.is_counted]
    return any(getattr(turn, column) is not None for turn in turns)


@pytest.mark.heavy
def test_advantages_of_turns_are_those_of_the_formulas_on_300_random_groups():
    rng, num_groups, num_turns = random.Random(7), 0, 0
    while num_groups < 300:
        group, section = random_group(rng), random_section(rng)
        if not has_what_it_needs(group, section):
            continue
        num_groups += 1
        algo = GrpoAlgo(turns=section)
        plain, _ = assign_advantages(group, algo)
        credited = credit_turns(plain, algo)
        expected = reference(group, section)
        for got, wanted in zip(credited.turn_advantages, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-9)
            num_turns += len(wanted)
        for one, before in zip(to_samples([credited]), to_samples([plain]), strict=True):
            member, index = map(int, one.sample_id.removeprefix("g0.").split("/"))
            wanted = before.advantages.astype(np.float64)
            for span in group.rollouts[member].branches[index].turns if expected[member] else ():
                wanted[span.start : span.end] += expected[member][span.turn]
            np.testing.assert_allclose(one.advantages, wanted * one.loss_mask, rtol=1e-6, atol=1e-6)
            assert not one.advantages[~one.loss_mask].any(), "tokens of the environment get nothing"
    assert num_turns > 3000


@pytest.mark.parametrize("section", [ReturnsCredit, StatesCredit, ValuesCredit])
def test_weight_0_gives_the_same_bits_as_no_credit_of_turns(section):
    rng = random.Random(11)
    for _ in range(50):
        group = random_group(rng)
        algo = GrpoAlgo(turns=section(weight=0.0))
        if not has_what_it_needs(group, algo.turns):
            continue
        without, with_zero = (assess(group, each) for each in (GrpoAlgo(), algo))
        assert without.has_signal == with_zero.has_signal
        assert without.group.advantages == with_zero.group.advantages
        for a, b in zip(to_samples([without.group]), to_samples([with_zero.group]), strict=True):
            assert a.advantages.tobytes() == b.advantages.tobytes()
            assert a.token_rewards is b.token_rewards is None


def assess(group, algo, **settings):
    return assess_group(group, OrchestratorSection(algo=algo, env=[{"id": "wordle", "name": "game"}], **settings))


# -- how it fits into the rest --


def right_then_wrong(member=0, *, reward=0.0, **fields):
    """Two turns; the first earned 0.5."""
    turns = (ScoredTurn(agent="policy", reward=0.5, state="a"), ScoredTurn(agent="policy", reward=0.0, state="b"))
    return rollout(member, turns, (branch([(0, 2), (1, 1)]),), reward=reward, **fields)


def all_wrong(member=1, *, reward=0.0):
    turns = (ScoredTurn(agent="policy", reward=0.0, state="a"),)
    return rollout(member, turns, (branch([(0, 2)]),), reward=reward)


def test_a_group_of_equal_rewards_has_signal_if_its_turns_differ():
    group = played(right_then_wrong(), all_wrong())
    assert not assess(group, GrpoAlgo()).has_signal
    verdict = assess(group, GrpoAlgo(turns=ReturnsCredit()), filters=[{"type": "zero_advantage", "enforce": True}])
    assert verdict.has_signal
    assert verdict.group.advantages == (0.0, 0.0)
    assert verdict.group.turn_advantages == ((0.25, 0.0), (-0.25,))
    assert [r.dropped_by for r in verdict.group.rollouts] == [None, None]
    first, _ = to_samples([verdict.group])
    assert first.advantages.tolist() == [0, 0, 0.25, 0.25, 0, 0, 0]
    section = OrchestratorSection(filters=[{"type": "zero_advantage"}]).filters[0]
    assert is_flagged(assess(group, GrpoAlgo()).group, 0, section)


def test_a_failed_member_is_in_no_comparison():
    failed = right_then_wrong(2, status=RolloutStatus.FAILED)
    group = played(right_then_wrong(), all_wrong(), failed)
    assert assess(group, GrpoAlgo(turns=StatesCredit())).group.turn_advantages == ((0.25, 0.0), (-0.25,), (0.0, 0.0))


def test_the_rollouts_advantage_has_a_weight_of_its_own():
    group = played(right_then_wrong(reward=1.0), all_wrong())
    alone = assess(group, GrpoAlgo(turns=ReturnsCredit(rollout_weight=0.0)))
    assert alone.has_signal and alone.group.advantages == (0.0, 0.0)
    first, second = to_samples([alone.group])
    assert first.advantages.tolist() == [0, 0, 0.75, 0.75, 0, 0, 0]
    assert second.advantages.tolist() == [0, 0, -0.75, -0.75]


def test_the_weight_of_the_rollout_applies_to_baselines_of_the_batch():
    algo = RaeAlgo(turns=ReturnsCredit(rollout_weight=0.5))
    group = assess(played(right_then_wrong(reward=1.0), all_wrong()), algo).group
    (credited,) = Baselines({"game": algo}).subtract([group])
    assert credited.advantages == (0.5, 0.0)
    assert credited.turn_advantages == ((0.75, 0.0), (-0.75,))


def test_a_length_penalty_is_in_the_reward_of_the_last_turn():
    algo = GrpoAlgo(turns=ReturnsCredit(), length_penalty={"output_weight": 0, "input_weight": 0, "turns_weight": 1})
    group = assess(played(right_then_wrong(reward=1.0), all_wrong(reward=1.0)), algo).group
    # The mean reward is 1, the longest rollout loses 1 and the other half of it: returns 0.5, 0 and 0.5.
    assert group.turn_advantages == ((0.0, 0.0), (0.0,))


@pytest.mark.parametrize(
    ("section", "needed"),
    [(ReturnsCredit(), "turn_rewards"), (ValuesCredit(), "state_values"), (StatesCredit(), "states")],
)
def test_an_environment_that_says_nothing_of_turns_fails_the_group_with_the_reason(section, needed):
    plain = rollout(0, (), (branch([(0, 2)]),), reward=1.0)
    verdict = assess(played(plain), GrpoAlgo(turns=section))
    assert verdict.has_failed
    assert f'orchestrator.algo.turns.type = "{section.type}" needs {needed}' in verdict.group.rollouts[0].error
    cut = rollout(0, (), (branch([(0, 2)]),), status=RolloutStatus.TRUNCATED)
    assert not assess(played(cut), GrpoAlgo(turns=section)).has_failed, "the limit ended it before a result"
    with pytest.raises(ConfigError, match=r"env\.0\.algo\.turns"):
        credit_turns(played(plain), GrpoAlgo(turns=section), "env.0.algo")


def test_echo_trains_turns_that_have_an_advantage_though_their_rollout_has_none():
    first = right_then_wrong()
    weights = np.zeros(len(first.branches[0].token_ids), np.float32)
    weights[4:6] = 0.1
    echoed = msgspec.structs.replace(first.branches[0], ce_weights=weights)
    group = played(msgspec.structs.replace(first, branches=(echoed,)), all_wrong())
    with_turns = assess(group, EchoAlgo(turns=ReturnsCredit()))
    assert to_samples([with_turns.group])[0].rl_weights is None
    assert not to_samples([assess(group, EchoAlgo()).group])[0].rl_weights.any()


def test_rewards_of_turns_are_sent_to_a_trainer_with_a_critic():
    sent = to_samples([assess(played(right_then_wrong(reward=2.0), all_wrong()), PpoAlgo()).group])
    assert sent[0].advantages.tolist() == [0, 0, 2, 2, 0, 0, 2]
    assert sent[0].token_rewards.tolist() == [0, 0, 0, 0.5, 0, 0, 0]
    assert not sent[1].token_rewards.any()


def test_the_reward_of_a_turn_that_is_not_trained_goes_to_the_turn_before():
    turns = tuple(ScoredTurn(agent="policy", reward=r) for r in (0.5, 0.25))
    greedy = np.array([False] * 6 + [True])
    one = msgspec.structs.replace(branch([(0, 2), (1, 1)]), is_greedy=greedy)
    (sample,) = to_samples([assess(played(rollout(0, turns, (one,))), PpoAlgo()).group])
    assert sample.token_rewards.tolist() == [0, 0, 0, 0.75, 0, 0, 0]


def test_rewards_of_turns_are_packed_beside_samples_without_any():
    scored_samples = to_samples([assess(played(right_then_wrong(reward=2.0), all_wrong()), PpoAlgo()).group])
    plain = to_samples([assess(played(rollout(0, (), (branch([(0, 2)]),), reward=1.0)), PpoAlgo()).group])
    assert plain[0].token_rewards is None
    packing = pack([*plain, *scored_samples], step=1, seq_len=64)
    with pytest.raises(StopIteration) as done:
        while True:
            next(packing)
    [batch] = done.value.value
    [row] = batch.micro_batches
    assert sorted(part.sum() for part in np.split(row.token_rewards, row.cu_seqlens[1:-1])) == [0.0, 0.0, 0.5]
    (first, second) = split_samples([row], 2)
    assert sum(mb.token_rewards.sum() for mb in (*first, *second)) == 0.5
