"""Losses of preference pairs: two replies to one prompt, of which the first is the better one.

DPO compares log-probabilities of replies with those of a reference; a reward model compares its own scores. Both give
one loss per pair; the caller divides by the pairs of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def dpo_loss(
    log_ratios: Float[Tensor, "pairs 2"],
    num_tokens: Float[Tensor, "pairs 2"],
    *,
    loss_type: str,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " pairs"]:
    """The loss of each pair; log_ratios: log-probability of a reply minus the reference's, in nats, the better first.

    num_tokens: tokens of each reply, by which `ipo` divides. The gradient of `hinge` is 0 from a margin of 1 on.

    Source: `sigmoid`, DPO, arXiv:2305.18290, equation 7; with label_smoothing cDPO, the expected loss if that share of
    labels is wrong. `robust`, arXiv:2403.00409, equation 9. `ipo`, arXiv:2310.12036, equation 17. `hinge`, SLiC,
    arXiv:2309.06657. Differs: `ipo` takes means over a reply's tokens, as its authors' experiments do.
    """
    return _DPO_LOSSES[loss_type](log_ratios, num_tokens, beta, label_smoothing)


def _difference(values: Float[Tensor, "pairs 2"]) -> Float[Tensor, " pairs"]:
    return values[:, 0] - values[:, 1]


def _sigmoid(log_ratios: Tensor, num_tokens: Tensor, beta: float, smoothing: float) -> Tensor:
    logits = beta * _difference(log_ratios)
    right = (1 - smoothing) * F.logsigmoid(logits)
    return -right - smoothing * F.logsigmoid(-logits) if smoothing else -right


def _robust(log_ratios: Tensor, num_tokens: Tensor, beta: float, smoothing: float) -> Tensor:
    logits = beta * _difference(log_ratios)
    return (-(1 - smoothing) * F.logsigmoid(logits) + smoothing * F.logsigmoid(-logits)) / (1 - 2 * smoothing)


def _hinge(log_ratios: Tensor, num_tokens: Tensor, beta: float, smoothing: float) -> Tensor:
    return F.relu(1 - beta * _difference(log_ratios))


def _ipo(log_ratios: Tensor, num_tokens: Tensor, beta: float, smoothing: float) -> Tensor:
    return (_difference(log_ratios / num_tokens.clamp(min=1)) - 1 / (2 * beta)).square()


_DPO_LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
}


def bradley_terry_loss(
    rewards: Float[Tensor, "pairs 2"], margins: Float[Tensor, " pairs"], *, center_coefficient: float | None = None
) -> Float[Tensor, " pairs"]:
    """-log of the probability that the first of each pair is better by its margin: sigmoid(r_0 - r_1 - margin).

    center_coefficient: the weight of (r_0 + r_1)^2, because the loss alone leaves a constant of all rewards open.

    Source: Bradley and Terry, as in arXiv:2203.02155, equation 1; margins, arXiv:2307.09288, equation 2; centring,
    arXiv:2312.09244.
    """
    loss = -F.logsigmoid(_difference(rewards) - margins)
    return loss if center_coefficient is None else loss + center_coefficient * rewards.sum(1).square()
