"""Programs as agents: whatever dialect they speak, what the policy sampled for them is trained, token by token."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEngine
from programs import CALCULATES, CALL, PROGRAM, RESULT, play, player_of, script, write_records
from turns import scripted, text_of

from stretto.base.errors import ConfigError
from stretto.envs.base import RolloutResult, load_environment
from stretto.envs.bundled.calculator import Calculator, calculate
from stretto.envs.parts import play_part
from stretto.orchestrator.rollout.play import Draw
from stretto.records.outcomes import Reason
from stretto.records.rollout import RolloutStatus
from stretto_agents.agent import Agent

pytestmark = pytest.mark.heavy


@pytest.fixture
def records(tmp_path):
    return write_records(tmp_path)


@pytest.mark.parametrize("words", [[d, *s] for d in ("chat", "messages", "responses") for s in ([], ["stream"])])
def test_an_agent_of_any_dialect_trains_the_same_tokens(records, words):
    answer = scripted("so~" + CALL, "then~" + RESULT)
    [rollout] = play([sys.executable, PROGRAM, "{prompt}", *words], records, answer).rollouts
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    assert rollout.reward == 1.0
    [branch] = rollout.branches
    assert text_of(branch, is_sampled=True) == f"so~{CALL}.then~{RESULT}."
    assert text_of(branch, is_sampled=False) == f"U47*86=.AT{RESULT}.A"


def test_members_of_a_group_have_keys_of_their_own(records):
    group = play([sys.executable, PROGRAM, "{prompt}"], records, members=3)
    assert [len(rollout.branches) for rollout in group.rollouts] == [1, 1, 1]
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3


def test_side_calls_and_compaction_are_branches_of_their_own(records):
    text = """
history = [user("main")]
history.append(ask(history))
ask([user("side")])
history.append(user("more"))
history.append(ask(history))
ask([user("summary"), user("last")])
"""
    [rollout] = play(script(text), records, lambda prompt, rng, version: "ok").rollouts
    prompts = [text_of(branch, is_sampled=False) for branch in rollout.branches]
    assert prompts == ["Umain.AUmore.A", "Uside.A", "Usummary.Ulast.A"]
    assert [text_of(branch, is_sampled=True) for branch in rollout.branches] == ["ok.ok.", "ok.", "ok."]
    assert {branch.agent for branch in rollout.branches} == {"policy"}


def test_a_request_that_is_sent_twice_has_one_turn(records):
    text = "assert ask([user('a')]) == ask([user('a')])"
    [rollout] = play(script(text), records, lambda prompt, rng, version: "ok").rollouts
    [branch] = rollout.branches
    assert text_of(branch, is_sampled=True) == "ok."
    assert rollout.metrics["repeated_requests"] == 1.0


def test_a_setting_without_effect_is_named_once_in_the_log(records, caplog):
    text = "ask([user('a')], temperature=0.1, mood='good', user='me'); ask([user('b')], temperature=0.1)"
    play(script(text), records, lambda prompt, rng, version: "ok")
    named = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(named) == 2 and "temperature = 0.1" in "".join(named) and "mood = 'good'" in "".join(named)


def test_a_call_that_cannot_be_parsed_is_text_and_the_history_goes_on(records):
    text = """
history = [user("a")]
history.append(ask(history))
assert history[1] == {"role": "assistant", "content": "hm\\noops"}, history[1]
ask([*history, user("b")])
"""
    [rollout] = play(script(text), records, scripted("hm!oops", "ok")).rollouts
    [branch] = rollout.branches
    assert text_of(branch, is_sampled=True) == "hm!oops.ok." and text_of(branch, is_sampled=False) == "Ua.AUb.A"


def test_programs_may_be_started_by_worker_processes(records):
    group = play([sys.executable, PROGRAM, "{prompt}", "messages", "stream"], records, members=2, num_workers=1)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0], group.rollouts[0].error
    assert [len(rollout.branches) for rollout in group.rollouts] == [1, 1]


def test_requests_side_by_side_are_answered(records):
    text = """
