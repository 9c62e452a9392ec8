"""[sft]: supervised fine-tuning, one process with the trainer's learner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.config.section import Section
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.orchestrator import EarlyStopSection, EvalSection


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
    """Rows with `messages`, or `prompt` and `completion`, from .jsonl or parquet files or from the Hub."""

    type: Literal["file"] = "file"
    name: str | list[str]
    """File, or directory whose .jsonl and .parquet files are read in order; `name@[a:b]` takes rows a to b - 1. Or a
    data set of the Hub, `ORG/NAME:CONFIG[SPLIT]`; without [SPLIT] it is `train`. Or a list of these. A message with
    `step_loss_mask` = 0 is not trained."""
    subsets: list[str | None] | None = None
    """Configs of a data set of the Hub that is named as ORG/NAME, or of each in the list."""
    splits: list[str | None] | None = None
    """Splits, one for each of them; None: `train`."""
    probabilities: list[float] | Literal["equal"] | None = None
    """Shares of an epoch that come from each of several data sets; rows of small ones come more than once. `equal`: as
    many of each, which `subsets` and `splits` set where nothing is given; None: every row of each once."""
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """With probabilities: an epoch has every row of every data set, or ends with the first that has no more."""
    shuffle: bool = True
    """Take the rows in a new random order every epoch; false: in the order of the data."""
    streaming: bool = False
    """Read a data set of the Hub without a copy on disk; the rows that are trained on are in memory in any case."""
    convert: str | None = None
    """`module:function` that converts each row before its keys are read."""
    input_key: str | None = None
    """Key of the conversation, or with `output_key` of the prompt; None: `messages`, or `prompt` and `completion`."""
    output_key: str | None = None
    """Key of the reply to the prompt; None: the conversation has it."""
    tool_key: str = "tools"
    """Key of the tools that the chat template shows, a list or its JSON text."""

    @property
    def sources(self) -> list[str]:
        """Every file or data set, as data.records.read_records reads them."""
        names = [self.name] if isinstance(self.name, str) else self.name
        if self.subsets is None and self.splits is None:
            return names
        count = max(len(names), len(self.subsets or ()), len(self.splits or ()))
        subsets, splits = self.subsets or [None] * count, self.splits or [None] * count
        names = names * count if len(names) == 1 else names
        return [
            f"{name}{f':{subset}' if subset else ''}[{split or 'train'}]"
            for name, subset, split in zip(names, subsets, splits)
        ]


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


class OnlineEvalSection(EvalSection):
    """Evals on environments while `sft` trains: an engine of their own is given the weights, and training goes on.

    `env` says which; held-out tasks, as with `rl`.
    """

    inference: InferenceSection = InferenceSection()
    """The engine."""
    max_inflight_rollouts: int = Field(256, gt=0)
    """Rollouts running at once."""
    rollout_timeout_s: float | None = Field(600.0, gt=0)
    """Deadline of one rollout; None: no deadline."""
    timeout_s: float = Field(3600.0, gt=0)
    """Longest wait for the last evals when training is done."""


class ValSection(Section):
    """Validation loss on rows of its own."""

    interval: int = Field(50, gt=0)
    """Steps between validations."""
    data: Data
    eval_on_start: bool = False
    """Also before the first step."""
    keep_best: bool = False
    """Write the weights to RUN/weights/best whenever a validation has the lowest loss so far."""
    early_stop: EarlyStopSection | None = None
