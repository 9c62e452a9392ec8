"""The words of code and documents: rates have "per", and no docstring or comment begins with "Of"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "docs", "tests", "examples", "benchmarks", "deploy", "scripts")
SUFFIXES = (".py", ".md", ".toml", ".yaml", ".yml", ".js", ".c", ".sh")
RATE = re.compile(
    r"\b((once|twice|times)\s+a\s+(second|minute|hour|day|step|run|update)"
    r"|(one|tokens|bytes|rows|requests|steps|rollouts|\d+\s?[kMG]i?B|\d+\s?m?s)\s+an?\s+"
    r"(second|minute|hour|day|step|rank|layer|node|GPU|core|engine|request|update|batch|replica))\b"
)
FRAGMENT = re.compile(r'(?:"""|^\s*# )Of ', re.MULTILINE)


def found(pattern: re.Pattern[str]) -> list[str]:
    """`file:line: text` of every match."""
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES}
    lines = []
    for path in sorted(files - {Path(__file__)}):
        text = path.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            lines.append(f"{path.relative_to(ROOT)}:{line}: {' '.join(match[0].split())}")
    return lines


@pytest.mark.heavy
def test_rates_say_per() -> None:
    assert found(RATE) == []


@pytest.mark.heavy
def test_no_docstring_or_comment_begins_with_of() -> None:
    assert found(FRAGMENT) == []
