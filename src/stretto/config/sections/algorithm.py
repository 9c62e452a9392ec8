"""What is learned from a rollout, and how: `[trainer.loss]` and `[orchestrator.algo]` (credit)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.config.section import Section
from stretto.config.sections.distill import OpdAlgo, OpsdAlgo, SftAlgo

Level = Literal["token", "sequence", "geometric"]
Reduction = Literal["token", "sample", "rollout", "constant"]


class RatioSection(Section):
    """Bounds on the ratio of trainer to sampler."""

    level: Level = "token"
    """`token`: each token's ratio; `sequence`: the product over a sample; `geometric`: its geometric mean."""
    low: float = Field(0.0, ge=0)
    """Least ratio."""
    high: float = Field(2.0, gt=0)
    """Greatest ratio."""


class WeightsSection(RatioSection):
    """Importance weights: the ratio of trainer to sampler multiplies the loss."""

    mode: Literal["truncate", "mask"] = "truncate"
    """What a ratio outside the bounds becomes: `truncate`, the bound (TIS); `mask`, 0 (IcePop)."""


class RejectSection(RatioSection):
    """Tokens (or, by level, whole samples) whose ratio lies outside the bounds are not trained."""

    level: Level = "geometric"
    low: float = Field(0.8, ge=0)
    high: float = Field(1.25, gt=0)


class CorrectionSection(Section):
    """Corrections for tokens that another policy than the trained one sampled."""

    weights: WeightsSection | None = None
    reject: RejectSection | None = None
    veto: float | None = Field(None, gt=0, lt=1)
    """A sample with any token whose ratio is below this is not trained; 1e-4 is usual. None: no veto."""


class ReferenceKlSection(Section):
    """KL divergence to a frozen reference policy, added to the loss. The trainer holds a second model for it."""

    coef: float = Field(1e-3, gt=0)
    """Weight in the loss."""
    estimator: Literal["k1", "k2", "k3", "low_var"] = "k3"
    """Per-token estimator; `low_var` is k3 cut at 10. The gradient of k1 is zero on average without is_unbiased: it
    does not hold the policy to the reference, and the plan says so."""
    is_unbiased: bool = False
    """Multiply by the ratio of trainer to sampler; the gradient of k1 and k3 is then that of the KL on average."""
    model: str | None = None
    """Directory or name of the reference; None: the weights that training starts from."""


class LossSection(Section):
    """Keys of all policy losses."""

    type: str
    reduction: Reduction = "token"
    """`token`: the mean over all trained tokens of the batch. `sample`: the mean over samples of each
    sample's mean. `rollout`: the same with rollouts in the place of samples, which are their branches.
    `constant`: the sum over a sample's tokens divided by reduction_tokens, averaged over samples."""
    reduction_tokens: int | None = Field(None, gt=0)
    """What `constant` divides by, such as the longest reply."""
    use_rollout_logprobs: bool = True
    """The ratio's denominator: true, the log-probabilities the engine sampled with; false, those of the policy
    as the step began, which the trainer computes. The correction then compares that policy with the engine."""
    correction: CorrectionSection | None = None
    entropy_coef: float | None = Field(None, gt=0)
    """Weight of the mean entropy of trained tokens, which is pushed up; None: it is only reported."""
    reference_kl: ReferenceKlSection | None = None


class DefaultLoss(LossSection):
    """DPPO mask and squared log-ratio KL to the sampling policy."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(0.2, ge=0)
    """Probability drop beyond which a token of negative advantage no longer contributes."""
    dppo_mask_high: float = Field(0.2, ge=0)
    """Probability rise beyond which a token of positive advantage no longer contributes."""
    adv_tau: float = Field(1.0, ge=0)
    """Weight of the policy gradient."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio between trainer and sampler."""


class IpoLoss(LossSection):
    """As the default, but a token whose probability moved either way is dropped, whatever its advantage."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(0.1, ge=0)
    """Change of probability, up or down, beyond which a token no longer contributes."""
    adv_tau: float = Field(1.0, ge=0)
    """Weight of the policy gradient."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio between trainer and sampler."""


class PpoLoss(LossSection):
    """PPO's clipped surrogate on the importance ratio of each token."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, ge=0, le=1)
    """A ratio below 1 - clip_low no longer pushes a token of negative advantage down."""
    clip_high: float = Field(0.2, ge=0)
    """A ratio above 1 + clip_high no longer pushes a token of positive advantage up; DAPO's clip-higher is 0.28."""
    clip_dual: float | None = Field(None, gt=1)
    """A ratio above it no longer pushes a token of negative advantage; None: no such bound. 3.0 is usual."""


class ReinforceLoss(LossSection):
    """Advantage times log-probability, with no importance ratio: on-policy, or with [trainer.loss.correction]."""

    type: Literal["reinforce"] = "reinforce"


