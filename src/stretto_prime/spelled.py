"""The page for those who come from prime-rl, generated from the table of spellings.

`python -m stretto_prime.spelled` prints the page, which `make docs` puts on the site; page.md is its frame.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stretto.config.describe import ROOTS
from stretto.config.root import RunRoot, SFTConfig
from stretto.config.section import Found, Section, dotted, find, show
from stretto.config.spelling import NO_DEFAULT, Instead, Row, Table
from stretto_prime.table import PARTS

WITH_TABLES: dict[str, type[RunRoot]] = {"sft": SFTConfig} | ROOTS
"""The class of a verb's config, by verb, also where no add-on has `sft`."""
TITLES = ("The run", "The trainer", "The orchestrator", "Inference", "`sft`, `evals`, `env-server`")


class State(Enum):
    """How a key of prime-rl is treated here."""

    SAME = "same"
    MOVED = "another name or place"
    IDLE = "accepted, and decides nothing"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """A key of prime-rl on the page."""

    table: Table
    row: Row
    state: State
    ours: str
    """Our key; empty if there is none."""
    default: str | None
    """Our default as text; None if there is none to compare."""

    @property
    def theirs(self) -> str:
        """The whole path in their spelling."""
        return ".".join(filter(None, (self.table.path, self.row.theirs)))

    @property
    def their_default(self) -> str | None:
        """Their default as text."""
        return None if self.row.default is NO_DEFAULT else show(self.row.default, is_exact=True)

    @property
    def differs(self) -> bool:
        """Whether the defaults differ."""
        is_value = self.their_default is not None and self.default not in (None, "required")
        return is_value and _plain(self.their_default or "") != _plain(self.default or "")


def _plain(text: str) -> str:
    """A default in a form that can be compared, such as without quotes."""
    text = text.replace("localhost", "127.0.0.1").replace("type = ", "").replace("[]", "None")
    return re.sub(r"(?<=\d)_(?=\d)|\.0$|\"|'", "", text)


def entries() -> Iterator[tuple[int, Entry]]:
    """Every listed key with the number of its part."""
    for number, part in enumerate(PARTS):
        for table in part.TABLES:
            for row in table.rows if table.is_listed else ():
                yield number, _entry(table, row)


def _entry(table: Table, row: Row) -> Entry:
    if row.is_refused:
        return Entry(table, row, State.REFUSED, "", None)
    if row.ours == "":
        return Entry(table, row, State.IDLE, "", None)
    written = ".".join(filter(None, (table.path, row.theirs.replace("*", "NAME"))))
    found = follow(WITH_TABLES[table.verb], written)
    ours = re.sub(r"\.0(?=\.|$)", "", dotted((*found.path, *found.rest)))
    theirs = re.sub(r"\.0(?=\.|$)", "", written)
    default = found.key.default_text() if found.is_known and not found.key.item_sections else None
    return Entry(table, row, State.SAME if ours == theirs else State.MOVED, ours, default)


def follow(root: type[Section], written: str) -> Found:
    """The key that a path as written leads to."""
    return find(root, tuple(int(part) if part.isdigit() else part for part in written.split(".") if part))


def markdown() -> str:
    """The whole page."""
    found = list(entries())
    count = {state: sum(entry.state is state for _, entry in found) for state in State}
    counts = (
        f"There are {len(found)} keys: {count[State.SAME]} are the same, {count[State.MOVED]} have another name or "
        f"place, {count[State.IDLE]} are accepted and decide nothing here, and {count[State.REFUSED]} are refused."
    )
    parts = {
        "@COUNTS@": counts,
        "@DEFAULTS@": "\n".join(_defaults([entry for _, entry in found])),
        "@REFUSED@": "\n".join(_refused([entry for _, entry in found])),
        "@TABLES@": "\n".join(_tables(found)).strip(),
    }
    page = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(name, text)
    return page


def _defaults(found: list[Entry]) -> Iterator[str]:
    yield from ("| key | theirs | here |", "|---|---|---|")
    lines = set()
    for entry in found:
        line = f"| `{_shown(entry)}` | {_code(entry.their_default)} | {_code(entry.default)} |"
        if entry.differs and not entry.row.is_old and line not in lines:
            lines.add(line)
            yield line


def _refused(found: list[Entry]) -> Iterator[str]:
    yield from ("| key | why, and what to write |", "|---|---|")
    keys_by_text: dict[str, list[str]] = {}
    for entry in found:
        if entry.state is State.REFUSED:
            text = entry.row.instead
            if entry.row.unless:
                text += f" ({', '.join(f'`{show(value)}`' for value in entry.row.unless)} is accepted)"
            keys_by_text.setdefault(text, []).append(f"`{_shown(entry)}`")
        for value, instead in entry.row.values.items():
            if isinstance(instead, Instead):
                keys_by_text.setdefault(instead.text, []).append(f"`{_shown(entry)} = {show(value)}`")
    for text, keys in keys_by_text.items():
        yield f"| {', '.join(dict.fromkeys(keys))} | {text} |"


def _tables(found: list[tuple[int, Entry]]) -> Iterator[str]:
    groups: dict[tuple[int, str, str], list[Entry]] = {}
    for number, entry in found:
        groups.setdefault((number, entry.table.verb, entry.table.path), []).append(entry)
    last = -1
    for (number, verb, path), rows in groups.items():
        if number != last:
            yield from ("", f"### {TITLES[number]}")
            last = number
        yield from ("", f"**{_header(path)}**" + (f" of `{verb}`" if verb != "rl" else ""), "")
        plain = [each for each in rows if each.state is State.SAME and not each.row.note]
        if plain:
            yield f"same: {', '.join(f'`{each.row.theirs}`{_mark(each)}' for each in plain)}"
            yield ""
        others = [each for each in rows if each not in plain and each.state is not State.REFUSED]
        if others:
            yield from ("| theirs | here | |", "|---|---|---|")
            yield from (f"| `{each.row.theirs}`{_mark(each)} | {_here(each)} | {each.row.note} |" for each in others)
            yield ""
        if refused := [each for each in rows if each.state is State.REFUSED]:
            yield f"refused: {', '.join(f'`{each.row.theirs}`{_mark(each)}' for each in refused)}"


def _here(entry: Entry) -> str:
    if entry.state is State.IDLE:
        return "decides nothing"
    return "same" if entry.state is State.SAME else f"`{entry.ours}`"


def _mark(entry: Entry) -> str:
    return "°" if entry.row.is_old else ""


def _shown(entry: Entry) -> str:
    path = re.sub(r"\.0(?=\.|$)", "", entry.theirs)
    return path if entry.table.verb == "rl" else f"{entry.table.verb}: {path}"


def _header(path: str) -> str:
    if not path:
        return "At the root"
    return f"`[[{path[:-2]}]]`" if path.endswith(".0") else f"`[{path}]`"


def _code(text: str | None) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
