"""Hugging Face weights of a run: RUN/weights/step_N, whole or not there, and `latest` beside it."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from torch import nn

from stretto.base.paths import RunDir
from stretto.config.model import ModelSection
from stretto.models import hub
from stretto.models.lora import save_adapter
from stretto.trainer.checkpoint import flush_to_disk
from stretto.trainer.critic import Critic
from stretto.trainer.mesh import is_lead_process

logger = logging.getLogger(__name__)


ADAPTER = "lora_adapters"


def export_weights(
    run: RunDir, policy: nn.Module, step: int, tokenizer_dir: Path, adapter_of: ModelSection | None = None
) -> Path:
    """Write a directory that transformers and vLLM load, then point `latest` at it.

    Every rank must call it; the lead writes what all join, tensor by tensor.

    adapter_of: the section of a policy with LoRA, whose adapter shall stand beside the merged weights.
    """
    start, target = time.perf_counter(), run.weights_step(step)
    if not is_lead_process():
        for _ in hub.export_tensors(policy):
            pass
        return target
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    hub.save_hf(policy, part, tokenizer_dir)
    if adapter_of is not None:
        assert adapter_of.lora is not None
        base = None if adapter_of.scratch is not None else adapter_of.name
        save_adapter(policy, part / ADAPTER, adapter_of.lora, base)
    for path in part.rglob("*"):
        flush_to_disk(path)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    run.link_latest_weights(step)
    logger.info("exported weights step=%d to %s in %.2fs", step, target, time.perf_counter() - start)
    return target


def export_critic(critic: Critic, target: Path, tokenizer_dir: Path) -> None:
    """Write the critic as a model for sequence classification with one label; every rank must call it."""
    start, tensors = time.perf_counter(), critic.export_tensors()
    if not is_lead_process():
        for _ in tensors:
            pass
        return
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    hub.save_hf(critic.network, part, tokenizer_dir, config=critic.hf_config(), tensors=tensors)
    for path in part.rglob("*"):
        flush_to_disk(path)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    logger.info("exported the critic to %s in %.2fs", target, time.perf_counter() - start)
