"""What a dry run of `sft` checks and shows: the first row as the model gets it, its files, and how long it is."""

from __future__ import annotations

import json
import sys
import tomllib

import pytest
from processes import forked

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.config.load import load
from stretto.config.root import SFTConfig
from stretto.envs.bundled.count_shapes import draw_shapes
from stretto_sft.check import check_records
from stretto_sft.dry_run import sft_screen

ENVS = """
from stretto.envs.base import SingleTurnEnv


class Rows(SingleTurnEnv):
    name = "rows"

    def tasks(self, split):
        raise NotImplementedError

    def prompt(self, task):
        raise NotImplementedError

    def score(self, task, text):
        raise NotImplementedError


class Swapped(Rows):
    def sft_rows(self, split, num_rows):
        return [{"messages": []}] * num_rows


class Solved(Rows):
    def sft_rows(self, num_rows, seed):
        messages = [{"role": "user", "content": "a" * 90}, {"role": "assistant", "content": "b" * 90}]
        return [{"messages": messages}] * num_rows
"""


def test_the_first_record_of_each_file_is_read(tmp_path):
    cfg = load(SFTConfig, ["--data.name", str(tmp_path / "none.parquet"), "--max-steps", "1"])
    with pytest.raises(ConfigError, match=r"data.name = .*none.parquet"):
        check_records(cfg)


@pytest.mark.heavy
def test_the_command_line_says_so_with_status_2(tmp_path):
    words = ["--data.name", "none.jsonl", "--max-steps", "1", "--output-dir", str(tmp_path), "--dry-run"]
    done = forked.run([sys.executable, "-m", "stretto", "sft", *words], timeout=120, cwd=tmp_path)
    assert done.returncode == 2 and "data.name = 'none.jsonl'" in done.stderr


def test_long_texts_that_all_rows_have_are_shown_as_phrases_that_shorten_them(tmp_path):
    def screen(scratch):
        data = {"type": "environment", "id": "calculator"}
        return sft_screen(SFTConfig(data=data, model={"scratch": scratch}, max_steps=1, output_dir=tmp_path))

    def length(text):
        return int(text.split(", row 0: ")[1].split(" tokens")[0])

    shown = screen({"max_position_embeddings": 4096})
    pasted = tomllib.loads(shown[shown.index("phrases = [") : shown.index("\n]\n") + 3])
    foretold = int(shown.split("would make the row about ")[1].split()[0])
    shorter = screen(pasted)
    assert abs(length(shorter) - foretold) < 10 and foretold < length(shown) / 4 and "phrases" not in shorter


def test_a_schedule_that_does_not_fit_into_the_epochs_of_sft_is_refused(tmp_path):
    def screen(**changes):
        rows = {"type": "environment", "id": "sort-letters", "num_rows": 40}
        run = {"data": rows, "max_epochs": 2, "batch_size": 16, "model": {"scratch": {}}, "output_dir": tmp_path}
        return sft_screen(SFTConfig.model_validate(run | changes))

    linear = {"type": "linear", "warmup_steps": 3, "decay_steps": 3}
    with pytest.raises(
        ConfigError, match=r"\[scheduler\] .*3 \+ 3, but max_epochs = 2 of 40 examples .*are 5 steps; lower"
    ):
        screen(scheduler=linear)
    with pytest.raises(ConfigError, match=r"warmup_steps = 5, but max_epochs = 2 .*are 5 steps"):
        screen(scheduler={"type": "cosine", "warmup_steps": 5}, max_steps=100)
    for fitting in (
        linear | {"decay_steps": 2},
        linear | {"warmup_steps": 0.5, "decay_steps": 0.5},
        {"type": "constant", "warmup_steps": 9},
    ):
        assert "trains 2 epochs" in screen(scheduler=fitting)


