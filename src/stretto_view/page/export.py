"""What a page gives away as a file: tables as CSV, and a rollout as one HTML file for a colleague without the run.

Text of rollouts is untrusted: the HTML file has it escaped, no script, and a policy that lets none run.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import StrettoError
from stretto.ledger.reader import LedgerReader
from stretto_view.page import conversation, curves, texts
from stretto_view.page.library import OpenRun
from stretto_view.page.query import FILTERS, ROLLOUT, filters_of, rollout_of

_MOST_PAGES = 20
_LOADING_S = 60.0  # a file waits for the tokenizer
_FORMULA = tuple("=+-@＝＋－＠")  # a spreadsheet would compute a text that begins so, also after blanks
_COLUMNS = (
    "rollout", "step", "env", "task_id", "status", "reward", "advantage", "num_sampled_tokens", "num_turns",
    "first_version", "last_version", "prompt", "reply", "error",
)  # fmt: skip


@dataclass(frozen=True)
class File:
    """A file to be saved: `/api/run/{run}/NAME`."""

    write: Callable[[OpenRun, Any], str]
    about: str
    content_type: str
    parameters: Mapping[str, str] = field(default_factory=dict)


def _curves(run: OpenRun, query: Any) -> str:
    keys = query.getall("key", []) or [each["name"] for each in curves.names(run.rows())]
    rows: dict[int, dict[str, Any]] = {}
    for own in run.rows().values():
        for row in own:
            kept = {key: row[key] for key in ("time", *keys) if key in row}
            rows[row["step"]] = {"step": row["step"], **kept, **rows.get(row["step"], {})}
    return table(("step", "time", *keys), (rows[step] for step in sorted(rows)))


def _evals(run: OpenRun, query: Any) -> str:
    rows = run.evals()
    return table(tuple(dict.fromkeys(key for row in rows for key in row)), rows)


def _rollouts(run: OpenRun, query: Any) -> str:
    """At most _MOST_PAGES pages of the list that the same filters give."""
    rows: list[dict[str, Any]] = []
    before, filters = None, filters_of(query)
    text, place = query.get("text") or "", query.get("place") or "anywhere"
    run.tokenizer_within(_LOADING_S)
    with LedgerReader(run.dir) as ledger:
        for _ in range(_MOST_PAGES):
            found = texts.page(ledger, run, filters, text=text, place=place, before=before)
            rows += [{"rollout": f"g{row['group_id']}.{row['member']}", **row} for row in found["rows"]]
            if (before := found["next"]) is None:
                break
    return table(_COLUMNS, rows)


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV; nested values as JSON, and no text that a spreadsheet would compute."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([_cell(name) for name in columns])
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return file.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        value = json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(_FORMULA) else value


_STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 1rem auto;
padding: 0 1rem; } h1 { font-size: 1.15rem; } h2 { font-size: 1rem; } article { border-left: 3px solid #8886;
padding: .1rem .7rem; margin: .6rem 0; } article.assistant, article.policy { border-color: #1f77c9; } article.tool {
border-color: #c98a1b; } h3 { font-size: .8rem; margin: 0; opacity: .7; } pre { white-space: pre-wrap; margin: .2rem 0;
overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; } mark { background: #1f77c92e; color: inherit; } dl {
display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; } dd { margin: 0; overflow-wrap: anywhere; }
img { height: 8rem; margin-right: .4rem; image-rendering: pixelated; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def _rollout(run: OpenRun, query: Any) -> str:
    found = conversation.conversation(run, *rollout_of(query))
    name = html.escape(f"{run.name}: g{found['group_id']}.{found['member']}")
    facts = {
        "environment": found["env"], "task": found["task_id"], "status": found["status"], "step": found["step"],
        "reward": found["reward"], "advantage": found["advantage"], "sampled tokens": found["num_sampled_tokens"],
        "versions": f"{found['first_version']} to {found['last_version']}", "what the reward said": found["metrics"],
        "task's data": found["data"], "error": found["error"],
    }  # fmt: skip
    listed = "".join(
        f"<dt>{title}</dt><dd>{html.escape(_as_text(value))}</dd>"
        for title, value in facts.items()
        if value not in (None, {}, "")
    )
    body = "".join(_branch(run, branch) for branch in found["branches"])
    lost = "".join(f"<p>{html.escape(why)}</p>" for why in (found["no_tokens"], found["no_text"]) if why)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1><dl>{listed}</dl>{lost}{body}"
        "<p><small>What the policy sampled is marked. Written by stretto view.</small></p></body></html>\n"
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _branch(run: OpenRun, branch: dict[str, Any]) -> str:
    head = "" if branch["agent"] == "policy" else f"<h2>{html.escape(branch['agent'])}</h2>"
    more = f"<p>{branch['num_more']} more tokens are left out</p>" if branch["num_more"] else ""
    return head + "".join(_image(run, name) for name in branch["images"]) + "".join(_turns(branch)) + more


def _turns(branch: dict[str, Any]) -> Iterable[str]:
    tokens, sampled = branch["tokens"]["text"], branch["tokens"]["sampled"]
    for turn in branch["turns"]:
        text, at = [], turn["body"]
        while at < turn["end"]:
            end = next((n for n in range(at, turn["end"]) if sampled[n] != sampled[at]), turn["end"])
            part = html.escape("".join(tokens[at:end]))
            text.append(f"<mark>{part}</mark>" if sampled[at] else part)
            at = end
        role = html.escape(turn["role"])
        yield f'<article class="{role}"><h3>{role}</h3><pre>{"".join(text)}</pre></article>'


def _image(run: OpenRun, name: str) -> str:
    try:
        png = base64.b64encode(conversation.picture(run, name)).decode()
    except StrettoError as error:
        return f"<p>{html.escape(str(error))}</p>"
    return f'<img alt="image" src="data:image/png;base64,{png}">'


FILES: dict[str, File] = {
    "curves.csv": File(_curves, "metrics as a table", "text/csv", {"key": "a metric; may be repeated; without it all"}),
    "evals.csv": File(_evals, "scores of every version", "text/csv"),
    "rollouts.csv": File(
        _rollouts,
        f"the list of rollouts with their beginnings, at most {_MOST_PAGES} pages",
        "text/csv",
        {key: value for key, value in FILTERS.items() if key != "before"},
    ),
    "rollout.html": File(_rollout, "one rollout as a file that needs nothing else", "text/html", ROLLOUT),
}
