"""reasoning-gym as an environment: questions, scores, and messages about wrong settings."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
import warnings

import pytest
from fakes import CharRenderer, FakeEngine

from stretto.base.errors import ConfigError, EnvError
from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import checked_score, load_environment
from stretto.envs.workers.pool import open_workers
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus
from stretto_games.reasoning_gym import is_held_out

pytestmark = pytest.mark.heavy

needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="the extra reasoning-gym is not installed"
)


@pytest.fixture(autouse=True)
def _quiet():
    """The package's own imports warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gym(**args):
    return load_environment("reasoning-gym", {"dataset": "chain_sum"} | args)


def score(env, task, text):
    return asyncio.run(checked_score(env.score(task, text), "a score"))


@needs_extra
@pytest.mark.parametrize("dataset", ["chain_sum", "spell_backward", "leg_counting", "mini_sudoku", "count_bits"])
def test_the_right_answer_scores_one_and_any_other_less(dataset):
    env = gym(dataset=dataset)
    for index in range(5):
        task = env.tasks("train").task(index)
        assert score(env, task, f"hm <answer>no</answer> <answer> {task.data['answer']} </answer>").reward == 1.0
        assert score(env, task, "<answer>zzz</answer>").reward < 0.1
        without = score(env, task, str(task.data["answer"]))
        assert (without.reward, without.metrics) == (0.0, {"has_answer": 0.0})


@needs_extra
def test_with_plain_answers_the_whole_reply_counts_and_the_prompt_has_no_tags():
    env = gym(answer_format="plain", max_terms=2)
    task = env.tasks("train").task(0)
    assert env.prompt(task) == [{"role": "user", "content": task.data["question"]}]
    assert score(env, task, f" {task.data['answer']}\n").reward == 1.0
    assert env.system_prompt is None
    assert gym(system_prompt="Be brief.").prompt(task)[0] == {"role": "system", "content": "Be brief."}


@needs_extra
def test_sft_rows_are_solved_questions_of_the_training_split():
    for answer_format in ("tags", "plain"):
        env = gym(answer_format=answer_format)
        rows = env.sft_rows(20, seed=1)
        assert rows == gym(answer_format=answer_format).sft_rows(20, seed=1) != env.sft_rows(20, seed=2)
        for row in rows:
            *asked, answer = row["messages"]
            assert not is_held_out(asked[-1]["content"])
            assert env.answer_in(answer["content"]) is not None and answer["role"] == "assistant"
    with pytest.raises(ConfigError, match="has no answers, only a scorer"):
        gym(dataset="rubiks_cube").sft_rows(2, seed=0)


@needs_extra
def test_no_question_is_in_both_splits_and_tasks_are_the_same_everywhere():
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    env, again = gym(**small), gym(**small)
    sides = {split: {env.tasks(split).task(i).data["question"] for i in range(150)} for split in ("train", "eval")}
    assert len(sides["train"]) > 40 and len(sides["eval"]) > 10
    assert not sides["train"] & sides["eval"]
    far = 5 * (1 << 32) + 7  # tasks of a run with another seed
    assert again.tasks("train").task(far) == env.tasks("train").task(far)
    assert gym(num_tasks=12).tasks("eval").num_tasks == 12


@needs_extra
def test_a_generator_with_too_few_questions_warns_that_the_splits_share_them(caplog):
    env = gym(dataset="leg_counting", min_animals=1, max_animals=1, min_instances=1, max_instances=1)
    env._dataset = [{"question": "How many?", "answer": "4", "metadata": {}}] * 3
    env._size = 3
    for split in ("train", "eval"):
        assert env.tasks(split).task(0).data["question"] == "How many?"
    assert len([r for r in caplog.records if "too few different questions" in r.message]) == 1


@needs_extra
def test_a_scorer_that_raises_fails_the_rollout():
    env = gym(dataset="prime_factorization")
    task = env.tasks("train").task(0)
    with pytest.raises(EnvError, match=r"its scorer raised ValueError.*the answer was 'seven'"):
        score(env, task, "<answer>seven</answer>")
    engine = FakeEngine(lambda prompt, rng, version: "<answer>seven</answer>")
    player = Player(engine, CharRenderer(), SamplingSection(), seq_len=4000, max_retries=1)
    group = asyncio.run(player.play(env, Draw(0, task, 2, version=0)))
    assert [r.status for r in group.rollouts] == [RolloutStatus.FAILED] * 2
    assert "its scorer raised ValueError" in group.rollouts[0].error


@pytest.mark.slow
@needs_extra
def test_every_generator_gives_tasks_and_scores_its_own_answers():
    from reasoning_gym.factory import DATASETS

    bad = {}
    for name in sorted(set(DATASETS) - {"composite"}):
        env = gym(dataset=name)
        task = env.tasks("train").task(3)
        if task.data["answer"] is None:  # many solutions
            continue
        try:
            reward = score(env, task, f"<answer>{env.entry('train', 3)['answer']}</answer>").reward
        except EnvError as error:
            reward = str(error)
        if reward != 1.0:
            bad[name] = reward
    assert not bad, bad


@needs_extra
def test_a_composite_generator_is_configured_by_tables():
    parts = [
        {"name": "chain_sum", "weight": 1.0},
        {"name": "spell_backward", "weight": 1, "config": {"max_word_len": 4}},
    ]
    env = gym(dataset="composite", datasets=parts)
    questions = [env.tasks("train").task(i).data["question"] for i in range(20)]
    assert any("arithmetic" in q for q in questions) and any("backward" in q for q in questions)


@needs_extra
def test_workers_give_the_same_tasks_as_one_process():
    """isomorphic_strings iterates over sets, whose order depends on the hash seed of the process."""
    args = {"dataset": "isomorphic_strings"}

    async def prompts(num_workers: int) -> list:
        env = open_workers("reasoning-gym", args, "gym", num_workers=num_workers)
        try:
            source = env.tasks("train")
            return await asyncio.gather(*(env.prompt(source.task(i)) for i in range(6)))
        finally:
            await env.close()

    assert asyncio.run(prompts(1)) == asyncio.run(prompts(2))


@needs_extra
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dataset": "chain_sun"}, "no generator dataset = 'chain_sun'; did you mean 'chain_sum'?"),
        ({"dataset": "qqq"}, "no generator dataset = 'qqq'; it has ab, acre,"),
        (
            {"min_term": 3},
            "generator 'chain_sum' has no setting 'min_term'; did you mean 'min_terms'? its settings are",
        ),
        ({"min_terms": -3}, "generator 'chain_sum' refuses these settings: min_terms must be positive"),
        ({"answer_format": "xml"}, "answer_format = 'xml'; use 'tags' or 'plain'"),
        ({"num_tasks": 0}, "num_tasks = 0; use a whole number above 0"),
        ({"dataset": "composite"}, "generator 'composite' refuses these settings: Must specify at least one dataset"),
        ({"dataset": "composite", "datasets": [{"nam": "x"}]}, "refuses these settings"),
    ],
)
def test_wrong_settings_give_one_message(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        gym(**args)


def test_the_error_without_a_generator_or_the_extra_says_what_to_do(monkeypatch):
    with pytest.raises(ConfigError, match=r"environment 'reasoning-gym': .*argument: 'dataset'"):
        load_environment("reasoning-gym")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.composite", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'stretto\[reasoning-gym\]'"):
        gym()
