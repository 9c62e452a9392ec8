"""repo-repair: a solver gets 1 on every task, doing nothing 0, and what is not a repair nothing either."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tiny_package import make_bank, write_package

from stretto.base.errors import ConfigError, DataError
from stretto.envs.base import EpisodeInfo, RunInfo, load_environment, tasks_of
from stretto_repair.bank import function_of, load_bank, without_functions
from stretto_repair.env import RepoRepair, SolvingContext
from stretto_repair.make import Maker, find_package, readable

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_bank(tmp_path_factory.mktemp("repair"))


@pytest.fixture
def env(folder):
    return load_environment("repo-repair", {"tasks": str(folder), "command_timeout_s": 60.0})


def task_of(env: RepoRepair, number: int = 0):
    row = list(env.bank.tasks.values())[number]
    return row, tasks_of(env, row.split).task(env.bank.of_split(row.split).index(row))


def play(env: RepoRepair, task, calls, episode=None):
    """The result of calls of tools in one episode, and their answers."""

    async def run():
        ctx = SolvingContext(calls)
        ctx.episode = episode
        result = await env.rollout(task, ctx)
        return result, [message["content"] for message in ctx.messages if message["role"] == "tool"]

    return asyncio.run(run())


@pytest.mark.slow
def test_the_solver_gets_1_on_every_task_and_doing_nothing_0(env):
    assert len(env.bank.tasks) == 4
    for number in range(4):
        _, task = task_of(env, number)
        result, answers = play(env, task, env.solution(task))
        assert result.reward == 1.0 and "failed" in answers[0] and "failed" not in answers[-1]
        result, _ = play(env, task, [])
        assert result.reward == 0.0 and result.metrics["failing_passed"] < 1.0


def test_hidden_tests_are_not_there_and_decide(env):
    row, task = task_of(env)
    given = env.bank.packages[row.package].given(row)["tests/test_counting.py"].decode()
    assert row.hidden and set(row.failing) & set(row.hidden) and set(row.failing) - set(row.hidden)
    for name in row.hidden:
        assert f"def {name.split('::')[-1]}(" not in given
    # All tests that it sees pass if the policy writes these: only the hidden ones know better.
    [path] = env.bank.packages[row.package].row.tests
    result, answers = play(env, task, [("create", {"path": path, "text": "def test_all():\n    pass\n"})])
    assert result.reward == 0.0 and answers == [f"wrote {path}"]


@pytest.mark.parametrize(
    "deed",
    [
        "printf 'import os, sys\\nprint({}, flush=True)\\nos._exit(0)\\n' > src/counting/__init__.py",
        "printf 'def pytest_runtest_logreport(report):\\n    report.outcome = \"passed\"\\n' > conftest.py",
        "printf 'import counting\\n' > src/sitecustomize.py; cp src/sitecustomize.py .; rm -r tests",
        "printf 'raise SystemExit(0)\\n' > src/json.py; printf 'main = None\\n' > pytest.py",
        "rm src/counting/__init__.py",
        "mkdir -p x; mv src/counting x/; ln -s /etc src/counting",
    ],
)
def test_what_is_no_repair_is_worth_nothing(env, deed):
    _, task = task_of(env)
    result, _ = play(env, task, [("run", {"command": deed})])
    assert result.reward == 0.0


def test_a_repair_with_a_new_module_counts(env):
    row, task = task_of(env)
    right = env.bank.packages[row.package].files[row.path].decode()
    calls = [
        ("create", {"path": "src/counting/own.py", "text": right}),
        ("create", {"path": row.path, "text": "from counting.own import histogram, longest_run, middle\n"}),
    ]
    assert play(env, task, calls)[0].reward == 1.0


def test_without_tools_blocks_of_shell_code_are_run(folder):
    env = load_environment("repo-repair", {"tasks": str(folder), "calls": "blocks"})
    [row] = env.sft_rows(1, seed=0)
    assert "```sh" in row["messages"][0]["content"] and "tools" not in row
    assert [message["role"] for message in row["messages"]] == ["user", *["assistant", "user"] * 4, "assistant"]
    assert row["messages"][1]["content"].startswith("```sh\npython -m pytest")
    assert "failed" in row["messages"][2]["content"] and "failed" not in row["messages"][8]["content"]


def test_partial_is_the_share_of_what_failed_and_0_if_something_else_fails(folder):
    env = load_environment("repo-repair", {"tasks": str(folder), "partial": True})
    shares = {"failing_passed": 0.5, "hidden_passed": 0.0, "others_passed": 1.0}
    assert env.reward_of(shares) == 0.5 and env.reward_of(shares | {"others_passed": 0.9}) == 0.0


def test_the_tools_say_what_is_wrong(env):
    _, task = task_of(env)
    calls = [
        ("view", {"path": "src/counting/__init__.py", "first": 4, "last": 5}),
        ("view", {"path": "nowhere.py"}),
        ("view", {"path": "/etc/shadow"}),
        ("str_replace", {"path": "src/counting/__init__.py", "old": "return", "new": ""}),
        ("str_replace", {"path": "src/counting/__init__.py", "old": "", "new": ""}),
        ("run", {"command": "echo a; exit 3"}),
        ("run", {"command": "true"}),
        ("run", {"command": "yes | head -c 20000"}),
        ("run", {}),
        ("run", {"command": "ls /proc/1/root/root; python -c 'import socket; socket.socket()'"}),
    ]
    answers = play(env, task, calls)[1]
    assert answers[0] == '4\tdef longest_run(values):\n5\t    """Length of the longest run of equal values."""'
    assert "No such file" in answers[1] and answers[2].startswith("Error: ")
    assert "times" in answers[3] and "0 times" in answers[4]
    assert answers[5] == "a\n[exit code 3]" and answers[6] == "[no output]"
    assert "characters ...]" in answers[7] and len(answers[7]) < 4100
    assert answers[8].startswith("Error: the arguments of run")
    assert "PermissionError" in answers[9]


def test_an_episode_is_played_again_without_running_anything(folder, tmp_path, monkeypatch):
    run = RunInfo(directory=str(tmp_path / "episodes"))
    episode = EpisodeInfo("g1.0", 1, 0)
    env = load_environment("repo-repair", {"tasks": str(folder)}, run=run)
    _, task = task_of(env)
    first, answers = play(env, task, env.solution(task), episode)
    other = load_environment("repo-repair", {"tasks": str(folder)}, run=run)
    monkeypatch.setattr(other.commands, "run_in", None)
    monkeypatch.setattr(other.tests, "run_in", None)
    again, answers_again = play(other, task, other.solution(task), episode)
    assert answers_again == answers and again.reward == first.reward == 1.0
    assert again.metrics["replayed"] == len(answers) + 1
    assert not (tmp_path / "episodes" / "repo-repair" / "g1.0" / "files").exists()


def test_sft_has_solved_tasks(env):
    rows = env.sft_rows(3, seed=0)
    assert len(rows) == 3 and rows == env.sft_rows(3, seed=0)
    assert [message["role"] for message in rows[0]["messages"]] == ["user", *["assistant", "tool"] * 4, "assistant"]
    assert {tool["function"]["name"] for tool in rows[0]["tools"]} == {"run", "view", "create", "str_replace"}


# -- banks --


def test_tasks_are_the_same_for_a_seed_and_more_keep_their_sides(folder, tmp_path):
    few, more = load_bank(make_bank(tmp_path, 2)), load_bank(folder)
    assert len(few.tasks) == 2 and few.tasks.items() <= more.tasks.items()


def test_only_tests_that_pass_count(folder):
    bank = load_bank(folder)
    [package] = bank.packages.values()
    names = {function_of(test) for test in package.row.passing}
    assert "tests/test_counting.py::test_that_is_wrong_from_the_start" not in names
    assert "tests/test_counting.py::TestHistogram::test_values_are_counted" in names
    for row in bank.tasks.values():
        assert {*row.failing, *row.hidden} <= names and row.path in package.row.modules


def test_functions_are_taken_out_of_their_files():
    head, tail = "import x\n\n\nclass TestA:\n", "\n\ndef test_c():\n    return 1\n"
    source = head + "    @x.y(\n        1\n    )\n    def test_b(self):\n        pass\n" + tail
    assert without_functions(source, ["TestA::test_b"]) == head + "    pass\n" + tail
    assert "test_c" not in without_functions(source, ["test_c"])


@pytest.mark.parametrize("content", [b"\xff", b"def (", b"x = 1\r\n", "x = '\u2028'\n".encode()])
def test_modules_that_cannot_be_changed_safely_are_left_out(content):
    assert readable(content) is None


async def test_packages_without_use_are_refused(tmp_path):
    package = write_package(tmp_path)
    maker = Maker(tmp_path / "bank")
    with pytest.raises(ConfigError, match="no package of this name"):
        await maker.add("no-such-package", 1)
    (package / "fast.c").write_text("")
    with pytest.raises(ConfigError, match=r"not pure Python.*fast\.c"):
        await maker.add(str(package), 1)
    (package / "fast.c").unlink()
    (package / "src" / "counting" / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match="no test passes"):
        await maker.add(str(package), 1)


def test_an_installed_package_is_found_with_what_it_needs(tmp_path):
    name, tree, needed = find_package("pytest", tmp_path)
    assert name.startswith("pytest-") and (tree / "_pytest" / "main.py").is_file() and "pluggy" in needed


def test_a_directory_without_tasks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no tasks\.jsonl.*make_tasks\.py"):
        load_environment("repo-repair", {"tasks": str(tmp_path)})


def test_a_line_that_is_no_task_is_named(folder, tmp_path):
    for name in ("packages.jsonl", "tasks.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with Path(tmp_path / "tasks.jsonl").open("a") as file:
        file.write(json.dumps({"task_id": 1}) + "\n")
    with pytest.raises(DataError, match=r"tasks.jsonl:5 is no TaskRow"):
        load_environment("repo-repair", {"tasks": str(tmp_path)})
