"""The critic's loss: regression of values on the returns of trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class ValueLoss(NamedTuple):
    """A loss per token, and the tokens whose loss is clipped."""

    loss: Float[Tensor, " tokens"]
    is_clipped: Bool[Tensor, " tokens"]


def value_loss(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    *,
    clip: float | None,
) -> ValueLoss:
    """max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2); without a clip (V - R)^2.

    V_old is the critic's value before the step. The clipped term has no gradient once V has moved by more than
    `clip`, so a value stops after it has moved that far towards its return.

    Source: the value loss of PPO's authors, described in arXiv:2005.12729, section 3. Differs: no factor 1/2.
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueLoss(torch.maximum(plain, bounded), (bounded > plain).detach())
