"""What environments say of single turns reaches the rollout, turn by turn, and wrong words fail it."""

from __future__ import annotations

import asyncio

import pytest
from fakes import FakeEngine, run_virtual
from processes.add_ons import needs
from turns import CallRenderer, OneTask, scripted, text_of

from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import EpisodeLimits, LimitReached, RolloutResult, SingleTurnEnv
from stretto.envs.multi_turn import MultiTurnEnv, ToolEnv
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus, ScoredTurn


def play(env, answer, *, task=None, delay=None, **settings):
    engine = FakeEngine(answer, delay=delay)
    settings = {"sampling": SamplingSection(), "seq_len": 2000, "seed": 1, "max_retries": 0} | settings
    player = Player(engine=engine, renderer=CallRenderer(), **settings)
    draw = Draw(3, task or env.tasks("train").task(0), 1, version=0)
    (rollout,) = run_virtual(player.play(env, draw)).rollouts
    return rollout


def replies(rollout):
    """The text of each turn, by the spans of the branches."""
    found = {}
    for branch in rollout.branches:
        for span in branch.turns:
            assert branch.is_sampled[span.start : span.end].all()
            found[span.turn] = "".join(map(chr, branch.token_ids[span.start : span.end]))
    return [found[number] for number in sorted(found)]


class Counting(OneTask, MultiTurnEnv):
    """Each turn earns its number; the state is the number of turns so far."""

    limits = EpisodeLimits(max_turns=3)

    def prompt(self, task):
        return "go"

    def respond(self, episode, reply):
        return None if reply.text == "end" else [{"role": "user", "content": "on"}]

    async def turn_reward(self, episode, reply):
        return float(episode.num_turns)

    def state_value(self, episode):
        return episode.num_turns / 10

    def state_name(self, episode):
        return f"after {episode.num_turns}"

    def score(self, episode):
        return 7.0


def test_methods_of_an_environment_say_something_of_each_turn():
    rollout = play(Counting(), scripted("a", "end"))
    assert rollout.turns == (
        ScoredTurn(agent="policy", reward=1.0, value=0.0, state="after 0"),
        ScoredTurn(agent="policy", reward=2.0, value=0.1, state="after 1"),
    )
    assert replies(rollout) == ["a.", "end."]


def test_a_limit_before_a_reply_leaves_no_turn_behind():
    rollout = play(Counting(), scripted("a", "b", "c", "d"))
    assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.TRUNCATED, 7.0, 3)
    assert [turn.reward for turn in rollout.turns] == [1.0, 2.0, 3.0]
    assert [turn.state for turn in rollout.turns] == ["after 0", "after 1", "after 2"]


def test_a_score_that_names_the_rewards_itself_wins():
    class Own(Counting):
        def score(self, episode):
            return RolloutResult(reward=1.0, turn_rewards=[None, 0.5])

    assert [turn.reward for turn in play(Own(), scripted("a", "end")).turns] == [0.0, 0.5]


def test_a_history_that_is_rewritten_puts_its_turns_into_another_branch():
    class Forgetful(Counting):
        def respond(self, episode, reply):
            episode.messages[:] = [{"role": "user", "content": "again"}, reply.message]
            return super().respond(episode, reply)

    rollout = play(Forgetful(), lambda prompt, rng, version: "end" if "again" in prompt else "a")
    assert [[span.turn for span in branch.turns] for branch in rollout.branches] == [[0], [1]]
    assert replies(rollout) == ["a.", "end."]


def test_without_words_about_turns_a_rollout_has_none():
    class Silent(Counting):
        turn_reward, state_value = MultiTurnEnv.turn_reward, MultiTurnEnv.state_value

        def state_name(self, episode):
            return None

    rollout = play(Silent(), scripted("end"))
    assert rollout.turns == () and rollout.branches[0].turns == ()


def test_calls_of_tools_are_turns_with_rewards():
    def plus(a: int, b: int) -> int:
        """The sum."""
        return a + b

    class Adding(OneTask, ToolEnv):
        tools = (plus,)

        def prompt(self, task):
            return "2+3?"

        def turn_reward(self, episode, reply):
            return 0.25 * len(reply.message.get("tool_calls", ()))

        def score(self, episode):
            return float(episode.last_text == "5")

    rollout = play(Adding(), scripted('!plus{"a": 2, "b": 3}', "5"))
    assert [turn.reward for turn in rollout.turns] == [0.25, 0.0] and rollout.reward == 1.0


class Talk(OneTask):
    """Two agents speak at the same time, several times; each turn is rewarded by the length of its reply."""

    limits = EpisodeLimits(max_turns=5)

    async def rollout(self, task, ctx):
        rewards = {}

        async def speak(name):
            history = [{"role": "user", "content": name}]
            for _ in range(3):
                reply = await ctx.agent(name).chat(history)
                rewards[reply.turn] = float(len(reply.text))
                history += [reply.message, {"role": "user", "content": "on"}]

        said = await asyncio.gather(speak("first"), speak("second"), return_exceptions=True)
        assert all(isinstance(each, LimitReached | None) for each in said)
        return RolloutResult(reward=0.0, turn_rewards=[rewards[n] for n in range(len(rewards))])


