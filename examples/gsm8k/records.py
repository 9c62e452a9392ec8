"""Rows of GSM8K as conversations for `sft`: the prompt of qwen3.toml, and a solution that ends in a box."""

from __future__ import annotations

import re
from typing import Any

ASK = "\n\nReason step by step, and put the final answer into \\boxed{}."


def solved(record: dict[str, Any]) -> dict[str, str]:
    """A row with `question` and `answer` (the solution, then `#### 72`) as prompt and completion."""
    steps, _, answer = record["answer"].partition("####")
    steps = re.sub(r"<<.*?>>", "", steps).strip()  # notes of a calculator, `<<6*12=72>>`
    return {"prompt": record["question"] + ASK, "completion": f"{steps}\n\n\\boxed{{{answer.strip()}}}"}
