"""The page's routes over a run of an orchestrator with fakes at the other ends of its wires."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import ledger_runs
import numpy as np
import pytest
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestClient, TestServer
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

import stretto
from stretto import state
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.ledger.reader import LedgerReader
from stretto.records.trained_tokens import encode_trained, trained_sample
from stretto_view.page import conversation, logs, rollouts, timeline
from stretto_view.page.app import build
from stretto_view.page.library import Library, OpenRun
from stretto_view.page.now import waits


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of eight rollouts, with evals of versions 0, 2, 4 and 5."""
    cfg = config(tmp_path_factory.mktemp("runs"), eval={"num_examples": 4, "interval": 2, "sampling": {}})
    train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5))
    run: RunDir = cfg.run_dir
    run.configs.mkdir()
    resolved = {
        "model": {"name": None},
        "tokenizer": {"name": None},
        "inference": {"api_key": "s3cret"},
        "max_steps": 5,
    }
    run.config("run").write_text(json.dumps(resolved))
    run.logs.mkdir(exist_ok=True)
    run.log("trainer").write_text(
        "10:00:00.000 INFO    trainer | one\n10:00:02.500 WARNING trainer | <b>two</b>\n  its second line\n"
    )
    run.log("inference").write_text("10:00:01.000 ERROR   inference | three\n")
    at = time.mktime((2026, 3, 2, 10, 0, 3, 0, 0, -1))
    for name in ("trainer", "inference"):
        os.utime(run.log(name), (at, at))
    build_letters_tokenizer(run.tokenizer, "".join(map(chr, range(1, 128))))
    return run.path


@pytest.fixture
async def page(path: Path) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build(Library([path.parent])))) as client:
        yield client


async def test_every_route_answers(page: TestClient, path: Path) -> None:
    [row] = await (await page.get("/api/runs")).json()
    assert row["id"] == "test" and row["state"] == "done" and row["step"] == row["max_steps"] == 5
    for route in (
        "now",
        "metrics",
        "curve?key=reward/mean",
        "rollouts",
        "timeline",
        "evals",
        "evals?version=2",
        "config",
        "logs",
    ):
        answer = await page.get(f"/api/run/test/{route}")
        assert answer.status == 200 and await answer.json(), route
    settings = await (await page.get("/api/run/test/config")).json()
    assert settings["inference.api_key"] == "***" and settings["max_steps"] == 5


async def test_the_page_is_its_own_files_and_nothing_else(page: TestClient) -> None:
    answer = await page.get("/")
    text = await answer.text()
    assert answer.status == 200 and "script-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "http://" not in text and "https://" not in text
    for name in ("main.js", "page.css", "uplot.js", "uplot-license.txt"):
        assert (await page.get(f"/static/{name}")).status == 200
    for name in ("app.py", "..%2Fapp.py", "%2e%2e%2fapp.py", "", "main.js%00"):
        assert (await page.get(f"/static/{name}")).status == 404, name


async def test_a_page_of_another_site_is_not_answered(page: TestClient) -> None:
    assert (await page.get("/api/runs", headers={"Host": "evil.example:80"})).status == 403
    assert (await page.get("/api/runs", headers={"Host": "localhost:1"})).status == 200


async def test_with_a_token_only_who_has_it_is_answered(path: Path) -> None:
    server = TestServer(build(Library([path.parent]), token="open sesame"))
    async with server, ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
        for address in ("/", "/api/runs", "/static/main.js", "/?token=", "/?token=open", "/?token=open%20sesamé"):
            assert (await session.get(server.make_url(address))).status == 401, address
        for key, status in (("open sesame", 200), ("open", 401), ("", 401)):  # a script has no cookies
            headers = {"Authorization": f"Bearer {key}"}
            assert (await session.get(server.make_url("/api/view"), headers=headers)).status == status, key
        answer = await session.get(server.make_url("/?token=open%20sesame"))
        assert answer.status == 200 and "token" not in str(answer.url)
        assert (await session.get(server.make_url("/api/runs"))).status == 200


