"""The text of rollouts: their beginnings for a list, a search through all that are kept, one task over the versions.

A ledger has tokens, not text, so a search decodes rollouts from the newest back until it has a page or its time is used
up. Its answer says how far it came; the next request continues there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stretto.base.errors import ConfigError, DataError, WireError
from stretto.chat.placeholders import one_per_image
from stretto.chat.tokenizer import Tokenizer
from stretto.ledger.reader import LedgerReader
from stretto.records.generate import VersionSpan
from stretto.records.partial import Turn
from stretto.records.rollout import Branch
from stretto_view.page import rollouts
from stretto_view.page.library import OpenRun
from stretto_view.roles import Stretch, readable, stretches, without_end

PLACES = ("anywhere", "prompt", "reply")
_BUDGET_S = 0.4
_EVALS_BUDGET_S = 2.0
_MOST_PER_VERSION = 8
_LOADING_S, _SEARCH_LOADING_S = 0.3, 120.0  # a list waits for the tokenizer so long, and a search
_STRETCH = 100  # rollouts between two looks at the clock
_TURNS_BUDGET_S = 0.3  # of rollouts under way that are left then, a list says only how many turns they have
_LENGTH = 160  # characters of a beginning, and of what is around a match
_MOST_PROMPT, _MOST_REPLY = 2000, 200  # tokens that are decoded for a beginning
_PAYLOAD = ("segment", "offset", "length", "crc")

Row = dict[str, Any]


def page(
    ledger: LedgerReader,
    run: OpenRun,
    filters: rollouts.Filters,
    *,
    text: str = "",
    place: str = "anywhere",
    before: int | None = None,
) -> dict[str, Any]:
    """As `rollouts.page`, each row with the beginnings of its prompt and reply; only rows that have `text`.

    is_loading: whether the beginnings are not there yet, because the tokenizer is still being loaded. no_text: why
    there are none.
    place: where the text must be. A row that has it also says what is around the match (`match`). unread: how many
    rollouts of the searched stretch have no tokens any more. The case of letters does not matter.

    Raises: ConfigError for an unknown place, or if there is no tokenizer to search with.
    """
    if place not in PLACES:
        raise ConfigError(f"place {place!r}: the places are {', '.join(PLACES)}.")
    if not text:
        found, tokenizer = rollouts.page(ledger, filters, before=before), run.tokenizer_within(_LOADING_S)
        return {
            **found,
            "is_loading": run.is_loading,
            "no_text": run.no_text,
            "rows": list(_listed(ledger, tokenizer, found["rows"])),
        }
    if (tokenizer := run.tokenizer_within(_SEARCH_LOADING_S)) is None:
        raise ConfigError(f"text: there is none to search in; {run.no_text}.")
    return _search(ledger, tokenizer, filters, text.lower(), place, before)


def _listed(ledger: LedgerReader, tokenizer: Tokenizer | None, rows: Sequence[Row]) -> Iterator[Row]:
    """The rows with their beginnings. Turns of rollouts under way are read one by one, so that takes a bounded time."""
    began = time.monotonic()
    for row in rows:
        if row["finished_at"] is None and time.monotonic() - began > _TURNS_BUDGET_S:
            yield _with_beginnings(ledger, None, row, ()) | {"is_long": True, "num_turns": None}
        else:
            yield _with_beginnings(ledger, tokenizer, row)


def _search(
    ledger: LedgerReader, tokenizer: Tokenizer, filters: rollouts.Filters, text: str, place: str, before: int | None
) -> dict[str, Any]:
    rows: list[Row] = []
    searched = num_read = unread = 0
    began, at = time.monotonic(), before
    while len(rows) < rollouts.PAGE and time.monotonic() - began < _BUDGET_S:
        found = rollouts.page(ledger, filters, before=at, limit=_STRETCH)
        for row in found["rows"]:
            branches = branches_of(ledger, row)
            num_read, unread = num_read + 1, unread + (not branches)
            if match := _match(tokenizer, branches, text, place):
                rows.append(_with_beginnings(ledger, tokenizer, row, branches) | {"match": match})
        searched, at = searched + found["searched"], found["next"]
        if at is None:
            break
    return {"rows": rows, "next": at, "searched": searched, "num_read": num_read, "unread": unread}


def branches_of(ledger: LedgerReader, row: Mapping[str, Any]) -> tuple[Branch, ...]:
    """The tokens of a row, also of one that has not ended; () where they are not kept or damaged."""
    try:
        return open_branches(ledger.turns(row)) if row["finished_at"] is None else ledger.branches(row)
    except (DataError, WireError):
        return ()


def open_branches(turns: Sequence[Turn]) -> tuple[Branch, ...]:
    """The turns so far of a rollout as branches: a turn that does not extend its agent's last one begins another."""
    found: dict[tuple[str, int], list[Turn]] = {}
    lengths: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for turn in turns:
        if turn.num_shared != lengths.get(turn.agent, 0) or turn.agent not in numbers:
            numbers[turn.agent] = numbers.get(turn.agent, -1) + 1
        found.setdefault((turn.agent, numbers[turn.agent]), []).append(turn)
        lengths[turn.agent] = turn.num_shared + len(turn.prompt_ids) + len(turn.completion.token_ids)
    branches: list[Branch] = []
    for (agent, _), own in found.items():
        earlier = next((each.token_ids for each in reversed(branches) if each.agent == agent), np.zeros(0, np.int32))
        branches.append(_branch(agent, earlier[: own[0].num_shared], own))
    return tuple(branches)


