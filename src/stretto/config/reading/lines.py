"""TOML and JSON files, with the line of every key for error messages.

The standard parsers give the data, but no lines. This scanner reads text that they have accepted, so that it only has
to find the keys.
"""

from __future__ import annotations

import json
import re
import tomllib
from bisect import bisect_right
from pathlib import Path
from typing import Any

from stretto.base.errors import json_fault, meant_path, near_path, reason_of
from stretto.config.reading.toml import BARE_KEY
from stretto.config.section import KeyPath

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_VALUE = re.compile(r"[^\s,\]}#]+")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'', re.DOTALL)

_TOML_REASONS = {
    "Cannot declare": "this table is defined above: put the keys of both under one",
    "Cannot overwrite a value": "this key is defined above: give it once",
    "Illegal character '\\n'": "a quote is not closed",
    "Unterminated string": "a quote is not closed",
    'Expected "\'"': "a quote is not closed",
    "Expected '\"'": "a quote is not closed",
    "Unescaped '\\' in a string": "a backslash: write the text in single quotes, or each backslash twice",
    "Unclosed array": "a list is not closed by ]",
    "Unclosed inline table": "a table is not closed by }",
}
"""Beginnings of messages of tomllib, and what a user should read instead."""


def read_file(name: str) -> tuple[dict[str, Any], dict[KeyPath, int]] | str:
    """Data of a TOML or JSON file and the line of each key; or a text that says what is wrong."""
    path = Path(name).expanduser()
    if path.suffix not in (".toml", ".json"):
        return f"{name}: {_not_a_config(path)}"
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except FileNotFoundError:
        return f"{name}: no such file{meant_path(path)}"
    except (OSError, UnicodeDecodeError) as error:
        return f"{name}: cannot be read: {reason_of(error)}"
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = int(where.group(1)) if where else _unclosed_line(text)
        reason = re.sub(r" [(]at .*", "", str(error))
        written = text.splitlines()[line - 1 : line]
        if ours := next((ours for theirs, ours in _TOML_REASONS.items() if reason.startswith(theirs)), None):
            shown = f" (`{written[0].strip()[:60]}`)" if written else ""
            return f"{name}:{line}: not valid TOML: {ours}{shown}"
        return f"{name}:{line}: not valid TOML: {reason}{_toml_advice(written)}"
    except json.JSONDecodeError as error:
        return f"{name}:{error.lineno}: not valid JSON: {json_fault(error)}"
    if not isinstance(data, dict):
        return f"{name}:1: the file must hold a table of keys"
    return data, (toml_lines(text) if path.suffix == ".toml" else json_lines(text))


def _unclosed_line(text: str) -> int:
    """The line of a TOML document that ends too early: the last with a quote that nothing closes, or its last one."""
    odd = [
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if any(line.partition("#")[0].count(quote) % 2 for quote in "'\"")
    ]
    return odd[0] if odd else text.count("\n") + 1


def _not_a_config(path: Path) -> str:
    """What is wrong with a path whose name does not end in .toml or .json."""
    if not path.is_dir():
        near = next((each for end in (".toml", ".json") if (each := path.with_name(path.name + end)).is_file()), None)
        near = near or near_path(path)
        is_text = path.is_file() and near in (None, path)
        way = (
            "; write it as TOML, `key = value` below `[table]`"
            if is_text
            else f"; did you mean {near}?"
            if near
            else ""
        )
        return f"not a .toml or .json file{way}"
    inside = sorted(each.name for each in path.iterdir() if each.suffix in (".toml", ".json"))
    if (path / "configs" / "run.json").is_file():
        return f"this is a run's directory; its configuration is {path / 'configs' / 'run.json'}"
    return "this is a directory, not a .toml or .json file; in it are " + (", ".join(inside[:6]) or "none")


