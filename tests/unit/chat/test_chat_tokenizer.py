"""The letters tokenizer: one token per character, role and chat token; the same ids as in transformers."""

from __future__ import annotations

import json
import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import ConfigError, DataError
from stretto.chat.tokenizer import CHAT_TOKENS, build_letters_tokenizer, load_tokenizer

PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n\t"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_letters_tokenizer(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def test_vocabulary_is_a_multiple_of_16_and_ids_are_dense(tokenizer):
    assert tokenizer.vocab_size == 112
    assert tokenizer.vocab_size % 16 == 0
    assert [tokenizer.token_id(t) for t in CHAT_TOKENS] == list(range(len(CHAT_TOKENS)))


def test_every_letter_digit_and_mark_is_one_token(tokenizer):
    for character in PRINTABLE:
        assert len(tokenizer.encode(character)) == 1, character


def test_chat_tokens_are_one_id_and_end_of_turn_ends(tokenizer):
    for token in CHAT_TOKENS:
        assert tokenizer.encode(token) == [tokenizer.token_id(token)]
    assert tokenizer.eos_ids == (tokenizer.token_id("<|im_end|>"),)


def test_role_is_one_token_only_where_a_role_stands(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nuser tool\nsystem")
    assert [tokenizer.decode([i]) for i in ids[:3]] == ["<|im_start|>", "user", "\n"]
    assert [tokenizer.decode([i]) for i in ids[3:]] == list("user tool\nsystem")
    assert len(tokenizer.encode("users")) == 5


def test_unknown_characters_become_the_unknown_token(tokenizer):
    assert tokenizer.encode("aé") == [*tokenizer.encode("a"), tokenizer.unk_token_id]


@given(st.text(alphabet=PRINTABLE, max_size=40))
def test_text_survives_encode_and_decode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_loads_it_and_gives_the_same_ids_with_and_without_a_model_config(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    directory = build_letters_tokenizer(tmp_path)
    text = "<|im_start|>user\nsort: b, a!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nab<|im_end|>"
    for config in (None, {"model_type": "qwen3", "eos_token_id": 2}):
        if config:
            (directory / "config.json").write_text(json.dumps(config))
        theirs = AutoTokenizer.from_pretrained(str(directory))
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
        assert (theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (2, 0, tokenizer.unk_token_id)


def test_end_ids_are_gathered_from_every_file(tmp_path):
    build_letters_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert load_tokenizer(tmp_path).eos_ids == (2, 0)


def test_missing_and_broken_directories_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no directory 'no/such-model'"):
        load_tokenizer("no/such-model")
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("tokenizer_config.json", {"eos_token": 7}, "eos_token = 7 must be the text of a token"),
        ("tokenizer_config.json", {"unk_token": ["<|unk|>"]}, "unk_token = ['<|unk|>'] must be the text of a token"),
        ("tokenizer_config.json", {"unk_token": {"content": 1}}, "unk_token = 1 must be the text of a token"),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "eos_token = '\\ud800' must be the text of a token"),
        ("tokenizer_config.json", [1], "a list where a JSON object belongs."),
        ("generation_config.json", {"eos_token_id": {}}, "eos_token_id = {} must be the id of a token"),
        ("config.json", {"eos_token_id": [1, "2"]}, "eos_token_id = '2' must be the id of a token"),
    ],
)
def test_values_of_a_wrong_kind_are_told_by_file_and_key(file, values, said, tmp_path):
    build_letters_tokenizer(tmp_path)
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(DataError) as told:
        load_tokenizer(tmp_path)
    assert str(told.value) == f"{tmp_path / file}: {said}" or str(told.value).startswith(f"{tmp_path / file}: {said},")


@pytest.mark.heavy
def test_loading_imports_neither_torch_nor_transformers(directory):
    code = (
        "import sys; from stretto.chat.render import build_renderer;"
        "from stretto.chat.tokenizer import load_tokenizer;"
        f"assert 'renderers' not in sys.modules; load_tokenizer({str(directory)!r});"
        f"build_renderer({str(directory)!r}, model_type='qwen3');"
        "assert not {'torch', 'transformers', 'openai', 'httpx'} & set(sys.modules);"
        "from openai import OpenAI; import openai.types, renderers.client; assert openai.__path__ and OpenAI;"
        "import httpx; assert httpx.__path__ and renderers.client.httpx.Response is httpx.Response"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.heavy
def test_a_thread_that_imports_openai_while_the_library_is_imported_gets_the_real_one():
    code = """
import sys, threading
from stretto.chat import family_backend

def import_in_between(event, args):
    if event == "import" and args[0] == "renderers.base":
        thread = threading.Thread(target=exec, args=("import openai.types; from openai import OpenAI", given))
        thread.start()
        thread.join(60)

given = {}
sys.addaudithook(import_in_between)
library = family_backend.import_library()
import openai
assert given["OpenAI"] is openai.OpenAI and library.create_renderer
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_phrases_are_one_token_each_and_change_no_other_id(tmp_path):
    plain = load_tokenizer(build_letters_tokenizer(tmp_path / "plain"))
    phrases = ['{"name": "calculate"', "}}", "# Tools\n\nYou <tool_call>\n"]
    tokenizer = load_tokenizer(build_letters_tokenizer(tmp_path / "phrases", phrases=phrases))
    assert tokenizer.vocab_size == plain.vocab_size + 3
    assert [len(tokenizer.encode(phrase)) for phrase in phrases] == [1, 1, 1]
    text = "<|im_start|>user\nuser } 12\n\n<|im_end|>"
    assert tokenizer.encode(text) == plain.encode(text)
    for text in ("a" + phrases[0] + "b}}}", phrases[2] + "<tool_call>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(ConfigError, match="'a' is a token already"):
        build_letters_tokenizer(tmp_path / "twice", phrases=["a"])


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "qwen.tiktoken", "vocab.json"])
def test_a_tokenizer_in_another_format_is_refused_with_the_command_that_writes_it(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"no tokenizer.json, but {name} .*AutoTokenizer.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_the_command_writes_a_tokenizer_of_the_same_ids(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the quick brown fox jumps {i} times over {i % 7} dogs" for i in range(300)))
    model = tmp_path / "model"
    model.mkdir()
    options = {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    spm.SentencePieceTrainer.train(input=str(text), model_prefix=str(model / "tokenizer"), **options)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "config.json").write_text('{"model_type": "llama"}')
    pieces = spm.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    with pytest.raises(DataError) as raised:
        load_tokenizer(model)
    code = str(raised.value).partition('python -c "')[2].partition('"')[0]
    exec(code)
    ids = load_tokenizer(model).encode("the quick fox")
    assert ids == pieces.encode("the quick fox")
