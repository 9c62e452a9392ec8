"""Scores of tokens from Megatron's last hidden states: the vocabulary is divided over tp, the tokens of a row over cp.

Log-probabilities and entropy need a maximum and sums over tp per chunk of tokens; logits exist for one chunk at a time,
as in models/lm_head.py, which is used itself where the vocabulary is whole. Every rank of tp and cp gets the scores of
all tokens and computes the same loss: its backward pass begins at the rank's own scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from stretto.models.lm_head import MASKED_LOGIT, head_logits, row_chunks, token_logprobs
from stretto.records.support import Support
from stretto.trainer.batch.pass_inputs import PassInputs
from stretto.trainer.network import Scores, Wanted
from stretto.trainer.parallel.collectives import all_gather, all_gather_at
from stretto_megatron.rows import Row

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Head:
    """The output weight of a rank: rows `start`, ... of the vocabulary, of which `vocab_size` are no padding.

    weight: [1, dim] and whole on every rank for values.
    """

    weight: Float[Tensor, "part dim"]
    start: int
    vocab_size: int
    chunk: int
    has_values: bool


def compute_scores(
    hidden: Float[Tensor, "local 1 dim"],
    head: Head,
    row: Row,
    inputs: PassInputs,
    wanted: Wanted,
    *,
    splits_tokens: bool,
) -> Scores:
    """The scores of all scored tokens of a pass.

    hidden: of this rank's tokens. splits_tokens: ranks of tp have some of them each.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if splits_tokens:
        # What ranks of tp make of a token is a part of its gradient, but for values, which all compute alike.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=not head.has_values, group=group
        )
    elif group.size() > 1 and not head.has_values:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
    hidden = hidden[:, 0].index_select(0, row.predictors)
    rank = parallel_state.get_context_parallel_rank()
    cp_group = parallel_state.get_context_parallel_group()

    def gather(own: Tensor) -> Tensor:
        return own if len(row.scored) == 1 else all_gather_at(own, row.scored, rank, cp_group)

    if head.has_values:
        return Scores(gather(head_logits(hidden, head.weight).squeeze(1)))
    own = row.scored[rank]
    targets, temperatures, support = inputs.targets, inputs.temperatures, inputs.support
    alternatives = inputs.streams.alternatives if wanted.alternatives else None
    if alternatives is not None:
        targets = torch.cat((targets[:, None], alternatives.ids.flatten(1).clamp(min=0)), 1)
    support = None if support is None else support.at(own.cpu().numpy())
    targets, temperatures = targets[own], temperatures[own]
    if group.size() == 1:
        logprobs, entropy = token_logprobs(
            hidden, head.weight, targets, temperatures, head.chunk, entropy_grad=wanted.entropy_grad, support=support
        )
    else:
        logprobs, entropy = _DividedLogprobs.apply(
            hidden, head.weight, targets, temperatures, head, wanted.entropy_grad, support, group
        )
    logprobs, entropy = gather(logprobs), gather(entropy)
    logits = gather(_whole_logits(hidden, head, group)) if wanted.logits else None
    others = None
    if logprobs.ndim == 2:
        logprobs, others = logprobs[:, 0], logprobs[:, 1:]
    return Scores(logprobs, entropy, others, logits)


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.size, ctx.rank = part.shape[1], group.rank()
        return all_gather(part, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.rank * ctx.size :][:, : ctx.size], None


def _whole_logits(hidden: Tensor, head: Head, group: Any) -> Float[Tensor, "own vocab"]:
    logits = head_logits(hidden, head.weight)
    if group.size() > 1:
        logits = _GatherVocabulary.apply(logits, group)
    return logits[:, : head.vocab_size]


