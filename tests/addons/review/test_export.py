"""`stretto export`: stored rollouts as data that `sft` and TRL read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet
import pytest
import stored_runs
from stored_runs import MEMBERS, word, write_run

from stretto.base import keeper
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.chat.render import build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.cli import main
from stretto.config.sections.sft import PreferenceData
from stretto.data.messages import parse_messages
from stretto.records.images import Image
from stretto.records.rollout import Group, Rollout, RolloutStatus, Task
from stretto_review import scores
from stretto_review.export import export, is_held_out

GROUPS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "words", GROUPS)


def rows(run: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    export([str(run), "--out", str(out), *words])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rollouts_have_all_that_is_stored(run: Path, tmp_path: Path) -> None:
    found = rows(run, tmp_path / "all.jsonl")
    assert len(found) == GROUPS * MEMBERS
    for row in found:
        assert row["reply"] == word(row["group"], row["member"]) + "<|im_end|>" and row["step"] == row["group"] // 4 + 1
        assert len(row["token_ids"]) == len(row["is_sampled"]) == len(row["logprobs"])


def test_sft_and_best_are_conversations(run: Path, tmp_path: Path) -> None:
    found = rows(run, tmp_path / "sft.jsonl", "--kind", "sft", "--min-reward", "1")
    assert found and all("a" in row["messages"][-1]["content"][:2] for row in found)
    assert all(parse_messages(row["messages"], "messages", "row")[-1]["role"] == "assistant" for row in found)
    best = rows(run, tmp_path / "best.jsonl", "--kind", "best", "--steps", "2")
    assert [row["group"] for row in best] == [4, 5, 6, 7] and {row["reward"] for row in best} == {1.0}
    with pytest.raises(ConfigError, match="--min-reward"):
        export([str(run), "--kind", "sft"])


def test_pairs_are_of_one_prompt_and_differ_in_reward(run: Path, tmp_path: Path) -> None:
    for row in rows(run, tmp_path / "pairs.jsonl", "--kind", "pairs", "--margin", "0.5"):
        assert row["prompt"][-1]["role"] == "user" and row["reward"] - row["rejected_reward"] >= 0.5
        [[chosen], [rejected]] = row["chosen"], row["rejected"]
        assert chosen["content"] == word(row["group"], row["member"])
        assert rejected["content"] == word(row["group"], row["rejected_member"])
    text = rows(run, tmp_path / "text.jsonl", "--kind", "pairs", "--text")
    assert all(isinstance(row[key], str) for row in text for key in ("prompt", "chosen", "rejected"))


def test_several_pairs_of_a_group_share_no_reply(run: Path, tmp_path: Path) -> None:
    one, two = (rows(run, tmp_path / "pairs.jsonl", "--kind", "pairs", "--per-group", n) for n in ("1", "2"))
    assert len(two) > len(one) and [row for row in two if row in one] == one
    used = [(row["group"], row[key]) for row in two for key in ("member", "rejected_member")]
    assert len(used) == len(set(used))
    assert all(row["reward"] > row["rejected_reward"] for row in two)
    with pytest.raises(ConfigError, match="--kind best: --per-group"):
        export([str(run), "--kind", "best", "--per-group", "2"])


def test_equal_replies_are_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward with noise tells them apart, and nothing can be learned from them."""
    noise = itertools.count()
    noisy = write_run(tmp_path / "noisy", 2, reply=lambda group, member: "abc", reward=lambda text: float(next(noise)))
    assert rows(noisy, tmp_path / "pairs.jsonl", "--kind", "pairs") == []
    assert "2 pairs of equal replies" in capsys.readouterr().out


def test_no_prompt_is_held_out_and_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = write_run(
        tmp_path / "several", 24, prompt=lambda group: f"Say a word with {'abc'[group % 3]}{group % 8}."
    )
    for kind, suffix in (("pairs", "jsonl"), ("best", "parquet")):
        out = tmp_path / f"{kind}.{suffix}"
        words = ["--kind", kind, "--out", str(out), "--held-out", "0.4", "--format", suffix]
        assert export([str(several), *words]) == 0
        kept, held_out = ([*read(place)] for place in (out, tmp_path / f"{kind}-held-out.{suffix}"))
        prompts = [{row.get("prompt", row.get("messages"))[0]["content"] for row in each} for each in (kept, held_out)]
        assert kept and held_out and not prompts[0] & prompts[1]
        assert f"held out: {len(held_out)} rows" in capsys.readouterr().out
    whole = rows(several, tmp_path / "whole.jsonl", "--kind", "best")
    assert sorted(row["group"] for row in kept + held_out) == [row["group"] for row in whole]
    with pytest.raises(ConfigError, match=r"'1\.5' is not a share"):
        export([str(several), "--held-out", "1.5"])


def test_prompts_with_other_images_are_other_prompts(tmp_path: Path) -> None:
    """Their texts are the same: all of them would be in one of the two files."""
    renderer = build_renderer(build_letters_tokenizer(tmp_path, has_images=True))
    image = renderer.encode("<|vision_start|><|image_pad|><|image_pad|><|vision_end|>")
    prompt = np.concatenate([image, renderer.encode("count"), renderer.encode("<|im_end|>")])
    branch = stored_runs._branch(prompt, np.concatenate([renderer.encode("two"), image]), -0.5)

    def group(*hashes: str) -> Group:
        images = tuple(Image(each, (1, 2, 4)) for each in hashes)
        task = Task(env="e", task_id="t", data={})
        rollout = Rollout(
            rollout_id="g0.0", group_id=0, member=0, task=task, status=RolloutStatus.FINISHED,
            branches=(msgspec.structs.replace(branch, images=images),),
        )  # fmt: skip
        return Group(group_id=0, task=task, rollouts=(rollout,))

    found = [is_held_out(group(f"h{n}", "a"), 0.5, renderer) for n in range(16)]
    assert len(set(found)) == 2
    later = [is_held_out(group(f"h{n}", "b"), 0.5, renderer) for n in range(16)]
    assert found == later, "an image after the prompt counts"


