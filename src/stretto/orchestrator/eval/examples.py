"""A few conversations of an eval or a step, as lines of the log and as rows for trackers."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from stretto.chat.render import Renderer
from stretto.orchestrator.eval.results import branch_texts
from stretto.records.rollout import Group, Rollout

PROMPT_CHARS = 300
REPLY_CHARS = 500

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""Text and numbers by column; `images` has PNG files, if one of the rows shows images."""


def choose(groups: Sequence[Group], count: int, seed: int) -> list[Rollout]:
    """The best rollout, the worst, then random others: at most `count` of those that did not fail."""
    played = [each for group in groups for each in group.rollouts if each.is_counted and each.branches]
    if not played:
        return []
    best, worst = max(played, key=lambda each: each.reward), min(played, key=lambda each: each.reward)
    extremes = [best] if worst is best else [best, worst]
    others = [each for each in played if each is not best and each is not worst]
    num_others = min(len(others), max(0, count - len(extremes)))
    return [*extremes, *random.Random(seed).sample(others, num_others)][:count]


def example_rows(groups: Sequence[Group], renderer: Renderer, mode: str, *, version: int, count: int) -> list[Row]:
    """Chosen conversations as rows of shortened text; of several branches the first is shown."""
    rows: list[Row] = []
    chosen = choose(groups, count, seed=version)
    has_images = any(rollout.branches[0].images for rollout in chosen)
    for rollout in chosen:
        texts = branch_texts(rollout.branches[0], renderer)
        rows.append(
            {
                "version": version,
                "env": rollout.task.env,
                "mode": mode,
                "task": rollout.task.task_id,
                "reward": rollout.reward,
                "prompt": shortened(texts["prompt"], PROMPT_CHARS),
                "reply": shortened(texts["reply"], REPLY_CHARS),
            }
        )
        if has_images:
            rows[-1]["images"] = renderer.pictures(rollout.branches[0].images)
    return rows


def shortened(text: str, num_chars: int) -> str:
    """The text, without its middle if it is longer than num_chars."""
    if len(text) <= num_chars:
        return text
    half = (num_chars - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def log_rows(rows: Sequence[Row]) -> None:
    """One line of the log per conversation; line breaks are written as \\n."""
    for row in rows:
        text = f"{row['prompt']} ▶ {row['reply']}".replace("\n", "\\n")
        logger.info(
            "version %s, %s %s, %s, reward %.3f: %s",
            row["version"], row["env"], row["task"], row["mode"], row["reward"], text,
        )  # fmt: skip