def _branch(agent: str, shared: np.ndarray, turns: Sequence[Turn]) -> Branch:
    """shared: the tokens before the first turn's own."""
    ids, sampled, logprobs, versions = [shared], [np.zeros(len(shared), bool)], [np.zeros(len(shared))], []
    for turn in turns:
        said = turn.completion
        start = sum(map(len, ids)) + len(turn.prompt_ids)
        ids += [turn.prompt_ids, said.token_ids]
        sampled += [np.zeros(len(turn.prompt_ids), bool), np.ones(len(said.token_ids), bool)]
        logprobs += [np.zeros(len(turn.prompt_ids)), said.logprobs]
        versions += [VersionSpan(span.version, span.start + start, span.end + start) for span in said.versions]
    return Branch(
        token_ids=np.concatenate(ids).astype(np.int32),
        is_sampled=np.concatenate(sampled),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        temperature=turns[-1].temperature,
        versions=tuple(versions),
        agent=agent,
        images=tuple(image for turn in turns for image in turn.images),
    )


def _with_beginnings(
    ledger: LedgerReader, tokenizer: Tokenizer | None, row: Row, branches: tuple[Branch, ...] | None = None
) -> Row:
    shown = {key: value for key, value in row.items() if key not in _PAYLOAD}
    found = branches_of(ledger, row) if branches is None else branches
    if row["status"] == "running":
        shown["num_sampled_tokens"] = sum(int(np.count_nonzero(each.is_sampled)) for each in found)
        shown["num_turns"] = sum(_num_replies(each) for each in found)
    prompt, reply = beginnings(tokenizer, found) if tokenizer is not None and found else (None, None)
    return shown | {"prompt": prompt, "reply": reply}


def _num_replies(branch: Branch) -> int:
    return int(np.count_nonzero(np.diff(branch.is_sampled, prepend=False) & branch.is_sampled))


def beginnings(tokenizer: Tokenizer, branches: Sequence[Branch]) -> tuple[str, str]:
    """How the last message of a user before the first reply begins, and how that reply does."""
    branch = next((each for each in branches if each.is_trained and each.is_sampled.any()), branches[0])
    start = int(branch.is_sampled.argmax()) if branch.is_sampled.any() else len(branch.token_ids)
    end = start + int((~branch.is_sampled[start:]).argmax()) if not branch.is_sampled[start:].all() else None
    prompt = one_per_image(tokenizer.decode(branch.token_ids[max(0, start - _MOST_PROMPT) : start]))
    reply = tokenizer.decode(branch.token_ids[start:end][:_MOST_REPLY])
    asked = [turn for turn in stretches(prompt) if turn.role == "user"]
    return _short(prompt[asked[-1].body : asked[-1].end] if asked else prompt), _short(reply)


def _short(text: str) -> str:
    line = " ".join(without_end(text).split())
    return line if len(line) <= _LENGTH else line[: _LENGTH - 1] + "…"


def _match(tokenizer: Tokenizer, branches: Sequence[Branch], text: str, place: str) -> str:
    """What is around the first match in any branch; "" without a match."""
    for branch in branches:
        start = int(branch.is_sampled.argmax()) if branch.is_sampled.any() else len(branch.token_ids)
        parts = {"anywhere": branch.token_ids, "prompt": branch.token_ids[:start], "reply": branch.token_ids[start:]}
        whole = tokenizer.decode(parts[place])
        if (at := whole.lower().find(text)) >= 0:
            low = max(0, at - (_LENGTH - len(text)) // 3)
            around = " ".join(readable(whole[low : low + _LENGTH]).split())
            return ("…" if low else "") + around + ("…" if low + _LENGTH < len(whole) else "")
    return ""


def over_versions(run: OpenRun, task: str, env: str | None) -> dict[str, Any]:
    """The replies to a task, newest version first, a few of each version, within a bound on time.

    is_cut: whether older versions were not read any more. damaged: files of evals with lines that cannot be read.

    Raises: ConfigError without a task.
    """
    if not task:
        raise ConfigError("a request for a task over the versions needs its id: `task`.")
    needles = (json.dumps(task, ensure_ascii=False), json.dumps(task))
    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    began, is_cut = time.monotonic(), False
    for version in sorted({row["version"] for row in run.evals()}, reverse=True):
        if is_cut := time.monotonic() - began > _EVALS_BUDGET_S:
            break
        own: list[dict[str, Any]] = []
        for file in sorted(run.dir.eval(version).glob("*.jsonl")):
            try:
                with file.open(encoding="utf-8") as lines:
                    for line in lines:
                        if len(own) < _MOST_PER_VERSION and any(needle in line for needle in needles):
                            row = json.loads(line)
                            if row.get("task_id") == task and env in (None, row.get("env")):
                                own.append(with_turns({**row, "version": version}))
            except (OSError, ValueError, AttributeError, DataError):
                damaged.append(str(file.relative_to(run.path)))
        rows += own
    return {"rows": rows, "is_cut": is_cut, "damaged": damaged}


def with_turns(row: Row) -> Row:
    """A reply of an eval whose branches also have their text as `turns`: role, text, and whether it is of the reply.

    The turn in which the reply begins is cut there.

    Raises: DataError if its branches are not such.
    """
    try:
        branches = [
            {**branch, "turns": list(_turns(branch["prompt"], branch["reply"]))} for branch in row.get("branches") or ()
        ]
    except (KeyError, TypeError) as cause:
        raise DataError(f"the reply to task {row.get('task_id')!r} is damaged: its branches have no text.") from cause
    return {**row, "branches": branches}


def _turns(prompt: str, reply: str) -> Iterator[dict[str, Any]]:
    whole, cut = prompt + reply, len(prompt)
    for turn in list(stretches(whole)) or [Stretch("text", 0, 0, len(whole))]:
        for start, end in ((turn.body, min(turn.end, cut)), (max(turn.body, cut), turn.end)):
            if start < end and (text := without_end(whole[start:end])):
                yield {"role": turn.role, "text": text, "is_reply": start >= cut}
