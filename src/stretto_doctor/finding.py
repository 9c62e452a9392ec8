"""One line of the doctor: what was checked, whether it is good, and what to type if it is not."""

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
    NOTE = "note"  # something is missing that only some runs need
    WARN = "warn"  # a run will be slow, or may fail later
    BAD = "bad"  # a run will fail


MARKS = {State.GOOD: "ok", State.NOTE: "--", State.WARN: "!!", State.BAD: "NO"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    """What was checked."""
    state: State
    text: str
    """The fact, or what will go wrong."""
    fix: str = ""
    """What to type or change; "" if nothing is wrong."""
    host: str = ""
    """Where it was found; "" for this machine alone."""

    def as_json(self) -> dict[str, Any]:
        return {key: str(getattr(self, key)) for key in ("host", "name", "state", "text", "fix")}


def good(name: str, text: str) -> Finding:
    return Finding(name, State.GOOD, text)


def note(name: str, text: str, fix: str = "") -> Finding:
    return Finding(name, State.NOTE, text, fix)


def warn(name: str, text: str, fix: str = "") -> Finding:
    return Finding(name, State.WARN, text, fix)


def bad(name: str, text: str, fix: str = "", host: str = "") -> Finding:
    return Finding(name, State.BAD, text, fix, host)


def finding_of(data: Any, host: str) -> Finding:
    """A finding that another host has sent, with texts of bounded length and without control characters."""
    data = data if isinstance(data, dict) else {}
    texts = {key: printable(str(data.get(key, "")))[:MAX_CHARS] for key in ("name", "state", "text", "fix")}
    state = State(texts["state"]) if texts["state"] in list(State) else State.WARN
    return Finding(texts["name"] or "?", state, texts["text"], texts["fix"], host)


Check = Callable[[], Iterator[Finding]]


def run_checks(checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    """The findings of all checks, which run at the same time, in the order of the checks."""
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda each: guarded(*each), checks)
    return [finding for findings in results for finding in findings]


def guarded(name: str, check: Check) -> list[Finding]:
    """The findings of a check; an error becomes a finding too, so that other checks go on."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except StrettoError as error:
        found.append(bad(name, str(error)))
    except Exception as error:  # also a mistake of ours, for a check meets odd machines
        found.append(warn(name, f"could not be looked at: {type(error).__name__}: {error}"))
    return found


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding, wrapped, with what to type below it."""
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
