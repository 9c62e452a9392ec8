"""A run whose every name and text would like to be markup, a formula or half a character: in files and in a browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.ledger import Ledger
from stretto.monitors.file import MetricsFile
from stretto.records.generate import VersionSpan
from stretto.records.images import Image
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task
from stretto_view.page.app import build
from stretto_view.page.export import table
from stretto_view.page.library import Library

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'<\\script>'\"&lt;"
"""A name of a file too, so it has no slash."""
FORMULA = '=HYPERLINK("http://x.example","&")'
VIEWS = ("now", "curves", "rollouts", "timeline", "evals", "config", "logs", "chat")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def hostile_run(folder: Path, name: str) -> RunDir:
    run = RunDir(folder / name)
    build_letters_tokenizer(run.tokenizer, "".join(map(chr, range(1, 128))))
    tokenizer = load_tokenizer(run.tokenizer)
    task = Task(env=f"{FORMULA}{HOSTILE}", task_id=f"{FORMULA}{HOSTILE}", data={HOSTILE: HOSTILE})
    prompt = tokenizer.encode(f"<|im_start|>user\n{FORMULA}{HOSTILE}<|im_end|>\n<|im_start|>assistant\n")
    ids = prompt + tokenizer.encode(f"{FORMULA}{HOSTILE}<|im_end|>")
    is_sampled = np.arange(len(ids)) >= len(prompt)
    ledger = Ledger(run)
    ledger.run_started({"max_off_policy_steps": 2})
    ledger.version_published(0)
    ledger.task_drawn(0, task)
    ledger.rollouts_started(0, range(2), 0)
    branches = tuple(
        Branch(
            token_ids=np.array(ids, np.int32), is_sampled=is_sampled,
            logprobs=np.where(is_sampled, -0.5, 0.0).astype(np.float32), temperature=1.0,
            versions=(VersionSpan(0, len(prompt), len(ids)),), agent=agent, images=(Image(HOSTILE, (1, 1, 1)),),
        )
        for agent in ("policy", HOSTILE)
    )  # fmt: skip
    members = tuple(
        Rollout(
            rollout_id=f"g0.{at}", group_id=0, member=at, task=task, status=status, branches=branches, reward=float(at),
            metrics={HOSTILE: 1.0}, started_at=1.0, finished_at=2.0, error=HOSTILE if at else None,
        )
        for at, status in enumerate((RolloutStatus.FINISHED, RolloutStatus.FAILED))
    )  # fmt: skip
    ledger.groups_finished([Group(group_id=0, task=task, rollouts=members, advantages=(0.5, -0.5))])
    ledger.close()
    run.configs.mkdir()
    run.config("run").write_text(json.dumps({"max_steps": 5, HOSTILE: {HOSTILE: [HOSTILE]}, "orchestrator": {}}))
    file = MetricsFile(run.metrics("orchestrator"))
    for step in (1, 2, 3):
        file.log(step, {"reward/mean": step / 10, "time/step": 1.0, HOSTILE: 0.5, f"{FORMULA}/mean": 1.0})
    file.close()
    run.logs.mkdir(exist_ok=True)
    run.log("trainer").write_text(f"10:00:00.000 WARNING {HOSTILE[:8]} | {HOSTILE}\n")
    run.log(HOSTILE).write_text(f"10:00:00.000 ERROR   trainer | {HOSTILE}\n")
    run.eval(2).mkdir(parents=True)
    row = {"env": task.env, "mode": HOSTILE, "mean": 0.5, HOSTILE: HOSTILE, "half": "\ud83d"}
    run.eval_results(2).write_text(json.dumps([row]))
    sample = {"task_id": task.task_id, "env": task.env, "mode": HOSTILE, "reward": 1.0, "half": "\ud83d"}
    texts = {"prompt": f"<|im_start|>user\n{HOSTILE}<|im_end|>\n<|im_start|>assistant\n", "reply": HOSTILE + "\ud83d"}
    (run.eval(2) / "e.jsonl").write_text(json.dumps({**sample, "branches": [texts]}) + "\n")
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    hostile_run(found, HOSTILE)
    hostile_run(found, "second")
    return found


@pytest.fixture
async def page(folder: Path) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build(Library([folder])))) as client:
        yield client


class Seen(HTMLParser):
    """The tags of a text, each with the names of its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("member", [0, 1])
