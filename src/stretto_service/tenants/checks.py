"""Checks what a hub sends to the ranks: the sections of a spec, losses, micro batches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from stretto.base.errors import ConfigError, DataError
from stretto.config.section import Section
from stretto.config.sections.algorithm import CustomLoss, DefaultLoss, Loss, LossSection
from stretto.config.sections.model import LORA_TARGETS, LoRASection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler, Optim, Scheduler
from stretto.records.sample import MicroBatch
from stretto_service.wires.operations import TenantSpec, TenantWork

if TYPE_CHECKING:
    from jaxtyping import Int

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class _SpecSections(Section):
    lora: LoRASection
    optim: Optim = AdamWOptim()
    scheduler: Scheduler = ConstantScheduler(warmup_steps=0)


class _LossSections(Section):
    loss: Loss = DefaultLoss()


def read_spec(spec: TenantSpec, max_rank: int | None) -> tuple[LoRASection, Optim, Scheduler]:
    """The sections of a spec.

    Raises: ConfigError that names the key.
    """
    if not _NAME.fullmatch(spec.name):
        raise ConfigError(f"name {spec.name!r}: use letters, digits and . _ : -, at most 128")
    if max_rank is not None and spec.rank > max_rank:
        raise ConfigError(f"rank = {spec.rank}: this service has adapters of at most rank {max_rank}")
    targets = LORA_TARGETS if spec.target_modules is None else spec.target_modules
    lora = {"rank": spec.rank, "alpha": spec.alpha, "dropout": spec.dropout, "target_modules": targets}
    if spec.rank == 0:  # no adapter
        lora = {}
    sections = _validated(_SpecSections, {"lora": lora, "optim": spec.optim, "scheduler": spec.scheduler})
    shares = [
        key
        for key in ("warmup_steps", "decay_steps")
        if isinstance(getattr(sections.scheduler, key, 0), float) and spec.max_steps is None
    ]
    if shares:
        raise ConfigError(f"scheduler.{shares[0]} is a share of max_steps; give max_steps or a number of steps")
    return sections.lora, sections.optim, sections.scheduler


def read_loss(work: TenantWork) -> LossSection:
    """The [trainer.loss] of a work.

    Raises: ConfigError that names the key; also for settings that a shared trainer does not support.
    """
    loss = _validated(_LossSections, {"loss": work.loss}).loss
    if isinstance(loss, CustomLoss):
        raise ConfigError('loss.type = "custom": a shared trainer runs no code of its users')
    if loss.reference_kl is not None and loss.reference_kl.model is not None:
        raise ConfigError("loss.reference_kl.model: the reference of an adapter is the model without it; remove it")
    return loss


def _validated(kind: type[Section], data: dict[str, Any]) -> Any:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {first['msg']}, got {first['input']!r}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_micro_batch(mb: MicroBatch, targets: Int[np.ndarray, "*_"] | None, vocab_size: int) -> None:
    """Check shapes, and values that index an array or divide.

    Raises: DataError for a micro batch that no forward pass could compute.
    """
    num = len(mb.token_ids)
    if mb.token_ids.ndim != 1 or not num:
        raise DataError(f"micro batch: token_ids has shape {list(mb.token_ids.shape)}")
    for name in ("loss_mask", "logprobs", "advantages", "temperatures"):
        _check_stream(name, getattr(mb, name), num)
    for name in ("rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs", "old_logprobs", "token_rewards"):
        if (stream := getattr(mb, name)) is not None:
            _check_stream(name, stream, num)
    if mb.ref_kl_weights is not None and mb.ref_logprobs is None:
        raise DataError("micro batch: ref_kl_weights without ref_logprobs")
    bounds = mb.cu_seqlens
    if bounds.ndim != 1 or len(bounds) < 2 or not np.issubdtype(bounds.dtype, np.integer):
        raise DataError(f"micro batch: cu_seqlens has shape {list(bounds.shape)} and dtype {bounds.dtype}")
    if mb.num_samples > len(bounds) - 1:
        raise DataError(f"micro batch: {mb.num_samples} samples in {len(bounds) - 1} documents")
    if not np.all(mb.temperatures > 0):
        raise DataError("micro batch: a temperature is not above 0")
    if targets is None:
        return
    _check_stream("targets", targets, num)
    if targets.min(initial=0) < 0 or targets.max(initial=0) >= vocab_size:
        raise DataError(f"micro batch: a target is not one of the model's tokens, 0..{vocab_size - 1}")


def _check_stream(name: str, stream: np.ndarray, num: int) -> None:
    if stream.shape != (num,):
        raise DataError(f"micro batch: {name} has shape {list(stream.shape)} for {num} tokens")
