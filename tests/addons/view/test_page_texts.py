"""Text of rollouts on the page: beginnings, the search, running rollouts, one task over the versions, and roles."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import ledger_runs
import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from waiting import until
from yarl import URL

from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.ledger import Ledger
from stretto.ledger.reader import LedgerReader
from stretto.records.generate import Completion, VersionSpan
from stretto.records.partial import Turn, latest_turns
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task
from stretto_view.page import conversation, library, rollouts, texts
from stretto_view.page.app import build
from stretto_view.page.library import Library, OpenRun

ASKED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n<|im_start|>assistant\n"
)
CALL, TOOL = (
    "<tool_call>6*7</tool_call><|im_end|>",
    "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n",
)
NEXT = "<|im_start|>assistant\n"


def rollout_of(member: int, ids: list[int], start: int, draw: int) -> Rollout:
    is_sampled = np.arange(len(ids)) >= start
    branch = Branch(
        token_ids=np.array(ids, np.int32),
        is_sampled=is_sampled,
        logprobs=np.where(is_sampled, -0.5, 0.0).astype(np.float32),
        temperature=1.0,
        versions=(VersionSpan(0, start, len(ids)),),
    )
    return Rollout(
        rollout_id=f"g{draw}.{member}",
        group_id=draw,
        member=member,
        task=Task(env="shop", task_id=f"t{draw % 3}", data={}),
        status=RolloutStatus.FINISHED,
        branches=(branch,),
        reward=float(member),
        started_at=1.0,
        finished_at=2.0,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """Twenty finished draws of two replies each, and one whose members 0 and 1 have played two turns and none."""
    run_dir = RunDir(tmp_path_factory.mktemp("runs") / "told")
    build_letters_tokenizer(run_dir.tokenizer, "".join(map(chr, range(1, 128))))
    tokenizer = load_tokenizer(run_dir.tokenizer)
    prompt = tokenizer.encode(ASKED)
    ledger = Ledger(run_dir)
    ledger.run_started({"max_off_policy_steps": 2})
    for draw in range(20):
        ledger.task_drawn(draw, Task(env="shop", task_id=f"t{draw % 3}", data={}))
        ledger.rollouts_started(draw, range(2), 0)
        replies = [tokenizer.encode(f"import os # {draw}<|im_end|>"), tokenizer.encode(f"It is {draw}.<|im_end|>")]
        members = tuple(rollout_of(at, prompt + reply, len(prompt), draw) for at, reply in enumerate(replies))
        ledger.groups_finished([Group(group_id=draw, task=members[0].task, rollouts=members, advantages=(-0.5, 0.5))])
    ledger.task_drawn(20, Task(env="shop", task_id="t9", data={}))
    ledger.rollouts_started(20, range(2), 0)
    call, tool, reply = (tokenizer.encode(text) for text in (CALL, TOOL + NEXT, "42<|im_end|>"))
    for index, (shared, asked, said) in enumerate([(0, prompt, call), (len(prompt) + len(call), tool, reply)]):
        completion = Completion(
            token_ids=np.array(said, np.int32),
            logprobs=np.full(len(said), -0.25, np.float32),
            finish_reason="stop",
            versions=(VersionSpan(3, 0, len(said)),),
        )
        turn = Turn(
            agent="policy", index=index, attempt=0, seed=1, temperature=1.0, num_shared=shared,
            prompt_ids=np.array(asked, np.int32), completion=completion,
        )  # fmt: skip
        ledger.turn_played(20, 0, turn)
    ledger.close()
    return OpenRun(run_dir.path)


@pytest.fixture
async def page(run: OpenRun) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build(Library([run.path.parent])))) as client:
        yield client


def test_a_row_says_how_question_and_answer_begin(run: OpenRun) -> None:
    run.tokenizer_within(60.0)
    with LedgerReader(run.dir) as ledger:
        rows = texts.page(ledger, run, rollouts.Filters())["rows"]
    assert {row["prompt"] for row in rows} == {"What is 6 times 7?"}
    assert rows[0]["reply"] == "It is 19." and rows[1]["reply"] == "import os # 19"
    assert not any("offset" in row for row in rows)


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("IMPORT os", "anywhere", 20),
        ("import os # 7<", "reply", 1),
        ("import", "prompt", 0),
        ("times 7", "prompt", 40),
        ("times 7", "reply", 0),
    ],
)
def test_a_search_finds_every_rollout_that_has_the_text(run: OpenRun, text: str, place: str, found: int) -> None:
    with LedgerReader(run.dir) as ledger:
        answer = texts.page(ledger, run, rollouts.Filters(), text=text, place=place)
    assert len(answer["rows"]) == found and answer["next"] is None and answer["num_read"] == 40
    assert all(text.lower() in row["match"].lower() or "<" in text for row in answer["rows"])


def test_a_search_out_of_time_goes_on_where_it_ended(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_STRETCH", 7)
    clock = iter(range(10**6))
    monkeypatch.setattr(texts.time, "monotonic", lambda: next(clock) * 1.0)  # each request has time for one stretch
    monkeypatch.setattr(texts, "_BUDGET_S", 1.5)
    monkeypatch.setattr(rollouts, "_BUDGET_S", 1e9)
    names, before, requests = [], None, 0
    with LedgerReader(run.dir) as ledger:
        while True:
            answer = texts.page(ledger, run, rollouts.Filters(), text="import os", before=before)
            names += [row["group_id"] for row in answer["rows"]]
            requests += 1
            if (before := answer["next"]) is None:
                break
    assert names == list(range(19, -1, -1)) and requests > 3


def test_turns_of_a_rollout_that_has_not_ended_are_shown(run: OpenRun) -> None:
    run.tokenizer_within(60.0)
    with LedgerReader(run.dir) as ledger:
        rows = texts.page(ledger, run, rollouts.Filters(status="running"))["rows"]
    assert [(row["member"], row["num_turns"], row["prompt"]) for row in rows] == [
        (0, 2, "What is 6 times 7?"),
        (1, 0, None),
    ]
    with LedgerReader(run.dir) as ledger:
        assert rollouts.page(ledger, rollouts.Filters(status="running"), limit=1)["next"] == 1
        assert not rollouts.page(ledger, rollouts.Filters(status="running", env="other"))["rows"]
    [branch] = conversation.conversation(run, 20, 0)["branches"]
    assert "".join(branch["tokens"]["text"]) == ASKED + CALL + TOOL + NEXT + "42<|im_end|>"
    assert [turn["role"] for turn in branch["turns"]] == ["system", "user", "assistant", "tool", "assistant"]
    said = [text for text, sampled in zip(branch["tokens"]["text"], branch["tokens"]["sampled"]) if sampled]
    assert "".join(said) == CALL + "42<|im_end|>"
    assert {v for v in branch["tokens"]["version"] if v is not None} == {3}
    assert conversation.conversation(run, 20, 1)["branches"] == []


def test_a_turn_that_rewrites_the_history_begins_a_branch() -> None:
    def turn(index: int, shared: int, asked: list[int], said: list[int]) -> Turn:
        spans = (VersionSpan(index, 0, len(said)),)
        logprobs = np.full(len(said), -1.0, np.float32)
        reply = Completion(token_ids=np.array(said, np.int32), logprobs=logprobs, finish_reason="stop", versions=spans)
        return Turn(
            agent="policy", index=index, attempt=0, seed=0, temperature=1.0, num_shared=shared,
            prompt_ids=np.array(asked, np.int32), completion=reply,
        )  # fmt: skip

    first, second = texts.open_branches([turn(0, 0, [1, 2], [3]), turn(1, 3, [4], [5]), turn(2, 2, [6], [7])])
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5] and first.is_sampled.tolist() == [0, 0, 1, 0, 1]
    assert second.token_ids.tolist() == [1, 2, 6, 7] and second.is_sampled.tolist() == [0, 0, 0, 1]
    assert [(span.version, span.start, span.end) for span in first.versions] == [(0, 2, 3), (1, 4, 5)]


def test_two_thousand_turns_are_one_branch() -> None:
    spans = (VersionSpan(0, 0, 2),)
    ids, logprobs = np.array([7, 8], np.int32), np.full(2, -1.0, np.float32)
    reply = Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=spans)
    turns = [
        Turn(
            agent="policy", index=index, attempt=0, seed=0, temperature=1.0, num_shared=5 * index,
            prompt_ids=np.array([1, 2, 3], np.int32), completion=reply,
        )
        for index in range(2000)
    ]  # fmt: skip
    [branch] = texts.open_branches(latest_turns(turns))
    assert len(branch.token_ids) == 10_000 and branch.is_sampled.sum() == 4000 and len(branch.versions) == 2000
    rewritten = [*turns, msgspec.structs.replace(turns[1000], seed=1)]
    assert len(latest_turns(rewritten)) == 1001


def test_what_is_not_kept_is_said_with_its_reason(run: OpenRun) -> None:
    found = conversation.conversation(run, 3, 1)
    assert set(found["not_kept"]) == {"entropy", "ratio"} and "no step trained" in found["not_kept"]["ratio"]
    [branch] = found["branches"]
    assert {value for value in branch["tokens"]["advantage"] if value is not None} == {0.5}
    assert branch["tokens"]["trained"] == branch["tokens"]["sampled"]


def test_rollouts_of_one_task_are_listed_over_the_versions(run: OpenRun) -> None:
    with LedgerReader(run.dir) as ledger:
        rows = rollouts.page(ledger, rollouts.Filters(task="t2", env="shop"))["rows"]
    assert {row["group_id"] for row in rows} == {2, 5, 8, 11, 14, 17}


async def test_files_to_save_are_whole_and_harmless(page: TestClient) -> None:
    answer = await page.get("/api/run/told/rollout.html?group=20&member=0")
    text = await answer.text()
    assert answer.status == 200 and "attachment" in answer.headers["Content-Disposition"]
    assert "&lt;tool_call&gt;6*7&lt;/tool_call&gt;" in text and "<script" not in text and "default-src 'none'" in text
    table = (await (await page.get("/api/run/told/rollouts.csv?text=import")).text()).splitlines()
    assert len(table) == 21 and table[0].startswith("rollout,step,env") and table[1].startswith("g19.0,")
    routes = await (await page.get("/api/view")).json()
    assert {"/api/run/{run}/rollouts", "/api/run/{run}/rollout.html", "/api/view"} <= {row["address"] for row in routes}


async def test_every_address_that_the_document_shows_answers(page: TestClient) -> None:
    text = (Path(__file__).parents[3] / "docs" / "seeing.md").read_text()
    shown = re.findall(r"curl (?:-OJ )?'http://127\.0\.0\.1:8765(/api/[^']*)'", text)
    assert len(shown) == 6
    for address in shown:
        assert (await page.get(URL(address.replace("/demo/", "/told/"), encoded=True))).status == 200, address


async def test_a_chat_is_only_on_a_page_that_asks_for_a_token(page: TestClient) -> None:
    places = await (await page.get("/api/run/told/chat")).json()
    assert places["is_on"] is False and "--chat" in places["why"]
    answer = await page.post("/api/run/told/chat", json={"place": "live", "messages": []})
    assert answer.status == 400 and "--chat" in await answer.text()
    with pytest.raises(AssertionError):
        build(Library([]), has_chat=True)


def test_replies_of_evals_have_turns() -> None:
    row = texts.with_turns({"branches": [{"prompt": ASKED, "reply": CALL + TOOL + NEXT + "42<|im_end|>"}]})
    turns = row["branches"][0]["turns"]
    assert [(turn["role"], turn["is_reply"]) for turn in turns] == [
        ("system", False), ("user", False), ("assistant", True), ("tool", True), ("assistant", True),
    ]  # fmt: skip


def test_every_row_of_a_deleted_segment_still_lists(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "gone")
    ledger_runs.steps(run_dir, 3).close()
    for file in run_dir.tokens.iterdir():
        file.unlink()
    run = OpenRun(run_dir.path)
    build_letters_tokenizer(run_dir.tokenizer)
    with LedgerReader(run_dir) as ledger:
        rows = texts.page(ledger, run, rollouts.Filters())["rows"]
        found = texts.page(ledger, run, rollouts.Filters(), text="a")
    assert rows and all(row["reply"] is None for row in rows) and found["unread"] == found["num_read"] > 0


async def test_a_tokenizer_that_comes_later_is_found_and_until_then_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_RESCAN_S", 0.0)
    run_dir = RunDir(tmp_path / "early")
    ledger_runs.steps(run_dir, 1).close()
    run = OpenRun(run_dir.path)
    assert run.tokenizer_within(60.0) is None and "tokenizer cannot be loaded" in str(run.no_text)
    build_letters_tokenizer(run_dir.tokenizer)
    await until(lambda: run.tokenizer_within(1.0) is not None)
    assert run.no_text is None


def test_of_rollouts_under_way_that_take_too_long_only_their_turns_are_counted(
    run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_TURNS_BUDGET_S", -1.0)
    with LedgerReader(run.dir) as ledger:
        rows = texts.page(ledger, run, rollouts.Filters(status="running"))["rows"]
    assert [(row["is_long"], row["num_turns"], row["prompt"]) for row in rows] == [(True, None, None)] * 2


def test_a_long_branch_is_given_in_pages(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = conversation.conversation(run, 20, 0)["branches"][0]["tokens"]["text"]
    monkeypatch.setattr(conversation, "MOST_TOKENS", 50)
    shown, begin = [], 0
    while True:
        [branch] = conversation.conversation(run, 20, 0, (0, begin))["branches"]
        assert branch["begin"] == begin and branch["turns"][-1]["end"] == len(branch["tokens"]["text"])
        assert not begin or branch["turns"][0]["role"] in ("text", "assistant", "policy", "context", "tool", "user")
        shown += branch["tokens"]["text"]
        begin += 50
        if not branch["num_more"]:
            break
    assert shown == whole
    [branch] = conversation.conversation(run, 20, 0, (0, 10**9))["branches"]
    assert branch["begin"] == len(whole) - 1
