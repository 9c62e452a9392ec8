"""Hugging Face weights of a run: RUN/weights/step_N, whole or not there, and `latest` beside it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from stretto.base.paths import RunDir
from stretto.config.model import ModelSection
from stretto.models import hub
from stretto.models.lora import Adapter, save_adapter
from stretto.trainer.checkpoint import flush_to_disk
from stretto.trainer.critic import HEAD, SCORE, Critic
from stretto.trainer.mesh import is_lead_process
from stretto.trainer.parallel.weights import save_weights

logger = logging.getLogger(__name__)


ADAPTER = "lora_adapters"


def export_weights(
    run: RunDir, policy: nn.Module, step: int, tokenizer_dir: Path, adapter_of: ModelSection | None = None
) -> Path:
    """Write a directory that transformers and vLLM load, then point `latest` at it.

    Every rank must call it; on several, each writes some of the tensors into files of its own.

    adapter_of: the section of a policy with LoRA, whose adapter shall stand beside the merged weights.
    """
    start, target = time.perf_counter(), run.weights_step(step)
    with _written(target, policy) as part:
        _write(policy, part, tokenizer_dir, policy.config.hf)
        if adapter_of is not None:
            assert adapter_of.lora is not None
            adapter = Adapter.of(policy)
            if is_lead_process():
                base = None if adapter_of.scratch is not None else adapter_of.name
                save_adapter(adapter, part / ADAPTER, adapter_of.lora, base)
    if is_lead_process():
        run.link_latest_weights(step)
        logger.info("exported weights step=%d to %s in %.2fs", step, target, time.perf_counter() - start)
    return target


def export_critic(critic: Critic, target: Path, tokenizer_dir: Path) -> None:
    """Write the critic as a model for sequence classification with one label; every rank must call it."""
    start = time.perf_counter()
    with _written(target, critic.network) as part:
        _write(critic.network, part, tokenizer_dir, critic.hf_config(), {HEAD: SCORE})
    if is_lead_process():
        logger.info("exported the critic to %s in %.2fs", target, time.perf_counter() - start)


def export_model(policy: nn.Module, target: Path, tokenizer_dir: Path) -> None:
    """The policy as a model directory anywhere; every rank must call it."""
    with _written(target, policy) as part:
        _write(policy, part, tokenizer_dir, policy.config.hf)


@contextmanager
def _written(target: Path, policy: nn.Module) -> Iterator[Path]:
    """A directory that becomes `target` when all ranks have written into it."""
    part, shards = target.with_name(target.name + ".part"), getattr(policy, "shards", None)
    if is_lead_process():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    if shards is not None:
        shards.mesh.gather(None)
    yield part
    if shards is not None:
        shards.mesh.gather(None)
    if is_lead_process():
        for path in part.rglob("*"):
            flush_to_disk(path)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)


def _write(
    policy: nn.Module,
    part: Path,
    tokenizer_dir: Path,
    config: dict[str, Any],
    names: dict[str, str] | None = None,
) -> None:
    """A model directory; names: of tensors that are called otherwise there."""
    shards, tensors = getattr(policy, "shards", None), None
    if shards is None:
        tensors = (((names or {}).get(name, name), tensor) for name, tensor in hub.export_tensors(policy))
    else:
        save_weights(shards, part, names)
    if is_lead_process():
        hub.save_as(policy, part, tokenizer_dir, config, tensors)
