"""Advantages per token from one reward per sample: KL penalty, discounted returns, GAE.

Used with [trainer.advantages]; without it every token of a sample gets the sample's advantage (credit.py). Arrays
have the trained tokens only, sample after sample, `lengths[s]` of them in sample s. Prompt, tool and environment
tokens are no time steps: they are neither discounted nor valued, and the score is the reward of the last trained
token. A sample of length 0 is allowed. Pure numpy, float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def token_rewards(
    scores: Float[np.ndarray, " samples"],
    kl: Float[np.ndarray, " tokens"] | None,
    lengths: Int[np.ndarray, " samples"],
    kl_coef: float,
) -> Float[np.ndarray, " tokens"]:
    """r_t = -kl_coef * KL_t, plus the sample's score at its last token.

    kl: estimated divergence from the reference at each token; None if there is no penalty.

    Source: InstructGPT, arXiv:2203.02155, section 3.4, as in PPO for language models, arXiv:1909.08593, eq. 2.
    """
    rewards = np.zeros(int(lengths.sum())) if kl is None else -kl_coef * kl.astype(np.float64)
    is_present = lengths > 0
    rewards[np.cumsum(lengths)[is_present] - 1] += scores[is_present]
    return rewards


def discounted_returns(
    rewards: Float[np.ndarray, " tokens"], lengths: Int[np.ndarray, " samples"], gamma: float
) -> Float[np.ndarray, " tokens"]:
    """G_t = r_t + gamma * G_{t+1} within each sample.

    Source: REINFORCE++, arXiv:2501.03262, eq. 8.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    is_token = np.arange(longest) >= longest - lengths[:, None]
    table = np.zeros(is_token.shape)
    table[is_token] = rewards
    for column in range(longest - 2, -1, -1):  # a loop over positions, not samples
        table[:, column] += gamma * table[:, column + 1]
    return table[is_token]


def gae(
    rewards: Float[np.ndarray, " tokens"],
    values: Float[np.ndarray, " tokens"],
    lengths: Int[np.ndarray, " samples"],
    *,
    gamma: float,
    lambd: float,
) -> tuple[Float[np.ndarray, " tokens"], Float[np.ndarray, " tokens"]]:
    """Advantages A_t = delta_t + gamma * lambd * A_{t+1}, and returns A_t + V_t for the critic.

    delta_t = r_t + gamma * V_{t+1} - V_t. V is 0 after the last trained token of a sample, also of a truncated one.

    Source: generalised advantage estimation, arXiv:1506.02438, eq. 16; returns as in PPO, arXiv:1707.06347.
    """
    values = values.astype(np.float64)
    following = np.zeros(len(values))
    following[:-1] = values[1:]
    following[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    advantages = discounted_returns(rewards + gamma * following - values, lengths, gamma * lambd)
    return advantages, advantages + values
