"""What a forward pass computes for the trained tokens of a micro batch, on any mesh: log-probabilities, or values.

Policy, reference, critic and the tenants of a service are all scored here. If the axis cp splits the tokens of a row,
each rank scores its own tokens (parallel/context.py), and all of them get the scores of all tokens: losses over whole
samples work unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.check.degrees import cp_style
from stretto.config.sections.model import ModelSection
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.lm_head import head_logits, token_logprobs
from stretto.models.parts.router import Routing
from stretto.trainer.batch.pass_inputs import PassInputs
from stretto.trainer.parallel import context
from stretto.trainer.parallel.collectives import all_gather_at
from stretto.trainer.ranks.mesh import Mesh

if TYPE_CHECKING:
    from jaxtyping import Float


def shares_prefixes(policy: Policy, mesh: Mesh, model: ModelSection) -> bool:
    """Whether prompts that several samples begin with are computed once."""
    is_ring = mesh.degrees.cp > 1 and cp_style(model, policy.config) == "ring"
    # On a GPU one flash kernel over whole documents is faster than a call per shape of segment.
    return mesh.device.type == "cpu" and policy.shares_prefixes and not is_ring


def compute_logprobs(
    policy: Policy,
    inputs: PassInputs,
    mesh: Mesh,
    model: ModelSection,
    *,
    routing: Routing | None = None,
    entropy_grad: bool = False,
    with_alternatives: bool = False,
    logits: list[Float[Tensor, "trained vocab"]] | None = None,
) -> tuple[Float[Tensor, " trained"] | Float[Tensor, "trained scored"], Float[Tensor, " trained"]]:
    """Log-probability and entropy of every trained token.

    routing: replays expert choices, and collects the expert loads of this rank's tokens. with_alternatives: if the
    tokens have alternatives, the log-probabilities of these follow that of the token. logits: a list to which the
    float32 logits of the trained tokens are appended.
    """
    hidden, places = _hidden_states(policy, inputs, mesh, model, routing)
    weight, targets, temperatures = policy.output_weight, inputs.targets, inputs.temperatures
    support, alternatives = inputs.support, inputs.streams.alternatives
    if with_alternatives and alternatives is not None:
        targets = torch.cat((targets[:, None], alternatives.ids.flatten(1).clamp(min=0)), 1)
    if places is not None:
        local = places[mesh.cp_rank]
        targets, temperatures = targets[local], temperatures[local]
        support = None if support is None else support.at(local.cpu().numpy())
    chunk, cap = model.fused_lm_head_token_chunk_size, policy.logit_cap
    scores = token_logprobs(
        hidden, weight, targets, temperatures, chunk, entropy_grad=entropy_grad, support=support, cap=cap
    )
    if logits is not None:
        logits.append(_gather(head_logits(hidden, weight, cap), places, mesh))
    logprobs, entropy = scores
    return _gather(logprobs, places, mesh), _gather(entropy, places, mesh)


def compute_values(critic: Decoder, inputs: PassInputs, mesh: Mesh, model: ModelSection) -> Float[Tensor, " trained"]:
    """The critic's value before every trained token."""
    hidden, places = _hidden_states(critic, inputs, mesh, model, None)
    return _gather(head_logits(hidden, critic.output_weight).squeeze(1), places, mesh)


def _hidden_states(
    policy: Policy, inputs: PassInputs, mesh: Mesh, model: ModelSection, routing: Routing | None
) -> tuple[Tensor, list[Tensor] | None]:
    """Hidden states before the trained tokens of this rank, and which tokens each rank has; None: it has all."""
    if mesh.degrees.cp > 1:
        assert isinstance(policy, Decoder), "cp is refused for models of transformers"
        return context.hidden_states(policy, inputs, mesh, cp_style(model, policy.config), routing)
    options: dict[str, Any] = {**inputs.options} if routing is None else {**inputs.options, "routing": routing}
    hidden = policy.hidden(inputs.token_ids, inputs.layout, inputs.rows, **options)
    return hidden.index_select(0, inputs.predictors), None


def _gather(scores: Tensor, places: list[Tensor] | None, mesh: Mesh) -> Tensor:
    """The scores of all trained tokens, on every rank of cp."""
    return scores if places is None else all_gather_at(scores, places, mesh.cp_rank, mesh.cp_group)