def _toml_advice(line: list[str]) -> str:
    """What to write instead of a line that is not TOML."""
    written = line[0].strip() if line else ""
    key, equals, value = written.partition("=")
    if written.startswith(("//", "--", ";")):
        return f" in `{written[:60]}`; a comment begins with #"
    if written.startswith("{"):
        return "; this is JSON: give the file a name that ends in .json"
    if match := re.fullmatch(r"([\w.-]+)\s*:\s*(.*)", written):
        way = f"write {match[1]} = {match[2]}" if match[2] else f"write [{match[1]}]"
        return f" in `{written[:60]}`; {way} (this is YAML)"
    if any(sign in written for sign in "\u201c\u201d\u2018\u2019"):
        return f" in `{written[:60]}`; its quotes are not the straight ones, \" or '"
    if equals and re.fullmatch(r".*[^,],\s*(#.*)?", value):
        return f" in `{written[:60]}`; remove the comma at its end"
    if equals and re.fullmatch(r"\s*0\d+\s*(#.*)?", value):
        number = int(value.partition("#")[0])
        return f" in `{written[:60]}`; a number does not begin with 0: write {key.strip()} = {number}"
    if equals and re.fullmatch(r"\s*(None|null|nil)\s*(#.*)?", value):
        return f'; TOML has no null, write {key.strip()} = "None"'
    if equals and re.fullmatch(r"\s*(True|False)\s*(#.*)?", value):
        return f"; write {key.strip()} = {value.partition('#')[0].strip().lower()}"
    shown = f" in `{written[:60]}`" if written else ""
    return f"{shown}; a line is `key = value` or `[table]`, a text has quotes, a list is [1, 2]"


def toml_lines(text: str) -> dict[KeyPath, int]:
    """Line of every key, table and list item of a valid TOML document."""
    return _Scanner(text).toml()


def json_lines(text: str) -> dict[KeyPath, int]:
    """Line of every key and list item of a valid JSON document."""
    scanner = _Scanner(text)
    scanner.value(())
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[KeyPath, int] = {}

    def toml(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        last_index: dict[KeyPath, int] = {}
        while self.skip_blank() < len(self.text):
            if not self.take("["):
                self.pair(table)
                self.skip_line()
                continue
            is_list = self.take("[")
            *parents, last = self.key()
            table = ()
            for part in parents:
                table += (part,)
                self.mark(table)
                table += (last_index[table],) if table in last_index else ()
            table += (last,)
            if is_list:
                last_index[table] = last_index.get(table, -1) + 1
            self.mark(table)
            if table in last_index:
                table += (last_index[table],)
                self.mark(table)
            self.position = self.text.index("]", self.position) + (2 if is_list else 1)
        return self.lines

    def pair(self, table: KeyPath) -> None:
        """`key = value` of TOML, or `"key": value` of JSON."""
        path = table
        for part in self.key():
            path += (part,)
            self.mark(path)
        self.skip_blank()
        self.position += 1
        self.value(path)

    def value(self, path: KeyPath) -> None:
        self.skip_blank()
        if self.take("["):
            index = 0
            while not self.closes("]"):
                self.mark((*path, index))
                self.value((*path, index))
                index += 1
        elif self.take("{"):
            while not self.closes("}"):
                self.pair(path)
        else:
            match = _STRING.match(self.text, self.position) or _BARE_VALUE.match(self.text, self.position)
            assert match, f"no value at character {self.position}"
            self.position = match.end()

    def closes(self, bracket: str) -> bool:
        self.skip_blank()
        self.take(",")
        self.skip_blank()
        return self.take(bracket)

    def key(self) -> list[str]:
        parts = []
        while True:
            self.skip_blank()
            match = _STRING.match(self.text, self.position) or BARE_KEY.match(self.text, self.position)
            assert match, f"no key at character {self.position}"
            parts.append(_unquoted(match.group()))
            self.position = match.end()
            self.skip_blank()
            if not self.take("."):
                return parts

    def mark(self, path: KeyPath) -> None:
        self.lines.setdefault(path, bisect_right(self.newlines, self.position - 1) + 1)

    def skip_blank(self) -> int:
        match = _BLANK.match(self.text, self.position)
        assert match
        self.position = match.end()
        return self.position

    def skip_line(self) -> None:
        """Skip the rest of a line, which has only blanks, a comment or the time of a date."""
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end

    def take(self, text: str) -> bool:
        if not self.text.startswith(text, self.position):
            return False
        self.position += len(text)
        return True


def _unquoted(key: str) -> str:
    if key.startswith('"'):
        try:
            return str(json.loads(key))
        except ValueError:
            return key[1:-1]
    return key[1:-1] if key.startswith("'") else key
