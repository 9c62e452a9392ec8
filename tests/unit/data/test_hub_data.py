"""Data sets of the Hub as data: from a server with the Hub's API, from its cache, and from a directory."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from cases.dataset import RUN
from cases.hub_site import open_hub
from processes.add_ons import needs

from stretto.base.errors import ConfigError, DataError
from stretto.chat.render import build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.sft import FileData, LossMaskSection
from stretto.data.hub import REQUESTS, HubSource, parse_source, told_once
from stretto.data.records import read_records
from stretto.envs.dataset import dataset

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.heavy

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
READ = """
import json, sys
from stretto.base.errors import StrettoError
from stretto.data.records import read_records
for how, source in zip(sys.argv[1].split(), sys.argv[2:]):
    try:
        rows = list(read_records(source, "path", is_streamed=how == "streamed"))
        print(json.dumps([len(rows), *rows[0]]))
    except StrettoError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
assert "torch" not in sys.modules
"""
ADVICE = "`hf download openai/gsm8k --repo-type dataset` fetches it into the cache (HF_HOME)"


def row(i: int) -> dict:
    return {"question": f"What is {i} + {i}?", "answer": f"<<{i}+{i}={2 * i}>>\n#### {2 * i}", "level": i}


def build_repository(directory: Path) -> Path:
    """Questions of GSM8K's form, in two configs."""
    splits = {"main/train": 20, "main/test": 5, "socratic/train": 3}
    for name, count in splits.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.Table.from_pylist([row(i) for i in range(count)])
        pyarrow.parquet.write_table(table, directory / f"{name}-00000-of-00001.parquet")
    (directory / "README.md").write_text(CARD)
    return directory


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    build_repository(root / "datasets" / "openai" / "gsm8k")
    with open_hub(root) as site:
        yield site


def environment(hub, home: Path, *, is_offline: bool = False) -> dict[str, str]:
    more = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return os.environ | more | {"HF_HUB_OFFLINE": str(int(is_offline))}