def test_a_row_that_the_model_cannot_take_is_named_with_its_line(tmp_path):
    (tmp_path / "shapes.png").write_bytes(draw_shapes(3, 1, 4, 32))
    parts = [{"type": "image", "image": str(tmp_path / "shapes.png")}, {"type": "text", "text": "?"}]
    question, answer = {"role": "user", "content": parts}, {"role": "assistant", "content": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [question, answer]}) + "\n")
    name = str(tmp_path / "rows.jsonl")
    cfg = load(SFTConfig, ["--data.name", name, "--max-steps", "1", "--model.scratch.family", "qwen3"])
    with pytest.raises(ConfigError) as found:
        sft_screen(cfg)
    words = f"{name}:1: messages[0].content[0] is an image, but [model.scratch] is a model of text"
    assert words in str(found.value)


def test_a_row_of_which_each_turn_is_an_example_says_so(tmp_path):
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turn * 2}) + "\n")
    words = ["--data.name", str(tmp_path / "rows.jsonl"), "--max-steps", "1", "--model.scratch.family", "qwen3"]
    words += ["--renderer.enable-thinking", "true"]
    shown = sft_screen(load(SFTConfig, words))
    assert (
        "(the first of 2 examples)" in shown and "\nNOTE: qwen3 shows earlier replies without their thoughts" in shown
    )
    kept = sft_screen(load(SFTConfig, [*words, "--renderer.settings", '{"thinking_retention": "all"}']))
    assert "first of" not in kept and "shows earlier replies" not in kept


# -- rows that an environment writes --


@pytest.fixture
def solver(tmp_path, monkeypatch):
    """A module `solvers` with environments that solve their own tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "solvers.py").write_text(ENVS)


def screen_of(env: str, seq_len: int) -> str:
    scratch = ["--model.scratch.max-position-embeddings", "150"]
    words = ["--data.type", "environment", "--data.id", env, "--model.scratch.family", "qwen3", "--max-steps", "1"]
    return sft_screen(load(SFTConfig, [*words, *scratch, "--seq-len", str(seq_len)]))


def test_the_first_row_of_sft_is_compared_with_every_limit(solver):
    assert "with seq_len = 50 nothing of it is trained" in screen_of("solvers:Solved", 50)
    assert "with seq_len = 120 it is cut" in screen_of("solvers:Solved", 120)
    assert "with model.scratch.max_position_embeddings = 150 it is cut" in screen_of("solvers:Solved", 400)


def test_sft_rows_with_another_signature_get_a_sentence(solver):
    with pytest.raises(EnvError, match=r"sft_rows\(4, 0\) returned no row"):
        screen_of("solvers:Swapped", 100)


def screen_with(tmp_path, *rows, **changes):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {"data": {"name": str(file)}, "model": {"scratch": {}}, "max_steps": 1, "output_dir": tmp_path}
    return sft_screen(SFTConfig.model_validate(run | changes))


ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_a_later_row_that_cannot_be_rendered_is_refused(tmp_path):
    plain = {"template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"}
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert "rows.jsonl:1" in screen_with(tmp_path, ROW, ROW, renderer=plain)
    with pytest.raises(DataError, match=r"rows.jsonl:3: .* shows no tools"):
        screen_with(tmp_path, ROW, ROW, ROW | {"tools": tools}, renderer=plain)


def test_a_later_reply_that_will_not_be_trained_is_said(tmp_path):
    messages = [ROW["messages"][0], {"role": "assistant", "content": "say <|im_end|>"}]
    shown = screen_with(tmp_path, ROW, {"messages": messages})
    assert "a reply of the first 2 rows will not be trained" in shown and "rows.jsonl:2: message 1 has" in shown
    assert "will not be trained" not in screen_with(tmp_path, ROW, ROW)


def test_a_reply_that_is_not_wanted_is_not_named_for_one_that_is(tmp_path):
    cut, end = ({"role": "assistant", "content": text} for text in ("say <|im_end|>", "b"))
    question = ROW["messages"][0]
    unwanted = {"messages": [question, cut | {"step_loss_mask": 0}, question, end]}
    shown = screen_with(tmp_path, ROW, unwanted, {"messages": [question, cut]})
    assert "a reply of the first 3 rows will not be trained" in shown and "rows.jsonl:3: message 1 has" in shown