class GspoLoss(LossSection):
    """PPO's clipped surrogate on one ratio per sample, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    reduction: Reduction = "sample"
    """As in the other losses; the paper's is `sample`."""
    clip_low: float = Field(3e-4, ge=0, le=1)
    """A ratio below 1 - clip_low no longer pushes a sample of negative advantage down."""
    clip_high: float = Field(4e-4, ge=0)
    """A ratio above 1 + clip_high no longer pushes a sample of positive advantage up."""


class CispoLoss(LossSection):
    """Advantage times log-probability, weighted by a clipped ratio that carries no gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(None, ge=0, le=1)
    """Weights are at least 1 - clip_low; None: no lower bound, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """Weights are at most 1 + clip_high."""


class CustomLoss(LossSection):
    """A function of your own: stretto.algorithms.custom says what it is given and must return."""

    type: Literal["custom"] = "custom"
    import_path: str
    """`module:function`; the module is looked for on the Python path and in the working directory."""
    kwargs: dict[str, Any] = Field({})
    """Its keyword arguments."""


Loss = Annotated[
    DefaultLoss | IpoLoss | PpoLoss | ReinforceLoss | GspoLoss | CispoLoss | CustomLoss, Field(discriminator="type")
]


class KlShapingSection(Section):
    """Keys of all kinds of token advantages."""

    type: str
    kl_coef: float = Field(0.0, ge=0)
    """Weight of a token's divergence from the reference, a second model in the trainer; its reward loses that."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var"] = "k1"
    """Per-token estimator of that divergence; `low_var` is k3 cut at 10."""
    kl_model: str | None = None
    """Directory or name of the reference; None: the weights that training starts from."""
    whiten: bool = True
    """Advantages of the trained tokens of a batch get mean 0 and deviation 1."""


class GaeAdvantages(KlShapingSection):
    """Generalised advantage estimation with the values of [trainer.critic]; for algo type `ppo`."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of rewards per trained token."""
    lambd: float = Field(1.0, ge=0, le=1)
    """1: returns minus values (no bias); closer to 0, values are trusted more."""


class ReturnsAdvantages(KlShapingSection):
    """Discounted returns, whitened; for algo type `reinforce_plus_plus`."""

    type: Literal["returns"] = "returns"
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of rewards per trained token."""


class ShapedAdvantages(KlShapingSection):
    """The sample's advantage minus each token's KL penalty, for algos that compare a group.

    With a stronger model as kl_model this is on-policy distillation beside the reward.
    """

    type: Literal["shaped"] = "shaped"


Advantages = Annotated[GaeAdvantages | ReturnsAdvantages | ShapedAdvantages, Field(discriminator="type")]


class LengthPenaltySection(Section):
    """Long rollouts of a group lose reward: more in a good group, nothing in one without success.

    Each weight applies to the longest rollout, and to the others in proportion.
    """

    output_weight: float = Field(0.25, ge=0)
    """Weight of sampled tokens."""
    input_weight: float = Field(0.1, ge=0)
    """Weight of prompt, tool and environment tokens."""
    turns_weight: float = Field(0.1, ge=0)
    """Weight of the number of turns."""


class OverlongSection(Section):
    """A penalty that rises linearly over the last tokens before a limit, DAPO's soft overlong punishment."""

    max_tokens: int = Field(gt=0)
    """Sampled tokens of a rollout from which on it pays the whole penalty; usually max_completion_tokens."""
    buffer_tokens: int = Field(gt=0)
    """Tokens before max_tokens over which the penalty rises from 0."""
    penalty: float = Field(1.0, gt=0)
    """The whole penalty, in reward units."""


class TurnCredit(Section):
    """Keys of all kinds of credit per turn.

    The rewards of a turn are those that the environment gives it; an agent's last turn has the rollout's reward too.
    """

    type: str
    weight: float = Field(1.0, ge=0)
    """Weight of a turn's advantage, which is added to that of its rollout."""
    rollout_weight: float = Field(1.0, ge=0)
    """Weight of the rollout's advantage; 0: turns are credited by their own advantages alone."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of rewards per turn of the agent; 0: a turn is credited for its own rewards only."""


class ReturnsCredit(TurnCredit):
    """The discounted sum of the rewards of a turn and of those after it, minus its mean over the group's turns of the
    same number."""

    type: Literal["returns"] = "returns"
    normalize_std: bool | Literal["unbiased"] = False
    """Also divide by the standard deviation of what is compared; "unbiased": by that of a sample, with n - 1."""


class StatesCredit(TurnCredit):
    """As `returns`, but turns are compared that begin in equal states, whatever their numbers (GiGPO)."""

    type: Literal["states"] = "states"
    normalize_std: bool | Literal["unbiased"] = False
    """Also divide by the standard deviation of what is compared; "unbiased": by that of a sample, with n - 1."""