@pytest.mark.parametrize(
    ("route", "status", "says"),
    [
        ("nobody/now", 404, "no run 'nobody'"),
        ("test/rollouts?step=x", 400, "step: 'x' is not a number"),
        ("test/rollouts?step=" + "9" * 30, 400, "is not a number"),
        ("test/rollouts?sort=ugly", 400, "the orders are newest, best"),
        ("test/rollouts?sort=best", 400, "sort 'best' orders the rollouts of one step; give `step`"),
        ("test/rollouts.csv?sort=longest&text=a", 400, "give `step`"),
        ("test/rollouts?stpe=1", 400, "there is no parameter 'stpe'; did you mean step?"),
        ("test/now?step=1", 400, "this address takes none"),
        ("test/rollouts.csv?status=lost", 400, "a rollout is finished, truncated"),
        ("test/curve?key=reward/mean&smooth=5", 400, "a share from 0 to 1"),
        ("test/curve?key=reward/mean&points=-1", 400, "points are 1 or more"),
        ("test/curves", 404, '{"error":"there is no /api/run/test/curves; /api/view lists the addresses."}'),
        ("test/rollout?group=1", 400, "`group` and `member`"),
        ("test/rollout?group=999&member=0", 404, "no rollout g999.0"),
        ("test/curve?key=reward/mean&axis=moon", 400, "the axes are step, time, tokens"),
        ("test/curve?key=reward/mean&smooth=nan", 400, "smooth: 'nan' is not a number"),
        ("test/logs?level=loud", 400, "the levels are debug"),
        ("test/evals?version=77", 400, "evaluated versions"),
    ],
)  # fmt: skip
async def test_a_wrong_question_gets_one_message(page: TestClient, route: str, status: int, says: str) -> None:
    answer = await page.get(f"/api/run/{route}")
    assert answer.status == status and says in await answer.text()


@pytest.mark.heavy
async def test_changes_are_told_as_they_happen(page: TestClient, path: Path) -> None:
    answer = await page.get("/api/changes")
    first = json.loads((await answer.content.readline()).removeprefix(b"data: "))
    assert first["run"] == "test" and {"metrics", "ledger", "logs"} <= set(first["subjects"])
    (path / "logs" / "later.log").write_text("a line\n")
    await answer.content.readline()
    later = json.loads((await answer.content.readline()).removeprefix(b"data: "))
    assert later == {"run": "test", "subjects": ["logs"]}
    answer.close()


# -- rollouts --


def test_pages_of_rollouts_are_all_that_are_wanted_once_each(path: Path) -> None:
    every = {(row["group_id"], row["member"]): row for row in stretto.Run(path).rollouts()}
    with LedgerReader(RunDir(path)) as ledger:
        for wanted, keep in (
            (rollouts.Filters(), lambda row: True),
            (rollouts.Filters(min_reward=0.5), lambda row: row["reward"] >= 0.5),
            (rollouts.Filters(max_reward=0.5, env="echo"), lambda row: row["reward"] <= 0.5),
            (rollouts.Filters(version=2), lambda row: row["first_version"] <= 2 <= row["last_version"]),
            (rollouts.Filters(step=3), lambda row: row["step"] == 3),
            (
                rollouts.Filters(step=3, sort="worst", min_reward=0.5),
                lambda row: row["step"] == 3 and row["reward"] >= 0.5,
            ),
            (rollouts.Filters(status="failed"), lambda row: False),
        ):
            found, before = [], None
            while True:
                page = rollouts.page(ledger, wanted, before=before, limit=3)
                found += [(row["group_id"], row["member"]) for row in page["rows"]]
                if (before := page["next"]) is None:
                    break
            assert sorted(found) == sorted(name for name, row in every.items() if keep(row)), wanted
        worst = [row["reward"] for row in rollouts.page(ledger, rollouts.Filters(step=3, sort="worst"))["rows"]]
        assert worst == sorted(worst)


def test_a_rare_rollout_far_back_is_found_in_many_short_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    ledger_runs.steps(run_dir, 30).close()
    monkeypatch.setattr(rollouts, "_STRETCH", 10)
    monkeypatch.setattr(rollouts, "_BUDGET_S", 0.0)  # a stretch per request would be none at all
    ticks = iter(range(10**6))
    monkeypatch.setattr(rollouts.time, "monotonic", lambda: next(ticks) * -1.0)  # every request looks at all stretches
    with LedgerReader(run_dir) as ledger:
        page = rollouts.page(ledger, rollouts.Filters(version=0))
    assert {row["first_version"] for row in page["rows"]} == {0} and page["next"] is None
    assert page["searched"] == 30 * 2 * ledger_runs.MEMBERS


