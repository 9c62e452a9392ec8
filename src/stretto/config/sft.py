"""[sft]: supervised fine-tuning, one process with the trainer's learner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.config.section import Section


class LossMaskSection(Section):
    """Which roles' tokens are trained."""

    system: bool = False
    """Train on system messages."""
    user: bool = False
    """Train on user messages."""
    assistant: bool = True
    """Train on the model's own messages."""
    tool: bool = False
    """Train on tool results."""


class FileData(Section):
    """Rows with `messages`, or `prompt` and `completion`, from local .jsonl or .parquet files."""

    type: Literal["file"] = "file"
    name: str
    """File, or directory whose .jsonl and .parquet files are read in order; `name@[a:b]` takes rows a to b - 1. A
    message with `step_loss_mask` = 0 is not trained."""


class EnvData(Section):
    """Rows written by an environment's own solution."""

    type: Literal["environment"] = "environment"
    id: str
    """Environment with `sft_rows`."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the environment."""
    num_rows: int = Field(4096, gt=0)
    """Rows to make."""


Data = Annotated[FileData | EnvData, Field(discriminator="type")]


class ValSection(Section):
    """Validation loss on rows of its own."""

    interval: int = Field(50, gt=0)
    """Steps between validations."""
    data: Data
    eval_on_start: bool = False
    """Also before the first step."""
