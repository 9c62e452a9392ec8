"""One line of the doctor: what was looked at, whether it is good, and what to type if it is not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stretto.base.errors import StrettoError
from stretto.base.status import printable

WIDTH = 118
MAX_CHARS = 600


class State(StrEnum):
    """How serious a finding is; only BAD makes the command fail."""

    GOOD = "good"
    NOTE = "note"  # is missing, and only some runs need it
    WARN = "warn"  # runs, and will be slow or may fail later
    BAD = "bad"  # will fail


MARKS = {State.GOOD: "ok", State.NOTE: "--", State.WARN: "!!", State.BAD: "NO"}


@dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    text: the fact, or what will go wrong. fix: what to type or change; "" if it is good. host: where it was found;
    "" for this machine alone.
    """

    name: str
    state: State
    text: str
    fix: str = ""
    host: str = ""

    def as_json(self) -> dict[str, Any]:
        return {key: str(getattr(self, key)) for key in ("host", "name", "state", "text", "fix")}


def finding_of(data: Any, host: str) -> Finding:
    """A finding that another host has sent: texts of bounded length, and nothing that a terminal would obey."""
    data = data if isinstance(data, dict) else {}
    texts = {key: printable(str(data.get(key, "")))[:MAX_CHARS] for key in ("name", "state", "text", "fix")}
    state = State(texts["state"]) if texts["state"] in list(State) else State.WARN
    return Finding(texts["name"] or "?", state, texts["text"], texts["fix"], host)


Check = Callable[[], Iterator[Finding]]


def run_checks(checks: Sequence[tuple[str, Check]], num_threads: int = 8) -> list[Finding]:
    """What checks find, in their order; they run at the same time. An error of one becomes its finding."""
    with ThreadPoolExecutor(num_threads) as pool:
        found = pool.map(lambda each: guarded(*each), checks)
    return [finding for findings in found for finding in findings]


def guarded(name: str, check: Check) -> list[Finding]:
    """What a check finds; an error becomes a finding too, because the others are still of use."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except StrettoError as error:
        found.append(Finding(name, State.BAD, str(error)))
    except Exception as error:
        found.append(Finding(name, State.WARN, f"could not be looked at: {type(error).__name__}: {error}"))
    return found


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding, wrapped; what to type stands below it."""
    if not findings:
        return ""
    names = [f"{finding.host}: {finding.name}" if finding.host else finding.name for finding in findings]
    width = min(max(map(len, names)), 34)
    lines = []
    for name, finding in zip(names, findings):
        indent = " " * (width + 6)
        text = f"{MARKS[finding.state]}  {name:<{width}}  {printable(finding.text)}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        if finding.fix:
            fix = f"{indent}-> {printable(finding.fix)}"
            lines += textwrap.wrap(fix, WIDTH, subsequent_indent=f"{indent}   ", break_on_hyphens=False)
    return "\n".join(lines)


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    num_bad = sum(finding.state is State.BAD for finding in findings)
    num_warned = sum(finding.state is State.WARN for finding in findings)
    if num_bad:
        return f"{num_bad} will fail (NO), {num_warned} may be a trouble (!!)"
    return f"nothing will fail; {num_warned} may be a trouble (!!)" if num_warned else "all is good"
