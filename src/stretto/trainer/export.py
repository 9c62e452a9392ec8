"""Hugging Face weights of a run: RUN/weights/step_N, whole or not there, and `latest` beside it."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from torch import nn

from stretto.base.paths import RunDir
from stretto.models import hub
from stretto.trainer.checkpoint import flush_to_disk

logger = logging.getLogger(__name__)


def export_weights(run: RunDir, policy: nn.Module, step: int, tokenizer_dir: Path) -> Path:
    """Write a directory that transformers and vLLM load, then point `latest` at it."""
    start, target = time.perf_counter(), run.weights_step(step)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    hub.save_hf(policy, part, tokenizer_dir)
    for path in part.iterdir():
        flush_to_disk(path)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    run.link_latest_weights(step)
    logger.info("exported weights step=%d to %s in %.2fs", step, target, time.perf_counter() - start)
    return target
