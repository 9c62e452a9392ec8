"""Context parallelism: the tokens of one packed row are split over the axis cp.

ulysses: every rank computes attention over all tokens for some of the heads (two all-to-alls per layer); documents,
shared prompts and kernels are those of attention.py. ring: every rank keeps its tokens, and keys and values pass from
rank to rank; a rank has one chunk from the first half of the row and its mirror image from the second half (zigzag),
so that causal attention is balanced. Rows need no padding: chunks may differ by one token.

Recurrent layers swap heads for tokens in both styles: their states pass from token to token, and each rank computes
those of its heads. Layers that choose their keys run with the ring's chunks: every rank gathers those of all tokens,
and chooses for its own queries.

Source: DeepSpeed-Ulysses, arXiv:2309.14509; Ring Attention, arXiv:2310.01889. Differs: masks follow packed
documents, and chunks of keys that no query sees are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.parts.attend import NO_LIMITS, Attend, Limits, OwnTokens
from stretto.models.parts.router import Routing
from stretto.trainer.batch.pass_inputs import PassInputs
from stretto.trainer.parallel.collectives import all_to_all, gather_rows
from stretto.trainer.ranks.mesh import Mesh

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class _TokenShards:
    """Which tokens of a row each rank has."""

    inputs: list[Tensor]  # per rank: indices of its tokens in the row
    owner: Tensor  # per token: the rank that has it
    place: Tensor  # per token: its index among the tokens of that rank


def _assign_tokens(num_tokens: int, degree: int, style: str, device: torch.device) -> _TokenShards:
    pieces = np.array_split(np.arange(num_tokens), degree if style == "ulysses" else 2 * degree)
    if style == "ring":
        pieces = [np.concatenate((pieces[i], pieces[-1 - i])) for i in range(degree)]
    owner, place = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
    for rank, piece in enumerate(pieces):
        owner[piece], place[piece] = rank, np.arange(len(piece))
    inputs = [torch.from_numpy(piece).to(device) for piece in pieces]
    return _TokenShards(inputs, torch.from_numpy(owner).to(device), torch.from_numpy(place).to(device))


class PassRows(NamedTuple):
    """The rows of a pass whose hidden states are computed, and which one is before each trained token."""

    num_tokens: int
    rows: Int[Tensor, " rows"]
    predictors: Int[Tensor, " trained"]


def hidden_states(
    policy: Decoder, inputs: PassInputs, mesh: Mesh, style: str, routing: Routing | None
) -> tuple[Float[Tensor, "rows dim"], PassRows, list[Int[Tensor, " _"]]]:
    """Hidden states of this rank's pass, its rows, and the indices of each rank's trained tokens.

    routing: for the whole row; the expert loads of this rank's tokens are added to it.
    """
    shards = _assign_tokens(len(inputs.token_ids), mesh.degrees.cp, style, inputs.token_ids.device)
    mine = shards.inputs[mesh.cp_rank]
    owner = shards.owner[inputs.rows]
    is_own = owner == mesh.cp_rank
    index_of_row = is_own.cumsum(0) - 1
    owner = owner[inputs.predictors]
    places = [(owner == rank).nonzero().squeeze(1) for rank in range(mesh.degrees.cp)]
    own_routing = None
    if routing is not None:
        replay = None if routing.replay is None else routing.replay[mine]
        # The dictionaries of loads and choices are the caller's: a replaced dataclass shares them.
        own_routing = replace(routing, replay=replay)
    sizes = [len(tokens) for tokens in shards.inputs]
    if style == "ulysses":
        attend = _ulysses(inputs.layout.attend, sizes, mesh)
    else:
        attend = _ring(inputs.layout, shards, mesh)
    options: dict[str, Any] = {} if own_routing is None else {"routing": own_routing}
    if (images := inputs.images) is not None:
        # Every rank encodes all images of the row; the gradients are those of its own tokens, and add up.
        is_here = shards.owner[images.rows] == mesh.cp_rank
        features = torch.arange(len(images.rows), device=mine.device) if images.features is None else images.features
        options["images"] = replace(images, rows=shards.place[images.rows][is_here], features=features[is_here])
    if policy.config.has_recurrence:
        options["documents"] = policy.documents(inputs.layout, SharedHeads(shards, mesh))
    rows = shards.place[inputs.rows][is_own]
    hidden = policy(inputs.token_ids[mine], inputs.layout.rotations[..., mine], attend, rows, **options)
    predictors = index_of_row[inputs.predictors[places[mesh.cp_rank]]]
    return hidden, PassRows(len(mine), rows, predictors), places


def _ulysses(attend: Attend, sizes: list[int], mesh: Mesh) -> Attend:
    """An `Attend` that calls `attend` on the whole row with this rank's share of the heads."""
    degree, group = mesh.degrees.cp, mesh.cp_group
    num_own = sizes[mesh.cp_rank]

    def gather_tokens(x: Tensor) -> Tensor:
        if x.shape[1] < degree:
            x = x.repeat_interleave(degree // x.shape[1], dim=1)
        by_rank = x.unflatten(1, (degree, -1)).transpose(0, 1).flatten(0, 1)
        return all_to_all(by_rank, sizes, [num_own] * degree, group)

    def attend_heads(layer: int, q: Tensor, k: Tensor, v: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        if limits.sinks is not None:
            limits = limits._replace(sinks=limits.sinks.view(degree, -1)[mesh.cp_rank])
        out = attend(layer, gather_tokens(q), gather_tokens(k), gather_tokens(v), limits)
        by_rank = all_to_all(out, [num_own] * degree, sizes, group)
        return by_rank.unflatten(0, (degree, num_own)).transpose(0, 1).flatten(1, 2)

    return attend_heads


@dataclass(frozen=True, eq=False)
class SharedHeads:
    """`Heads` of ranks that share a row: every rank gets all tokens, of some heads.

    A state passes through the tokens of a document in their order, so that ranks cannot each compute their own tokens
    at the same time; heads are independent of each other.
    """

    shards: _TokenShards
    mesh: Mesh

    @property
    def degree(self) -> int:
        return self.mesh.degrees.cp

    @cached_property
    def _sizes(self) -> list[int]:
        return [len(tokens) for tokens in self.shards.inputs]

    @cached_property
    def _order(self) -> Tensor:
        """The tokens of the row by the rank that has them."""
        return torch.cat(self.shards.inputs)

    @cached_property
    def _places(self) -> Tensor:
        """Where each token of the row is in that order."""
        return self._order.argsort()

    def spread(self, x: Float[Tensor, "own channels"], parts: Sequence[int]) -> Float[Tensor, "tokens share"]:
        """As `Heads.spread`."""
        by_rank = torch.cat([self.own(x.T, parts, rank).T for rank in range(self.degree)])
        gathered = all_to_all(by_rank, self._sizes, [len(x)] * self.degree, self.mesh.cp_group)
        return gathered.index_select(0, self._places)

    def collect(self, x: Float[Tensor, "tokens share dim"]) -> Float[Tensor, "own heads dim"]:
        """As `Heads.collect`."""
        num_own = self._sizes[self.mesh.cp_rank]
        by_rank = x.index_select(0, self._order)
        received = all_to_all(by_rank, [num_own] * self.degree, self._sizes, self.mesh.cp_group)
        return received.unflatten(0, (self.degree, num_own)).transpose(0, 1).flatten(1, 2)

    def own(
        self, weight: Float[Tensor, "channels ..."], parts: Sequence[int], rank: int | None = None
    ) -> Float[Tensor, "share ..."]:
        """As `Heads.own`, of this rank or of another."""
        rank = self.mesh.cp_rank if rank is None else rank
        return torch.cat([part.chunk(self.degree)[rank] for part in weight.split(list(parts))])


def _ring(layout: PackedLayout, shards: _TokenShards, mesh: Mesh) -> Attend:
    """An `Attend` over this rank's tokens, to which the others' keys and values come in turn."""
    assert layout.parents is None, "ring attention does not support shared prompts"
    positions = layout.position_ids
    bounds = torch.tensor(layout.cu_seqlens, device=positions.device)
    documents = torch.repeat_interleave(bounds.diff())
    docs, places = ([x[tokens] for tokens in shards.inputs] for x in (documents, positions))
    me = mesh.cp_rank
    sizes = [len(tokens) for tokens in shards.inputs]

    @cache
    def order(window: int | None) -> _RingOrder:
        masks: list[Tensor | None] = []
        for rank in range(mesh.degrees.cp):
            is_seen = (docs[me][:, None] == docs[rank]) & (places[rank] <= places[me][:, None])
            if window is not None:
                is_seen &= places[me][:, None] - places[rank] < window
            masks.append(is_seen if bool(is_seen.any()) else None)
        return _RingOrder(mesh, masks, sizes)

    @cache
    def own() -> OwnTokens:
        gather = lambda x: gather_rows(x, shards.inputs, me, mesh.cp_group)
        return OwnTokens(shards.inputs[me].cpu().numpy(), gather)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        if limits.keys is not None:
            return limits.keys.attend(q, k, v, layout.tree, own())
        return _RingAttention.apply(q, k, v, limits.sinks, order(limits.window))

    return attend


@dataclass(frozen=True)
class _RingOrder:
    """The order in which the ranks' keys arrive.

    masks[rank]: bool [own tokens, the rank's tokens], True where attention is allowed; None if no own token sees it.
    """

    mesh: Mesh
    masks: list[Tensor | None]
    sizes: list[int]

    def source(self, hop: int) -> int:
        """The rank whose keys are here after `hop` hops."""
        return (self.mesh.cp_rank - hop) % self.mesh.degrees.cp

    def pass_on(self, tensors: list[Tensor], hop: int) -> list[Tensor]:
        """Send the tensors of hop `hop` to the next rank; those received from the rank before."""
        degree, me, group = self.mesh.degrees.cp, self.mesh.cp_rank, self.mesh.cp_group
        size = self.sizes[self.source(hop + 1)]
        out = [x.new_empty(size, *x.shape[1:]) for x in tensors]
        receiver, sender = (dist.get_global_rank(group, (me + step) % degree) for step in (1, -1))
        ops = [dist.P2POp(dist.isend, x.contiguous(), receiver, group) for x in tensors]
        ops += [dist.P2POp(dist.irecv, x, sender, group) for x in out]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out


class _RingAttention(torch.autograd.Function):
    """Softmax over keys that arrive rank by rank, with a running maximum and sum; in float32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _RingOrder
    ) -> Float[Tensor, "tokens heads dim"]:
        ctx.ring, ctx.scale = ring, q.shape[-1] ** -0.5
        grouped = _grouped(q, k.shape[1])
        peak = grouped.new_full(grouped.shape[:-1], float("-inf"))
        total, out = torch.zeros_like(peak), torch.zeros_like(grouped)
        keys, values = k, v
        for hop in range(len(ring.sizes)):
            mask = ring.masks[ring.source(hop)]
            if mask is not None:
                scores = _scores(grouped, keys, mask, ctx.scale)
                higher = torch.maximum(peak, scores.amax(-1))
                faded = (peak - higher).exp()
                weights = (scores - higher[..., None]).exp()
                total = total * faded + weights.sum(-1)
                out = out * faded[..., None] + torch.einsum("kgts,skd->kgtd", weights, values.float())
                peak = higher
            if hop + 1 < len(ring.sizes):
                keys, values = ring.pass_on([keys, values], hop)
        if sinks is not None:
            logits = _sink_logits(sinks, k.shape[1])
            higher = torch.maximum(peak, logits)
            faded = (peak - higher).exp()
            total, out, peak = total * faded + (logits - higher).exp(), out * faded[..., None], higher
        out = out / total[..., None]
        ctx.save_for_backward(q, k, v, sinks, out, peak + total.log())
        return _flat(out).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, norm = ctx.saved_tensors
        ring, grouped = ctx.ring, _grouped(q, k.shape[1])
        grad = _grouped(grad, k.shape[1])
        inner = (grad * out).sum(-1, keepdim=True)
        dsinks = None
        if sinks is not None:
            share = (_sink_logits(sinks, k.shape[1]) - norm).exp()
            dsinks = -(share * inner.squeeze(-1)).sum(-1).flatten().to(sinks.dtype)
        dq = torch.zeros_like(grouped)
        keys, values = k, v
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        for hop in range(len(ring.sizes)):
            mask = ring.masks[ring.source(hop)]
            if mask is not None:
                weights = (_scores(grouped, keys, mask, ctx.scale) - norm[..., None]).exp()
                dv = dv + torch.einsum("kgts,kgtd->skd", weights, grad)
                slopes = weights * (torch.einsum("kgtd,skd->kgts", grad, values.float()) - inner) * ctx.scale
                dq += torch.einsum("kgts,skd->kgtd", slopes, keys.float())
                dk = dk + torch.einsum("kgts,kgtd->skd", slopes, grouped)
            # One hop more than in the forward pass: the gradients must return to the rank of their keys.
            keys, values, dk, dv = ring.pass_on([keys, values, dk, dv], hop)
        return _flat(dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _sink_logits(sinks: Tensor, kv_heads: int) -> Tensor:
    """[kv heads, query heads per kv head, 1], float32."""
    return sinks.float().view(kv_heads, -1, 1)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, dim] -> float32 [kv heads, query heads per kv head, tokens, dim]."""
    return x.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _flat(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3).flatten(1, 2).contiguous()


def _scores(grouped: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("kgtd,skd->kgts", grouped, keys.float()) * scale
    return scores.masked_fill(~mask, float("-inf"))