from concurrent.futures import ThreadPoolExecutor
print(len(list(ThreadPoolExecutor().map(lambda n: ask([user(str(n))]), range(4)))))
"""
    [rollout] = play(script(text), records, lambda prompt, rng, version: "ok").rollouts
    assert rollout.status is RolloutStatus.FINISHED and len(rollout.branches) == 4


def test_a_program_that_dies_is_a_failed_rollout_with_its_last_lines(records):
    [rollout] = play(script("ask([user('a')]); sys.exit('no such tool')"), records).rollouts
    assert rollout.status is RolloutStatus.FAILED
    assert "exit code 1" in rollout.error and "no such tool" in rollout.error


def test_a_program_without_a_request_is_a_failed_rollout(records):
    [rollout] = play([sys.executable, "-c", "print('hello')"], records).rollouts
    assert "without one reply" in rollout.error and "hello" in rollout.error


def test_a_program_that_does_not_end_is_ended_and_its_rollout_counts(records):
    text = "ask([user('a')]); import time; time.sleep(600)"
    [rollout] = play(script(text), records, lambda p, r, v: RESULT, timeout_s=2.0).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == 1.0
    assert rollout.reason is Reason.TIME_LIMIT


def test_a_request_beyond_a_limit_is_refused_and_the_rollout_counts(records):
    text = "ask([user('a')]); ask([user('b')])"
    [rollout] = play(script(text), records, lambda p, r, v: RESULT, max_turns=1).rollouts
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == 1.0 and len(rollout.branches) == 1
    assert rollout.reason is Reason.TURN_LIMIT


def test_what_a_program_prints_is_kept_and_can_be_the_answer(records, tmp_path):
    text = f"ask([user('a')]); print({RESULT})"
    kept = tmp_path / "kept"
    [rollout] = play(script(text), records, answer="output", output_dir=str(kept)).rollouts
    assert rollout.reward == 1.0
    assert [path.read_text() for path in kept.rglob("*.txt")] == [f"{RESULT}\n"]


def test_a_reward_may_reward_each_reply(records, tmp_path, monkeypatch):
    (tmp_path / "turns_reward.py").write_text(
        "def judge(args, sample):\n"
        "    sample.metadata['turn_rewards'] = [float(len(text)) for text in sample.metadata['replies']]\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "first = ask([user('a')]); ask([user('a'), first, user('bb')])"
    policy = lambda prompt, rng, version: "x" * (1 + prompt.count("A"))
    [rollout] = play(script(text), records, policy, reward="turns_reward:judge").rollouts
    assert [(turn.agent, turn.reward) for turn in rollout.turns] == [("policy", 2.0), ("policy", 3.0)], rollout.error


def test_a_program_that_does_not_exist_is_refused(records):
    with pytest.raises(ConfigError, match=r"command\[0\].*no-such-agent"):
        load_environment("agent", {"command": ["no-such-agent"], "path": records})


def test_the_example_has_the_tool_and_the_products_of_calculator_token_by_token():
    env, tool = Calculator(), runpy.run_path(PROGRAM)
    function = tool["TOOL"] | {"parameters": tool["SCHEMA"]}
    assert json.dumps([{"type": "function", "function": function}]) == json.dumps(env.tool_schemas())
    for split, name in (("train", "records"), ("eval", "held_out")):
        lines = Path(PROGRAM).with_name(f"{name}.jsonl").read_text().splitlines()
        products = [env.tasks(split).task(index).data["product"] for index in range(len(lines))]
        expected = [{"prompt": f"{product}=", "label": calculate(product)} for product in products]
        assert list(map(json.loads, lines)) == expected


def test_the_example_and_the_environment_calculator_train_the_same_tokens_for_the_same_rewards():
    def says(prompt, rng, version):
        product = prompt.partition("=")[0].rpartition("U")[2]
        if "T" in prompt and rng.random() < 0.7:
            return prompt.rpartition("T")[2].rpartition(".A")[0]
        first, second = product.split("*")
        expression = rng.choice([product, f"{second}*{first}", f"{first}*{second[::-1]}"])
        return rng.choice([f'!calculate{{"expression": "{expression}"}}', calculate(product), "17", "no idea"])

    async def played(env, count=8):
        player = player_of(FakeEngine(says))
        draws = [Draw(number, env.tasks("train").task(number), 4, version=0) for number in range(count)]
        rollouts = [rollout for draw in draws for rollout in (await player.play(env, draw)).rollouts]
        if isinstance(env, Agent):
            await env.close()
        return rollouts

    records = {"path": str(Path(PROGRAM).with_name("records.jsonl")), "shuffle": False, "max_turns": 10}
    agent = load_environment("agent", {"command": [sys.executable, PROGRAM, "{prompt}"], **records})
    ours, theirs = asyncio.run(played(agent)), asyncio.run(played(Calculator()))
    assert {rollout.reward for rollout in ours} == {0.0, 1.0} and {len(r.branches) for r in ours} == {1}
    for one, other in zip(ours, theirs, strict=True):
        assert (one.reward, one.num_turns, one.reason) == (other.reward, other.num_turns, other.reason)
        for name in ("token_ids", "is_sampled", "logprobs"):
            assert np.array_equal(getattr(one.branches[0], name), getattr(other.branches[0], name))


def test_programs_may_play_parts_of_a_rollout_side_by_side(records):
    """Each has an address and a key of its own, and its tokens belong to an agent of its own."""
    command = [sys.executable, PROGRAM, "{prompt}"]

    class Office:
        def __init__(self):
            self.name, self.program = "office", load_environment("agent", {"command": command, "path": records})

        def tasks(self, split):
            return self.program.tasks(split)

        async def rollout(self, task, ctx):
            parts = await asyncio.gather(*(play_part(ctx, self.program, task, name) for name in ("left", "right")))
            await self.program.close()
            return RolloutResult(reward=sum(part.result.reward for part in parts), parts=parts)

    env = Office()
    draw = Draw(3, env.tasks("train").task(0), 1, version=0)
    [rollout] = asyncio.run(player_of(FakeEngine(CALCULATES)).play(env, draw)).rollouts
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    assert rollout.reward == 2.0 and rollout.agent_rewards == {"left": 1.0, "right": 1.0}
    texts = {branch.agent: text_of(branch, is_sampled=True) for branch in rollout.branches}
    assert texts == dict.fromkeys(("left", "right"), f"{CALL}.{RESULT}.")