class _DividedLogprobs(torch.autograd.Function):
    """`token_logprobs` with a part of the vocabulary on each rank; the gradient of hidden is this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "tokens dim"],
        weight: Float[Tensor, "part dim"],
        targets: Int[Tensor, " tokens"] | Int[Tensor, "tokens targets"],
        temperatures: Float[Tensor, " tokens"],
        head: Head,
        entropy_grad: bool,
        support: Support | None,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        columns = targets.view(len(targets), -1)
        logprobs = torch.empty(columns.shape, dtype=torch.float32, device=hidden.device)
        entropy, norms = (logprobs.new_empty(len(targets)) for _ in range(2))
        for rows in row_chunks(len(targets), head.chunk):
            logits = _own_logits(hidden[rows], weight, columns[rows], temperatures[rows], head, support, rows)
            largest = logits.amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            exps = logits.sub(largest[:, None]).exp_()
            local, is_here = _local(columns[rows], head)
            chosen = logits.gather(1, local).masked_fill_(~is_here, 0.0)
            sums = torch.cat((exps.sum(1)[:, None], (exps * logits).sum(1)[:, None], chosen), 1)
            dist.all_reduce(sums, group=group)
            norm = sums[:, 0].log() + largest
            norms[rows] = norm
            logprobs[rows] = sums[:, 2:] - norm[:, None]
            entropy[rows] = norm - sums[:, 1] / sums[:, 0]
        ctx.save_for_backward(hidden, weight, targets, temperatures, norms, entropy)
        ctx.head, ctx.support, ctx.entropy_grad = head, support, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs.view(targets.shape), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, norms, entropy = ctx.saved_tensors
        columns, grads = targets.view(len(targets), -1), grad.reshape(len(targets), -1)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in row_chunks(len(targets), ctx.head.chunk):
            logits = _own_logits(hidden[rows], weight, columns[rows], temperatures[rows], ctx.head, ctx.support, rows)
            logprobs = logits.sub_(norms[rows, None])
            probs = logprobs.exp()
            # as in models/lm_head.py: (onehot - p) / temperature, and of the entropy -p (log p + entropy) / temperature
            scales = grads[rows] / temperatures[rows, None]
            d_logits = probs * -scales.sum(1, keepdim=True)
            local, is_here = _local(columns[rows], ctx.head)
            d_logits.scatter_add_(1, local, scales * is_here)
            if ctx.entropy_grad:
                slope = torch.special.entr(probs) - probs * entropy[rows, None]
                d_logits += slope * (grad_entropy[rows] / temperatures[rows])[:, None]
            d_logits = d_logits.to(hidden.dtype)
            grad_hidden[rows] = d_logits @ weight
            grad_weight += d_logits.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _own_logits(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    head: Head,
    support: Support | None,
    rows: slice,
) -> Float[Tensor, "tokens part"]:
    """This rank's float32 logits over their temperatures; MASKED_LOGIT for padding and outside the support."""
    logits = head_logits(hidden, weight).div_(temperatures[:, None])
    if (num_real := head.vocab_size - head.start) < logits.shape[1]:
        logits[:, max(num_real, 0) :] = MASKED_LOGIT
    if support is None or not (part := support.part(rows.start, rows.stop)).sizes.any():
        return logits
    owners, ids = np.repeat(np.arange(len(part)), part.sizes), part.ids.astype(np.int64) - head.start
    is_here = (ids >= 0) & (ids < logits.shape[1])
    is_cut = torch.from_numpy(part.sizes > 0).to(logits.device)[:, None].repeat(1, logits.shape[1])
    is_cut[tuple(torch.from_numpy(each[is_here]).to(logits.device) for each in (owners, ids))] = False
    local, is_target = _local(targets, head)
    tokens, places = is_target.nonzero(as_tuple=True)
    is_cut[tokens, local[tokens, places]] = False
    return logits.masked_fill_(is_cut, MASKED_LOGIT)


def _local(targets: Int[Tensor, "tokens targets"], head: Head) -> tuple[Tensor, Tensor]:
    """Where targets are among this rank's logits (0 for others), and whether they are there."""
    local = targets - head.start
    is_here = (local >= 0) & (local < len(head.weight))
    return local.masked_fill(~is_here, 0), is_here
