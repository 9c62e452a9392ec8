"""The page in a browser: on a run while it learns, on its end, and on text that would like to be markup."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import LONG_S, start, toml, untrained_model, wait

from stretto.base.files import open_locked
from stretto.base.paths import RunDir
from stretto.orchestrator.eval.results import write_results
from stretto.orchestrator.eval_scores import EvalScore
from stretto_python.run import Run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-all")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt install chromium"),
]

VIEWS = ("now", "curves", "rollouts", "timeline", "evals", "config", "logs", "chat")
WIDTHS = {"desk": (1280, 800), "phone": (390, 800)}
HOSTILE = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as kit:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        own = kit.chromium.launch(executable_path=BROWSER, args=flags)
        yield own
        own.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page of the browser; at the end nothing may have failed or gone elsewhere."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(LONG_S * 1000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            faults.append(request.url) if not re.match(r"http://127\.0\.0\.1:|data:", request.url) else None
        ),
    )
    yield page
    page.close()
    assert not faults


def run_words(folder: Path) -> list[str]:
    settings = {
        "run": {"name": "live"},
        "model": {"name": str(untrained_model(folder))},
        "orchestrator": {"env": [{"id": "sort-letters"}], "batch_size": 16, "rollouts_per_example": 4},
        "max_steps": 100_000,
    }
    (folder / "rl.toml").write_text(toml(settings))
    return ["@", "rl.toml", "--output-dir", "outputs"]


def test_a_run_is_seen_while_it_learns(tab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the address on the first line of the console; new steps come without a reload; nothing scrolls sideways."""
    monkeypatch.delenv("STRETTO_VIEW")
    popen = start("rl", run_words(tmp_path), tmp_path)
    assert popen.stdout is not None
    first = popen.stdout.readline()
    assert first.startswith("view  http://127.0.0.1:"), first
    address = first.split()[1]
    tab.goto(address)
    tab.get_by_text("reward/mean").first.wait_for()
    seen = tab.locator(".headline").inner_text()
    tab.wait_for_function("seen => document.querySelector('.headline').innerText !== seen", arg=seen)
    tab.keyboard.press("2")
    tab.locator("figure canvas").first.wait_for()
    tab.keyboard.press("3")
    tab.locator("tr[data-rollout]").first.wait_for()
    tab.keyboard.press("j")
    tab.locator(".turn").first.wait_for()
    tab.goto("about:blank")  # the page ends with the run
    popen.send_signal(signal.SIGINT)
    code, output = wait(popen, LONG_S)
    assert code == 0, output


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, and a copy in which a warning is hostile."""
    folder = tmp_path_factory.mktemp("ended")
    code, output = wait(start("rl", [*run_words(folder), "--max-steps", "4"], folder), LONG_S)
    assert code == 0, output
    run = RunDir(folder / "outputs" / "live")
    shutil.copytree(run.path, folder / "outputs" / "copy")
    config = RunDir(folder / "outputs" / "copy").config("run")
    config.write_text(json.dumps({**json.loads(config.read_text()), "seed_of_the_copy": 7}))
    with run.log("orchestrator").open("a") as log:
        log.write(f"23:00:00.000 WARNING orchestrator | {HOSTILE}\n")
    return folder / "outputs"


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """The address of a page of the runs in a folder."""
    words = [sys.executable, "-m", "stretto", "view", str(folder), "--port", "0", *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[1]
        finally:
            server.terminate()
        assert server.wait(60) == 0


@pytest.fixture(scope="module")
def address(ended: Path) -> Iterator[str]:
    with served(ended) as found:
        yield found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_drawn_and_fits(browser: Any, address: str, width: str, scheme: str) -> None:
    size = dict(zip(("width", "height"), WIDTHS[width]))
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.set_default_timeout(LONG_S * 1000)
    for view in VIEWS:
        page.goto(f"{address}#/{view}?run=live&run=copy")
        page.locator(f"nav a[aria-current=page]:text-is('{view}')").wait_for()
        page.locator("#view > *").first.wait_for()
        assert page.locator(".error").count() == 0 or view in ("now", "logs"), view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} scrolls sideways"
    page.close()


def test_text_of_a_run_is_never_markup(tab: Any, address: str) -> None:
    tab.goto(f"{address}#/logs?run=live")
    tab.get_by_text(HOSTILE).wait_for()
    tab.goto(f"{address}#/now?run=live")
    tab.get_by_text(HOSTILE).wait_for()
    assert tab.locator("#view script, #view img").count() == 0 and tab.title() != "taken"


def test_the_rollouts_of_a_filter_are_those_of_the_ledger(tab: Any, address: str, ended: Path) -> None:
    every = Run(ended / "live").rollouts(step=3)
    tab.goto(f"{address}#/rollouts?run=live&step=3&sort=best")
    tab.locator("tr[data-rollout]").first.wait_for()
    shown = tab.locator("tr[data-rollout]").evaluate_all("rows => rows.map((row) => row.dataset.rollout)")
    assert sorted(shown) == sorted(f"{row['group_id']}.{row['member']}" for row in every)
    best = max(every, key=lambda row: row["reward"])
    tab.locator("tr[data-rollout]").first.click()
    tab.locator(".detail .turn").first.wait_for()
    assert tab.locator(".detail p").first.inner_text().startswith("sort-letters, task")
    assert f"reward {best['reward']:g}" in tab.locator(".detail").inner_text()
    colours = tab.locator(".detail .text span").evaluate_all("spans => spans.map((span) => span.style.backgroundColor)")
    assert any(colours)  # by log-probability, unless something else is chosen
    tab.locator(".detail select").select_option("none")
    assert tab.locator(".detail .text span").count() == 0
    tab.locator(".detail select").select_option("entropy")  # written down at every step, without a setting
    tab.locator(".detail .text span").first.wait_for()


def test_text_is_searched_and_what_is_found_is_saved(tab: Any, address: str) -> None:
    tab.goto(f"{address}#/rollouts?run=live")
    tab.locator("tr.beginning mark").first.wait_for()
    asked = tab.locator("tr.beginning div").first.inner_text()
    tab.locator("input[name=text]").fill(asked)
    tab.keyboard.press("Enter")
    tab.locator("mark.found").first.wait_for()
    assert asked.lower() in tab.locator("mark.found").first.inner_text().lower()
    tab.locator("tr[data-rollout]").first.click()
    tab.locator(".detail .turn").first.wait_for()
    with tab.expect_download() as saved:
        tab.get_by_text("HTML file").click()
    text = Path(saved.value.path()).read_text()
    assert asked in text and "<mark>" in text and "<script" not in text
    tab.get_by_text("this task over the versions").click()
    tab.locator("input[name=task]:not([value=''])").wait_for()
    tab.locator("tr[data-rollout]").first.wait_for()
    tab.goto(f"{address}#/curves?run=live&key=reward/mean")
    tab.locator("figure canvas").first.wait_for()
    for text, ending in (("PNG", ".png"), ("CSV", ".csv")):
        with tab.expect_download() as saved:
            tab.locator("main").get_by_text(text, exact=True).click()
        assert saved.value.suggested_filename.endswith(ending)


def test_a_view_that_waits_for_its_answer_says_so(tab: Any, address: str) -> None:
    held: list[Any] = []
    asked = re.compile(r"/api/run/live/timeline")
    tab.route(asked, lambda route: held.append(route))
    tab.goto(f"{address}#/timeline?run=live")
    tab.locator("#loading").wait_for()
    assert "loading" in tab.locator("#loading").inner_text()
    for route in held:
        route.continue_()
    tab.unroute(asked)
    tab.locator("canvas").first.wait_for()
    tab.locator("#loading").wait_for(state="hidden")


def test_a_search_ends_when_its_view_is_left(tab: Any, address: str) -> None:
    """Nothing passes the filter, so the page would look further back for as long as it may."""
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    nothing = {"rows": [], "next": 9, "choices": {"envs": [], "statuses": []}}
    tab.route("**/rollouts?*", lambda route: route.fulfill(json=nothing))
    tab.goto(f"{address}#/rollouts?run=live&min_reward=9")
    tab.get_by_text("looking further back").wait_for()
    tab.keyboard.press("6")
    tab.locator("td code").first.wait_for()
    asked.clear()
    tab.keyboard.press("5")
    tab.locator("tr[tabindex], .note").first.wait_for()
    assert not [url for url in asked if "/rollouts" in url]


def test_what_is_drawn_stays_as_the_run_goes_on(tab: Any, address: str, ended: Path) -> None:
    """A curve without values stays one box, zoomed curves stay zoomed, and selected text stays selected."""
    metrics = RunDir(ended / "live").metrics("trainer")

    def go_on() -> None:
        with metrics.open("a") as file:  # a step whose tokens are not known yet
            row = {"step": 5, "time": time.time(), "incarnation": 1, "a/metric": 1.0}
            file.write(json.dumps(row) + "\n")

    go_on()
    tab.goto(f"{address}#/curves?run=live&key=reward/mean&key=a/metric&axis=tokens")
    tab.locator("figure canvas").first.wait_for()
    box = tab.locator("figure .u-over").first.bounding_box()
    tab.mouse.move(box["x"] + 80, box["y"] + 50)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 200, box["y"] + 50, steps=4)
    tab.mouse.up()
    picture = "document.querySelector('figure canvas').toDataURL()"
    tab.mouse.move(5, 5)
    zoomed = tab.evaluate(picture)
    for _ in range(2):
        with tab.expect_response(re.compile("/curve")):
            go_on()
    assert tab.locator("figure").count() == 2 and tab.evaluate(picture) == zoomed
    tab.goto(f"{address}#/now?run=live")
    tab.locator(".headline").first.wait_for()
    tab.evaluate("getSelection().selectAllChildren(document.querySelector('.headline'))")
    go_on()
    tab.get_by_text("held while text is selected").wait_for()
    assert tab.evaluate("getSelection().toString()").startswith("done")
    with tab.expect_response(re.compile("/now")):
        tab.evaluate("getSelection().removeAllRanges()")


def test_what_the_chat_asks_stays_until_it_is_answered(tab: Any, ended: Path) -> None:
    """Another run goes on, so the page asks before it starts an engine; news of the run draw the view anew."""
    lock = open_locked(RunDir(ended / "copy").lock)
    os.write(lock, b"17")
    summary = RunDir(ended / "live").summary
    try:
        with served(ended, "--chat") as found:
            tab.goto(found)
            tab.goto(f"{found.partition('?')[0]}#/chat?run=live")
            tab.get_by_role("button", name="start an engine on step 4").click()
            sure = tab.get_by_role("button", name="start it all the same")
            sure.wait_for()
            for _ in range(2):
                with tab.expect_response(re.compile("/chat$")):
                    summary.write_text(summary.read_text() + " ")
            sure.click()
            tab.get_by_text("ready: it took").wait_for()
            tab.goto("about:blank")  # the page ends now
    finally:
        os.close(lock)


def test_two_runs_are_compared(tab: Any, address: str) -> None:
    tab.goto(f"{address}#/config?run=live&run=copy")
    tab.locator("tr.differs code:has-text('seed_of_the_copy')").wait_for()
    tab.goto(f"{address}#/curves?run=live&run=copy&key=reward/mean")
    tab.locator("figure canvas").first.wait_for()
    assert tab.locator(".legend span").count() == 2


def test_evals_have_a_curve_of_each_reward_in_one_colour_per_run(tab: Any, ended: Path, tmp_path: Path) -> None:
    """The first run lacks a reward, and the second one keeps its colour there."""
    for name, metrics in (("live", {"reward_right": 0.5}), ("copy", {"reward_right": 0.7, "reward_short": 0.1})):
        shutil.copytree(ended / name, tmp_path / name)
        for version in range(3):
            score = EvalScore("echo", "sampled", 0.5, 1, {}, {}, 4, 0, 0, 7.0, 0.1, metrics, version)
            write_results(RunDir(tmp_path / name).eval_results(version), [score])
    with served(tmp_path) as own:
        tab.goto("about:blank")
        tab.goto(f"{own}#/evals?run=live&run=copy")
        tab.locator("figure canvas").first.wait_for()
        figures = tab.locator("figure").evaluate_all(
            "all => all.map((each) => [each.querySelector('b').innerText, "
            "Object.fromEntries([...each.querySelectorAll('.legend span')].map((line) => "
            "[line.innerText.split(' ')[1], line.style.color]))])"
        )
        shown = dict(figures)
        assert set(shown) == {"echo: mean", "echo: reward_right", "echo: reward_short"}
        assert shown["echo: reward_short"] == {"copy,": shown["echo: mean"]["copy,"]}
        assert shown["echo: reward_right"] == shown["echo: mean"] and len(set(shown["echo: mean"].values())) == 2
        tab.goto("about:blank")


def test_two_rollouts_of_a_task_stand_beside_each_other(tab: Any, address: str, ended: Path) -> None:
    """Two runs, and two versions of one run; what is shown is in the address."""
    row = Run(ended / "live").rollouts(step=2)[0]
    tab.goto(f"{address}#/rollouts?run=live&run=copy&rollout={row['group_id']}.{row['member']}")
    tab.get_by_text("side by side").click()
    tab.locator(".besides section:last-child .turn").first.wait_for()
    assert tab.locator(".besides section > h2:first-child").all_inner_texts() == ["live", "copy"]
    told = tab.locator(".besides section").all_inner_texts()
    assert all(f"task {row['task_id']}" in each and "assistant" in each for each in told)
    assert "left=" in tab.url and "right=" in tab.url
    tab.goto("about:blank")
    tab.goto(f"{address}#/rollouts?run=live&beside={row['task_id']}&env=sort-letters")
    tab.locator(".besides section:last-child > :is(.turn, .turns, p)").first.wait_for()
    assert tab.locator(".besides section > h2:first-child").all_inner_texts() == ["live", "live"]
    tab.get_by_text("the list").click()
    tab.locator("tr[data-rollout]").first.wait_for()


def test_a_run_without_steps_or_rollouts_says_why_in_one_sentence(tab: Any, tmp_path: Path) -> None:
    for name, config in (("dry", "{}"), ("given", '{"data": {}}'), ("cut", "{}"), ("damaged", "{")):
        run = RunDir(tmp_path / name)
        run.configs.mkdir(parents=True)
        run.config("run").write_text(config)
    RunDir(tmp_path / "cut").logs.mkdir()
    with served(tmp_path) as own:
        for run, view, says in (
            ("dry", "now", "It has not started"), ("dry", "curves", "It has not started"),
            ("dry", "rollouts", "It has not started"), ("given", "rollouts", "It trains on given texts"),
            ("cut", "curves", "It ended before its first step"), ("cut", "rollouts", "ledger.sqlite is missing"),
        ):  # fmt: skip
            tab.goto("about:blank")
            tab.goto(f"{own}#/{view}?run={run}")
            tab.locator("#view").get_by_text(says).wait_for()
        tab.goto(f"{own}#/curves?run=damaged")
        tab.locator("#view .error:has-text('damaged/configs/run.json')").wait_for()
        tab.goto("about:blank")  # the page ends
