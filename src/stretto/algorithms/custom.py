"""A user's loss or advantage estimator: its arguments, and what it must return.

    def my_loss(inputs: LossInputs, **kwargs) -> Tensor | LossOutputs        # [trainer.loss] type = "custom"
    def my_credit(inputs: CreditInputs, **kwargs) -> Sequence[float]         # [orchestrator.algo], as well

Both are called with the keyword arguments `kwargs` of their section. What they return is checked, and an exception
is reported with its file and line. This module does not import torch: the orchestrator has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.base.errors import ConfigError
from stretto.base.foreign import call, load_function
from stretto.config.sections.algorithm import CustomAlgo, CustomLoss
from stretto.records.rollout import Group

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64
    from torch import Tensor

    from stretto.algorithms.sample_index import SampleIndex

LOSS_PATH = "trainer.loss.import_path"


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of one micro batch, sample after sample.

    `is_member` marks the tokens of the rl component; the losses of others are ignored. Weights, correction and
    reduction are applied to the returned loss.
    """

    logprobs: Float[Tensor, " tokens"]
    """Those of the trained policy, with gradient."""
    behavior_logprobs: Float[Tensor, " tokens"]
    """Those of the policy that sampled; with use_rollout_logprobs = false of the policy before the step."""
    advantages: Float[Tensor, " tokens"]
    is_member: Bool[Tensor, " tokens"]
    samples: SampleIndex
    """`samples.mean(values, is_member)` gives one number per sample, `samples.spread(...)` one per token."""


@dataclass(frozen=True)
class LossOutputs:
    """A loss per token, and values per token whose means over the trained tokens become metrics."""

    loss: Float[Tensor, " tokens"]
    metrics: dict[str, Float[Tensor, " tokens"]] = field(default_factory=dict)


@dataclass(frozen=True)
class CreditInputs:
    """One played group, in member order. Members that are not counted have failed and get 0."""

    rewards: np.ndarray
    """float64 [members], after length penalties."""
    is_counted: np.ndarray
    """bool [members]."""
    group: Group
    """The rollouts themselves: tokens, metrics, turns."""


def custom_loss(cfg: CustomLoss, inputs: LossInputs) -> LossOutputs:
    """Call the section's loss on these tokens.

    Raises: ConfigError if it raises, or returns anything but a loss per token with a gradient.
    """
    where = f"{LOSS_PATH} = {cfg.import_path!r}"
    function = load_function(cfg.import_path, cfg.kwargs, LOSS_PATH)
    returned = call(function, inputs, cfg.kwargs, where)
    outputs = returned if isinstance(returned, LossOutputs) else LossOutputs(returned)
    expected = inputs.logprobs.shape
    for name, values in {"loss": outputs.loss, **outputs.metrics}.items():
        if getattr(values, "shape", None) != expected:
            got = f"shape {tuple(values.shape)}" if hasattr(values, "shape") else type(values).__name__
            rule = f"return a tensor of shape {tuple(expected)}, one value per token"
            raise ConfigError(f"{where}: {name} is of {got}; {rule}, not a sum or mean")
    if not outputs.loss.requires_grad:
        raise ConfigError(f"{where}: the loss has no gradient; compute it from inputs.logprobs")
    return outputs


def custom_credit(
    cfg: CustomAlgo, inputs: CreditInputs, place: str = "orchestrator.algo"
) -> Float64[np.ndarray, " members"]:
    """Advantages of a group by the section's function, float64 [members]; 0 if not counted.

    `place` is the config path of the section.

    Raises: ConfigError if it raises, or returns anything but a finite number per member.
    """
    where = f"{place}.import_path = {cfg.import_path!r}"
    returned = call(load_credit(cfg, place), inputs, cfg.kwargs, where)
    try:
        advantages = np.array(returned, dtype=np.float64)
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"{where} returned {type(returned).__name__}: {cause}") from cause
    if advantages.shape != inputs.rewards.shape:
        rule = f"return one number for each of the {len(inputs.rewards)} members"
        raise ConfigError(f"{where} returned shape {advantages.shape}; {rule}")
    advantages[~inputs.is_counted] = 0.0
    if not (np.abs(advantages) <= np.finfo(np.float32).max).all():
        raise ConfigError(f"{where} returned {advantages.tolist()}; advantages must be finite, as float32 too")
    return advantages


def load_credit(cfg: CustomAlgo, place: str = "orchestrator.algo") -> Any:
    """Import the section's function; also called at the start, to report a wrong path early."""
    return load_function(cfg.import_path, cfg.kwargs, f"{place}.import_path")


def load_loss(cfg: CustomLoss) -> Any:
    """Import the section's loss."""
    return load_function(cfg.import_path, cfg.kwargs, LOSS_PATH)
