"""The forward and backward passes of one operation: which micro batches are computed together, and their losses.

    works -> pieces (one micro batch of one tenant, with its inputs) -> groups (the pieces of one forward pass)

Without a limit of tokens every piece is a group, computed as in a run with one tenant. With a limit, pieces of several
tenants share a pass: their inputs are ordered tenant by tenant, and attention, experts and losses of a tenant do not
see those of others. Ranks make the same number of passes, since they gather each other's shards; a rank without data
computes two tokens and ignores the result. Ranks of cp have the same micro batches, and a
pass for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.algorithms.losses import needs_samples, total_loss
from stretto.base.errors import DataError, StrettoError, boundary
from stretto.config.sections.algorithm import LossSection
from stretto.config.sections.model import ModelSection
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.records.sample import MicroBatch
from stretto.records.support import concat_supports
from stretto.records.token_counts import TokenCounts, counts_of_step, weigh_by_rollout
from stretto.trainer.batch.metrics import StepSums
from stretto.trainer.batch.pass_inputs import IDLE_MICRO_BATCH, PassInputs, build_pass_inputs
from stretto.trainer.parallel.scores import compute_logprobs, sharing_of
from stretto.trainer.ranks.mesh import Mesh
from stretto_service.tenants.checks import check_micro_batch, read_loss
from stretto_service.tenants.layers import Turn
from stretto_service.tenants.losses import needs_sample_index, sum_loss
from stretto_service.tenants.tenant import Tenant
from stretto_service.wires.operations import Pass, TenantResult, TenantWork


@dataclass
class Piece:
    """One micro batch of a tenant: its inputs and results."""

    work: int
    index: int  # in the work
    mb: MicroBatch
    inputs: PassInputs
    reference: Tensor | None = None
    logprobs: np.ndarray | None = None


@dataclass
class _Work:
    """A checked work, with its pieces and results."""

    request: TenantWork
    tenant: Tenant
    loss: LossSection | None  # None: a sum
    pieces: list[Piece] = field(default_factory=list)
    micro_batches: Sequence[MicroBatch] = ()
    counts: TokenCounts | None = None
    sums: StepSums = field(default_factory=StepSums)

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with the backbone alone."""
        return self.loss is not None and self.loss.reference_kl is not None


