import sys

import pytest

from stretto.base.errors import ConfigError, EnvError
from stretto.envs import find
from stretto.envs.base import RolloutResult, SingleTurnEnv, TaskSource, checked_score, load_environment, tasks_of
from stretto.envs.bundled.held_out import is_held_out
from stretto.records.rollout import Task


def text_of(task):
    return next(iter(task.data.values()))


@pytest.mark.parametrize("env_id", ["sort-letters", "reverse-text"])
def test_tasks_are_the_same_by_index_in_every_process(env_id):
    first, second = load_environment(env_id), load_environment(env_id)
    for split in ("train", "eval"):
        tasks = [first.tasks(split).task(i) for i in range(50)]
        assert tasks == [second.tasks(split).task(i) for i in range(50)]
        assert len({t.task_id for t in tasks}) == 50


@pytest.mark.parametrize("env_id", ["sort-letters", "reverse-text"])
def test_no_held_out_string_is_ever_trained_on(env_id):
    env = load_environment(env_id, {"num_letters": 3} if env_id == "sort-letters" else {"max_length": 3})
    held_out = {text_of(env.tasks("eval").task(i)) for i in range(300)}
    trained = {text_of(env.tasks("train").task(i)) for i in range(3000)}
    trained |= {row["messages"][0]["content"] for row in env.sft_rows(3000, seed=1)}
    assert not held_out & trained
    assert all(is_held_out(text) for text in held_out)


def test_sorting_is_scored_by_exact_match():
    env = load_environment("sort-letters")
    task = env.tasks("train").task(3)
    letters = task.data["letters"]
    assert len(letters) == 6 and set(letters) <= set("abcdefghijklmnop")
    assert env.prompt(task) == [{"role": "user", "content": letters}]
    answer = "".join(sorted(letters))
    assert env.score(task, answer) == env.score(task, f" {answer}\n") == 1.0
    assert env.score(task, answer[:-1]) == env.score(task, answer + "a") == env.score(task, "") == 0.0


def test_reversing_is_scored_by_exact_match_and_lengths_vary():
    env = load_environment("reverse-text")
    texts = [env.tasks("train").task(i).data["text"] for i in range(200)]
    assert {len(t) for t in texts} == {3, 4, 5, 6}
    task = Task(env="reverse-text", task_id="t", data={"text": "abcd"})
    assert env.score(task, "dcba") == 1.0
    assert env.score(task, "abcd") == 0.0


@pytest.mark.parametrize("env_id", ["sort-letters", "reverse-text"])
def test_sft_rows_are_solved_tasks(env_id):
    env = load_environment(env_id, {"instruction": "Do it: "})
    key = "letters" if env_id == "sort-letters" else "text"
    rows = env.sft_rows(40, seed=0)
    assert rows != env.sft_rows(40, seed=1)
    for row in rows:
        user, assistant = row["messages"]
        data = {key: user["content"].removeprefix("Do it: ")}
        task = Task(env=env_id, task_id="t", data=data)
        assert env.prompt(task) == [user]
        assert env.score(task, assistant["content"]) == 1.0


def test_the_error_for_an_unknown_id_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'sort-letters'"):
        load_environment("sort_leters")
    with pytest.raises(ConfigError, match="reverse-text, sort-letters"):
        load_environment("chess")


def test_the_error_for_unknown_arguments_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'letters'; its arguments are num_letters=6, num_symbols=16"):
        load_environment("sort-letters", {"letters": 3})
    with pytest.raises(ConfigError, match="num_letters = 0"):
        load_environment("sort-letters", {"num_letters": 0})


