"""Environments of hubs by name: what the policy reads and samples, what the server is told, what a check says."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes import FakeEngine
from turns import CallRenderer, text_of

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import load_environment, needs_worker
from stretto.envs.checks import missing_for
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus
from stretto_hubs.openenv import shown
from stretto_hubs.servers import LocalServer

pytestmark = pytest.mark.heavy
SERVERS = str(Path(__file__).parent / "hub_servers.py")
FREE_PORT = "http://127.0.0.1:9"  # nothing listens there
ADD = {"type": "function", "name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"responses_create_params": {"input": "add", "tools": [ADD]}, "start": 1, "wanted": 4}
    path.write_text("\n".join(json.dumps(row | {"start": start}) for start in (1, 2, 3)))
    return str(path)


@asynccontextmanager
async def served(kind):
    server = LocalServer(kind, [sys.executable, SERVERS, kind])
    try:
        yield await server.url()
    finally:
        await server.close()


def play(hub, kind, policy, *, members=1, **args):
    """The rollouts of one group of the first task."""

    async def run():
        async with served(kind) as url:
            env = load_environment(f"{hub}:{url}", args, in_worker=True)
            assert await asyncio.to_thread(env.check) == []
            settings = {"sampling": SamplingSection(), "seq_len": 2000, "seed": 1, "max_retries": 0}
            player = Player(engine=FakeEngine(policy), renderer=CallRenderer(), **settings)
            try:
                group = await player.play(env, Draw(0, env.tasks("train").task(0), members, version=0))
            finally:
                await env.close()
            return group.rollouts

    return asyncio.run(run())


def says(*lines):
    """Line n at the n-th turn of an episode; a turn ends with a full stop of the policy."""
    return lambda prompt, rng, version: next(line for line in lines if f"{line}." not in prompt)


# -- OpenEnv --


def test_an_action_of_one_text_is_the_text_of_a_reply():
    [rollout] = play("openenv", "openenv-text", says("one", '{"word": "two"}', "```\nthree\n```"))
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    assert rollout.reward == 1.5 and rollout.metrics["turns"] == 3 and rollout.metrics["invalid_actions"] == 0
    [branch] = rollout.branches
    given = text_of(branch, is_sampled=False)
    assert given.startswith("Useed 0.A") and '{"seen": {"word": "one"}, "steps": 1}' in given
    assert '{"word": "two"}' in given


def test_the_calls_of_a_reply_are_actions_and_the_episode_ends_when_the_server_says_so():
    answer = says('!guess{"number": 5}!gess{}', '!guess{"number": 0}!guess{"number": 1}', "late")
    [rollout] = play("openenv", "openenv-tools", answer)
    assert rollout.reward == 1.0 and rollout.metrics["turns"] == 2 and rollout.metrics["invalid_actions"] == 1
    given = text_of(rollout.branches[0], is_sampled=False)
    assert "Twrong.TError: no tool 'gess'; there are guess." in given


def test_a_form_is_the_tool_step_and_an_action_that_does_not_fit_is_told_to_the_policy():
    answer = says('!step{"row": 1}', '!step{"row": 1, "column": 2}', "nothing more")
    [rollout] = play("openenv", "openenv-form", answer, reward="last")
    assert rollout.reward == 0.5 and rollout.metrics["turns"] == 3
    assert "Error: row: Field required" in text_of(rollout.branches[0], is_sampled=False)


def test_a_limit_of_turns_truncates_and_a_fault_of_the_server_fails_the_rollout():
    [rollout] = play("openenv", "openenv-text", says("one", "two", "three"), max_turns=2, prompt="Play")
    assert rollout.status is RolloutStatus.TRUNCATED and rollout.reward == 1.0
    assert text_of(rollout.branches[0], is_sampled=False).startswith("SPlay.U")
    [rollout] = play("openenv", "openenv-text", says('{"crash": 1}'))
    assert rollout.status is RolloutStatus.FAILED and "it broke" in rollout.error


def test_rollouts_wait_for_a_session_of_a_full_server(caplog):
    rollouts = play("openenv", "openenv-text", says("one", "two", "three"), members=6)
    assert [rollout.reward for rollout in rollouts] == [1.5] * 6
    assert caplog.text.count("Other rollouts wait") == 1


def test_tasks_are_seeds_or_resets_and_held_out_ones_are_others():
    env = load_environment(f"openenv:{FREE_PORT}", in_worker=True)
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert train.num_tasks is None and train.task(3).data == {"reset": {"seed": 3}}
    assert held_out.task(0).data["reset"]["seed"] >= 2**30
    resets = [{"level": level} for level in range(5)]
    env = load_environment(f"openenv:{FREE_PORT}", {"resets": resets, "num_eval": 2}, in_worker=True)
    assert [env.tasks("train").task(i).data["reset"]["level"] for i in range(3)] == [0, 1, 2]
    assert [env.tasks("eval").task(i).data["reset"]["level"] for i in range(2)] == [3, 4]


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"prompt": "hello", "metadata": {"x": 1}}, "hello"),
        ({"board": [1], "prompt": "p", "nothing": None}, '{"board": [1], "prompt": "p"}'),
        ({"tool_name": "t", "result": {"content": [{"type": "text", "text": "a"}]}, "error": None}, "a"),
        ({"tool_name": "t", "result": {"data": 3}}, "3"),
        ({"tool_name": "t", "result": None, "error": {"message": "no such tool"}}, "Error: no such tool"),
    ],
)
def test_an_observation_is_shown_as_text(observation, text):
    assert shown(observation) == text


# -- NeMo Gym --


def test_tools_are_routes_of_the_server_and_it_verifies_the_whole_conversation(rows):
    answer = says('!add{"number": 1}!ad{}', '!add{"nmber": 2}!add{"number": 2}', "done")
    [rollout] = play("nemo-gym", "gym-tools", answer, path=rows)
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    assert rollout.reward == 1.0 and rollout.metrics["num_items"] == 9.0
    given = text_of(rollout.branches[0], is_sampled=False)
    assert given.startswith('Uadd.AT{"total": 2}.T{"error": "no tool')
    assert 'T{"detail": "number is needed"}.T{"total": 4}.A' in given


def test_members_have_sessions_of_their_own(rows):
    rollouts = play("nemo-gym", "gym-tools", says('!add{"number": 3}', "done"), path=rows, members=4)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4


def test_a_server_of_steps_ends_the_episode_and_its_rewards_are_summed(rows):
    [rollout] = play("nemo-gym", "gym-steps", says("one", "two", "end", "more"), path=rows)
    assert rollout.reward == 0.75
    assert text_of(rollout.branches[0], is_sampled=False) == "Uadd.Ubegin.AUafter one.AUafter two.A"


def test_an_agent_of_nemo_gym_is_told_from_a_resources_server(rows):
    async def run():
        async with served("gym-agent") as url:
            env = load_environment(f"nemo-gym:{url}", {"path": rows}, in_worker=True)
            return await asyncio.to_thread(env.check)

    [problem] = asyncio.run(run())
    assert "is an agent of NeMo Gym, whose place the policy takes" in problem


def test_a_row_that_is_none_is_named_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"responses_create_params": {"input": "a"}}\n{"prompt": "a"}')
    with pytest.raises(DataError, match=r"rows.jsonl:2.*responses_create_params"):
        load_environment(f"nemo-gym:{FREE_PORT}", {"path": str(path)}, in_worker=True)


# -- names and checks --


def test_an_id_of_a_hub_runs_in_workers_only():
    assert all(needs_worker(f"{hub}:{FREE_PORT}") for hub in ("openenv", "nemo-gym", "harbor"))
    assert not needs_worker("my_envs:Shout")
    with pytest.raises(ConfigError, match="is played in worker processes"):
        load_environment(f"openenv:{FREE_PORT}")
    with pytest.raises(ConfigError, match="names a hub; say what of it"):
        needs_worker("harbor:")


@pytest.mark.parametrize(
    ("env_id", "args", "said"),
    [
        (f"openenv:{FREE_PORT}", {"max_turn": 3}, "unexpected keyword argument 'max_turn'; its arguments are resets"),
        (f"openenv:{FREE_PORT}", {"max_turns": "3"}, "max_turns = '3' must be int"),
        (f"openenv:{FREE_PORT}", {"reward": "mean"}, "reward = 'mean' must be"),
        (f"openenv:{FREE_PORT}", {"resets": [{}], "num_eval": 1}, "num_eval = 1 must be 0 or more and less than its 1"),
        (f"openenv:{FREE_PORT}", {"num_eval": 1}, "num_eval is about `resets`"),
        ("openenv:no/such/place", {}, "neither a URL nor a directory or module with openenv.yaml"),
        ("openenv:.", {}, "neither a URL nor a directory or module with openenv.yaml"),
        (f"nemo-gym:{FREE_PORT}", {}, "missing a required argument: 'path'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_run(tmp_path, monkeypatch, env_id, args, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        missing_for(env_id, args)
    assert said in str(error.value)


def test_what_is_missing_is_one_sentence_that_says_what_to_do(tmp_path, rows):
    [problem] = missing_for(f"openenv:{FREE_PORT}", {})
    assert "does not answer" in problem and problem.endswith("start it, or correct the id")
    (tmp_path / "openenv.yaml").write_text("name: x\napp: server.app:app\n")
    python = str(tmp_path / "python")
    Path(python).write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    Path(python).chmod(0o755)
    [problem] = missing_for(f"openenv:{tmp_path}", {"python": python})
    assert problem == f"{python} has no package openenv: {python} -m pip install openenv"
    [problem] = missing_for("nemo-gym:blackjack", {"path": rows, "python": python})
    assert problem.startswith(f"{python} has no package nemo-gym: {python} -m pip install nemo-gym")
    [problem] = missing_for(f"harbor:{tmp_path}", {"python": python})
    assert "has no package harbor" in problem and "Python 3.12 or later" in problem
    missing = missing_for(f"harbor:{tmp_path}", {"python": "no-such-python", "gateway_host": "192.0.2.1"})
    assert missing[0].startswith("python = 'no-such-python' is no program")
    assert missing[1].startswith("gateway_host = '192.0.2.1' is no address of this machine")


def test_a_server_that_ends_at_once_fails_the_rollout_with_its_last_lines(tmp_path):
    server = LocalServer("openenv:x", [sys.executable, "-c", "raise SystemExit('no such app')"])

    async def run():
        try:
            await server.url()
        finally:
            await server.close()

    with pytest.raises(Exception, match="its server ended with exit code 1:\nno such app"):
        asyncio.run(run())
