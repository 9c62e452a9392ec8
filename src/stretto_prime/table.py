"""All tables of prime-rl's keys, and what else its files mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.config.spelling import Correction, KeyPath, Row, Spelling, Table
from stretto_prime import inference, orchestrator, run, sft, trainer
from stretto_prime.inference import nodes_of_one
from stretto_prime.orchestrator import merge_filters, pools_of_buffer

PARTS = (run, trainer, orchestrator, inference, sft)
"""Modules with its keys, in the order of the page."""
TABLES: tuple[Table, ...] = tuple(table for part in PARTS for table in part.TABLES)
LISTS = {"orchestrator.train.source": "orchestrator.env", "orchestrator.eval.source": "orchestrator.eval.env"}
"""Our path of a list of tables, where it is another one."""


def names_of_prime_rl(verb: str, word: str) -> list[str]:
    """Keys of prime-rl's that contain a word, and what each is here, in the files of a verb."""
    part = word.replace("-", "_")
    found: dict[str, str] = {}
    for table in TABLES:
        if table.verb != (verb if verb in ("sft", "eval") else "rl"):
            continue
        base = table.path.removesuffix(table.below.replace("*", "0")).removesuffix(".")
        for theirs, ours in LISTS.items():
            base = base.replace(theirs, ours)
        for row in table.rows:
            path = ".".join(filter(None, (table.path, row.theirs)))
            if part in path and (row.ours is not None or row.is_refused):
                found.setdefault(path, f"{path}: {_meaning(row, base)}")
    return sorted(found.values())


def _meaning(row: Row, base: str) -> str:
    if row.is_refused:
        return f"refused: {row.instead}"
    if not row.ours:
        return f"decides nothing: {row.note}"
    ours = row.ours[1:] if row.ours.startswith("/") else ".".join(filter(None, (base, row.ours.removesuffix(".*"))))
    return f"--{ours.replace('_', '-')}" + (f" ({row.note})" if row.note else "")


def corrections(root: str, values: Mapping[KeyPath, Any], spelled: Mapping[KeyPath, str]) -> list[Correction]:
    """What files of 0.6 mean: nodes of all engines of a side, and the thresholds of a buffer."""
    nodes = nodes_of_one(values) if root == "RLConfig" else {}
    why = "counts the nodes of all engines, as deployment.num_infer_nodes shows; here it is those of one engine: "
    found = [Correction(path, number, f"{why}{number}") for path, number in nodes.items()]
    return found + [Correction(path, value) for path, value in pools_of_buffer(values, spelled).items()]


SPELLING = Spelling(TABLES, names_of_prime_rl, merge_filters, corrections)
