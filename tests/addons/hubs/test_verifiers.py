"""Unchanged verifiers tasksets in worker processes: the trained tokens are those that the engine saw."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import CharRenderer, FakeEngine, parrot
from turns import CallRenderer, scripted

from stretto.base.errors import ConfigError
from stretto.config.sections.orchestrator import EnvSection, SamplingSection
from stretto.envs import find
from stretto.envs.base import load_environment
from stretto.orchestrator.build import build_env
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import Group, RolloutStatus
from stretto_hubs.verifiers import packages

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore"),  # verifiers and what it is made of warn
]
TASKSETS = Path(__file__).parent / "tasksets"
needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="the extra verifiers is not installed"
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(TASKSETS))
    # Tool servers are processes, and find their modules as workers do.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


class Seen(FakeEngine):
    """Records every prompt with its continuation."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sequences: list[list[int]] = []

    async def generate(self, request):
        completions = await super().generate(request)
        for completion in completions:
            self.sequences.append([*request.prompt_ids.tolist(), *completion.token_ids.tolist()])
        return completions


def built(env_id, args):
    """Build the environment in this process as a worker does, so that verifiers is imported only once."""
    return load_environment(env_id, args, "test", in_worker=True)


def play(
    env_id, args, indices, engine=None, *, renderer=None, num_members=2, in_worker=False, **settings
) -> list[Group]:
    settings = {"seq_len": 4000, "max_retries": 0} | settings
    player = Player(engine or Seen(parrot(1.0)), renderer or CharRenderer(), SamplingSection(), **settings)

    async def run() -> list[Group]:
        env = build_env(EnvSection(id=env_id, args=args)) if in_worker else built(env_id, args)
        try:
            assert not in_worker or (env.name == env_id and len(env.pool.workers) == 1)  # one by default
            source = env.tasks("train")
            draws = [Draw(i, source.task(i), num_members, version=0) for i in indices]
            return await asyncio.gather(*(player.play(env, draw) for draw in draws))
        finally:
            await env.close()

    return asyncio.run(run())


def text_of(branch, is_sampled: bool) -> str:
    return "".join(chr(t) for t, s in zip(branch.token_ids, branch.is_sampled) if bool(s) == is_sampled)


# -- playing --


@needs_extra
@pytest.mark.parametrize("in_worker", [True, False])
def test_a_single_turn_taskset_plays_by_the_name_of_its_module(in_worker):
    engine = Seen(parrot(0.6))
    groups = play("echo-v1", {"num_tasks": 4, "system": "Hm"}, range(4), engine, num_members=3, in_worker=in_worker)
    for index, group in enumerate(groups):
        for rollout in group.rollouts:
            assert rollout.status is RolloutStatus.FINISHED, rollout.error
            (branch,) = rollout.branches
            assert text_of(branch, False) == f"SHm.Uw{index}.A"
            message = text_of(branch, True).removesuffix(".")
            assert rollout.reward == 2.0 * (message == f"w{index}")
            assert rollout.metrics == {"is_same": rollout.reward / 2, "length": float(len(message))}
            assert branch.token_ids.tolist() in engine.sequences
            assert (branch.agent, branch.is_trained) == ("policy", True)
    assert len(engine.sequences) == 12