@pytest.mark.parametrize("slow", ["first", "second"])
def test_turns_of_agents_that_speak_at_once_are_told_apart_by_their_number(slow):
    rollout = play(
        Talk(),
        lambda prompt, rng, version: "x" * (1 + prompt.count("A") + 4 * ("second" in prompt)),
        delay=lambda request: 5.0 if slow in "".join(map(chr, request.prompt_ids)) else 1.0,
    )
    assert rollout.num_turns == len(rollout.turns) == 5
    for text, turn in zip(replies(rollout), rollout.turns, strict=True):
        assert turn.reward == len(text) - 1
        assert (turn.reward > 5) == (turn.agent == "second") or turn.reward == 5
    assert [turn.agent for turn in rollout.turns][:2] == ["first", "second"], "in the order of the requests"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turn_rewards": [1.0]}, "turn_rewards has 1 entries for 2 turns"),
        ({"states": ["a", "b", "c"]}, "states has 3 entries for 2 turns"),
        ({"turn_rewards": [1.0, float("nan")]}, r"turn_rewards[1] is nan, not a finite number"),
        ({"state_values": [1.0, "2"]}, r"state_values[1] is '2', not a finite number"),
        ({"turn_rewards": {0: 1.0, 1: 2.0}}, "turn_rewards is dict {0: 1.0, 1: 2.0}; give a list"),
        ({"states": [3, "a"]}, r"states[0] is 3; give a text"),
    ],
)
def test_wrong_words_about_turns_fail_the_rollout_with_the_reason(fields, message):
    class Wrong(Counting):
        turn_reward, state_value = MultiTurnEnv.turn_reward, MultiTurnEnv.state_value
        state_name = MultiTurnEnv.state_name

        def score(self, episode):
            return RolloutResult(reward=1.0, **fields)

    rollout = play(Wrong(), scripted("a", "end"))
    assert rollout.status is RolloutStatus.FAILED and message in rollout.error


def test_a_single_turn_has_one_reward_of_its_turn():
    class One(OneTask, SingleTurnEnv):
        def prompt(self, task):
            return "go"

        def score(self, task, text):
            return RolloutResult(reward=1.0, turn_rewards=[0.5], states=["x" * 1000])

    rollout = play(One(), scripted("hm"))
    (turn,) = rollout.turns
    assert turn.reward == 0.5 and len(turn.state) == 32, "a long state is known by its digest"
    assert replies(rollout) == ["hm."] and text_of(rollout.branches[0], True) == "hm."
    One.score = lambda self, task, text: RolloutResult(reward=1.0, turn_rewards=[0.5, 0.5])
    failed = play(One(), scripted("hm"))
    assert failed.status is RolloutStatus.FAILED and "2 entries for 1 turns" in failed.error


def test_a_timeout_that_is_worth_zero_takes_the_rewards_of_turns_too():
    class Slow(Counting):
        limits = EpisodeLimits(timeout_s=1.5)

    rollout = play(Slow(), scripted("a", "b", "end"), delay=lambda request: 1.0, timeout_is="zero")
    assert rollout.reward == 0.0 and [turn.reward for turn in rollout.turns] == [0.0, 0.0]


# -- bundled --


def said(*lines):
    """An answer function: one line after the other. Answers of wordle have the letter by which `scripted` counts."""
    left = iter(lines)
    return lambda prompt, rng, version: next(left)


@needs("games")
def test_wordle_names_a_state_by_its_answers_and_values_what_they_tell():
    from stretto_games.wordle import Wordle

    env = Wordle()
    task = env.tasks("train").task(0)
    word = task.data["word"]
    others = [each for each in sorted(env._words) if each != word][:2]
    rollout = play(env, said(others[0], others[1], word), task=task)
    states, values = ([getattr(turn, name) for turn in rollout.turns] for name in ("state", "value"))
    assert states[0] == "" and values[0] == pytest.approx(0.0) and rollout.reward == 1.0
    assert values == sorted(values) and values[-1] <= 1.0
    swapped = play(env, said(others[1], others[0], word), task=task)
    assert swapped.turns[2].state == states[2] != swapped.turns[1].state
    large = play(Wordle(num_symbols=26), scripted("x"))
    assert large.turns[0].value is None and large.turns[0].state == ""


@needs("games")
def test_alphabet_sort_gives_each_right_turn_its_share():
    from stretto_games.alphabet_sort import AlphabetSort

    env = AlphabetSort(num_turns=2, letters_per_turn=2, num_symbols=4, scores_turns=True)
    task = env.tasks("train").task(0)
    letters = task.data["letters"]
    first, second = "".join(sorted(letters[:2])), "".join(sorted(letters))
    assert [t.reward for t in play(env, scripted(first, second), task=task).turns] == [0.5, 0.5]
    assert [t.reward for t in play(env, scripted(first, "no"), task=task).turns] == [0.5, 0.0]
    assert [t.reward for t in play(env, scripted("no"), task=task).turns] == [0.0]
    plain = play(AlphabetSort(num_turns=2, letters_per_turn=2, num_symbols=4), scripted(first, second), task=task)
    assert [(t.reward, t.value, t.state) for t in plain.turns] == [(None, 0.0, "0"), (None, 0.5, "1")]