def test_a_rollout_is_shown_token_by_token_with_its_group(path: Path) -> None:
    run = OpenRun(path)
    [row, *_] = run.rollouts(step=2)
    found = conversation.conversation(run, row["group_id"], row["member"])
    [branch] = found["branches"]
    assert "".join(branch["tokens"]["text"]) == row["prompt"] + row["reply"]
    assert branch["tokens"]["sampled"] == row["is_sampled"].astype(int).tolist()
    assert np.allclose(branch["tokens"]["logprob"], row["logprobs"], atol=1e-4)
    assert {v for v, s in zip(branch["tokens"]["version"], row["is_sampled"]) if s} == set(row["versions"])
    turns = branch["turns"]
    assert [turn["end"] for turn in turns[:-1]] == [turn["start"] for turn in turns[1:]]
    assert turns[0]["start"] == 0 and turns[-1]["end"] == len(row["token_ids"])
    assert len(found["group"]) == len([r for r in run.rollouts(step=2) if r["group_id"] == row["group_id"]])


def test_what_the_trainer_computed_colours_the_tokens_that_it_trained(path: Path) -> None:
    run = OpenRun(path)
    [row, *_] = run.rollouts(step=2)
    where = row["group_id"], row["member"]
    assert "not written yet, or has gone" in conversation.conversation(run, *where)["not_kept"]["ratio"]
    tokens = np.flatnonzero(row["is_sampled"])
    values = np.linspace(-0.5, 0.5, len(tokens))
    sample = trained_sample("g{}.{}/0".format(*where), tokens, values, values + 1, values)
    file = run.dir.trained_tokens / "rank_1" / "step_2.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(encode_trained([sample]))
    found = conversation.conversation(run, *where)
    columns = found["branches"][0]["tokens"]
    for name, wanted in {"ratio": np.exp(values), "entropy": values + 1, "advantage": values}.items():
        assert np.allclose([columns[name][at] for at in tokens], wanted, atol=2e-3)
        assert columns[name].count(None) == len(row["token_ids"]) - len(tokens)
    assert found["not_kept"] == {}
    file.write_bytes(b"cut off")
    assert "step_2.bin: it is no record" in conversation.conversation(run, *where)["not_kept"]["entropy"]
    file.unlink()


def test_turns_are_those_of_the_chat_and_otherwise_of_who_wrote_them() -> None:
    texts = ["<|im_start|>", "us", "er\n", "hi", "<|im_end|>", "\n", "<|im_start|>", "assistant\n", "yes", "<|im_end|>"]
    sampled = np.array([0] * 8 + [1] * 2, bool)
    assert [
        (turn["role"], "".join(texts[turn["body"] : turn["end"]])) for turn in conversation.turns(texts, sampled)
    ] == [("user", "hi<|im_end|>\n"), ("assistant", "yes<|im_end|>")]
    plain = list(conversation.turns(["1+1", "=", "2"], np.array([False, False, True])))
    assert [(turn["role"], turn["start"], turn["end"]) for turn in plain] == [("context", 0, 2), ("policy", 2, 3)]