def test_a_user_environment_is_found_by_module_and_attribute(tmp_path, monkeypatch):
    (tmp_path / "my_env_module.py").write_text(
        "from stretto.envs.bundled.sort_letters import SortLetters\n"
        "def two_letters(num_symbols=3):\n"
        "    return SortLetters(num_letters=2, num_symbols=num_symbols)\n"
        "def not_an_environment():\n"
        "    return object()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    env = load_environment("my_env_module:two_letters", {"num_symbols": 5}, name="two")
    assert env.name == "two" and env.tasks("train").task(0).env == "two"
    with pytest.raises(ConfigError, match="did you mean my_env_module:two_letters"):
        load_environment("my_env_module:two_leters")
    with pytest.raises(ConfigError, match="lacks name, tasks or rollout"):
        load_environment("my_env_module:not_an_environment")
    with pytest.raises(ConfigError, match="no module 'no_such_module'"):
        load_environment("no_such_module:env")


def test_a_finite_source_starts_over():
    source = TaskSource(lambda i: Task(env="e", task_id=str(i), data={}), num_tasks=3)
    assert [source.task(i).task_id for i in range(5)] == ["0", "1", "2", "0", "1"]


async def test_a_score_may_be_a_number_a_result_or_a_coroutine():
    async def ask():
        return 0.5

    assert (await checked_score(1, "score")).reward == 1.0
    assert (await checked_score(ask(), "score")).reward == 0.5
    result = RolloutResult(reward=0.25, metrics={"length": 3.0})
    assert await checked_score(result, "score") == result


def test_a_single_turn_environment_needs_only_tasks_prompt_and_score():
    class Echo(SingleTurnEnv):
        name = "echo"

        def tasks(self, split):
            return TaskSource(lambda i: Task(env=self.name, task_id=str(i), data={}))

        def prompt(self, task):
            return [{"role": "user", "content": "a"}]

        def score(self, task, text):
            return float(text == "a")

    assert Echo().score(Echo().tasks("train").task(0), "a") == 1.0


class Odd(SingleTurnEnv):
    """Returns `source` as its tasks."""

    def __init__(self, source) -> None:
        self.name, self.source = "odd", source

    def tasks(self, split):
        return self.source

    def prompt(self, task):
        return []

    def score(self, task, text):
        return 0.0


def test_a_task_that_cannot_be_made_is_an_env_error_with_file_and_line():
    source = tasks_of(Odd(TaskSource(lambda i: {}["a"])), "eval")
    with pytest.raises(EnvError, match=r"'odd', tasks\('eval'\), task 7: .*test_envs.py.* in .*: KeyError: 'a'"):
        source.task(7)
    with pytest.raises(EnvError, match="task 3 is a dict, not a Task"):
        tasks_of(Odd(TaskSource(lambda i: {"word": "a"})), "train").task(3)


def test_a_task_bears_the_name_of_its_environment_in_the_run():
    made = [Task(env="odd", task_id=f"{i}", data={}) for i in range(3)]
    env = load_environment("test_envs:Odd", {"source": TaskSource(made.__getitem__, 3)}, name="even")
    source = tasks_of(env, "train")
    assert source.num_tasks == 3 and [source.task(i).env for i in range(4)] == ["even"] * 4
    assert source.task(4).task_id == "1"


@pytest.mark.parametrize("count", [0, -1, "3", 2.5])
def test_an_invalid_number_of_tasks_is_refused(count):
    with pytest.raises(ConfigError, match=r"'odd', tasks\('train'\): num_tasks = "):
        tasks_of(Odd(TaskSource(lambda i: i, count)), "train")


WRONG_TYPES = (
    ("sort-letters", {"num_letters": "3"}, "num_letters = '3' must be int, got str"),
    ("tic-tac-toe", {"num_opening_moves": True}, "num_opening_moves = True must be int, got bool"),
    ("python-code", {"partial": "no"}, "partial = 'no' must be bool, got str"),
    ("reasoning-gym", {"dataset": "chain_sum", "seed": "a"}, "seed = 'a' must be int, got str"),
    ("wordle", {"instruction": 5}, "instruction = 5 must be str, got int"),
    ("arithmetic", {"timeout_s": [1]}, r"timeout_s = \[1\] must be float, got array"),
    ("calculator", {"seed": 0.5}, "seed = 0.5 must be int, got float"),
    ("alphabet-sort", {"num_turns": {}}, "num_turns = {} must be int, got object"),
    ("reverse-text", {"seed": None}, "seed = None must be int, got null"),
)


@pytest.mark.parametrize(("env_id", "args", "message"), [each for each in WRONG_TYPES if each[0] in find.names()])
def test_an_argument_of_the_wrong_type_is_refused(env_id, args, message):
    with pytest.raises(ConfigError, match=f"^environment '{env_id}': {message}"):
        load_environment(env_id, args)


def test_a_constructor_that_ends_the_process_is_refused():
    with pytest.raises(ConfigError, match=r"'test_envs:leave': .*test_envs.py:\d+ in leave: SystemExit"):
        load_environment("test_envs:leave")


def leave():
    raise SystemExit("log in first")


def test_an_int_is_accepted_as_a_float():
    assert load_environment("arithmetic", {"timeout_s": 2}).verifier.timeout_s == 2
