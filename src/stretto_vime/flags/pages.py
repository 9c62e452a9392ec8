"""`vime --help` and the documents' page of all flags (vime-flags.md), both written from the table.

`python -m stretto_vime.flags.pages` prints the page; docs/vime.md says how the flags are taken.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

from stretto_vime.flags.flag import Flag
from stretto_vime.flags.groups import BY_NAME, GROUPS
from stretto_vime.flags.others import ANSWERS, SHIPPED, UNKNOWN, answer_of

VALUES = {
    "switch": "", "integer": " N", "number": " X", "text": " TEXT", "list": " TEXT ...", "integers": " N ...",
    "object": " JSON",
}  # fmt: skip
WIDTH = 110
MOST_NAMES = 5
"""Options of Megatron-LM's that a row of the page names."""


def help_text(word: str = "") -> str:
    """All flags by group that have this word in their name or meaning."""
    lines = [
        "usage: vime --FLAG [VALUE] ...",
        "",
        "vime's command line; `vime --help WORD` shows flags with a word.",
        "",
    ]
    for group, flags in GROUPS.items():
        shown = [flag for flag in flags if word.lower() in f"{flag.name} {flag.help}".lower()]
        if shown:
            lines += [f"{group}:", *(line for flag in shown for line in _help_lines(flag)), ""]
    lines.append("Any option of vLLM's is --vllm-OPTION, any of vllm-router's is --router-OPTION.")
    return "\n".join(lines) + "\n"


def _help_lines(flag: Flag) -> Iterator[str]:
    yield f"  {flag.name}{VALUES[flag.kind]}"
    text = f"{flag.help} {_default(flag)}".strip()
    if flag.state == "refused":
        text = f"{text} REFUSED: {flag.note}."
    yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default(flag: Flag) -> str:
    if flag.kind == "switch" or flag.default in (None, {}):
        return ""
    return f"Default {_shown(flag.default)}."


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def counts() -> Counter[str]:
    """How many flags are in each state."""
    return Counter(flag.state for flags in GROUPS.values() for flag in flags)


def markdown() -> str:
    """The page of all flags."""
    alone = [flag for flag in SHIPPED.table.flags if flag.name not in BY_NAME]
    about = {
        "version": SHIPPED.table.version,
        "others": len(alone),
        "answers": "\n".join(_answers()),
        "unknown": UNKNOWN,
    }
    return _PAGE.format(table="\n".join(_tables()), total=counts().total(), **counts(), **about)


def _answers() -> Iterator[str]:
    """A row for each kind of Megatron-LM's other options, with a few of their names."""
    names = [flag.name for flag in SHIPPED.table.flags if flag.name not in BY_NAME]
    for each in ANSWERS:
        found = [name for name in names if answer_of(name) is each]
        more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
        shown = ", ".join(f"`{name}`" for name in found[:MOST_NAMES])
        yield f"| {shown}{more} | {'**refused**' if each.is_refused else 'a note'}: {each.text} |"


def _tables() -> Iterator[str]:
    for group, flags in GROUPS.items():
        yield f"### {group}\n"
        yield "| flag | vime's default | here |\n|---|---|---|"
        for flag in flags:
            yield f"| `{flag.name}` | {_cell(flag)} | {_meaning(flag)} |"
        yield ""


def _cell(flag: Flag) -> str:
    if flag.kind == "switch":
        return "on" if flag.default else "off"
    return "none" if flag.default is None else f"`{_shown(flag.default)}`"


def _meaning(flag: Flag) -> str:
    note = flag.note if not flag.note or flag.note.endswith(".") else f"{flag.note}."
    if flag.state == "refused":
        taken = ", ".join(f"`{_shown(each)}`" for each in flag.allowed if each != {})
        return f"**refused**{f' but for {taken}' if taken else ''}: {note}"
    if flag.state == "equal":
        return f"{flag.help} *Nothing to set*: {note}"
    keys = ", ".join(f"`{key}`" for key in flag.keys)
    return " ".join(filter(None, (flag.help, f"Sets {keys}." if keys else "", note)))


_PAGE = """\
# vime's flags

Every flag of vime's `train.py`, with its default and what it does here. [vime's command line](vime.md) says how the
flags are taken; `vime --help WORD` shows those with a word.

{total} flags: {acts} act, {equal} request what happens anyway, {refused} are refused. Any option of vLLM's is
`--vllm-OPTION`, any of vllm-router's `--router-OPTION`: they are checked against the versions that are supported.
Megatron-LM's other options are answered by kind, as the last table says.
`orchestrator.env.0.args` are the arguments of the environment `dataset`, `orchestrator.eval.env.0` is each data set of
the evals.

{table}
### Megatron-LM's other options

Megatron-LM {version} has {others} options beside these. Their defaults are accepted. Another value is

| for | answer |
|---|---|
{answers}
| any other | **refused**: {unknown} |
"""


if __name__ == "__main__":
    print(markdown(), end="")
