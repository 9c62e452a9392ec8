"""What a forward pass computes for the trained tokens of a micro batch, on any mesh: log-probabilities, or values.

Policy, reference, a valuer and the tenants of a service are all scored here. If the axis cp splits the tokens of a
row, each rank scores its own tokens (parallel/context.py), and so do ranks of tp that split them
(parallel/sequence.py). All of them get the scores of all tokens: losses over whole samples work unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.config.sections.model import ModelSection, SharedPrefixes, cp_style
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.lm_head import head_logits, token_logprobs
from stretto.models.parts.router import Routing
from stretto.trainer.batch.pass_inputs import PassInputs
from stretto.trainer.parallel import context
from stretto.trainer.parallel.collectives import all_gather_at
from stretto.trainer.parallel.context import PassRows
from stretto.trainer.parallel.sequence import own_rows
from stretto.trainer.ranks.mesh import Mesh

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def sharing_of(policy: Policy, mesh: Mesh, model: ModelSection) -> SharedPrefixes:
    """Which tokens that samples begin with alike are computed once: what `model` says, where it can be done.

    Never "auto".
    """
    is_ring = mesh.degrees.cp > 1 and cp_style(model, policy.config) == "ring"
    # On a GPU one flash kernel over whole documents is faster than a call per shape of prompt and reply.
    is_slower = mesh.device.type != "cpu" and model.shared_prefixes in ("auto", "prompts")
    if not policy.shares_prefixes or is_ring or is_slower:
        return "off"
    return "tree" if model.shared_prefixes == "auto" else model.shared_prefixes


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
    repeats = inputs.repeats
    if repeats is not None:
        predictors, targets, temperatures = (
            x[repeats.firsts] for x in (inputs.predictors, inputs.targets, inputs.temperatures)
        )
        inputs = replace(inputs, predictors=predictors, targets=targets, temperatures=temperatures, repeats=None)
    hidden, tokens = _hidden_states(policy, inputs, mesh, model, routing)
    weight, targets, temperatures = policy.output_weight, inputs.targets, inputs.temperatures
    support, alternatives = inputs.support, inputs.streams.alternatives
    if with_alternatives and alternatives is not None:
        targets = torch.cat((targets[:, None], alternatives.ids.flatten(1).clamp(min=0)), 1)
    if tokens.own is not None:
        targets, temperatures = targets[tokens.own], temperatures[tokens.own]
        support = None if support is None else support.at(tokens.own.cpu().numpy())
    chunk, cap = model.fused_lm_head_token_chunk_size, policy.logit_cap
    scores = token_logprobs(
        hidden, weight, targets, temperatures, chunk, entropy_grad=entropy_grad, support=support, cap=cap
    )
    found = [tokens.gather(x) for x in scores]
    if logits is not None:
        found.append(tokens.gather(head_logits(hidden, weight, cap)))
    if repeats is not None:
        found = [x.index_select(0, repeats.places) for x in found]
    if logits is not None:
        logits.append(found[2])
    return found[0], found[1]


def compute_values(
    module: Decoder, inputs: PassInputs, mesh: Mesh, model: ModelSection, *, routing: Routing | None = None
) -> Float[Tensor, " trained"]:
    """The value or a reward model's score before every trained token."""
    # Tokens that samples share have one value, however many samples these are.
    one_by_one = torch.arange(len(inputs.rows), device=inputs.rows.device)
    hidden, tokens = _hidden_states(module, replace(inputs, predictors=one_by_one), mesh, model, routing)
    values = tokens.gather(head_logits(hidden, module.output_weight).squeeze(1))
    return values.index_select(0, inputs.predictors)


@dataclass
class _TrainedTokens:
    """Which trained tokens of a pass this rank scores; the axes that split them, the outermost first."""

    own: Int[Tensor, " own"] | None = None
    """None: all."""
    axes: list[tuple[list[Tensor], int, Any]] = field(default_factory=list)
    """Which tokens each rank of an axis has, among those that the axes before leave; this rank; the group."""

    def split(self, places: list[Tensor], rank: int, group: Any) -> None:
        """Leave to this rank of an axis its tokens."""
        self.axes.append((places, rank, group))
        self.own = places[rank] if self.own is None else self.own[places[rank]]

    def gather(self, scores: Float[Tensor, "own ..."]) -> Float[Tensor, "all ..."]:
        """The scores of all trained tokens, on every rank."""
        for places, rank, group in reversed(self.axes):
            scores = all_gather_at(scores, places, rank, group)
        return scores


def _hidden_states(
    policy: Policy, inputs: PassInputs, mesh: Mesh, model: ModelSection, routing: Routing | None
) -> tuple[Float[Tensor, "own dim"], _TrainedTokens]:
    """Hidden states before the trained tokens of this rank, and which these are."""
    tokens = _TrainedTokens()
    if mesh.degrees.cp > 1:
        assert isinstance(policy, Decoder), "cp is refused for models of transformers"
        style = cp_style(model, policy.config)
        hidden, rows, places = context.hidden_states(policy, inputs, mesh, style, routing)
        tokens.split(places, mesh.cp_rank, mesh.cp_group)
    else:
        options: dict[str, Any] = {**inputs.options} if routing is None else {**inputs.options, "routing": routing}
        hidden = policy.hidden(inputs.token_ids, inputs.layout, inputs.rows, **options)
        rows = PassRows(len(inputs.token_ids), inputs.rows, inputs.predictors)
    predictors = rows.predictors
    if mesh.degrees.splits_tokens:
        counts = torch.tensor(own_rows(rows.rows, rows.num_tokens, mesh.degrees.tp), device=predictors.device)
        owner = torch.searchsorted(counts.cumsum(0), predictors, right=True)
        tokens.split([(owner == rank).nonzero().squeeze(1) for rank in range(len(counts))], mesh.tp_rank, mesh.tp_group)
        predictors = predictors[owner == mesh.tp_rank] - counts[: mesh.tp_rank].sum()
    return hidden.index_select(0, predictors), tokens
