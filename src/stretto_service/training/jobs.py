"""Requests of runs as work for the trainer: the operation of each kind, and the results of passes.

A `Job` is one request. It is built from its kind and body alone, so that the journal can build it again. `pass` (of the
Tinker API) and `batch` (of `/v1/runs`) have micro batches, which the queue gives out one by one; a job of another kind
is one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.base.errors import DataError
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal
from stretto_service.futures import Future
from stretto_service.requests import bodies, data, protobuf
from stretto_service.store import Run
from stretto_service.training.scheduler import Share
from stretto_service.wires import service
from stretto_service.wires.operations import (
    AdamSettings,
    ExportAdapter,
    LoadTenant,
    OptimStep,
    Pass,
    SaveTenant,
    TenantResult,
    TenantWork,
)


@dataclass(frozen=True)
class Limits:
    """Limits of the data in requests."""

    seq_len: int
    vocab_size: int


@dataclass(eq=False)
class Job:
    """One request of a run. seq: its number in the run; None for the hub's own work."""

    run: Run
    kind: str
    body: Any
    seq: int | None = None
    future: Future | None = None
    batch: data.Batch | None = None
    scores: dict[int, np.ndarray] = field(default_factory=dict)
    """Log-probabilities by micro batch, as far as they were computed."""
    sums: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    num_bytes: int = 0
    """Size of its body."""
    directory: Path | None = None
    """The directory that its operation reads or writes."""
    on_done: Callable[[TenantResult], None] | None = None
    """Called with the result of an operation of the hub's own."""

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Identifies it, also after a restart."""
        return self.run.id, self.kind, self.seq

    @property
    def units(self) -> tuple[int, ...]:
        """Tokens of each part that can be computed alone."""
        if self.kind != "batch":
            return () if self.batch is None else self.batch.units
        sizes = tuple(len(each.token_ids) for each in self.body.micro_batches)
        # Without counts of the whole step the loss uses those of the pass, which then must not be split.
        is_whole = self.body.counts is None and self.body.sum_loss is None
        return (sum(sizes),) if is_whole else sizes

    @property
    def adds_gradients(self) -> bool:
        if self.kind == "batch":
            return not self.body.is_forward_only
        return self.kind == "pass" and not self.body.forward_only

    def work(self, units: Sequence[int]) -> TenantWork:
        """The work of one rank: these micro batches."""
        if self.kind == "batch":
            return self._part_of_batch(units)
        assert self.batch is not None, f"{self.kind} has no data"
        targets = tuple(self.batch.targets[i] for i in units)
        return TenantWork(
            tenant=self.run.spec.name,
            micro_batches=tuple(self.batch.micro_batches[i] for i in units),
            sum_loss=self.batch.loss,
            targets=targets if any(target is not None for target in targets) else (),
            is_forward_only=self.body.forward_only,
            wants_logprobs=True,
        )

    def _part_of_batch(self, units: Sequence[int]) -> TenantWork:
        work: TenantWork = self.body
        is_split = len(self.units) == len(work.micro_batches)
        at = units if is_split else range(len(work.micro_batches) * len(units))
        return msgspec.structs.replace(
            work,
            tenant=self.run.spec.name,
            micro_batches=tuple(work.micro_batches[i] for i in at),
            targets=tuple(work.targets[i] for i in at) if work.targets else (),
        )

    def add(self, result: TenantResult, units: Sequence[int], *, is_first: bool) -> None:
        """Add what one rank computed; metrics are the same on all ranks, and only the first one's are used."""
        self.error = self.error or result.error
        for unit, scores in zip(units, result.logprobs):
            if scores is not None:
                self.scores[unit] = scores
        if is_first:
            for name, value in result.metrics.items():
                known = self.sums.get(name)
                largest = value if known is None else max(known, value)
                self.sums[name] = largest if name.startswith("max/") else (known or 0.0) + value

    def outputs(self) -> bytes:
        """The body of a pass's result."""
        assert self.batch is not None, f"{self.kind} has no data"
        scores = self.batch.per_sequence([self.scores[i] for i in range(len(self.batch.units))])
        loss = self.sums.get("loss", math.nan)
        outputs = [{"logprobs": np.asarray(each, np.float32)} for each in scores]
        return protobuf.write_forward_backward(outputs, {"loss:sum": loss})


def read_job(run: Run, kind: str, body: bytes, limits: Limits, *, seq: int | None) -> Job:
    """Build the job of a request. Raises: DataError or Refusal if it is not valid."""
    if kind == "pass":
        request = protobuf.read_forward_backward(body)
        batch = data.pack(
            request.data, request.loss_fn, request.config, seq_len=limits.seq_len, vocab_size=limits.vocab_size
        )
        return Job(run, kind, request, seq, batch=batch)
    if kind == "batch":
        work = service.decode_work(body)
        check_work(work, limits)
        return Job(run, kind, work, seq)
    job = Job(run, kind, api.decode_json(body, KINDS[kind]), seq)
    if kind == "optim_step":
        adam_settings(job.body)
    if kind == "step" and job.body.adam is not None:
        check_adam(job.body.adam)
    return job


