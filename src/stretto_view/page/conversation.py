"""One rollout, token by token, and the group beside it."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stretto.base.errors import DataError, StrettoError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import Tokenizer
from stretto.ledger.reader import LedgerReader
from stretto.ledger.schema import SHOWN_STATUS
from stretto.records.rollout import Branch
from stretto.records.trained_tokens import TrainedSample, find_trained
from stretto_view.page.library import OpenRun
from stretto_view.page.texts import open_branches
from stretto_view.roles import mark_of, stretches

MOST_TOKENS = 20_000
"""Most tokens of a branch that are shown; the page says how many more there are."""
_LOADING_S = 120.0
_BROKEN = "\ufffd"  # a token ends inside a character
_LONGEST_CHARACTER = 4  # bytes, so tokens that one character may need
_MEMBER = f"""
    SELECT r.*, {SHOWN_STATUS} AS shown, d.env, d.task_id, d.data, d.state AS group_state,
           d.reason AS group_reason,
           (SELECT b.step FROM batch_rollouts x JOIN batches b USING (batch)
            WHERE x.row = r.row AND b.state != 'undone') AS step
    FROM rollouts r JOIN draws d USING (group_id) WHERE r.group_id = ? AND r.status != 'lost'
    ORDER BY r.member, r.row
"""


def conversation(run: OpenRun, group_id: int, member: int, begin: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """The rollout with its branches, its group's rows, and what the environment reported.

    begin: a branch, and its first token that is shown; of other branches that is the first one.

    Raises: DataError if there is no such rollout.
    """
    with LedgerReader(run.dir) as ledger:
        newest = {row["member"]: row | {"status": row["shown"]} for row in ledger.rows(_MEMBER, group_id)}
        if member not in newest:
            raise DataError(f"{run.dir}: no rollout g{group_id}.{member}.")
        row = newest[member]
        try:
            branches = open_branches(ledger.turns(row)) if row["finished_at"] is None else ledger.branches(row)
            lost = None
        except StrettoError as error:  # the tokens were deleted, or have the format of another version
            branches, lost = (), str(error)
    trained, why = _trained(run.dir, row)
    scored = json.loads(row["turns"] or "[]")
    tokenizer = run.tokenizer_within(_LOADING_S)
    return {
        **{key: value for key, value in row.items() if key not in ("segment", "offset", "length", "crc")},
        "turns": scored,
        "branches": [
            _branch(tokenizer, branch, trained.get(number), row["advantage"], scored, at)
            for number, branch in enumerate(branches)
            for at in [begin[1] if number == begin[0] else 0]
        ],
        "no_tokens": lost,
        "no_text": run.no_text,
        "not_kept": dict.fromkeys(("entropy", "ratio"), why) if why else {},
        "group": [
            {key: each[key] for key in ("member", "status", "reward", "advantage", "num_sampled_tokens")}
            for _, each in sorted(newest.items())
        ],
    }


def picture(run: OpenRun, name: str) -> bytes:
    """An image of the run as PNG, as the model sees it.

    Raises: DataError if the ledger does not have it, or the model's image processor is not found from here.
    """
    if run.image_processor is None:
        raise DataError(f"{run.dir}: the model's image processor is not found from here.")
    with LedgerReader(run.dir) as ledger:
        image = ledger.image(name)
    try:
        return run.image_processor.png(image)
    except ValueError as cause:
        raise DataError(f"{run.dir}: image {name} does not fit the model's image processor: {cause}") from cause


def _branch(
    tokenizer: Tokenizer | None,
    branch: Branch,
    trained: TrainedSample | None,
    advantage: float | None,
    scored: Sequence[dict[str, Any]],
    begin: int,
) -> dict[str, Any]:
    """Tokens from `begin` on as columns, and turns as stretches of them.

    advantage: of the whole rollout, for tokens that the trainer gave no advantages of their own. `ratio` is the
    trainer's probability over the engine's; it and `entropy` are there where the trainer wrote them. `trained` is the
    loss mask.
    scored: the rollout's turns, if its environment scored them; the turns of the policy then have their `number`.
    """
    begin = min(begin, max(0, len(branch.token_ids) - 1))
    shown = slice(begin, begin + MOST_TOKENS)
    ids = branch.token_ids[shown]
    texts = token_texts(tokenizer, ids)
    is_trained = branch.is_sampled & branch.is_trained
    if branch.is_greedy is not None:
        is_trained = is_trained & ~branch.is_greedy
    columns: dict[str, Any] = {
        "text": texts,
        "sampled": branch.is_sampled[shown].astype(int).tolist(),
        "logprob": [_rounded(value) for value in branch.logprobs[shown].tolist()],
        "version": _versions(branch)[shown],
        "trained": is_trained[shown].astype(int).tolist(),
    }
    if branch.ref_logprobs is not None:
        columns["teacher"] = [_rounded(value) for value in (branch.ref_logprobs - branch.logprobs)[shown].tolist()]
    for name, stream in ({} if trained is None else trained.streams(len(branch.token_ids))).items():
        columns[name] = [_rounded(value) for value in stream[shown].tolist()]
    if "advantage" not in columns and advantage is not None:
        credit = np.full(len(branch.token_ids), advantage)
        for span in branch.turns:
            credit[span.start : span.end] += scored[span.turn].get("advantage", 0.0)
        pairs = zip(credit[shown].tolist(), is_trained[shown].tolist())
        columns["advantage"] = [_rounded(value) if each else None for value, each in pairs]
    return {
        "agent": branch.agent,
        "is_trained": branch.is_trained,
        "reward": branch.reward,
        "temperature": branch.temperature,
        "images": [image.hash for image in branch.images],
        "tokens": columns,
        "begin": begin,
        "num_more": max(0, len(branch.token_ids) - begin - MOST_TOKENS),
        "turns": [
            # of a turn that began before these tokens nobody here knows whose it is
            {**turn, "role": "text"}
            if begin and turn["start"] == turn["body"] == 0
            else turn | _number(branch, turn, begin)
            for turn in turns(texts, branch.is_sampled[shown])
        ],
    }


def _number(branch: Branch, stretch: dict[str, Any], begin: int) -> dict[str, int]:
    """The number of the scored turn whose reply begins in a stretch of the tokens from `begin` on."""
    inside = [span.turn for span in branch.turns if stretch["start"] <= span.start - begin < stretch["end"]]
    return {"number": inside[0]} if inside else {}


def token_texts(tokenizer: Tokenizer | None, token_ids: np.ndarray) -> list[str]:
    """The text of each token. Where several tokens make one character, the first has it and the others are empty.

    A token is decoded behind an earlier one: some decoders take the blank away that their text begins with.
    """
    if tokenizer is None:
        return [f"{token} " for token in token_ids.tolist()]
    ids = token_ids.tolist()
    texts: list[str] = []
    before: list[int] = []
    while len(texts) < len(ids):
        at, begun = len(texts), tokenizer.decode(before)
        for whole in range(1, _LONGEST_CHARACTER + 1):
            text = tokenizer.decode(before + ids[at : at + whole]).removeprefix(begun)
            if _BROKEN not in text:
                before = ids[at : at + whole]
                break
        else:
            whole, text = 1, tokenizer.decode(ids[at : at + 1])
        texts += [text, *[""] * (whole - 1)]
    return texts[: len(ids)]


def turns(texts: Sequence[str], is_sampled: np.ndarray) -> Iterator[dict[str, Any]]:
    """Stretches of tokens with one role: by the chat's marks, or policy and context where there are none.

    A mark counts only if its first tag is one token: text that spells a mark is no mark.
    """
    text = "".join(texts)
    ends = list(itertools.accumulate(map(len, texts)))
    starts = [0, *ends[:-1]]
    found = [
        stretch
        for stretch in stretches(text)
        if stretch.start == stretch.body or texts[bisect_right(starts, stretch.start) - 1] == mark_of(text, stretch)
    ]
    if any(stretch.start < stretch.body for stretch in found):
        bounds = [bisect_left(ends, stretch.start + 1) for stretch in found] + [len(texts)]
        if bounds[0]:
            yield {"role": "text", "start": 0, "body": 0, "end": bounds[0]}
        for stretch, start, end in zip(found, bounds, bounds[1:]):
            body = min(end, bisect_left(ends, stretch.body) + 1) if stretch.body > stretch.start else start
            yield {"role": stretch.role, "start": start, "body": body, "end": end}
        return
    edges = np.flatnonzero(np.diff(is_sampled.astype(np.int8))) + 1
    for start, end in itertools.pairwise([0, *edges.tolist(), len(texts)]):
        if end > start:
            role = "policy" if is_sampled[start] else "context"
            yield {"role": role, "start": start, "body": start, "end": end}


def _versions(branch: Branch) -> list[int | None]:
    found: list[int | None] = [None] * len(branch.token_ids)
    for span in branch.versions:
        for at in range(span.start, min(span.end, len(found))):
            found[at] = span.version if branch.is_sampled[at] else None
    return found


def _trained(run: RunDir, row: dict[str, Any]) -> tuple[dict[int, TrainedSample], str]:
    """What the trainer computed for each branch that it trained, and otherwise why it is not there."""
    if row["finished_at"] is None:
        return {}, "the rollout has not ended, and the engines do not report it"
    if row["step"] is None:
        return {}, "no step trained on this rollout, and the engines do not report it"
    name, found = f"g{row['group_id']}.{row['member']}", {}
    try:
        for sample in find_trained(run.trained_tokens, row["step"]):
            rollout, _, branch = sample.sample_id.partition("/")
            if rollout == name:
                found[int(branch or 0)] = sample
    except DataError as error:
        return {}, str(error)
    why = "the trainer's record of this step is not written yet, or has gone: a run keeps 1 GB of them"
    return found, "" if found else why


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 4)