class Passes:
    """Executes `Pass` operations on one rank."""

    def __init__(
        self, policy: Policy, turn: Turn, mesh: Mesh, model: ModelSection, reshard: Callable[[], None]
    ) -> None:
        """reshard: frees the weights that a pass without a backward pass has gathered."""
        self.policy, self.turn, self.mesh = policy, turn, mesh
        self._model, self._reshard = model, reshard
        self._vision = policy.config.vision if isinstance(policy, Decoder) else None
        # A rank of cp has tokens from all over a row, which are not ranges of tenants.
        self._can_mix = isinstance(policy, Decoder) and mesh.degrees.cp == 1
        self._sharing = sharing_of(policy, mesh, model)
        if mesh.world_size > 1:
            embedding = next(module for module in policy.modules() if isinstance(module, nn.Embedding))
            embedding.register_forward_hook(_with_gradient)

    def execute(self, operation: Pass, tenants: dict[str, Tenant]) -> dict[str, TenantResult]:
        """Results by tenant, the same on every rank but for log-probabilities; all ranks must call it."""
        works, errors = self._prepare(operation, tenants)
        groups = list(self._groups(works, operation.max_tokens))
        is_forward_only = lambda group: works[group[0].work].request.is_forward_only
        kinds = {
            "reference": [[piece] for group in groups for piece in group if works[piece.work].has_reference],
            "forward": [group for group in groups if is_forward_only(group)],
            "train": [group for group in groups if not is_forward_only(group)],
        }
        most = self._exchange_counts(works, {kind: len(some) for kind, some in kinds.items()})
        passes = {kind: some + [[]] * (most[kind] - len(some)) for kind, some in kinds.items()}
        self._score_references(passes["reference"])
        self._run(works, passes["forward"], has_gradient=False)
        self._run(works, passes["train"], has_gradient=True)
        return errors | self._results(works)

    # -- before the passes --

    def _prepare(self, operation: Pass, tenants: dict[str, Tenant]) -> tuple[list[_Work], dict[str, TenantResult]]:
        """The works that all ranks can compute, and results with an error for the others."""
        outcomes: list[tuple[str, _Work | str]] = []
        for number, work in enumerate(operation.works):
            try:
                with boundary(DataError, "micro batches"):
                    outcomes.append((work.tenant, self._build(number, work, tenants)))
            except StrettoError as error:
                outcomes.append((work.tenant, str(error)))
        local_errors = [outcome if isinstance(outcome, str) else None for _, outcome in outcomes]
        of_ranks = self.mesh.gather(local_errors, list[str | None])
        works: list[_Work] = []
        errors: dict[str, TenantResult] = {}
        for number, (name, outcome) in enumerate(outcomes):
            reasons = [each[number] for each in of_ranks if each[number] is not None]
            if reasons:
                errors[name] = TenantResult(error=reasons[0])
            elif isinstance(outcome, _Work):
                for piece in outcome.pieces:
                    piece.work = len(works)
                works.append(outcome)
        return works, errors

    def _build(self, number: int, work: TenantWork, tenants: dict[str, Tenant]) -> _Work:
        tenant = tenants[work.tenant]
        loss = None if work.sum_loss is not None else read_loss(work)
        if loss is not None and loss.reference_kl is not None and tenant.scaling is None:
            raise DataError("loss.reference_kl: the model that it compares with is what is trained here; remove it")
        checked = _Work(work, tenant, loss, micro_batches=work.micro_batches)
        vocab_size = self.policy.config.vocab_size
        targets: Sequence[np.ndarray | None] = work.targets or [None] * len(work.micro_batches)
        for mb, target in zip(work.micro_batches, targets, strict=True):
            check_micro_batch(mb, target, vocab_size)
        if loss is not None and loss.reduction == "rollout":
            checked.micro_batches, _ = weigh_by_rollout(work.micro_batches)
        with_samples = loss is not None and needs_samples(loss)
        if work.sum_loss is not None:
            with_samples = needs_sample_index(work.sum_loss)
        for index, (mb, target) in enumerate(zip(checked.micro_batches, targets)):
            inputs = build_pass_inputs(
                mb,
                vocab_size,
                self.mesh.device,
                is_scored=_all_but_first(mb) if work.wants_logprobs else None,
                sharing=self._sharing,
                with_samples=with_samples,
                vision=self._vision,
            )
            if inputs is None:
                continue
            if target is not None:
                ids = torch.from_numpy(target[inputs.sources].astype(np.int64)).to(self.mesh.device)
                inputs = replace(inputs, targets=ids, repeats=None)
            checked.pieces.append(Piece(number, index, mb, inputs))
        return checked

    def _exchange_counts(self, works: Sequence[_Work], num_passes: dict[str, int]) -> dict[str, int]:
        """Set the denominators of works, where the hub gave none; the most passes of each kind on any rank."""
        local_counts: list[dict[str, float]] = []
        for work in works:
            if work.loss is None or work.request.counts is not None:
                local_counts.append({})
                continue
            local_counts.append(counts_of_step(work.request.micro_batches, work.loss.reduction)._asdict())
        most = {f"max/{kind}": float(num) for kind, num in num_passes.items()}
        *sums, most = self.mesh.reduce_each([*local_counts, most])
        for work, counts in zip(works, sums):
            if work.request.counts is not None:
                work.counts = TokenCounts(*work.request.counts)
            elif counts:
                work.counts = TokenCounts(**counts)
        return {kind: int(most[f"max/{kind}"]) for kind in num_passes}

    def _groups(self, works: Sequence[_Work], max_tokens: int | None) -> Iterator[list[Piece]]:
        """The pieces of each forward pass, those of one tenant side by side."""
        for is_forward_only in (True, False):
            group: list[Piece] = []
            size = 0
            for work in works:
                if work.request.is_forward_only != is_forward_only:
                    continue
                for piece in work.pieces:
                    num = len(piece.inputs.token_ids)
                    is_alone = not self._can_mix or piece.inputs.images is not None or work.tenant.lora.dropout
                    if max_tokens is None or is_alone:
                        yield [piece]
                        continue
                    if group and size + num > max_tokens:
                        yield group
                        group, size = [], 0
                    group.append(piece)
                    size += num
            if group:
                yield group

    # -- the passes --

    @torch.no_grad()
    def _score_references(self, groups: Sequence[list[Piece]]) -> None:
        """Log-probabilities of the backbone alone, for losses with a reference."""
        for group in groups:
            self.turn.set()
            logprobs, _ = self._forward(group[0].inputs if group else self._idle_inputs())
            if group:
                group[0].reference = logprobs
        if groups:
            self._reshard()

    def _run(self, works: Sequence[_Work], groups: Sequence[list[Piece]], *, has_gradient: bool) -> None:
        """The passes of these groups; an empty group is a pass that only other ranks need."""
        with torch.set_grad_enabled(has_gradient):
            for group in groups:
                if group:
                    self._run_group(works, group, has_gradient=has_gradient)
                    continue
                self.turn.set()
                logprobs, _ = self._forward(self._idle_inputs())
                if has_gradient:
                    (logprobs * 0.0).sum().backward()
        if groups and not has_gradient:
            self._reshard()

    def _run_group(self, works: Sequence[_Work], group: list[Piece], *, has_gradient: bool) -> None:
        tenants = [works[piece.work].tenant for piece in group]
        inputs = group[0].inputs if len(group) == 1 else join_inputs([piece.inputs for piece in group])
        self.turn.set(*_ranges(tenants, group))
        losses = [works[piece.work].loss for piece in group]
        entropy_grad = has_gradient and any(loss and loss.entropy_coef is not None for loss in losses)
        with ExitStack() as stack:
            if len(group) == 1:
                stack.enter_context(tenants[0].random_numbers(has_gradient=has_gradient))
            logprobs, entropy = self._forward(inputs, entropy_grad=entropy_grad)
            start = 0
            total: Tensor | None = None
            for piece in group:
                end = start + len(piece.inputs.targets)
                # Not a slice of a single piece: it is computed as in a run with one tenant.
                scores = (logprobs, entropy) if len(group) == 1 else (logprobs[start:end], entropy[start:end])
                loss = self._loss(works[piece.work], piece, *scores)
                total, start = loss if total is None else total + loss, end
            if has_gradient:
                assert total is not None, "a group has pieces"
                total.backward()

    def _loss(self, work: _Work, piece: Piece, logprobs: Tensor, entropy: Tensor) -> Tensor:
        inputs = piece.inputs
        streams = inputs.streams.filled_in(logprobs)
        entropy_value = entropy.detach()
        if work.loss is None:
            assert work.request.sum_loss is not None
            loss, sums = sum_loss(logprobs, streams, work.request.sum_loss)
        else:
            assert work.counts is not None, "set by _exchange_counts"
            loss, sums = total_loss(
                logprobs, streams, work.counts, work.loss, entropy=entropy, reference_logprobs=piece.reference
            )
        sums = {name: value.detach() for name, value in sums.items()}
        sums["loss"] = loss.detach()
        sums["entropy"] = (entropy_value * streams.is_sampled).sum()
        work.sums.add(sums | {"tokens": float(piece.mb.num_tokens)})
        if work.request.wants_logprobs:
            piece.logprobs = np.zeros(len(piece.mb.token_ids), np.float32)
            piece.logprobs[inputs.sources] = logprobs.detach().float().cpu().numpy()
        return loss

    def _forward(self, inputs: PassInputs, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        return compute_logprobs(self.policy, inputs, self.mesh, self._model, entropy_grad=entropy_grad)

    def _idle_inputs(self) -> PassInputs:
        inputs = build_pass_inputs(IDLE_MICRO_BATCH, self.policy.config.vocab_size, self.mesh.device)
        assert inputs is not None
        return inputs

    # -- after the passes --

    def _results(self, works: Sequence[_Work]) -> dict[str, TenantResult]:
        """Metrics over all ranks, in one exchange."""
        totals = self.mesh.reduce_each([work.sums.pop_sums(lambda sums: sums) for work in works])
        results: dict[str, TenantResult] = {}
        for work, total in zip(works, totals):
            tenant = work.tenant
            if not work.request.is_forward_only and total:
                tenant.num_passes += 1
                tenant.sums.add(total)
            logprobs: tuple[np.ndarray | None, ...] = ()
            if work.request.wants_logprobs:
                by_index = {piece.index: piece.logprobs for piece in work.pieces if piece.logprobs is not None}
                logprobs = tuple(
                    by_index.get(i, np.zeros(len(mb.token_ids), np.float32)) for i, mb in enumerate(work.micro_batches)
                )
            before = results.get(work.request.tenant)
            if before is not None:  # several works of one tenant
                total = {n: before.metrics.get(n, 0.0) + total.get(n, 0.0) for n in before.metrics | total}
                logprobs = before.logprobs + logprobs
            results[work.request.tenant] = TenantResult(metrics=total, logprobs=logprobs)
        return results


def _ranges(
    tenants: Sequence[Tenant], group: Sequence[Piece]
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """The arguments of `Turn.set` for a group: names, inputs of each, rows of each in the last block."""
    names: list[str] = []
    rows: list[int] = []
    last: list[int] = []
    for tenant, piece in zip(tenants, group):
        if not names or names[-1] != tenant.spec.name:
            names.append(tenant.spec.name)
            rows.append(0)
            last.append(0)
        rows[-1] += len(piece.inputs.token_ids)
        last[-1] += len(piece.inputs.rows)
    return tuple(names), tuple(rows), tuple(last)


def join_inputs(parts: Sequence[PassInputs]) -> PassInputs:
    """The inputs of one pass over the rows of several; they have no images."""
    first = parts[0]
    device = first.token_ids.device
    bounds, rows, predictors = [0], [], []
    parents: list[int] = []
    num_tokens = num_rows = 0
    for part in parts:
        layout, num_segments = part.layout, len(parents)
        bounds += [num_tokens + end for end in layout.cu_seqlens[1:]]
        part_parents = layout.parents or (-1,) * (len(layout.cu_seqlens) - 1)
        parents += [-1 if parent < 0 else num_segments + parent for parent in part_parents]
        rows.append(part.rows + num_tokens)
        predictors.append(part.predictors + num_rows)
        num_tokens, num_rows = num_tokens + len(part.token_ids), num_rows + len(part.rows)
    has_parents = any(parent >= 0 for parent in parents)
    cat = lambda name: torch.cat([getattr(part, name) for part in parts])
    return replace(
        first,
        token_ids=cat("token_ids"),
        layout=PackedLayout(tuple(bounds), device, tuple(parents) if has_parents else None),
        rows=torch.cat(rows),
        predictors=torch.cat(predictors),
        repeats=None,
        targets=cat("targets"),
        temperatures=cat("temperatures"),
        support=concat_supports([part.support for part in parts], [len(part.targets) for part in parts]),
    )


def _all_but_first(mb: MicroBatch) -> np.ndarray:
    """True for every token of a document but its first; padding has none."""
    is_scored = np.zeros(len(mb.token_ids), bool)
    bounds = mb.cu_seqlens[: mb.num_samples + 1]
    is_scored[: bounds[-1]] = True
    is_scored[bounds[:-1][np.diff(bounds) > 0]] = False
    return is_scored


def _with_gradient(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """All ranks gather the same shards in the backward pass, wherever the first adapter is."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