@needs_extra
def test_the_taskset_that_the_documentation_shows_plays(tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text()
    (shown,) = [block for block in re.findall(r"```py\n(.*?)```", page, re.S) if "vf.Taskset" in block]
    (tmp_path / "capitals_v1.py").write_text(shown)
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = Seen(lambda prompt, rng, version: "Tokyo")
    groups = play("capitals-v1", {"continent": "Asia"}, range(2), engine, num_members=1)
    assert [group.rollouts[0].reward for group in groups] == [1.0, 0.0]


@needs_extra
def test_tools_are_called_wrong_calls_are_answered_and_the_tokens_of_all_turns_are_one_branch():
    calls = ["!nothing{}", '!sums_add{"a": "x", "b": 3}', '!sums_add{"a": 3, "b": 3}']

    def says(prompt, rng, version):
        num_calls = prompt.count("!")
        return calls[num_calls] if num_calls < len(calls) else prompt.rpartition("T")[2].removesuffix(".A")

    engine = Seen(says)
    (group,) = play("adding-v1", {}, [0], engine, renderer=CallRenderer())
    assert len(group.rollouts) == 2  # each with a tool server of its own
    for rollout in group.rollouts:
        assert (rollout.status, rollout.reward, rollout.num_turns) == (RolloutStatus.FINISHED, 1.0, 4), rollout.error
        assert rollout.metrics == {"is_right": 1.0, "calls": 3.0}
        (branch,) = rollout.branches
        given = text_of(branch, False)
        assert given.startswith("U3+3.ATerror: unknown tool 'nothing'") and given.endswith("AT6.A")
        assert "validation error" in given
        assert text_of(branch, True) == "".join(f"{call}." for call in (*calls, "6"))
        assert branch.token_ids.tolist() in engine.sequences


@needs_extra
@pytest.mark.parametrize("words", [[d, *s] for d in ("chat", "messages", "responses") for s in ([], ["stream"])])
def test_a_harness_of_any_dialect_trains_the_same_tokens(words):
    call = '!calculate{"expression": "47*86"}'
    args = {"taskset": "dialect-v1", "agent": {"harness": {"id": "dialect-v1", "words": words}}}
    (group,) = play("verifiers", args, [0], Seen(scripted(call, "4042")), renderer=CallRenderer(), num_members=1)
    (rollout,) = group.rollouts
    assert (rollout.status, rollout.reward) == (RolloutStatus.FINISHED, 1.0), rollout.error
    (branch,) = rollout.branches
    assert text_of(branch, True) == f"{call}.4042." and text_of(branch, False) == "U47*86=.AT4042.A"


@needs_extra
async def test_the_file_with_the_port_of_a_tool_server_is_removed(tmp_path):
    from verifiers.v1.mcp import launch

    from stretto_hubs.verifiers import env

    env._install()
    path = tmp_path / "port"
    path.write_text("123")

    async def read(path):
        return Path(path).read_bytes()

    assert await launch._read_back_port(SimpleNamespace(type="subprocess", read=read), str(path)) == 123
    assert not path.exists()


@needs_extra
def test_each_agent_has_its_own_stream_and_only_trainable_ones_are_trained():
    args = {"taskset": "duel-v1", "num_attempts": 2}
    (group,) = play("verifiers", args, [1], Seen(parrot(1.0)), num_members=1)
    (rollout,) = group.rollouts
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    by_agent = {branch.agent: branch for branch in rollout.branches}
    assert {name: branch.is_trained for name, branch in by_agent.items()} == {
        "solver": True,
        "solver.2": True,
        "judge": False,
    }
    assert len(rollout.branches) == 3
    assert text_of(by_agent["solver"], False) == "Uduel1.AUagain duel1.A"
    assert text_of(by_agent["solver"], True) == "duel1.again duel1."
    assert rollout.agent_rewards == {"solver": 11.0, "solver.2": 11.0}
    assert rollout.reward == 11.0
    assert rollout.metrics["judge/length"] == 5.0
    # Each trace has rewards for its own replies.
    assert [(turn.agent, turn.reward) for turn in rollout.turns] == [
        ("solver", 5.0), ("solver", 11.0), ("solver.2", 5.0), ("solver.2", 11.0), ("judge", 5.0),
    ]  # fmt: skip


@needs_extra
def test_held_out_tasks_are_the_last_ones_and_are_not_trained_on():
    env = built("verifiers", {"taskset": {"id": "echo-v1", "num_tasks": 10}, "num_eval": 3})
    sides = [[env.tasks(split).task(i).task_id for i in range(n)] for split, n in (("train", 7), ("eval", 3))]
    assert [env.tasks(split).num_tasks for split in ("train", "eval")] == [7, 3]
    assert sides[0] + sides[1] == [f"echo-{i}" for i in range(10)]


@needs_extra
def test_select_chooses_tasks_and_an_endless_taskset_needs_num_tasks():
    args = {"taskset": {"id": "echo-v1"}, "select": {"include": {"idx": ["4:"]}}}
    (group,) = play("verifiers", args, [1], num_members=1)
    assert text_of(group.rollouts[0].branches[0], False) == "Uw5.A"
    (group,) = play("verifiers", {"taskset": "endless-v1", "num_tasks": 5}, [4], num_members=1)
    assert text_of(group.rollouts[0].branches[0], False) == "U4.A"


# -- failures --


@needs_extra
def test_failures_fail_the_rollout_even_if_verifiers_calls_them_ok():
    args = {"taskset": "trouble-v1", "agent": {"timeout": {"scoring": 0.3}}}
    groups = play("verifiers", args, range(5), num_members=1)
    message = [group.rollouts[0].error or "" for group in groups]
    assert [group.rollouts[0].status for group in groups] == [RolloutStatus.FINISHED] + [RolloutStatus.FAILED] * 4
    for text, part in zip(message[1:], ["no world", "no verdict", "scoring_timeout: there is no reward", "is nan"]):
        assert text.startswith("EnvError") and part in text, message


@needs_extra
def test_a_timeout_before_the_first_reply_fails_and_a_later_one_truncates():
    def delays(seconds):
        return lambda request: 0.0 if len(request.prompt_ids) < 9 else seconds

    slow = Seen(parrot(1.0), delay=lambda request: 30.0)
    args = {"taskset": "echo-v1", "agent": {"timeout": {"rollout": 0.3}}}
    (group,) = play("verifiers", args, [0], slow, num_members=1)
    assert group.rollouts[0].status is RolloutStatus.FAILED
    assert "the episode ended before any reply (agent_timeout)" in group.rollouts[0].error
    later = Seen(parrot(1.0), delay=delays(30.0))
    args = {"taskset": "duel-v1", "solver": {"timeout": {"rollout": 1.0}}}
    (group,) = play("verifiers", args, [0], later, num_members=1)
    assert (group.rollouts[0].status, group.rollouts[0].reward) == (RolloutStatus.TRUNCATED, 5.0)


@needs_extra
def test_a_failure_of_the_engine_is_an_engine_error():
    broken = Seen(parrot(1.0), fail=lambda request: "out of order")
    (group,) = play("echo-v1", {}, [0], broken, num_members=1)
    assert group.rollouts[0].error.startswith("EngineError") and "out of order" in group.rollouts[0].error


@needs_extra
def test_a_prompt_without_room_fails_and_a_conversation_that_outgrows_the_context_is_truncated():
    (group,) = play("echo-v1", {"prefix": "w" * 50}, [0], num_members=1, seq_len=40)
    assert group.rollouts[0].status is RolloutStatus.FAILED and "OutOfContext" in group.rollouts[0].error
    (group,) = play("verifiers", {"taskset": "duel-v1"}, [0], num_members=1, seq_len=16)
    rollout = group.rollouts[0]
    assert (rollout.status, rollout.agent_rewards) == (RolloutStatus.TRUNCATED, {"solver": 5.0}), rollout.error


@needs_extra
@pytest.mark.parametrize(
    ("env_id", "args", "message"),
    [
        ("verifiers", {}, "missing a required argument: 'taskset'"),
        ("verifiers", {"taskset": {}}, "args.taskset names no taskset"),
        ("verifiers", {"taskset": "no-such"}, "taskset 'no-such' not found"),
        ("verifiers", {"taskset": "empty-v1"}, "exports no Taskset subclass"),
        ("verifiers", {"taskset": "echo-v1", "agnt": {}}, "no setting 'agnt'; it has agent, id,"),
        ("verifiers", {"taskset": "echo-v1", "agent": {"max_turn": 3}}, "there is no setting 'agent.max_turn'"),
        ("verifiers", {"taskset": "echo-v1", "retries": {"max_retries": 2}}, "set orchestrator.max_rollout_retries"),
        (
            "verifiers",
            {"taskset": "echo-v1", "num_eval": 6},
            "num_eval = 6 must be 0 or more and less than its 6 tasks",
        ),
        ("verifiers", {"taskset": "endless-v1"}, "is endless; set args.num_tasks"),
        ("verifiers", {"taskset": "echo-v1", "select": {"idx": [1]}}, "select: there is no setting 'idx'"),
        ("verifiers", {"taskset": "echo-v1", "agent": {"max_turns": "x"}}, "agent.max_turns = 'x': Input should be"),
        ("echo-v1", {"num_task": 3}, "there is no setting 'taskset.num_task'"),
    ],
)
def test_wrong_settings_give_one_message(env_id, args, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        built(env_id, args)
    assert "Traceback" not in str(error.value)


@needs_extra
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"taskset": "echo-v1"}, []),
        ({"taskset": "echo-v1", "agnt": {}}, ["no setting 'agnt'; it has agent, id,"]),
        ({"taskset": {"id": "openenv"}}, ["pass `env` or `base_url`"]),
        ({"taskset": "echo-v1", "harness": "codex"}, ["agent.harness = codex installs programs"]),
        ({"taskset": "echo-v1", "harness": "mini_swe_agent"}, ["agent.harness = mini_swe_agent installs programs"]),
        ({"taskset": "echo-v1", "harness": "null", "agent": {"harness": {"id": "in_process"}}}, []),
        (
            {"taskset": "echo-v1", "harness": {"id": "pi"}, "agent": {"runtime": {"type": "podman"}}},
            ["agent.runtime = podman: "],
        ),
    ],
)
def test_a_check_builds_the_settings_and_looks_for_what_they_need(settings, said):
    from stretto_hubs.verifiers.check import problems_of

    found = problems_of(settings)
    assert len(found) == len(said), found
    assert all(each in text for each, text in zip(said, found)), found


