"""Rollouts within a rollout: what their policy says is recorded, credited and limited as in a rollout of their own."""

from __future__ import annotations

import asyncio

import pytest
from fakes import FakeEngine, run_virtual
from turns import CallRenderer, OneTask, text_of

from stretto.config.sections.algorithm import GrpoAlgo, ReturnsCredit
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import EpisodeLimits, RolloutResult, SingleTurnEnv
from stretto.envs.multi_turn import MultiTurnEnv
from stretto.envs.parts import MOST_LEVELS, play_part
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.orchestrator.groups.turns import credit_turns
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus


def said(prompt, rng, version):
    """The last message with the letters in another order now and then, so that members of a group differ."""
    last = prompt.rpartition("U")[2].partition(".")[0]
    return last if rng.random() < 0.5 else last[::-1]


def play(env, members=1, answer=said, **sampling):
    settings = {"sampling": SamplingSection(**sampling), "seq_len": 2000, "seed": 1, "max_retries": 0}
    player = Player(engine=FakeEngine(answer), renderer=CallRenderer(), **settings)
    return run_virtual(player.play(env, Draw(3, env.tasks("train").task(0), members, version=0)))


class Word(OneTask, SingleTurnEnv):
    def prompt(self, task):
        return "xyz"

    def score(self, task, text):
        return RolloutResult(reward=float(text == "xyz"), metrics={"length": float(len(text))})


class Steps(OneTask, MultiTurnEnv):
    """Each turn is rewarded with its number."""

    def __init__(self, num_turns=2, **limits):
        super().__init__()
        self.num_turns, self.limits = num_turns, EpisodeLimits(**limits)

    def prompt(self, task):
        return "ab"

    def respond(self, episode, reply):
        return None if episode.num_turns == self.num_turns else [{"role": "user", "content": "cd"}]

    def turn_reward(self, episode, reply):
        return float(episode.num_turns)

    def score(self, episode):
        return episode.num_turns / 10


class Team(OneTask):
    """Has its parts played side by side, says something, and gets the sum of their rewards."""

    limits = EpisodeLimits()

    def __init__(self, parts, **own):
        super().__init__()
        self.parts, self.own = parts, own

    async def rollout(self, task, ctx):
        played = (play_part(ctx, env, env.tasks("train").task(0), name) for name, env in self.parts.items())
        parts = tuple(await asyncio.gather(*played))
        await ctx.chat([{"role": "user", "content": "done"}])
        return RolloutResult(reward=sum(part.result.reward for part in parts), parts=parts, **self.own)


def test_parts_are_agents_of_the_rollout_with_their_own_rewards_and_metrics():
    [rollout] = play(Team({"word": Word(), "steps": Steps()})).rollouts
    assert rollout.status is RolloutStatus.FINISHED and rollout.num_turns == 4
    assert {branch.agent for branch in rollout.branches} == {"policy", "word", "steps"}
    word = float(next(text_of(b, is_sampled=True) for b in rollout.branches if b.agent == "word") == "xyz.")
    assert rollout.agent_rewards == {"word": word, "steps": 0.2} and rollout.reward == word + 0.2
    assert rollout.metrics == {"word/reward": word, "word/length": 3.0, "steps/reward": 0.2}


def test_what_the_rollout_says_of_an_agent_and_a_metric_goes_before_the_part():
    own = {"agent_rewards": {"word": 7.0}, "metrics": {"word/length": 8.0}}
    [rollout] = play(Team({"word": Word()}, **own)).rollouts
    assert rollout.agent_rewards == {"word": 7.0} and rollout.metrics["word/length"] == 8.0


def test_members_are_compared_part_by_part():
    group, has_signal = assign_advantages(play(Team({"first": Word(), "second": Word()}), members=8), GrpoAlgo())
    assert has_signal
    for agent in ("first", "second"):
        rewards = [rollout.agent_rewards[agent] for rollout in group.rollouts]
        mean = sum(rewards) / len(rewards)
        assert list(group.agent_advantages[agent]) == pytest.approx([reward - mean for reward in rewards])