async def test_a_rollout_as_a_file_has_its_texts_as_text(page: TestClient, member: int) -> None:
    answer = await page.get(f"/api/run/second/rollout.html?group=0&member={member}")
    text = await answer.text()
    seen = Seen(text)
    assert answer.status == 200 and not seen.tags & {"script", "img", "iframe", "object", "link"}, seen.tags
    assert not {name for name in seen.attributes if name.startswith("on") or name in ("src", "href")}
    assert seen.text.count(HOSTILE) > 6 and re.search(r"default-src 'none'", text)


@pytest.mark.parametrize("name", ["curves.csv", "evals.csv", "rollouts.csv", "rollouts.csv?text=hyper"])
async def test_no_cell_of_a_table_is_a_formula(page: TestClient, name: str) -> None:
    answer = await page.get(f"/api/run/second/{name}")
    rows = list(csv.reader(io.StringIO(await answer.text())))
    assert answer.status == 200 and len(rows) > 1
    assert any("HYPERLINK" in cell for row in rows for cell in row)
    assert not [cell for row in rows for cell in row if re.match(r"\s*([=+@]|-(?!\d+\.\d+$))", cell)]


@pytest.mark.parametrize("text", ["=1", "+1", "-1+cmd", "@x", "\t=1", "\r=1", "\n=1", "  =1", "＝1"])
def test_a_text_that_a_spreadsheet_would_compute_is_marked_as_text(text: str) -> None:
    [_, [cell]] = list(csv.reader(io.StringIO(table(("a",), [{"a": text}]), newline="")))
    assert cell == f"'{text}"
    assert table(("a",), [{"a": -1.5}]).splitlines()[1] == "-1.5"  # a number stays one


async def test_every_answer_is_whole_json_and_every_name_leads_to_its_run(page: TestClient) -> None:
    rows = await (await page.get("/api/runs")).json()
    assert sorted(row["id"] for row in rows) == sorted([HOSTILE, "second"])
    quoted = "".join(f"%{byte:02X}" for byte in HOSTILE.encode())
    for route in (
        "now", "metrics", "rollouts", "rollout?group=0&member=0", "timeline", "evals", "evals?version=2", "scores",
        "config", "logs",
    ):  # fmt: skip
        answer = await page.get(URL(f"/api/run/{quoted}/{route}", encoded=True))
        assert answer.status == 200, (route, await answer.text())
        msgspec.json.decode(await answer.read())  # stricter than the standard library's
    answer = await page.get(URL(f"/api/run/{quoted}/curves.csv", encoded=True))
    assert re.fullmatch(r'attachment; filename="[\w.-]+"', answer.headers["Content-Disposition"], re.ASCII)


async def test_half_a_character_is_a_question_mark(page: TestClient) -> None:
    [row] = await (await page.get("/api/run/second/evals?version=2")).json()
    assert row["half"] == "?" and row["branches"][0]["turns"][-1]["text"] == HOSTILE + "?"


# -- in a browser --


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: apt install chromium")
    kit = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-all")
    with kit.sync_playwright() as started:
        own = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield own
        own.close()


@pytest.mark.slow
def test_no_view_runs_or_draws_what_a_run_says(browser: Any, folder: Path) -> None:
    """The policy forbids scripts of others, so a node that should be text is looked for too."""
    words = [sys.executable, "-m", "stretto", "view", str(folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server, ExitStack() as stack:
        stack.callback(server.terminate)
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        faults: list[str] = []
        tab.on("pageerror", lambda error: faults.append(str(error)))
        names = URL.build(query={"run": HOSTILE}).raw_query_string
        task = URL.build(query={"beside": f"{FORMULA}{HOSTILE}", "env": f"{FORMULA}{HOSTILE}"}).raw_query_string
        for view in (*VIEWS, "rollouts/0", "rollouts/1", "beside"):
            more = "&rollout=0." + view[-1] if "/" in view else f"&{task}" if view == "beside" else ""
            name = "rollouts" if view == "beside" else view.partition("/")[0]
            tab.goto("about:blank")
            tab.goto(f"{address}#/{name}?{names}&run=second{more}")
            tab.locator(f"nav a[aria-current=page]:text-is('{name}')").wait_for()
            tab.locator("#view > :not([aria-busy])").first.wait_for()
            if view == "evals":
                tab.locator("tr[tabindex]").first.click()
                tab.locator(".reply").first.wait_for()
            tab.wait_for_timeout(300)
            made = tab.evaluate("[...document.querySelectorAll('script:not([src]), img[onerror], img[src=x]')].length")
            assert made == 0 and tab.title() != "taken", view
            assert HOSTILE in tab.locator("body").inner_text() or view in ("timeline", "chat"), view
        tab.close()
    assert not faults
