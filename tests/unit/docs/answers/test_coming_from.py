"""Pages for users of other frameworks: every row's right-hand side is a configuration that loads."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from pages.blocks import ROOT

from stretto.config.describe import ROOTS
from stretto.config.load import load

BASE = {
    "rl": 'max_steps = 500\n[model]\nname = "Qwen/Qwen3-0.6B"\n[[orchestrator.env]]\nid = "dataset"\n',
    "sft": 'max_steps = 10\n[data]\nname = "rows.jsonl"\n',
    "pairs": 'max_steps = 10\n[data]\ntype = "preference"\nname = "rows.jsonl"\n[loss]\ntype = "dpo"\n',
}
SECTIONS = {"## SFT": "sft", "## DPO": "pairs"}
"""By how their heading begins: what the base of their rows is; others are of `rl`."""
PAGES = ("from_trl.md", "from_verl.md")


def rows() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Base, place and settings of each row of a table."""
    for page in PAGES:
        base = "rl"
        for number, line in enumerate((ROOT / "docs" / page).read_text().splitlines(), 1):
            if line.startswith("## "):
                base = next((name for start, name in SECTIONS.items() if line.startswith(start)), "rl")
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 3 and not set(cells[0]) <= {"-"} and cells[1] != "here":
                yield base, f"{page}:{number}", tuple(re.findall(r"`([^`]+)`", cells[1]))


ROWS = list(rows())


def words_of(setting: str) -> list[str]:
    """The words of the command line for a line of TOML."""
    key, value = setting.split(" = ", 1)
    tomllib.loads(f"value = {value}")
    return [f"--{key}", value.strip('"') if value.startswith('"') else value]


def test_the_tables_are_read():
    assert len(ROWS) > 120 and all(settings for _, _, settings in ROWS)


@pytest.mark.heavy
@pytest.mark.parametrize(("base", "place", "settings"), ROWS, ids=[place for _, place, _ in ROWS])
def test_every_row_loads(base, place, settings, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(BASE[base])
    verb = "rl" if base == "rl" else "sft"
    words = [word for setting in settings for word in words_of(setting)]
    load(ROOTS[verb], ["@", str(file), *words], verb=verb)
