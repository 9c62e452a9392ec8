"""A loss or a rule of credit that a user wrote: what it is given, what it must return.

    def my_loss(inputs: LossInputs, **kwargs) -> Tensor | LossOutputs        # [trainer.loss] type = "custom"
    def my_credit(inputs: CreditInputs, **kwargs) -> Sequence[float]         # [orchestrator.algo], as well

Both are called with the keyword arguments `kwargs` of their section. What they return is checked, and what
they raise is reported with its file and line. No torch is imported here: credit belongs to a process
without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.base.errors import ConfigError
from stretto.base.imports import call, load_function
from stretto.config.algorithm import CustomAlgo, CustomLoss
from stretto.records.rollout import Group

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from stretto.algorithms.segments import Segments

LOSS_PATH = "trainer.loss.import_path"


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of one micro batch, sample after sample.

    `is_member` marks those of the rl component; the others' losses do not count. The weights, the correction
    and the reduction are applied to what the loss returns.
    """

    logprobs: Float[Tensor, " tokens"]
    """Of the trained policy, with gradient."""
    behavior_logprobs: Float[Tensor, " tokens"]
    """Of the policy that sampled; of the policy as the step began with use_rollout_logprobs = false."""
    advantages: Float[Tensor, " tokens"]
    is_member: Bool[Tensor, " tokens"]
    samples: Segments
    """`samples.mean(values, is_member)` is one number a sample, `samples.spread(...)` brings it back."""


@dataclass(frozen=True)
class LossOutputs:
    """A loss a token, and values a token whose means over the trained tokens become metrics."""

    loss: Float[Tensor, " tokens"]
    metrics: dict[str, Float[Tensor, " tokens"]] = field(default_factory=dict)


@dataclass(frozen=True)
class CreditInputs:
    """One finished group, in member order. Members that are not counted have failed, and get 0."""

    rewards: np.ndarray
    """float64 [members], after length penalties."""
    is_counted: np.ndarray
    """bool [members]."""
    group: Group
    """The rollouts themselves: tokens, metrics, turns."""


def custom_loss(cfg: CustomLoss, inputs: LossInputs) -> LossOutputs:
    """What the loss of the section says about these tokens.

    Raises: ConfigError when it raises, or returns anything but a loss a token.
    """
    where = f"{LOSS_PATH} = {cfg.import_path!r}"
    function = load_function(cfg.import_path, cfg.kwargs, LOSS_PATH)
    returned = call(function, inputs, cfg.kwargs, where)
    outputs = returned if isinstance(returned, LossOutputs) else LossOutputs(returned)
    expected = inputs.logprobs.shape
    for name, values in {"loss": outputs.loss, **outputs.metrics}.items():
        if getattr(values, "shape", None) != expected:
            got = f"shape {tuple(values.shape)}" if hasattr(values, "shape") else type(values).__name__
            rule = f"return a tensor of shape {tuple(expected)}, one value a token"
            raise ConfigError(f"{where}: {name} is of {got}; {rule}; sums and means are taken outside")
    if not outputs.loss.requires_grad:
        raise ConfigError(f"{where}: the loss carries no gradient; make it of inputs.logprobs")
    return outputs


def custom_credit(cfg: CustomAlgo, inputs: CreditInputs, place: str = "orchestrator.algo") -> np.ndarray:
    """Advantages of a group by the section's function, float64 [members]; 0 for those not counted.

    `place` is where the section stands.

    Raises: ConfigError when it raises, or returns anything but a finite number a member.
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
    if not np.isfinite(advantages).all():
        raise ConfigError(f"{where} returned {advantages.tolist()}; advantages must be finite")
    return advantages


def load_credit(cfg: CustomAlgo, place: str = "orchestrator.algo") -> Any:
    """The section's function; called once at the start, so that a wrong path is told before anything runs."""
    return load_function(cfg.import_path, cfg.kwargs, f"{place}.import_path")


def load_loss(cfg: CustomLoss) -> Any:
    """As load_credit, of a loss."""
    return load_function(cfg.import_path, cfg.kwargs, LOSS_PATH)