@needs_extra
def test_a_taskset_and_a_harness_have_names():
    args = {"num_tasks": 2, "harness": "in_process", "prefix": "x"}
    [group] = play("verifiers:echo-v1", args, [0], num_members=1)
    assert text_of(group.rollouts[0].branches[0], False) == "Ux0.A"
    with pytest.raises(ConfigError, match="'no-such'"):
        built("verifiers:echo-v1", {"harness": "no-such"})


# -- ids --


@needs_extra
def test_a_taskset_runs_never_without_a_worker():
    with pytest.raises(ConfigError, match="is played in worker processes"):
        load_environment("echo-v1")


def test_the_error_for_a_v0_environment_says_how_to_port_it():
    with pytest.raises(ConfigError, match=r"'old-v0'.*verifiers v0.*`vf.Taskset`"):
        build_env(EnvSection(id="old-v0"))


def test_errors_name_the_missing_extra_and_a_wrong_version(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(find.importlib.metadata, "version", version)
    for env_id in ("verifiers", "echo-v1"):
        with pytest.raises(ConfigError, match=rf"environment '{env_id}' .*'stretto\[verifiers\]'"):
            build_env(EnvSection(id=env_id))
    monkeypatch.setattr(find.importlib.metadata, "version", lambda name: "0.2.14")
    with pytest.raises(ConfigError, match=r"verifiers 0.2.14 .*0.4"):
        build_env(EnvSection(id="verifiers"))


def test_modules_are_classified_without_importing_them():
    taskset, kinds = packages.ModuleKind.TASKSET, ["echo_v1", "duel_v1", "old_v0", "worker_envs"]
    assert [packages.classify_module(name) for name in kinds] == [
        taskset,
        taskset,
        packages.ModuleKind.V0,
        packages.ModuleKind.OURS,
    ]
    assert find.find_module("someone/echo-v1@1.2.0") == "echo_v1"
    assert find.find_module("no-such-module") is find.find_module("what is this") is None


def test_console_scripts_find_modules_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "lying_here_v0.py").write_text((TASKSETS / "old_v0.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    before = list(sys.path)
    assert find.find_module("lying-here-v0") == "lying_here_v0"
    assert packages.classify_module("lying_here_v0") is packages.ModuleKind.V0
    assert sys.path == before


def test_a_module_with_one_environment_is_loaded_by_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    base = "from stretto.envs.bundled.sort_letters import SortLetters\n"
    (tmp_path / "one_env.py").write_text(base + "class Mine(SortLetters):\n    pass\n")
    (tmp_path / "two_envs.py").write_text(base + "class A(SortLetters):\n    pass\nclass B(A):\n    pass\n")
    (tmp_path / "chosen_env.py").write_text((tmp_path / "two_envs.py").read_text() + '__all__ = ["B"]\n')
    (tmp_path / "no_env.py").write_text("x = 1\n")
    assert type(load_environment("one-env", {"num_letters": 3})).__name__ == "Mine"
    assert type(load_environment("chosen_env")).__name__ == "B"
    with pytest.raises(ConfigError, match=r"several environments.*two_envs:A, two_envs:B"):
        load_environment("two-envs")
    with pytest.raises(ConfigError, match="has no class with `tasks` and `rollout`"):
        load_environment("no-env")
