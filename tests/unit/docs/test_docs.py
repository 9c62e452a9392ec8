"""Documents hold: links lead somewhere, named functions exist, commands are understood."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.cli import main
from stretto.config.sections.model import ScratchSection
from stretto.models.hub import random_model, save_hf

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
VERBS = {"rl", "sft", "trainer", "orchestrator", "inference", "eval"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands(page: Path) -> list[list[str]]:
    """Words of every command of ours in the page's shell blocks, with continued lines joined."""
    found = []
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(), re.S):
        for line in re.split(r"\n|&&", block.replace("\\\n", " ")):
            words = shlex.split(line.split("#")[0].removeprefix("$ "))
            while words and (words[0] in ("stretto", "uv", "run") or words[0].startswith(".venv/bin/")):
                words = [Path(words[0]).name, *words[1:]]
                if words[0] in VERBS:
                    break
                words = words[1:]
            if words and words[0] in VERBS:
                found.append(words)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path):
    for _, target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_function_named_on_the_way_of_a_rollout_exists_where_the_link_says():
    page = ROOT / "docs" / "one_rollout.md"
    stops = re.findall(r"^\*\*(\d+)\.", page.read_text(), re.M)
    assert stops == [str(n) for n in range(1, 15)]
    named = [
        (name.strip("`"), target) for name, target in LINK.findall(page.read_text()) if name.startswith("`")
    ]
    assert len(named) > 25
    for name, target in named:
        source = (page.parent / target).read_text()
        if name == Path(target).parent.name:
            continue  # a package, named by its folder
        for part in name.split("."):
            assert re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", source, re.M), (
                f"{name} is not in {target}"
            )


def test_the_map_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    written = set(re.findall(r"([a-z0-9_]+)/", page.split("## Where things are")[1].split("```")[1]))
    source = ROOT / "src" / "stretto"
    rooms = {path.parent for path in source.rglob("__init__.py")} - {source}
    assert {room.name for room in rooms} <= written
    assert written - {"src", "stretto", "tests", "unit"} <= {room.name for room in rooms}


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


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder as a reader of the documents has it: the examples, their warmed-up models, and files of his own."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "examples", folder / "examples")
    tokenizer = build_letters_tokenizer(folder / "tokenizer")
    for name in ("sort-letters", "reverse-text"):
        for model in (f"outputs/{name}-sft/weights/latest", f"outputs/{name}/weights/latest"):
            (folder / model).mkdir(parents=True)
            save_hf(random_model(ScratchSection(), 112), folder / model, tokenizer)
    whole = tomllib.loads((ROOT / "examples/sort_letters/rl.toml").read_text())
    model = f'[model]\nname = "{whole["model"]["name"].format(output_dir="outputs")}"\n'
    env = '[[orchestrator.env]]\nid = "sort-letters"\n'
    for name in ("rl.toml", "base.toml"):
        (folder / name).write_text(model + env)
    page = (ROOT / "docs" / "first_hour.md").read_text()
    for name, kind in (("vowels.toml", "toml"), ("my_envs.py", "python")):
        (folder / name).write_text(re.findall(rf"```{kind}\n(.*?)```", page, re.S)[0])
    (folder / "mine.toml").write_text("seed = 1\n")
    for name, text in {"train": model, "orch": '[[env]]\nid = "sort-letters"\n', "infer": ""}.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("page", "words"),
    [(page, words) for page in PAGES for words in commands(page)],
    ids=lambda v: shlex.join(v)[:60] if isinstance(v, list) else v.stem,
)
def test_every_command_in_the_documents_is_understood(page, words, workplace, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(workplace)
    if words[0] in ("sft", "rl") and "--output-dir" not in words:
        words = [*words, "--output-dir", str(tmp_path)]
        for warmed in (workplace / "outputs").glob("*-sft") if words[0] == "rl" else ():
            (tmp_path / warmed.name).symlink_to(warmed)
    # Whether a run is there to continue or to delete is tested elsewhere.
    words = [w for w in words if w not in ("--resume", "--clean")]
    assert main([*words, "--dry-run"]) in (0, None), capsys.readouterr().err
