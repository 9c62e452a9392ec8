"""Operations of a training service, from its hub to the trainer's ranks, and their answers.

One trainer has one frozen backbone and an adapter, optimizer and schedule for every tenant. The wire
(wires/tenants.py) numbers operations from 1; every rank executes all of them in this order and answers each with
`Done`. Every rank gets the same operation, except that a `Pass` has the micro batches of one rank. An error of one
tenant is part of that tenant's result, the same on all ranks, and leaves its weights, optimizer state and all other
tenants as they were.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from stretto.records.sample import MicroBatch

BASE_WEIGHTS = "base_weights"
"""In RUN/service: the weights of the model itself, for engines of a service that trains all weights."""

Section = dict[str, Any]
"""A section of a config as plain data: its keys and values."""


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant trains: its adapter, and the optimizer and schedule of its steps."""

    name: str  # unique in the service; letters, digits, "_", "-" and "."
    # Rank of the adapter; 0: no adapter, all weights are trained, if the backbone serves one tenant alone.
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None  # None: the default of [model.lora]
    seed: int = 0  # of the adapter's first values, and of dropout
    optim: Section = msgspec.field(default_factory=lambda: {"type": "adamw"})  # [trainer.optim]
    # [trainer.scheduler]; without a rise, because clients choose the rate of every step.
    scheduler: Section = msgspec.field(default_factory=lambda: {"type": "constant", "warmup_steps": 0})
    max_steps: int | None = None  # where a schedule that falls ends


# -- operations --


class CreateTenant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Add a tenant, with fresh weights or those of a directory."""

    number: int = 0
    spec: TenantSpec
    # A directory of SaveTenant, or `checkpoints/step_N/trainer` of a run with [model.lora].
    path: str | None = None
    with_optimizer: bool = True  # load optimizer state and step count too


class RemoveTenant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Remove a tenant; its saved files stay. Removing an unknown one is no error."""

    number: int = 0
    tenant: str


class SumLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A loss that is a sum over tokens, as training APIs have it; nothing is divided.

    p: the adapter's probability of a token, q: exp(MicroBatch.logprobs), A: advantages, r = p / q, w: weights.

        cross_entropy        -w log p                               w: ce_weights
        importance_sampling  -r A                                   on tokens of the rl component (rl_weights)
        ppo                  -min(r A, clip(r, low, high) A)
        cispo                -sg(clip(r, low, high)) A log p
        dro                  -A log p + beta / 2 (log r)^2
        gspo                 as ppo, r: exp(mean log r of the document's rl tokens), with the gradient of log p
    """

    type: Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2
    beta: float = 0.05


class TenantWork(msgspec.Struct, frozen=True, kw_only=True):
    """Micro batches of one tenant on one rank.

    Either `sum_loss`, or `loss` with `counts`: the numbers of TokenCounts (algorithms/losses.py) of the tenant's whole
    step over all ranks and passes; None: those of this operation over all ranks, when it has the whole step.
    """

    tenant: str
    micro_batches: tuple[MicroBatch, ...] = ()  # their number may differ between ranks
    loss: Section = msgspec.field(default_factory=lambda: {"type": "default"})  # [trainer.loss]
    counts: tuple[float, float, float, float] | None = None
    sum_loss: SumLoss | None = None
    # Per micro batch int32 [tokens]: the token that is scored at t instead of token_ids[t]; () or None: token_ids.
    targets: tuple[np.ndarray | None, ...] = ()
    is_forward_only: bool = False  # no gradient: log-probabilities and the loss only
    wants_logprobs: bool = False  # score every token but the first of each document, and return it


class Pass(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Add gradients of micro batches to those of their tenants.

    Every rank gets works of the same tenants in the same order.

    max_tokens None: every micro batch is a forward pass of its own, which computes bit for bit what a run with one
    tenant does. Else micro batches of several tenants share passes of at most so many tokens.
    """

    number: int = 0
    works: tuple[TenantWork, ...]
    max_tokens: int | None = None


class AdamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one AdamW step."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_norm: float | None = None  # gradient norm above which gradients are scaled down; None: no clipping


class OptimStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Update the weights with the gradients since the last step, and clear them.

    adam: settings of this step; None: the tenant's optimizer and schedule. A gradient that is not finite is an error:
    it is dropped, weights and step count stay.
    """

    number: int = 0
    tenant: str
    adam: AdamSettings | None = None


class DropGradients(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Clear the gradients since the last step, and the error of a pass."""

    number: int = 0
    tenant: str


class SaveTenant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a tenant's state to a directory that appears whole, or not at all.

    progress: the hub's own data, which LoadTenant and CreateTenant return.
    """

    number: int = 0
    tenant: str
    path: str
    with_optimizer: bool = True
    progress: Section = {}


class LoadTenant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Replace a tenant's weights, optimizer state and step count by a directory's; clear gradients."""

    number: int = 0
    tenant: str
    path: str
    with_optimizer: bool = True


class ExportAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the adapter as a PEFT directory, whole or not at all; engines and users load it."""

    number: int = 0
    tenant: str
    directory: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the rank after this operation; nothing is saved."""

    number: int = 0
    reason: str = ""


Operation = (
    CreateTenant | RemoveTenant | Pass | OptimStep | DropGradients | SaveTenant | LoadTenant | ExportAdapter | Shutdown
)


# -- answers --


class TenantResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an operation for one tenant.

    metrics are over all ranks and the same on each. A Pass has `loss` (the sum or the share of the step's loss), and
    sums of algorithms/losses.py; an OptimStep has `optim/lr`, `optim/grad_norm` before clipping, `step`, and means
    since the last step, as a run has them; CreateTenant and LoadTenant have `step` and `parameters`.
    """

    error: str | None = None  # why the operation did nothing; None if it succeeded
    metrics: dict[str, float] = {}
    # Per micro batch of this rank: float32 [tokens], 0 where not scored.
    logprobs: tuple[np.ndarray | None, ...] = ()
    progress: Section | None = None  # of CreateTenant and LoadTenant: the `progress` of SaveTenant


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank has executed an operation; results by tenant."""

    number: int
    results: dict[str, TenantResult] = {}


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank is about to end because of an error that is not one tenant's."""

    reason: str


Answer = Done | RankFailed
