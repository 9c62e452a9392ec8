"""One rollout, token by token, and the group beside it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stretto.base.errors import DataError, StrettoError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import TURN_START, Tokenizer
from stretto.ledger.reader import LedgerReader
from stretto.ledger.schema import SHOWN_STATUS
from stretto.records.rollout import Branch
from stretto_view.page.library import OpenRun

MOST_TOKENS = 20_000
"""Most tokens of a branch that are shown; the page says how many more there are."""
_BROKEN = "\ufffd"  # a token ends inside a character
_LONGEST_CHARACTER = 4  # bytes, so tokens that one character may need
_MEMBER = f"""
    SELECT r.*, {SHOWN_STATUS} AS shown, d.env, d.task_id, d.data, d.state AS group_state,
           d.reason AS group_reason,
           (SELECT b.step FROM batch_rollouts x JOIN batches b USING (batch)
            WHERE x.row = r.row AND b.state != 'undone') AS step
    FROM rollouts r JOIN draws d USING (group_id) WHERE r.group_id = ? AND r.status NOT IN ('running', 'lost')
    ORDER BY r.member, r.row
"""


def conversation(run: OpenRun, group_id: int, member: int) -> dict[str, Any]:
    """The rollout with its branches, its group's rows, and what the environment reported.

    Raises: DataError if there is no such rollout.
    """
    with LedgerReader(run.dir) as ledger:
        newest = {row["member"]: row | {"status": row["shown"]} for row in ledger.rows(_MEMBER, group_id)}
        if member not in newest:
            raise DataError(f"{run.dir}: no rollout g{group_id}.{member}; it may not have ended yet.")
        row = newest[member]
        try:
            group = ledger.group(group_id)
            branches = next(each.branches for each in group.rollouts if each.member == member)
            lost = None
        except StrettoError as error:  # the tokens were deleted, or have the format of another version
            branches, lost = (), str(error)
    trained = _trained(run.dir, row)
    return {
        **{key: value for key, value in row.items() if key not in ("segment", "offset", "length", "crc")},
        "branches": [_branch(run.tokenizer, branch, trained.get(number)) for number, branch in enumerate(branches)],
        "no_tokens": lost,
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


def _branch(tokenizer: Tokenizer | None, branch: Branch, trained: dict[int, dict[str, float]] | None) -> dict[str, Any]:
    """Tokens as columns, and turns as stretches of them.

    `ratio` is the trainer's probability over the engine's, where the trainer wrote it down.
    """
    shown = slice(0, MOST_TOKENS)
    ids = branch.token_ids[shown]
    texts = token_texts(tokenizer, ids)
    columns: dict[str, Any] = {
        "text": texts,
        "sampled": branch.is_sampled[shown].astype(int).tolist(),
        "logprob": [_rounded(value) for value in branch.logprobs[shown].tolist()],
        "version": _versions(branch)[shown],
    }
    if trained:
        columns["ratio"] = [_rounded(trained.get(at, {}).get("ratio")) for at in range(len(ids))]
        columns["advantage"] = [_rounded(trained.get(at, {}).get("advantage")) for at in range(len(ids))]
    return {
        "agent": branch.agent,
        "is_trained": branch.is_trained,
        "temperature": branch.temperature,
        "images": [image.hash for image in branch.images],
        "tokens": columns,
        "num_more": max(0, len(branch.token_ids) - MOST_TOKENS),
        "turns": list(turns(texts, branch.is_sampled[shown])),
    }


def token_texts(tokenizer: Tokenizer | None, token_ids: np.ndarray) -> list[str]:
    """The text of each token. Where several tokens make one character, the first has it and the others are empty."""
    if tokenizer is None:
        return [f"{token} " for token in token_ids.tolist()]
    ids = token_ids.tolist()
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        whole = next(
            (n for n in range(1, _LONGEST_CHARACTER + 1) if _BROKEN not in tokenizer.decode(ids[at : at + n])), 1
        )
        texts += [tokenizer.decode(ids[at : at + whole]), *[""] * (whole - 1)]
    return texts[: len(ids)]


def turns(texts: Sequence[str], is_sampled: np.ndarray) -> Iterator[dict[str, Any]]:
    """Stretches of tokens with one role: by the chat's markers, or policy and context where there are none."""
    if TURN_START in texts:
        starts = [at for at, text in enumerate(texts) if text == TURN_START]
        bounds = [0, *starts, len(texts)] if starts[0] else [*starts, len(texts)]
        for start, end in itertools.pairwise(bounds):
            text = "".join(texts[start:end])
            role, _, rest = text.removeprefix(TURN_START).partition("\n")
            is_marked = text.startswith(TURN_START) and role.isidentifier()
            head = _num_tokens_of(texts[start:end], len(text) - len(rest)) if is_marked else 0
            yield {"role": role if is_marked else "text", "start": start, "body": start + head, "end": end}
        return
    edges = np.flatnonzero(np.diff(is_sampled.astype(np.int8))) + 1
    for start, end in itertools.pairwise([0, *edges.tolist(), len(texts)]):
        if end > start:
            role = "policy" if is_sampled[start] else "context"
            yield {"role": role, "start": start, "body": start, "end": end}


def _num_tokens_of(texts: Sequence[str], num_characters: int) -> int:
    """How many tokens make up the first num_characters characters."""
    for number, end in enumerate(itertools.accumulate(map(len, texts)), 1):
        if end >= num_characters:
            return number
    return len(texts)


def _versions(branch: Branch) -> list[int | None]:
    found: list[int | None] = [None] * len(branch.token_ids)
    for span in branch.versions:
        for at in range(span.start, min(span.end, len(found))):
            found[at] = span.version if branch.is_sampled[at] else None
    return found


def _trained(run: RunDir, row: dict[str, Any]) -> dict[int, dict[int, dict[str, float]]]:
    """By branch and position what the trainer wrote with `trainer.enable_token_export`; {} if it wrote nothing."""
    if row["step"] is None or not run.trained_tokens.is_dir():
        return {}
    name = f"g{row['group_id']}.{row['member']}"
    found: dict[int, dict[int, dict[str, float]]] = {}
    for file in sorted(run.trained_tokens.glob(f"**/step_{row['step']}.jsonl")):
        for line in file.open():
            if f'"{name}' in line[:200] and (sample := json.loads(line))["sample_id"].partition("/")[0] == name:
                branch = int(sample["sample_id"].partition("/")[2] or 0)
                pairs = zip(
                    sample["position"], sample["trainer_logprob"], sample["sampler_logprob"], sample["advantage"]
                )
                found[branch] = {
                    at: {"ratio": float(np.exp(trainer - sampler)), "advantage": advantage}
                    for at, trainer, sampler, advantage in pairs
                }
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 4)
