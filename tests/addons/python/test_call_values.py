"""Arguments of `stretto.rl`, `sft` and `evaluate` become a configuration; what it cannot hold is refused by its key."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Linear

import stretto
from stretto.base.errors import ConfigError
from stretto.config.root import EvalConfig, RLConfig, SFTConfig
from stretto.config.section import all_paths
from stretto.envs.bundled.sort_letters import SortLetters
from stretto_python.given.files import Given
from stretto_python.given.settings import KEYS, TRL, call_of
from stretto_python.verbs import in_python

ROWS = [{"prompt": "a", "answer": "b", "level": 1}]
LOCK = threading.Lock()


def values_of(verb: str, *config: Any, **keywords: Any) -> dict[str, Any]:
    return call_of(verb, config, keywords, Given()).values


def close(completion: str, answer: str) -> float:
    return float(completion == answer)


def test_every_short_name_is_a_key() -> None:
    for verb, root in {"rl": RLConfig, "sft": SFTConfig, "evaluate": EvalConfig}.items():
        for name, key in KEYS[verb].items():
            assert key in {path for path, _, _ in all_paths(root)}, f"{verb}: {name} = {key}"


def test_keywords_lie_over_dicts_and_dicts_over_one_another() -> None:
    values = values_of("rl", {"trainer.optim.lr": 1.0, "max_steps": 3}, {"trainer": {"optim": {"lr": 2.0}}}, lr=3.0)
    assert values == {"trainer": {"optim": {"lr": 3.0}}, "max_steps": 3}


def test_files_and_flags_stay_words() -> None:
    call = call_of("rl", ["a.toml", Path("b.toml"), "--max-steps", 3], {"clean": True, "resume": 4}, Given())
    assert call.files == ["a.toml", "b.toml"]
    assert call.flags == ["--max-steps", "3", "--clean", "--resume.step", "4"]


def test_an_environment_of_a_module_is_its_name() -> None:
    [entry] = values_of("rl", env=SortLetters)["orchestrator"]["env"]
    assert entry == {"id": "stretto.envs.bundled.sort_letters:SortLetters", "name": "sort-letters"}
    [entry] = values_of("evaluate", env={"id": SortLetters, "args": {"num_letters": 3}})["eval"]["env"]
    assert entry["args"] == {"num_letters": 3}


def test_records_and_a_function_are_the_environment_dataset() -> None:
    values = values_of("rl", dataset=ROWS, eval_dataset=ROWS, reward=close)["orchestrator"]
    args = values["env"][0]["args"]
    assert values["eval"] == {} and values["env"][0]["id"] == "dataset"
    assert args["label_key"] == "answer" and args["metadata_key"] == ["prompt", "answer", "level"]
    assert args["path"] == "{given}/records.jsonl" and args["eval_path"] == "{given}/held_out.jsonl"
    assert args["reward"] == "{given}/code.py:reward_of_records" and "group_reward" not in args


def test_the_names_of_trl_are_told_what_they_are_here() -> None:
    for name in TRL:
        with pytest.raises(ConfigError, match=f"takes no {name}=; write "):
            stretto.rl(**{name: 1})


def words_of_trl() -> list[tuple[str, str]]:
    """The names in the tables of docs/from_trl.md, each with the verb whose table it stands in."""
    rl, sft = (Path(__file__).parents[3] / "docs" / "from_trl.md").read_text().split("## SFTConfig")
    rows = [(verb, line) for verb, page in (("rl", rl), ("sft", sft)) for line in page.splitlines()]
    cells = [(verb, line.split("|")[1]) for verb, line in rows if line.startswith("| `")]
    return [(verb, word) for verb, cell in cells for word in re.findall(r"`([a-z_]+[a-z0-9])\b", cell)]


SAME = {"model", "output_dir", "seed", "max_steps", "reward_weights", "eval_dataset", "eval_steps", "sft"}
"""Words that mean the same here."""


def test_every_word_of_the_page_for_trl_is_told_what_it_is_here() -> None:
    assert len(words_of_trl()) > 60
    for verb, name in words_of_trl():
        if name not in SAME:
            with pytest.raises(ConfigError, match=f"takes no {name}=; write "):
                getattr(stretto, verb)(**{name: 1})


@pytest.mark.parametrize("value", [1, 2.5, [], {}], ids=repr)
def test_what_is_no_data_set_is_told_by_its_keyword(value) -> None:
    for verb, name in (("rl", "dataset"), ("sft", "dataset"), ("sft", "eval_dataset")):
        with pytest.raises(ConfigError, match=f"{name}.*give a list of dicts"):
            getattr(stretto, verb)(**{name: value})


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("warmup_ratio", r'write \*\*{"trainer.scheduler.warmup_steps": ...}'),
        ("num_iterations", r'write \*\*{"trainer.epochs_per_step": ...}'),
        ("mask_truncated_completions", r'write \*\*{"orchestrator.mask_truncated_completions": ...}'),
        ("top_p", r'write \*\*{"orchestrator.train.sampling.top_p": ...}'),
        ("run_name", "write name="),
        ("resume_from_checkpoint", "write resume="),
    ],
)
def test_a_name_of_another_framework_or_a_key_without_its_section_is_told_the_key(name: str, written: str) -> None:
    with pytest.raises(ConfigError, match=f"takes no {name}=; {written}"):
        stretto.rl(**{name: 1})


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"modle": "x"}, "did you mean model="),
        ({"env": ROWS}, "a dict without `id`"),
        ({"env": object()}, "orchestrator.env.0.id is a object, which has no `tasks` and `rollout`"),
        ({"env": {"id": SortLetters(), "args": {"num_letters": 3}}}, "an instance, which has its arguments already"),
        ({"env": SortLetters, "reward": close}, "env= and reward= exclude each other"),
        ({"reward": close}, "give dataset= too"),
        ({"dataset": [{"text": "a"}], "reward": close}, "the prompt is looked for in prompt and question"),
        ({"dataset": [], "reward": close}, "it is empty"),
        ({"dataset": [*ROWS, 3], "reward": close}, "its entry 1 is a int"),
        ({"dataset": ["cab", "bca"], "reward": close}, "its entry 0 is the text 'cab'; records are dicts"),
        ({"dataset": ROWS, "reward": close, "model": Linear(2, 2)}, "model.name is a Linear of torch"),
        (
            {"dataset": ROWS, "reward": lambda completion, anwser: 0},
            "takes anwser, and the records have no such column",
        ),
        ({"dataset": ROWS, "reward": lambda text: 0}, "takes text, but no reply; write `def reward"),
        ({"dataset": ROWS, "reward": 3}, "reward is 3; give a function"),
        ({"dataset": ROWS, "reward": [close], "reward_weights": [1, 2]}, "has 2 numbers for 1 reward"),
        ({"dataset": ROWS, "reward": [close, close]}, "two are called close"),
        ({"dataset": ROWS, "reward": ["exact", "exakt"]}, r"reward\[1\]: 'exakt' is no reward; did you mean 'exact'"),
        ({"dataset": ROWS, "reward": {"exact": 1.0}}, "give the list of the rewards, and reward_weights= beside it"),
        ({"dataset": ROWS, "reward": close, "reward_weights": ["a"]}, "give a list with a number for each reward"),
        ({"dataset": ROWS, "reward": close, "reward_weights": 2}, "give a list with a number for each reward"),
        ({"dataset": ROWS, "reward_weights": [2.0]}, "weighs the rewards of reward=; give that too"),
        ({"env": SortLetters, "reward_weights": [2.0]}, "weighs the rewards of reward=; give that too"),
        ({"dataset": iter(ROWS)}, "dataset is a list_iterator, which can be read once"),
        ({"dataset": ROWS, "eval_dataset": (row for row in ROWS)}, "eval_dataset is a generator, which can be read"),
        ({"trainer": {"optim": {"lr": LOCK}}}, "trainer.optim.lr is a lock"),
        ({"orchestrator": {"env": [{"id": "dataset", "args": {"path": {1, 2}}}]}}, "its entry 0 is a int"),
        ({"resume": [1]}, "give True, a step, or the directory of a run"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_name(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stretto.rl(**keywords)


@pytest.mark.heavy
def test_a_model_that_generates_no_text_is_refused_before_it_is_saved(tmp_path, monkeypatch) -> None:
    from transformers import BertConfig, BertModel, T5Config, T5Model

    monkeypatch.chdir(tmp_path)
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    bert = BertModel(BertConfig(**small))
    with pytest.raises(ConfigError, match=r"is a BertModel, .*load it with AutoModelForCausalLM"):
        stretto.rl(model=bert, tokenizer="x", env=SortLetters)
    t5 = T5Model(T5Config(d_model=8, d_ff=8, d_kv=8, num_layers=1, num_heads=1, vocab_size=9))
    with pytest.raises(ConfigError, match=r"is a T5Model, .*families are .*llama, "):
        stretto.evaluate(model=t5, tokenizer="x", env=SortLetters)
    assert not any(tmp_path.iterdir())


def test_what_holds_a_lock_is_refused_with_what_to_do() -> None:
    def locked(completion: str) -> float:
        with LOCK:
            return 0.0

    held = LOCK

    def closed(completion: str) -> float:
        with held:
            return locked(completion)

    with pytest.raises(ConfigError, match=r"cannot be given to the processes of a run: .* Make locks, files"):
        stretto.rl(dataset=ROWS, reward=closed)


def test_a_word_among_the_files_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"argument 2 is .*SortLetters.*; before the keywords go files"):
        stretto.rl("rl.toml", SortLetters)


def test_a_mistake_in_the_configuration_is_the_message_of_the_exception() -> None:
    with pytest.raises(ConfigError, match=r"orchestrator.groop_size: unknown key; did you mean `group_size`"):
        stretto.rl({"orchestrator": {"groop_size": 3}}, env="sort-letters", model="x")


def test_the_names_of_the_package_are_those_it_has() -> None:
    assert set(stretto.__all__) < set(dir(stretto)) and all(hasattr(stretto, name) for name in dir(stretto))


def test_the_columns_of_sft_are_found() -> None:
    assert values_of("sft", dataset=ROWS)["data"] == {
        "name": "{given}/rows.jsonl",
        "input_key": "prompt",
        "output_key": "answer",
    }
    assert values_of("sft", dataset=[{"messages": []}])["data"] == {"name": "{given}/rows.jsonl"}
    pairs = [{"question": "a", "chosen": "b", "rejected": "c"}]
    found = {"name": "{given}/rows.jsonl", "type": "preference", "prompt_key": "question"}
    assert values_of("sft", dataset=pairs)["data"] == found
    with pytest.raises(ConfigError, match="sft reads `messages`, `prompt` and `completion`, or `chosen`"):
        stretto.sft(dataset=[{"text": "a"}])


def test_words_of_trl_are_answered_with_what_they_mean_and_not_with_what_is_spelled_alike() -> None:
    meant = {
        "save_strategy": "write ckpt={'interval': 10}",
        "deepspeed": "write deployment={'num_train_gpus': 8}: parameters are always sharded",
        "data_seed": "write seed=",
        "rollout_func": '"generate": function',
        "chat_template_kwargs": 'write **{"orchestrator.renderer.enable_thinking": ...}',
        "torch_compile": 'write **{"model.compile": ...}',
        "optimizers": "docs/python.md lists the keywords; `rl --help optimizers` searches the keys",
    }
    for name, words in meant.items():
        with pytest.raises(ConfigError, match=re.escape(f"stretto.rl takes no {name}=") + ".*" + re.escape(words)):
            stretto.rl(dataset=ROWS, **{name: 1})


def test_sft_refuses_each_word_of_rewards() -> None:
    for name, value in {"reward": close, "reward_weights": [1.0], "env": SortLetters}.items():
        with pytest.raises(ConfigError, match=f"stretto.sft takes no {name}="):
            stretto.sft(dataset=ROWS, **{name: value})


def test_one_reward_has_its_weight_too() -> None:
    given = Given()
    call_of("rl", [], {"dataset": ROWS, "reward": "exact", "reward_weights": [2.0]}, given)
    assert "reward_of_records = rewards_of({'exact': 'exact'}, [2.0]" in given._code(Path("unused"))


def test_a_reward_is_called_by_its_function_or_class() -> None:
    class Longer:
        def __call__(self, completion: str) -> float:
            return float(len(completion))

    given = Given()
    call_of("rl", [], {"dataset": ROWS, "reward": [partial(close, answer="b"), Longer(), "exact"]}, given)
    assert "rewards_of({'close': close, 'Longer': Longer, 'exact': 'exact'}" in given._last[-1]


def test_a_name_that_the_package_lacks_is_answered_with_those_it_has() -> None:
    with pytest.raises(
        AttributeError, match="no attribute 'train'; it has Run, compare, evaluate, plot, rl, sft"
    ) as found:
        stretto.train  # noqa: B018
    assert found.value.name == "train" and found.value.obj is stretto


def test_commands_in_a_message_stay_commands() -> None:
    text = "delete it with --clean\n  /bin/rl @ outputs/a/given/config.json --clean --max-steps 1"
    assert in_python(text) == text.replace("with --clean", "with clean=True")


def test_messages_name_keywords_in_place_of_flags() -> None:
    text = "Continue it with --resume from step 3, or --resume.step 2; delete it with --clean, or give --run.name."
    assert in_python(text) == (
        "Continue it with resume=True from step 3, or --resume.step 2; delete it with clean=True, or give name=."
    )