def read(hub, home: Path, *sources: str, how: str = "cached", is_offline: bool = False) -> list:
    """What another process reads of each source: number of records, place and content of the first; or the error.

    how: `cached` or `streamed`; or one of the two for each source.
    """
    hows = how if " " in how else " ".join([how] * len(sources))
    done = subprocess.run(
        [sys.executable, "-c", READ, hows, *sources],
        env=environment(hub, home, is_offline=is_offline), cwd=home.parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


MAIN, PART, OTHER = ("openai/gsm8k:main[train]", "openai/gsm8k:main[train[5:8]]", "openai/gsm8k:socratic[train]")


def test_a_split_is_fetched_once_and_then_read_from_the_cache_without_a_network(hub, tmp_path):
    home = tmp_path / "home"
    expected = [[20, f"{MAIN}, row 1", row(0)], [3, f"{PART}, row 1", row(5)]]
    assert read(hub, home, MAIN, PART) == expected
    hub.requests.clear()
    *found, missing = read(hub, home, MAIN, PART, OTHER, is_offline=True)
    assert found == expected
    assert missing.startswith("DataError: path = 'openai/gsm8k:socratic[train]'") and ADVICE in missing
    assert not hub.requests


def test_a_stream_leaves_no_copy_on_disk(hub, tmp_path):
    home = tmp_path / "home"
    assert read(hub, home, MAIN, PART, how="streamed") == [
        [20, f"{MAIN}, row 1", row(0)],
        [3, f"{PART}, row 1", row(5)],
    ]
    assert not list(home.rglob("*.arrow")) and not list(home.rglob("*.parquet"))


READ_ONE = """
import sys
from stretto.data.records import read_records
rows = read_records(sys.argv[1], "path", is_streamed=True)
print(next(iter(rows))[1]["level"])
"""


def test_a_process_that_ends_within_a_stream_says_nothing(tmp_path):
    source = f"{build_repository(tmp_path / 'gsm8k')}:main[train]"
    done = subprocess.run(
        [sys.executable, "-c", READ_ONE, source], env=os.environ | {"HF_HOME": str(tmp_path / "home")},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_what_is_fetched_by_hand_is_read_offline_in_both_ways(hub, tmp_path):
    home = tmp_path / "home"
    [missing] = read(hub, home, MAIN, is_offline=True)
    assert missing.startswith("DataError: path = 'openai/gsm8k:main[train]': Couldn't reach") and ADVICE in missing
    command = [str(Path(sys.executable).with_name("hf")), "download", "openai/gsm8k", "--repo-type", "dataset"]
    subprocess.run(command, env=environment(hub, home), check=True, capture_output=True, timeout=300)
    how = "cached cached cached streamed streamed streamed"
    both = read(hub, home, *[MAIN, PART, OTHER] * 2, how=how, is_offline=True)
    for found in (both[:3], both[3:]):
        assert [each[0] for each in found] == [20, 3, 3] and found[0][2] == row(0)


def test_mistakes_are_named_with_what_there_is_instead(hub, tmp_path):
    sources = [
        "openai/gsm8k:mian[train]",
        "openai/gsm8k:main[valid]",
        "openai/gsm8k[train]",
        "openai/none[train]",
        "openai/gsm8k:main[train[:50%]]",
    ]
    how = "cached cached cached cached streamed"
    config, split, unnamed, repo, percent = read(hub, tmp_path / "home", *sources, how=how)
    assert config.startswith("ConfigError: path = 'openai/gsm8k:mian[train]'") and "['main', 'socratic']" in config
    assert split.startswith("ConfigError") and "['train', 'test']" in split
    assert unnamed.startswith("ConfigError") and "'socratic'" in unnamed
    assert repo.startswith("DataError") and "doesn't exist" in repo and "hf auth login" in repo
    assert percent.startswith("ConfigError") and "or remove streaming" in percent


# -- what is a file, and what is not --


@pytest.mark.parametrize(("text", "source"), [
    ("openai/gsm8k:main[train]", HubSource("openai/gsm8k", "main", "train")),
    ("openai/gsm8k[train[:500]]", HubSource("openai/gsm8k", None, "train[:500]")),
    ("openai/gsm8k:main[train[10%:20%]]", HubSource("openai/gsm8k", "main", "train[10%:20%]")),
    ("openai/gsm8k:main", None), ("gsm8k[train]", None), ("./mine/rows[train]", None), ("a/b/c[train]", None),
])  # fmt: skip
def test_a_data_set_is_organisation_name_and_split(text, source):
    assert parse_source(text) == source
    assert source is None or str(source) == text


def test_a_data_set_without_a_split_is_its_split_train(hub, tmp_path):
    found, missing = read(hub, tmp_path / "home", "openai/gsm8k:main", "openai/none")
    assert found == [20, f"{MAIN}, row 1", row(0)]
    assert "'openai/none[train]', which is no path here and so a data set of the Hub: " in missing


def test_what_exists_or_ends_like_a_file_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path("org/rows[train]").mkdir()
    Path("org/rows[train]/a.jsonl").write_text('{"prompt": "here"}\n')
    assert [record for _, record in read_records("org/rows[train]")] == [{"prompt": "here"}]
    with pytest.raises(ConfigError, match=r"'org/none\.jsonl': no such file or directory\.") as caught:
        list(read_records("org/none.jsonl"))
    assert "Hub" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"'org/none': no such file .*'org/none\[train\]'"):
        list(read_records("org/none"))
    with pytest.raises(ConfigError, match=r"file.*streaming"):
        list(read_records("org/rows[train]", is_streamed=True))


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"path = 'org/name\[train\]': .*'stretto\[hub\]'"):
        list(read_records("org/name[train]", "path"))


# -- columns --