class ValuesCredit(TurnCredit):
    """What a turn has changed: its rewards, plus the value of the state after it, minus that of the state before."""

    type: Literal["values"] = "values"
    lambd: float = Field(0.0, ge=0, le=1)
    """0: values are trusted, differences count; closer to 1, what came later does too. 1: returns minus values."""


Turns = Annotated[ReturnsCredit | StatesCredit | ValuesCredit, Field(discriminator="type")]


class CreditSection(Section):
    """Keys of most algos: rewards are shaped first, then compared."""

    type: str
    turns: Turns | None = None
    """Credit per turn, from what the environment says of its turns; None: a rollout's turns are credited alike."""
    length_penalty: LengthPenaltySection | None = None
    overlong: OverlongSection | None = None


class GroupAlgo(CreditSection):
    """Keys of algos that compare the rollouts of a group."""

    whiten: bool = False
    """Afterwards the advantages of the trained tokens of the batch get mean 0 and deviation 1."""


class GrpoAlgo(GroupAlgo):
    """Advantage = reward minus the group's mean."""

    type: Literal["grpo"] = "grpo"
    normalize_std: bool | Literal["unbiased"] = False
    """Also divide by the group's standard deviation; "unbiased": by that of a sample, with n - 1."""


class DrGrpoAlgo(GroupAlgo):
    """Reward minus the group's mean, never divided; its loss has reduction = "constant"."""

    type: Literal["dr_grpo"] = "dr_grpo"


class RlooAlgo(GroupAlgo):
    """Reward minus the mean of the group's other rollouts."""

    type: Literal["rloo"] = "rloo"


class MaxRlAlgo(GroupAlgo):
    """Reward minus the group's mean, divided by that mean: rarely solved tasks count more."""

    type: Literal["max_rl"] = "max_rl"


class PpoAlgo(CreditSection):
    """The reward itself, at the last trained token; [trainer.advantages] and a critic make advantages of it."""

    type: Literal["ppo"] = "ppo"


class ReinforcePlusPlusAlgo(CreditSection):
    """The reward itself, whitened over the trained tokens of the batch."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    whiten: bool = True
    """False: the trainer does it, because it has [trainer.advantages]; `rl` sets it."""


class ReinforcePlusPlusBaselineAlgo(CreditSection):
    """Reward minus the group's mean, then whitened over the trained tokens of the batch."""

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    whiten: bool = True
    """False: the trainer does it, because it has [trainer.advantages]; `rl` sets it."""


class RaeAlgo(CreditSection):
    """Reward minus what this agent of this environment usually earns: for agents that play one another."""

    type: Literal["rae"] = "rae"
    decay: float = Field(0.95, ge=0, lt=1)
    """Share of the running mean that each new reward leaves in place."""


class HierarchicalGrpoAlgo(CreditSection):
    """Reward minus the mean of the players of the same role: for episodes with several of them, such as a
    proposer and its solvers. A player is called `<role>/<number>`."""

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_agents: tuple[str, ...] = Field(min_length=1)
    """Roles whose players are compared within their episode; all others are compared within the group."""


class CustomAlgo(CreditSection):
    """A function of your own: stretto.algorithms.custom says what it is given and must return."""

    type: Literal["custom"] = "custom"
    import_path: str
    """`module:function`; the module is looked for on the Python path and in the working directory."""
    kwargs: dict[str, Any] = Field({})
    """Its keyword arguments."""


class EchoAlgo(CreditSection):
    """As grpo, plus cross-entropy on what the environment answers after the first reply.

    Weights are by role of the message; None: not learned. Only its text counts, not the template around it.
    """

    type: Literal["echo"] = "echo"
    normalize_std: bool | Literal["unbiased"] = False
    """Also divide by the group's standard deviation; "unbiased": by that of a sample, with n - 1."""
    tool: float | None = Field(0.1, gt=0)
    """Weight of the tokens of tool messages."""
    user: float | None = Field(None, gt=0)
    """Weight of the tokens of user messages."""
    system: float | None = Field(None, gt=0)
    """Weight of the tokens of system messages."""
    filter: str | None = None
    """`module:function` that is given a message and returns whether it is learned; None: all are."""


class ZeroAlgo(Section):
    """Advantages forced to zero: the control that must not learn."""

    type: Literal["zero"] = "zero"


Algo = Annotated[
    GrpoAlgo | DrGrpoAlgo | RlooAlgo | MaxRlAlgo | PpoAlgo | ReinforcePlusPlusAlgo | ReinforcePlusPlusBaselineAlgo
    | RaeAlgo | HierarchicalGrpoAlgo | CustomAlgo | EchoAlgo | OpdAlgo | OpsdAlgo | SftAlgo | ZeroAlgo,
    Field(discriminator="type"),
]  # fmt: skip