def test_turns_of_parts_are_credited():
    [rollout] = play(Team({"steps": Steps(), "more": Steps(3)})).rollouts
    rewards = {name: [t.reward for t in rollout.turns if t.agent == name] for name in ("steps", "more", "policy")}
    assert rewards == {"steps": [1.0, 2.0], "more": [1.0, 2.0, 3.0], "policy": [None]}
    group = play(Team({"steps": Steps(), "word": Word()}), members=4)
    algo = GrpoAlgo(turns=ReturnsCredit())
    credited = credit_turns(assign_advantages(group, algo)[0], algo)
    assert [len(each) for each in credited.turn_advantages] == [4] * 4


def test_parts_within_parts_keep_their_names_and_turns():
    [rollout] = play(Team({"inner": Team({"steps": Steps()})})).rollouts
    assert {branch.agent for branch in rollout.branches} == {"policy", "inner", "inner/steps"}
    assert rollout.agent_rewards == {"inner": 0.2, "inner/steps": 0.2}
    assert rollout.metrics["inner/steps/reward"] == 0.2
    assert [t.reward for t in rollout.turns if t.agent == "inner/steps"] == [1.0, 2.0]


def test_a_part_has_the_limits_of_its_environment():
    [rollout] = play(Team({"steps": Steps(9, max_turns=3)})).rollouts
    assert rollout.status is RolloutStatus.FINISHED and rollout.num_turns == 4 and rollout.reward == 0.3
    [rollout] = play(Team({"steps": Steps(9, max_tokens=5)})).rollouts
    [branch] = [b for b in rollout.branches if b.agent == "steps"]
    assert branch.is_sampled.sum() == 5


def test_no_reply_of_a_part_is_longer_than_the_run_allows():
    [rollout] = play(Team({"steps": Steps(1, max_tokens=50)}), max_completion_tokens=1).rollouts
    assert all(branch.is_sampled.sum() == 1 for branch in rollout.branches)


def test_the_limit_of_the_whole_rollout_ends_its_parts():
    team = Team({"steps": Steps(9)})
    team.limits = EpisodeLimits(max_turns=3)
    [rollout] = play(team).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.num_turns == 3


def test_a_part_that_raises_its_own_limit_has_no_reward():
    class Deaf(Steps):
        async def rollout(self, task, ctx):
            while True:
                await ctx.chat([{"role": "user", "content": "ab"}])

    [rollout] = play(Team({"deaf": Deaf(max_turns=2)})).rollouts
    assert rollout.status is RolloutStatus.FINISHED and rollout.agent_rewards == {"deaf": 0.0}


class Mirror(Team):
    """Plays itself."""

    def __init__(self):
        super().__init__({})
        self.parts = {"me": self}


class Group(Word):
    async def score_group(self, group, notes):
        return None


class Keeping(Word):
    async def rollout(self, task, ctx):
        ctx.keep([])


class Silent(OneTask):
    async def rollout(self, task, ctx):
        return RolloutResult(reward=1.0)


class Raising(Word):
    def score(self, task, text):
        raise ValueError("oh")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Mirror(), f"more than {MOST_LEVELS}"),
        (Team({"a": Group()}), "score_group"),
        (Team({"a": Keeping()}), "ctx.keep"),
        (Team({"a": Silent()}), "before any reply"),
        (Team({"a": Raising()}), "ValueError: oh"),
        (Team({"a": Word()}, turn_rewards=[1.0]), "1 entries for 2 turns"),
    ],
)
def test_what_a_part_cannot_do_fails_the_rollout_with_its_name(env, words):
    [rollout] = play(env).rollouts
    assert rollout.status is RolloutStatus.FAILED and words in rollout.error


def test_a_part_needs_a_name_of_its_own():
    class Twice(OneTask):
        async def rollout(self, task, ctx):
            parts = [await play_part(ctx, Word(), task, "word") for _ in range(2)]
            return RolloutResult(reward=0.0, parts=parts)

    [rollout] = play(Twice()).rollouts
    assert "two parts are named 'word'" in rollout.error
