"""Context parallelism: the tokens of one packed row shared out over the axis cp, attention exchanged.

ulysses: every rank attends with some of the heads to all tokens (two all-to-alls a layer); documents, shared
prompts and kernels are those of attention.py. ring: every rank keeps its tokens, and keys and values go round;
a rank has a piece of the beginning and its mirror image at the end of the row (zigzag), so that causal work is
even. Rows need no padding: pieces may differ by a token. Log-probabilities come back whole, so losses over
samples need not know.

Source: DeepSpeed-Ulysses, arXiv:2309.14509; Ring Attention, arXiv:2310.01889. Differs: masks follow packed
documents, and pieces of keys no query sees are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.models.attention import Attend, PackedLayout
from stretto.models.lm_head import head_logits, token_logprobs
from stretto.models.moe import Routing
from stretto.trainer.mesh import Mesh
from stretto.trainer.parallel.exchange import exchange, joined
from stretto.trainer.rows import Rows


@dataclass(frozen=True)
class _Shares:
    """Which tokens of a row each rank has."""

    inputs: list[Tensor]  # of each rank: its tokens, in its order
    owner: Tensor  # of each token: its rank
    place: Tensor  # of each token: where its rank has it


def _share_out(num_tokens: int, degree: int, style: str, device: torch.device) -> _Shares:
    pieces = np.array_split(np.arange(num_tokens), degree if style == "ulysses" else 2 * degree)
    if style == "ring":
        pieces = [np.concatenate((pieces[i], pieces[-1 - i])) for i in range(degree)]
    owner, place = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
    for rank, piece in enumerate(pieces):
        owner[piece], place[piece] = rank, np.arange(len(piece))
    inputs = [torch.from_numpy(piece).to(device) for piece in pieces]
    return _Shares(inputs, torch.from_numpy(owner).to(device), torch.from_numpy(place).to(device))


def score(
    policy: nn.Module,
    rows: Rows,
    mesh: Mesh,
    style: str,
    routing: Routing | None,
    chunk: int,
    *,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every trained token, on every rank of cp; each computes its share.

    `routing` is that of the whole row; what this rank's tokens did is added to it.
    """
    hidden, places = _hidden(policy, rows, mesh, style, routing)
    rank, group = mesh.cp_rank, mesh.cp_group
    trained = places[rank]
    logprobs, entropy = token_logprobs(
        hidden,
        policy.output_weight,
        rows.targets[trained],
        rows.temperatures[trained],
        chunk,
        entropy_grad=entropy_grad,
    )
    return joined(logprobs, places, rank, group), joined(entropy, places, rank, group)


def values(critic: nn.Module, rows: Rows, mesh: Mesh, style: str) -> Tensor:
    """What a critic says of the text before every trained token, on every rank of cp."""
    hidden, places = _hidden(critic, rows, mesh, style, None)
    return joined(head_logits(hidden, critic.output_weight).squeeze(1), places, mesh.cp_rank, mesh.cp_group)