@pytest.fixture
def local(tmp_path, monkeypatch) -> str:
    """A directory with the files of a data set."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return str(build_repository(tmp_path / "gsm8k"))


def test_columns_become_prompts_labels_and_metadata(local):
    env = dataset(
        path=f"{local}:main[train[:4]]",
        eval_path=f"{local}:main[test]",
        input_key="question",
        prompt_template="{prompt} Answer in \\boxed{}.",
        label_key="answer",
        label_pattern="#### (.*)",
        metadata_key=["level"],
        reward="math",
        run=RUN,
    )
    source = env.tasks("train")
    assert source.num_tasks == 4 and env.tasks("eval").num_tasks == 5
    assert source.task(3).data == {
        "prompt": [{"role": "user", "content": "What is 3 + 3? Answer in \\boxed{}."}],
        "label": "6",
        "metadata": {"level": 3},
        "tools": None,
    }
    streamed = dataset(path=f"{local}:main[train[:4]]", streaming=True, input_key="question", label_key="answer")
    assert streamed.tasks("train").num_tasks == 4


@pytest.mark.parametrize(("args", "message"), [
    ({"label_pattern": "@@@ (.*)"}, r"row 1: 'answer' has nothing that label_pattern = '@@@ \(\.\*\)' matches: '<<0"),
    ({"label_pattern": "#### .*"}, r"label_pattern = '#### \.\*' must have one group"),
    ({"label_pattern": "("}, r"label_pattern = '\(': missing \)"),
    ({"prompt_template": "Answer."}, r"prompt_template has no \{prompt\}"),
    ({"metadata_key": ["level", "topic"]}, r"row 1: no 'topic' \(metadata_key\); the record has answer, level, quest"),
    ({"input_key": "level", "prompt_template": "{prompt}!"}, r"row 1: prompt_template needs text under 'level', got 0"),
])  # fmt: skip
def test_a_column_that_does_not_fit_is_named(local, args, message):
    keys = {"input_key": "question", "label_key": "answer"}
    with pytest.raises((ConfigError, DataError), match=message):
        dataset(path=f"{local}:main[train]", **keys | args)


def boxed(record: dict) -> dict:
    steps, _, answer = record["answer"].partition("\n#### ")
    return {"prompt": record["question"], "completion": f"{steps} \\boxed{{{answer}}}"}


def broken(record: dict) -> dict:
    return {"prompt": record["questoin"]}


@needs("sft")
def test_columns_become_examples_for_sft(local, tmp_path):
    from stretto_sft.rows import load_examples

    renderer = build_renderer(build_letters_tokenizer(tmp_path / "letters"), model_type="qwen3")

    def texts(**keys) -> list[str]:
        data = FileData(name=f"{local}:main[train[:2]]", **keys)
        found = load_examples(data, renderer, LossMaskSection(), 512, seed=0)
        return [renderer.tokenizer.decode(each.token_ids[each.is_trained]) for each in found.examples]

    replies = texts(input_key="question", output_key="answer")
    assert len(replies) == 2 and replies[1].endswith("2<|im_end|>")
    assert len(texts(convert=f"{__name__}:boxed", streaming=True)) == 2
    with pytest.raises(DataError, match=r"row 1: no 'reply' \(output_key\).*answer, level, question"):
        texts(input_key="question", output_key="reply")
    with pytest.raises(ConfigError, match=r"row 1: convert.*test_hub_data\.py:\d+: KeyError"):
        texts(convert=f"{__name__}:broken")
    with pytest.raises(DataError, match=r"must return a record.*NoneType"):
        texts(convert="builtins:print")


def test_that_the_hub_is_asked_again_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with told_once("path = 'a/b[train]'"):
        for attempt in (1, 2):
            logging.getLogger(REQUESTS).warning("'[Errno -2]' thrown. Retrying in 1s [Retry %d/5].", attempt)
    [record] = caplog.records
    assert "a/b[train]" in record.getMessage() and "asked again" in record.getMessage()
    logging.getLogger(REQUESTS).warning("of something else")
    assert len(caplog.records) == 2
