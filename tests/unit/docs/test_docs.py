"""Documents hold: links lead somewhere, named functions exist where they are said to be."""

from __future__ import annotations

import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train
from pages.blocks import GENERATED, PAGES, ROOT, text_of

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_exist_or_to_pages_that_are_generated(page: str):
    folder = ROOT / Path(page).parent
    made = {(ROOT / "docs" / name).resolve() for name in GENERATED}
    for _, target in LINK.findall(text_of(page)):
        if "://" not in target:
            path = (folder / target).resolve()
            assert path.exists() or path in made, f"{page} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_a_page_begins_with_a_sentence_and_the_readme_links_to_it(page: str):
    title, first = text_of(page).strip().split("\n\n")[:2]
    assert title.startswith("# ") and not first.startswith(("```", "|", "- ")), f"{page} begins with {first[:40]!r}"
    if Path(page).name not in GENERATED:
        assert f"({page})" in text_of("README.md"), f"no link in README.md to {page}"


def test_the_readme_links_to_nothing_that_is_not_stored():
    assert not [target for _, target in LINK.findall(text_of("README.md")) if Path(target).name in GENERATED]


@pytest.mark.heavy
def test_generated_pages_are_written_into_a_directory(tmp_path, monkeypatch):
    tmp_path = tmp_path / "not" / "there"
    monkeypatch.setattr(sys, "argv", ["generated.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "docs" / "site" / "generated.py"), run_name="__main__")
    assert {path.name for path in tmp_path.iterdir()} == set(GENERATED)
    for name in GENERATED:
        assert (tmp_path / name).read_text() == text_of(f"docs/{name}")


def test_every_function_named_on_the_way_of_a_rollout_exists_where_the_link_says():
    page = ROOT / "docs" / "one_rollout.md"
    stops = re.findall(r"^\*\*(\d+)\.", page.read_text(), re.M)
    assert stops == [str(n) for n in range(1, 15)]
    named = [(name.strip("`"), target) for name, target in LINK.findall(page.read_text()) if name.startswith("`")]
    assert len(named) > 25
    for name, target in named:
        source = (page.parent / target).read_text()
        if name == Path(target).parent.name:
            continue  # a package, named by its folder
        for part in name.split("."):
            assert re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", source, re.M), f"{name} is not in {target}"


def test_the_map_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    written = set(re.findall(r"([a-z0-9_]+)/", page.split("## Where things are")[1].split("```")[1]))
    source = ROOT / "src"
    rooms = {path.parent for path in source.rglob("__init__.py")} - {source / "stretto"}
    assert {room.name for room in rooms} <= written
    folders = {path.name for path in source.rglob("*") if path.is_dir()}
    assert written - {"src", "tests", "unit", "addons"} <= folders


def test_a_rollout_takes_the_way_that_is_written_down(tmp_path):
    """The orchestrator's functions on the page, in the order in which a run enters them once it draws."""
    page = ROOT / "docs" / "one_rollout.md"
    named = [
        ((page.parent / target).resolve(), name.strip("`"))
        for name, target in LINK.findall(page.read_text())
        if "/orchestrator/" in target or target.endswith(("ledger/writer.py", "algorithms/credit.py"))
    ]
    written = [(path, name) for path, name in named if name.rpartition(".")[2].islower() or "_" in name]
    assert len(written) > 18 and len(set(written)) == len(written)
    entered: dict[tuple[Path, str], None] = {}

    def on_call(frame, event, _) -> None:
        if event == "call":
            name = frame.f_code.co_qualname
            entered[Path(frame.f_code.co_filename), name.removeprefix("Ledger.")] = None

    async def draw_under_watch(run, *args) -> None:
        sys.setprofile(on_call)
        await run(*args)

    async def watch(loop) -> None:
        loop._pipeline.run = partial(draw_under_watch, loop._pipeline.run)

    settings = config(tmp_path, batch_size=4, max_steps=1)
    try:
        train(settings, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=1), meanwhile=watch)
    finally:
        sys.setprofile(None)
    found = [each for each in entered if each in set(written)]
    assert [name for _, name in found] == [name for _, name in written]