def _hidden(
    policy: nn.Module, rows: Rows, mesh: Mesh, style: str, routing: Routing | None
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states that predict this rank's trained tokens, and which trained tokens are whose."""
    shares = _share_out(len(rows.token_ids), mesh.degrees.cp, style, rows.token_ids.device)
    mine = shares.inputs[mesh.cp_rank]
    owner = shares.owner[rows.rows]
    is_here = owner == mesh.cp_rank
    number = is_here.cumsum(0) - 1
    owner = owner[rows.predictors]
    places = [(owner == rank).nonzero().squeeze(1) for rank in range(mesh.degrees.cp)]
    own = None
    if routing is not None:
        replay = None if routing.replay is None else routing.replay[mine]
        # The dictionaries of what was seen are shared with the caller's.
        own = replace(routing, replay=replay)
    sizes = [len(part) for part in shares.inputs]
    if style == "ulysses":
        attend = _ulysses(rows.layout.attend, sizes, mesh)
    else:
        attend = _ring(rows.layout, shares, mesh)
    hidden = policy(
        rows.token_ids[mine],
        rows.layout.position_ids[mine],
        attend,
        shares.place[rows.rows][is_here],
        *(() if own is None else (own,)),
    )
    return hidden.index_select(0, number[rows.predictors[places[mesh.cp_rank]]]), places


def _ulysses(attend: Attend, sizes: list[int], mesh: Mesh) -> Attend:
    """`attend` over the whole row with this rank's share of the heads."""
    degree, group = mesh.degrees.cp, mesh.cp_group
    here = sizes[mesh.cp_rank]

    def whole(x: Tensor) -> Tensor:
        if x.shape[1] < degree:
            x = x.repeat_interleave(degree // x.shape[1], dim=1)
        parts = x.unflatten(1, (degree, -1)).transpose(0, 1).flatten(0, 1)
        return exchange(parts, sizes, [here] * degree, group)

    def attend_heads(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(layer, whole(q), whole(k), whole(v))
        back = exchange(out, [here] * degree, sizes, group)
        return back.unflatten(0, (degree, here)).transpose(0, 1).flatten(1, 2)

    return attend_heads


def _ring(layout: PackedLayout, shares: _Shares, mesh: Mesh) -> Attend:
    assert layout.parents is None, "a ring does not know shared prompts"
    positions = layout.position_ids
    bounds = torch.tensor(layout.cu_seqlens, device=positions.device)
    documents = torch.repeat_interleave(bounds.diff())
    docs, places = ([x[part] for part in shares.inputs] for x in (documents, positions))
    me = mesh.cp_rank
    masks: list[Tensor | None] = []
    for rank in range(mesh.degrees.cp):
        is_seen = (docs[me][:, None] == docs[rank]) & (places[rank] <= places[me][:, None])
        masks.append(is_seen if bool(is_seen.any()) else None)
    ring = _RingOrder(mesh, masks, [len(part) for part in shares.inputs])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _RingAttention.apply(q, k, v, ring)

    return attend


@dataclass(frozen=True)
class _RingOrder:
    """Who comes when; masks[rank] is [my tokens, its tokens], None where I see none of it."""

    mesh: Mesh
    masks: list[Tensor | None]
    sizes: list[int]

    def source(self, turn: int) -> int:
        """Whose keys are here after so many turns."""
        return (self.mesh.cp_rank - turn) % self.mesh.degrees.cp

    def turn(self, tensors: list[Tensor], turn: int) -> list[Tensor]:
        """Hand on what is here after `turn` turns, and take what comes."""
        degree, me, group = self.mesh.degrees.cp, self.mesh.cp_rank, self.mesh.cp_group
        size = self.sizes[self.source(turn + 1)]
        out = [x.new_empty(size, *x.shape[1:]) for x in tensors]
        to, since = (dist.get_global_rank(group, (me + step) % degree) for step in (1, -1))
        ops = [dist.P2POp(dist.isend, x.contiguous(), to, group) for x in tensors]
        ops += [dist.P2POp(dist.irecv, x, since, group) for x in out]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out


class _RingAttention(torch.autograd.Function):
    """Softmax over keys that come round, kept as running maximum and sum; in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _RingOrder) -> Tensor:
        ctx.ring, ctx.scale = ring, q.shape[-1] ** -0.5
        grouped = _grouped(q, k.shape[1])
        peak = grouped.new_full(grouped.shape[:-1], float("-inf"))
        total, out = torch.zeros_like(peak), torch.zeros_like(grouped)
        keys, values = k, v
        for turn in range(len(ring.sizes)):
            mask = ring.masks[ring.source(turn)]
            if mask is not None:
                scores = _scores(grouped, keys, mask, ctx.scale)
                higher = torch.maximum(peak, scores.amax(-1))
                faded = (peak - higher).exp()
                weights = (scores - higher[..., None]).exp()
                total = total * faded + weights.sum(-1)
                out = out * faded[..., None] + torch.einsum("kgts,skd->kgtd", weights, values.float())
                peak = higher
            if turn + 1 < len(ring.sizes):
                keys, values = ring.turn([keys, values], turn)
        out = out / total[..., None]
        ctx.save_for_backward(q, k, v, out, peak + total.log())
        return _flat(out).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, norm = ctx.saved_tensors
        ring, grouped = ctx.ring, _grouped(q, k.shape[1])
        grad = _grouped(grad, k.shape[1])
        inner = (grad * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(grouped)
        keys, values = k, v
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        for turn in range(len(ring.sizes)):
            mask = ring.masks[ring.source(turn)]
            if mask is not None:
                weights = (_scores(grouped, keys, mask, ctx.scale) - norm[..., None]).exp()
                dv = dv + torch.einsum("kgts,kgtd->skd", weights, grad)
                slopes = weights * (torch.einsum("kgtd,skd->kgts", grad, values.float()) - inner) * ctx.scale
                dq += torch.einsum("kgts,skd->kgtd", slopes, keys.float())
                dk = dk + torch.einsum("kgts,kgtd->skd", slopes, grouped)
            # One turn more than forward: the gradients end where their keys began.
            keys, values, dk, dv = ring.turn([keys, values, dk, dv], turn)
        return _flat(dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, dim] -> float32 [kv heads, heads of each, tokens, dim]."""
    return x.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _flat(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3).flatten(1, 2).contiguous()


def _scores(grouped: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("kgtd,skd->kgts", grouped, keys.float()) * scale
    return scores.masked_fill(~mask, float("-inf"))