def test_a_character_of_several_tokens_is_shown_once(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    byte_level.pre_tokenizer, byte_level.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    byte_level.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = np.array(tokenizer.encode("aé漢b"))
    texts = conversation.token_texts(tokenizer, ids)
    assert len(texts) == len(ids) == 7 and texts == ["a", "é", "", "漢", "", "", "b"]
    assert conversation.token_texts(None, ids[:1]) == [f"{ids[0]} "]


def test_the_blank_before_a_word_is_shown_also_where_a_decoder_takes_it_from_a_text_of_its_own(tmp_path: Path) -> None:
    """As those of SentencePiece do: a token alone has no blank, the same token behind another has one."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<s>", "▁one", "▁", "▁two", "s", "<0xC3>", "<0xA9>"]
    pieces = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = np.array([1, 2, 3, 4, 3, 5, 6, 3, 5])
    texts = conversation.token_texts(tokenizer, ids)
    assert texts == ["one", " ", " two", "s", " two", "é", "", " two", "\ufffd"]
    assert "".join(texts) == tokenizer.decode(ids)


# -- logs, timeline, now --


def test_logs_are_one_by_time_and_lines_without_a_time_belong_to_the_one_before(path: Path) -> None:
    found = logs.merged(RunDir(path), processes=["trainer", "inference"])["lines"]
    assert [(row["process"], row["text"]) for row in found] == [
        ("trainer", "one"), ("inference", "three"), ("trainer", "<b>two</b>\n  its second line"),
    ]  # fmt: skip
    worse = logs.merged(RunDir(path), level="warning", processes=["trainer"])["lines"]
    assert [row["level"] for row in worse] == ["warning"]
    assert [row["text"] for row in logs.merged(RunDir(path), text="THREE")["lines"]] == ["three"]
    newest = logs.merged(RunDir(path), processes=["trainer"], limit=1)
    older = logs.merged(RunDir(path), processes=["trainer"], limit=5, before=newest["next"])
    assert [row["text"] for row in older["lines"]] == ["one"] and older["next"] is None


def test_times_before_midnight_are_of_the_day_before(tmp_path: Path) -> None:
    file = tmp_path / "trainer.log"
    file.write_text(
        "23:59:59.000 INFO    trainer | late\n"
        "00:00:01.000 INFO    trainer | early\n"
        "00:00:00.900 INFO    trainer | a thread\n"
    )
    at = time.mktime((2026, 3, 2, 0, 0, 1, 0, 0, -1))
    os.utime(file, (at, at))
    late, early, thread = logs.read("trainer", file)
    assert late.at == at - 2 and early.at == at and thread.at == pytest.approx(at - 0.1)


def test_json_lines_are_read_as_text_lines_are(tmp_path: Path) -> None:
    file = tmp_path / "trainer.log"
    entry = {
        "time": "2026-03-02T10:00:00.500Z",
        "level": "warning",
        "role": "trainer",
        "logger": "x",
        "message": "m",
        "traceback": "T",
    }
    file.write_text(json.dumps(entry) + "\n")
    [line] = logs.read("trainer", file)
    assert line.level == "warning" and line.text == "m\nT" and line.at == 1772445600.5


def test_warnings_of_one_kind_are_one_with_their_number(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.log("trainer").write_text("".join(f"10:00:0{n}.000 WARNING trainer | slow by {n} s\n" for n in range(3)))
    [row] = logs.warnings(run)
    assert row["count"] == 3 and row["text"] == "slow by 2 s"


def test_spans_that_do_not_overlap_share_a_lane() -> None:
    spans = [{"start": start, "end": end} for start, end in ((0, 2), (1, 3), (2, 4), (2.5, 5), (4, 6))]
    assert [[span["start"] for span in lane] for lane in timeline.packed(spans)] == [[0, 2], [1, 4], [2.5]]


def test_a_trainers_step_is_laid_out_back_from_its_end() -> None:
    row = {"step": 3, "time": 10.0, "time/wait_for_batch": 2.0, "time/train": 3.0, "time/publish": 1.0}
    spans = [(span["kind"], span["start"], span["end"]) for span in timeline.trainer_spans(row)]
    assert spans == [("wait", 4.0, 6.0), ("train", 6.0, 9.0), ("publish", 9.0, 10.0)]


def test_the_timeline_has_every_rollout_of_its_stretch(path: Path) -> None:
    run = OpenRun(path)
    found = timeline.timeline(run, start=0.0, end=time.time() + 1)
    shown = {span["rollout"] for lane in found["lanes"] for span in lane["spans"] if "rollout" in span}
    assert shown == {f"{row['group_id']}.{row['member']}" for row in run.rollouts()} and found["one_of"] == 1
    assert {"batches", "weights"} <= {lane["name"] for lane in found["lanes"]}
    assert timeline.timeline(run, start=1.0, end=2.0)["lanes"] == []


def test_waits_are_shares_of_the_time_of_the_steps() -> None:
    steps = [{"time/step": 2.0, "time/wait_for_rollouts": 1.0}, {"time/step": 2.0, "time/wait_for_trainer": 3.0}]
    found = waits(steps)
    assert (
        found is not None
        and found["trainer waits for rollouts"] == 0.25
        and found["engines wait for the trainer"] == 0.75
    )
    assert waits([]) is None


# -- which runs --


def test_runs_are_found_below_a_directory_and_each_has_an_id_of_its_own(path: Path, tmp_path: Path) -> None:
    for name in ("a/test", "b/test", "c"):
        (tmp_path / name / "configs").mkdir(parents=True)
        (tmp_path / name / "configs" / "run.json").write_text("{}")
    (tmp_path / "b" / "test" / "configs" / "run.json").write_text("[broken")
    library = Library([tmp_path, path])
    found = library.runs()
    assert sorted(found) == ["c", "test", "test~2", "test~3"]
    rows = {name: state.describe(run.dir) for name, run in found.items()}
    assert [row["state"] for row in rows.values()].count("damaged") == 1 and rows["c"]["state"] == "not started"
