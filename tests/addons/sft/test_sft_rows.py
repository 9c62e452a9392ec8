"""SFT examples: errors name the row, one number is the cursor, packing loses no token."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.chat.render import build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.sft import EnvData, FileData, LossMaskSection
from stretto_sft.rows import Example, ExampleOrder, load_examples, pack, parse_row, read_rows

ASSISTANT = LossMaskSection()


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return build_renderer(build_letters_tokenizer(tmp_path_factory.mktemp("letters")), model_type="qwen3")


def load(renderer, path, max_tokens=512):
    return load_examples(FileData(name=str(path)), renderer, ASSISTANT, max_tokens, seed=0)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def messages(ask, reply):
    return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": reply}]}


def trained_text(renderer, example):
    return renderer.tokenizer.decode(example.token_ids[example.is_trained])


def test_messages_and_prompt_completion_rows_are_the_same_examples(renderer, tmp_path):
    ask, reply = messages("ba", "ab")["messages"]
    rows = [messages("ba", "ab"), {"prompt": "ba", "completion": "ab"}, {"prompt": [ask], "completion": [reply]}]
    examples = load(renderer, write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [trained_text(renderer, example) for example in examples] == ["ab<|im_end|>"] * 3
    assert len({example.token_ids.tobytes() for example in examples}) == 1


@pytest.mark.parametrize(
    ("beside", "way"),
    [
        ({"system": "Be brief."}, "write it as the first message"), ({"system_prompt": "Be brief."}, "first message"),
        ({"functions": [{"name": "look"}]}, "under 'tools'"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "in the config's section renderer"),
    ],
)  # fmt: skip
def test_what_a_row_says_to_the_model_beside_its_conversation_is_refused(beside, way, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [messages("ba", "ab"), messages("ba", "ab") | beside])
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {next(iter(beside))!r} beside the conversation.*{way}"):
        list(read_rows(FileData(name=str(path)), 0))


def test_columns_that_are_empty_or_said_in_the_conversation_or_named_are_read_on(tmp_path):
    talk = messages("ba", "ab")["messages"]
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": talk, "system": "", "functions": [], "source": "web", "id": 3},
        {"messages": [system, *talk], "system": "Be brief."},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert len(list(read_rows(FileData(name=str(path)), 0))) == 2
    path = write_jsonl(tmp_path / "named.jsonl", [{"system_prompt": "ba", "answer": "ab"}])
    (row,) = read_rows(FileData(name=str(path), input_key="system_prompt", output_key="answer"), 0)
    assert row.messages == talk


@pytest.mark.parametrize(
    "empty",
    [
        {"tools": ""}, {"tools": " "}, {"tools": "[]"}, {"tools": "null"}, {"functions": "[]"}, {"system": " "},
        {"system_prompt": "null"}, {"chat_template_kwargs": "{}"},
        {"chat_template_kwargs": {"custom_instructions": "", "python_tools": [], "enable_thinking": None}},
    ],
)  # fmt: skip
def test_what_stands_for_nothing_in_a_column_is_nothing(empty, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [messages("ba", "ab") | empty])
    (row,) = read_rows(FileData(name=str(path)), 0)
    assert row.tools is None
    assert row.messages == messages("ba", "ab")["messages"]


def test_the_context_of_an_instruction_is_not_lost(tmp_path):
    row = {"instruction": "Who?", "context": "Ada wrote it.", "response": "Ada"}
    data = FileData(
        name=str(write_jsonl(tmp_path / "rows.jsonl", [row])), input_key="instruction", output_key="response"
    )
    with pytest.raises(DataError, match=r"'context' beside the conversation.*join the two"):
        list(read_rows(data, 0))
    write_jsonl(tmp_path / "rows.jsonl", [row | {"context": ""}])
    assert len(list(read_rows(data, 0))) == 1


@pytest.mark.parametrize("keys", [{}, {"input_key": "instruction", "output_key": "output"}])
def test_the_input_of_an_instruction_is_not_lost(keys, tmp_path):
    row = {"instruction": "Sort.", "input": "ba", "output": "ab"}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=r"join the two"):
        list(read_rows(FileData(name=str(path), **keys), 0))
    path = write_jsonl(tmp_path / "rows.jsonl", [row | {"input": ""}])
    (found,) = read_rows(FileData(name=str(path), input_key="instruction", output_key="output"), 0)
    assert found.messages[0]["content"] == "Sort."


def test_conversation_and_tools_are_read_from_the_configured_keys(renderer, tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "description": "a", "parameters": {}}}]
    talk = messages("ba", "ab")["messages"]
    rows = [{"talk": talk, "my_tools": json.dumps(tools), "messages": "not these", "tools": 3}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    (row,) = read_rows(FileData(name=str(path), input_key="talk", tool_key="my_tools"), 0)
    assert row.messages == talk and row.tools == tools
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no 'speech' \(input_key\).*messages, my_tools"):
        list(read_rows(FileData(name=str(path), input_key="speech"), 0))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: `messages` must be a list.*'not these'"):
        list(read_rows(FileData(name=str(path), input_key="messages"), 0))


@pytest.mark.parametrize(("masks", "trained"), [
    ((1, 1), "one<|im_end|>two<|im_end|>"),
    ((0, 1), "two<|im_end|>"),
    ((1, 0), "one<|im_end|>"),
    ((None, 1), "one<|im_end|>two<|im_end|>"),
])  # fmt: skip
def test_a_turn_with_step_loss_mask_0_is_context_and_not_trained(renderer, tmp_path, masks, trained):
    """Parquet columns have the key in every message, with None in messages without it."""
    first, second = messages("a", "one")["messages"], messages("b", "two")["messages"]
    plain = load(renderer, write_jsonl(tmp_path / "plain.jsonl", [{"messages": first + second}]))
    first[1]["step_loss_mask"], second[1]["step_loss_mask"] = masks
    rows = [{"messages": first + second}]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for path in (write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "rows.parquet"):
        (example,) = load(renderer, path).examples
        assert trained_text(renderer, example) == trained
        shown = plain[0].token_ids[: len(example.token_ids)]
        assert np.array_equal(example.token_ids, shown)  # the mask is no part of the template


def test_nothing_follows_the_last_trained_token(renderer, tmp_path):
    (example,) = load(renderer, write_jsonl(tmp_path / "rows.jsonl", [messages("ba", "ab")])).examples
    assert example.is_trained[-1]
    assert example.token_ids[-1] == renderer.stop_ids[0]


def test_directory_of_jsonl_and_parquet_is_read_in_order_of_names(renderer, tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [messages("x", "second")])
    table = pyarrow.Table.from_pylist(
        [{**messages("x", "first"), "prompt": None, "completion": None}, {"prompt": "x", "completion": "mid"}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "readme.txt").write_text("not data")
    examples = load(renderer, tmp_path)
    assert [trained_text(renderer, e) for e in examples] == ["first<|im_end|>", "mid<|im_end|>", "second<|im_end|>"]


def test_the_seed_determines_the_rows_that_an_environment_writes(renderer):
    data = EnvData(id="sort-letters", num_rows=5)
    first, again = (load_examples(data, renderer, ASSISTANT, 64, seed=3) for _ in range(2))
    other = load_examples(data, renderer, ASSISTANT, 64, seed=4)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    for row in read_rows(data, 3):
        ask, reply = (message["content"] for message in row.messages)
        assert reply == "".join(sorted(ask))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "a"}', "needs `messages`, or `prompt` and `completion`; it has text"),
        ('{"prompt": "a"}', "it has prompt"),
        ('{"messages": []}', r"`messages` must be a list of messages, got \[\]"),
        ('{"messages": ["a"]}', r"messages\[0\] must be an object"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', r"messages\[0\].role must be one of .* got 'robot'"),
        ('{"messages": [{"role": "user", "content": 3}]}', r"messages\[0\].content must be text, got 3"),
        ('{"prompt": "a", "completion": "b", "tools": "["}', "tools: not JSON"),
    ],
)
def test_a_row_that_is_no_example_is_refused_with_file_and_line(renderer, tmp_path, line, complaint):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(messages("a", "b")) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: .*{complaint}"):
        load(renderer, path)


NAMED = {"input_key": "q", "output_key": "a"}


@pytest.mark.parametrize(
    ("row", "keys", "complaint"),
    [
        ({"messages": None}, {}, "'messages' is null; give it a value, or leave the row out"),
        ({"prompt": "x", "completion": None}, {}, "'completion' is null"),
        ({"messages": None, "prompt": None, "completion": "x"}, {}, "'prompt' is null"),
        ({"q": "x", "a": None}, NAMED, r"'a' \(output_key\) is null"),
        ({"q": None, "a": "x"}, NAMED, r"'q' \(input_key\) is null"),
        ({"q": "x", "a": float("nan")}, NAMED, "`a` must be a text or a list of messages, got nan"),
        ({"q": float("nan"), "a": "x"}, NAMED, "`q` must be a text or a list of messages, got nan"),
        ({"prompt": "x", "a": [3]}, {"output_key": "a"}, r"a\[0\] must be an object"),
        ({"messages": float("nan")}, {}, "`messages` must be a list of messages, got nan"),
        ({"q": "x", "a": "y", "t": "["}, NAMED | {"tool_key": "t"}, "t: not JSON"),
    ],
)
def test_a_column_that_is_empty_is_named_as_the_file_names_it(row, keys, complaint, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {complaint}"):
        list(read_rows(FileData(name=str(path), **keys), 0))


def test_an_environment_that_writes_no_rows_is_named(renderer):
    with pytest.raises(ConfigError, match=r"has no sft_rows"):
        load_examples(EnvData(id=f"{__name__}:Unsolved"), renderer, ASSISTANT, 64, 0)
    with pytest.raises(EnvError, match=r"Mistaken': sft_rows: .*test_sft_rows.py:\d+.*KeyError"):
        load_examples(EnvData(id=f"{__name__}:Mistaken"), renderer, ASSISTANT, 64, 0)


class Unsolved:
    """An environment that cannot write solutions."""

    name = "unsolved"

    def tasks(self, split):
        raise NotImplementedError

    async def rollout(self, task, ctx):
        raise NotImplementedError


class Mistaken(Unsolved):
    def sft_rows(self, num_rows, seed):
        yield {"messages": {}["answer"]}


def test_long_examples_are_cut_and_counted_and_dropped_if_no_reply_is_left(renderer, tmp_path):
    rows = [messages("ab", "ab"), messages("ab", "x" * 50), messages("y" * 50, "ab")]
    examples = load(renderer, write_jsonl(tmp_path / "rows.jsonl", rows), max_tokens=20)
    assert (len(examples), examples.num_truncated, examples.num_dropped) == (2, 1, 1)
    assert max(len(example.token_ids) for example in examples) == 20
    with pytest.raises(DataError, match="no row has a token to train on"):
        load(renderer, write_jsonl(tmp_path / "rows.jsonl", [messages("y" * 50, "ab")]), max_tokens=20)


def test_row_with_text_parts_and_tool_calls_is_rendered(renderer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    row = parse_row(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "ab"}], "name": None},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ]
        },
        "here",
    )
    [(ids, mask, _)] = renderer.render_sft(row.messages, ASSISTANT).examples
    assert "ab" in renderer.tokenizer.decode(ids)
    assert '"name": "add"' in renderer.tokenizer.decode(ids[mask])


def test_every_epoch_has_each_example_once_in_a_new_order():
    order = ExampleOrder(10, seed=5)
    epochs = [order.draw(10) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ExampleOrder(10, seed=5).draw(10) == epochs[0]
    assert ExampleOrder(10, seed=6).draw(10) != epochs[0]


@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=6), st.integers(0, 3))
@settings(max_examples=50)
def test_an_order_resumed_at_any_point_continues_as_if_never_stopped(num_examples, counts, seed):
    whole = ExampleOrder(num_examples, seed).draw(sum(counts))
    pieces, num_drawn = [], 0
    for count in counts:
        resumed = ExampleOrder(num_examples, seed, num_drawn)
        pieces += resumed.draw(count)
        num_drawn = resumed.num_drawn
    assert pieces == whole


@given(st.lists(st.integers(2, 16), min_size=1, max_size=30), st.integers(16, 40))
@settings(max_examples=60)
def test_packing_loses_no_token_splits_no_example_and_overfills_no_row(lengths, row_tokens):
    rng = np.random.default_rng(len(lengths))
    examples = [Example(rng.integers(0, 99, n).astype(np.int32), np.arange(n) >= min(n - 1, 1)) for n in lengths]
    micro_batches = pack(examples, row_tokens)
    seen = {}
    for mb in micro_batches:
        assert mb.num_tokens == len(mb.token_ids) <= row_tokens
        assert mb.num_samples == len(mb.cu_seqlens) - 1
        assert not mb.loss_mask.any()
        for d, sample_id in enumerate(mb.sample_ids):
            span = slice(mb.cu_seqlens[d], mb.cu_seqlens[d + 1])
            seen[int(sample_id)] = (mb.token_ids[span], mb.ce_weights[span])
    assert sorted(seen) == list(range(len(examples)))
    for i, (token_ids, weights) in seen.items():
        assert np.array_equal(token_ids, examples[i].token_ids)
        assert np.array_equal(weights, examples[i].is_trained)
    # First fit: no two rows could have been one.
    sizes = sorted(mb.num_tokens for mb in micro_batches)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > row_tokens
