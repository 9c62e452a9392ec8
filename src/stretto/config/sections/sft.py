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


class SourceData(Section):
    """Files or data sets of the Hub, and how their rows are drawn."""

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


class FileData(SourceData):
    """Rows with `messages`, or `prompt` and `completion`, from .jsonl or parquet files or from the Hub."""

    type: Literal["file"] = "file"
    input_key: str | None = None
    """Key of the conversation, or with `output_key` of the prompt; None: `messages`, or `prompt` and `completion`."""
    output_key: str | None = None
    """Key of the reply to the prompt; None: the conversation has it."""


PREFERENCE = '[data] type = "preference"'


class PreferenceData(SourceData):
    """Rows with `chosen` and `rejected`: two replies to one prompt, of which the first is the better one.

    What is learned from them is [loss].
    """

    type: Literal["preference"] = "preference"
    prompt_key: str = "prompt"
    """Key of the prompt, messages or text. In rows without it the two replies are whole conversations, and what they
    begin with alike is the prompt."""
    chosen_key: str = "chosen"
    """Key of the better reply."""
    rejected_key: str = "rejected"
    """Key of the other one."""
    margin_key: str = "margin"
    """Key of the number by which the better reply is better, which the loss `reward` reads; rows may lack it."""
    text: Literal["chat", "raw"] = "chat"
    """Rows of text without roles. `chat`: the prompt is a user's message, a reply the model's, and the chat template
    shows both. `raw`: the text is all that the model sees, and the end token follows it, as in TRL."""


class EnvData(Section):
    """Rows written by an environment's own solution."""

    type: Literal["environment"] = "environment"
    id: str
    """Environment with `sft_rows`."""
    args: dict[str, Any] = Field({})
    """Keyword arguments of the environment."""
    num_rows: int = Field(4096, gt=0)
    """Rows to make."""


Data = Annotated[FileData | EnvData | PreferenceData, Field(discriminator="type")]


class DpoSection(Section):
    """Direct preference optimization: the log-probability of the better reply rises against that of the other, both
    measured from the weights that the run starts with."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """How closely the policy stays to the start: a reply's reward is beta x (log-probability - that at the start), in
    nats. For `ipo` it is the paper's tau."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    """`sigmoid`: that of DPO. `hinge`: that of SLiC, 0 from a margin of 1 on. `ipo`: a squared distance to a margin of
    1 / (2 beta) nats per token, which does not grow without bound. `robust`: unbiased if a share `label_smoothing` of
    the pairs is the wrong way round."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be the wrong way round, for `sigmoid` and `robust`."""
    nll_coef: float | None = Field(None, gt=0)
    """Weight of the better reply's negative log-likelihood, the mean over its tokens, beside the loss. Without it the
    log-probability of both replies may fall, and what the policy samples becomes worse; None: without."""
    reference_free: bool = False
    """Measure log-probabilities from 0 and not from those of the start."""


class RewardSection(Section):
    """A reward model by Bradley and Terry: one number for a conversation, higher for the better of two."""

    type: Literal["reward"] = "reward"
    center_rewards_coefficient: float | None = Field(None, gt=0)
    """Weight of the squared sum of a pair's two rewards, which keeps them around 0 (0.01 is usual); None: without."""


PairLoss = Annotated[DpoSection | RewardSection, Field(discriminator="type")]


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