KINDS: dict[str, type[Any]] = {
    "optim_step": bodies.OptimStepBody,
    "save_weights": bodies.SaveBody,
    "save_weights_for_sampler": bodies.SaveBody,
    "save_weights_external": bodies.SaveBody,
    "load_weights": bodies.LoadBody,
    "step": service.StepBody,
    "publish": service.PublishBody,
    "save": service.SaveBody,
    "load": service.LoadBody,
}
"""By kind, the type of a JSON body."""
WRITES: dict[str, str] = {
    "save_weights": "training",
    "save_weights_for_sampler": "sampler",
    "save_weights_external": "external",
    "save": "training",
    "publish": "sampler",
}
"""By kind of a request, the kind of the checkpoint that it writes."""


def check_work(work: TenantWork, limits: Limits) -> None:
    """Raises: DataError for a batch with the wrong form, too many tokens, or tokens that the model does not have."""
    if not work.micro_batches:
        raise DataError("micro_batches: there are none")
    if len(work.targets) not in (0, len(work.micro_batches)):
        raise DataError(f"targets: {len(work.targets)} for {len(work.micro_batches)} micro batches")
    for i, each in enumerate(work.micro_batches):
        if each.token_ids.ndim != 1:
            raise DataError(f"micro_batches[{i}].token_ids has {each.token_ids.ndim} dims, not 1")
        ids, size = each.token_ids, len(each.token_ids)
        if size > limits.seq_len:
            raise DataError(f"micro_batches[{i}] has {size} tokens; this service takes {limits.seq_len} (seq_len)")
        if not size or ids.min() < 0 or ids.max() >= limits.vocab_size:
            raise DataError(
                f"micro_batches[{i}]: token ids must be below {limits.vocab_size}, the size of this model's "
                "vocabulary; is it of another tokenizer?"
            )


def adam_settings(body: bodies.OptimStepBody) -> AdamSettings:
    """Raises: Refusal for another optimizer, DataError for a setting that is out of range."""
    if body.optimizer_params is not None:
        raise Refusal("optimizer_params: this service has AdamW; send AdamParams")
    params = body.adam_params or bodies.AdamBody()
    if not params.grad_clip_norm >= 0:
        raise DataError(f"adam_params.grad_clip_norm = {params.grad_clip_norm} must be at least 0")
    settings = AdamSettings(
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_norm=params.grad_clip_norm or None,
    )
    check_adam(settings, where="adam_params", lr="learning_rate", max_norm="grad_clip_norm")
    return settings


def check_adam(settings: AdamSettings, *, where: str = "adam", **names: str) -> None:
    """Raises: DataError for a setting that is out of range; names: the request's names where they differ."""
    for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "max_norm"):
        value, high = getattr(settings, name), 1 if name in ("beta1", "beta2") else math.inf
        if value is not None and not 0 <= value < high:
            key = names.get(name, name)
            raise DataError(f"{where}.{key} = {value} must be at least 0 and less than {high}")


def operation(job: Job, directory: str | None) -> Any:
    """The operation of a job without data, for every rank. directory: that it writes or reads."""
    tenant = job.run.spec.name
    match job.kind:
        case "optim_step":
            return OptimStep(number=0, tenant=tenant, adam=adam_settings(job.body))
        case "step":
            return OptimStep(number=0, tenant=tenant, adam=job.body.adam)
        case "save_weights" | "save_state" | "save":
            progress = job.body.progress if job.kind == "save" else {"run": job.run.id}
            return SaveTenant(number=0, tenant=tenant, path=directory or "", progress=progress)
        case "save_weights_for_sampler" | "save_weights_external" | "publish":
            return ExportAdapter(number=0, tenant=tenant, directory=directory or "")
        case "load_weights" | "load":
            return LoadTenant(number=0, tenant=tenant, path=directory or "", with_optimizer=job.body.optimizer)
    raise AssertionError(f"a job of kind {job.kind}")


def assign(shares: Sequence[Share], num_ranks: int, cp: int = 1) -> list[dict[str, list[int]]]:
    """The micro batches of each rank, by run: each one goes to the ranks with the fewest tokens so far.

    cp: how many neighbours among the ranks share each micro batch.
    """
    load = [0] * (num_ranks // cp)
    units: list[dict[str, list[int]]] = [{share.request.payload.run.id: [] for share in shares} for _ in load]
    for share in shares:
        for unit in range(share.start, share.stop):
            rank = load.index(min(load))
            load[rank] += share.request.units[unit]
            units[rank][share.request.payload.run.id].append(unit)
    return [own for own in units for _ in range(cp)]


def passes_of(shares: Sequence[Share], units: Sequence[dict[str, list[int]]], max_tokens: int) -> list[Pass]:
    """The pass of each rank over its micro batches of these shares."""
    jobs: list[Job] = [share.request.payload for share in shares]
    return [
        Pass(number=0, works=tuple(job.work(own[job.run.id]) for job in jobs), max_tokens=max_tokens) for own in units
    ]