def test_a_held_out_file_that_no_longer_fits_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", 4)
    words = [str(one), "--kind", "pairs", "--out", str(tmp_path / "pairs.jsonl")]
    assert export([*words, "--held-out", "0.01"]) == 1
    assert "--held-out 0.01 holds out no prompt" in capsys.readouterr().out
    assert export(words) == 0
    assert "pairs-held-out.jsonl is of an earlier export" in capsys.readouterr().out
    for name in ("--margin", "--min-reward"):
        with pytest.raises(ConfigError, match=f"{name}: 'nan' is not a number"):
            export([*words, name, "nan"])


def test_a_reply_with_a_call_that_is_none_is_read_by_sft(tmp_path: Path) -> None:
    """A reply is often cut within its call."""
    cut = 'so <tool_call>{"name'
    run = write_run(
        tmp_path / "calls", 1, reply=lambda group, member: cut if member else "a", is_cut=lambda text: text == cut
    )
    [row] = rows(run, tmp_path / "pairs.jsonl", "--kind", "pairs")
    parse_pair = pytest.importorskip("stretto_preference.rows").parse_pair
    pair = parse_pair(row, PreferenceData(name="pairs.jsonl"), "row")
    assert pair.replies[1] == [{"role": "assistant", "content": cut}] and pair.is_cut == (False, True)


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return found
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_cut_reply_is_marked_in_pairs_and_no_row_to_imitate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages would end it: `sft` would be taught to stop in the middle, DPO not to stop."""
    cut = write_run(tmp_path / "cut", GROUPS, is_cut=lambda text: len(text) > 20)
    pairs = rows(cut, tmp_path / "pairs.jsonl", "--kind", "pairs")
    for row in pairs:
        for key in ("chosen", "rejected"):
            assert row[f"{key}_is_cut"] == (len(row[key][0]["content"]) > 20)
    assert {row["rejected_is_cut"] for row in pairs} == {False, True}
    capsys.readouterr()
    for kind in ("best", "sft"):
        found = rows(cut, tmp_path / f"{kind}.jsonl", "--kind", kind, "--min-reward", "0")
        assert found and all(len(row["messages"][-1]["content"]) <= 20 for row in found)
        num_cut = sum(len(word(group, member)) > 20 for group in range(GROUPS) for member in range(MEMBERS))
        assert f"{num_cut} cut at a limit of tokens" in capsys.readouterr().out


def test_new_scores_take_the_place_of_rewards(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [scores.Line(2, member, float(member == 5), 0.0) for member in range(MEMBERS)]
    scores.save(RunDir(run), "sixth", ["my:fn"], lines)
    [row] = rows(run, tmp_path / "best.jsonl", "--kind", "best", "--scores", "sixth")
    assert (row["group"], row["member"], row["reward"]) == (2, 5, 1.0)
    assert f"{(GROUPS - 1) * MEMBERS} without a score of that name" in capsys.readouterr().out


@pytest.mark.heavy
def test_formats_hold_the_same_rows(run: Path, tmp_path: Path) -> None:
    import datasets

    wanted = rows(run, tmp_path / "best.jsonl", "--kind", "best")
    export([str(run), "--kind", "best", "--format", "parquet", "--out", str(tmp_path / "best.parquet")])
    export([str(run), "--kind", "best", "--format", "hf", "--out", str(tmp_path / "best")])
    assert pyarrow.parquet.read_table(tmp_path / "best.parquet").to_pylist() == wanted
    assert datasets.load_from_disk(str(tmp_path / "best")).to_list() == wanted


@pytest.mark.heavy
def test_pairs_are_read_by_the_library_that_trl_reads_them_with(run: Path, tmp_path: Path) -> None:
    import datasets

    wanted = rows(run, tmp_path / "pairs.jsonl", "--kind", "pairs", "--per-group", "3")
    found = datasets.load_dataset(
        "json", data_files=str(tmp_path / "pairs.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert found.to_list() == wanted
    assert found.features["chosen"] == found.features["rejected"] == found.features["prompt"]


def test_a_place_below_a_file_is_no_bug(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(keeper.VARIABLE, raising=False)
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), "--out", str(tmp_path / "file" / "rows.jsonl")]) == 2
    err = capsys.readouterr().err
    assert "cannot be made (File exists); name another place" in err and "bug" not in err


@pytest.mark.parametrize("kind", ["best", "pairs"])
def test_what_a_template_writes_before_a_reply_is_none_of_it(run: Path, tmp_path: Path, kind: str) -> None:
    """The messages of tasks without a prompt are read from tokens, where an empty thought is before each reply."""
    bare = write_run(tmp_path / "bare", GROUPS, has_messages=False)
    assert "<think>" in rows(bare, tmp_path / "all.jsonl", "--kind", "rollouts")[0]["prompt"]
    found, wanted = (rows(each, tmp_path / "some.jsonl", "--kind", kind) for each in (bare, run))
    assert found and found == wanted
