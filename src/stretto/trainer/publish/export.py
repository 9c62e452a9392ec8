"""Exports Hugging Face weights to RUN/weights/step_N, complete or absent; links `latest`."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from stretto.base import rundir
from stretto.base.errors import EngineError
from stretto.base.files import flush_parents, put_in_place
from stretto.base.paths import RunDir
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import CkptSection, num_exports_kept
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.lora import save_adapter
from stretto.models.value_head import HEAD_NAME, SCORE_NAME, classification_config, has_value_head
from stretto.trainer.optim.build import MasterWeights, TrainedWeights
from stretto.trainer.parallel.weights import gather_peft_adapter, save_weights
from stretto.trainer.ranks.mesh import Mesh

logger = logging.getLogger(__name__)

ADAPTER = "lora_adapters"


def export_weights(
    run: RunDir, weights: TrainedWeights, step: int, tokenizer_dir: Path, adapted: ModelSection | None = None
) -> Path:
    """Write a directory that transformers and vLLM load, then point `latest` at it.

    All ranks must call it; each writes some of the tensors into files of its own.

    adapted: the [model] of a policy with LoRA, to save its adapter beside the merged weights; None: not to.
    """
    start, target = time.perf_counter(), run.weights_step(step)
    with new_directory(target, weights.mesh) as directory:
        _write(weights, directory, tokenizer_dir)
        if adapted is not None:
            assert adapted.lora is not None
            adapter = gather_peft_adapter(weights)
            if weights.mesh.is_lead:
                base = None if adapted.scratch is not None else adapted.name
                save_adapter(adapter, directory / ADAPTER, adapted.lora, base)
    if weights.mesh.is_lead:
        run.link_latest_weights(step)
        flush_parents(run.latest_weights, run.path.parent)
        logger.info("exported weights step=%d to %s in %.2fs", step, target, time.perf_counter() - start)
    return target


def export_model(weights: TrainedWeights, target: Path, tokenizer_dir: Path) -> None:
    """Write a model directory, with a value head that of a classification model; all ranks must call it."""
    with new_directory(target, weights.mesh) as directory:
        _write(weights, directory, tokenizer_dir)


def prune_exports(directory: Path, ckpt: CkptSection, step: int, mesh: Mesh) -> None:
    """Delete exports beyond those that [ckpt] keeps, after the export of `step`; all ranks may call it."""
    if mesh.is_lead:
        rundir.prune_exports(directory, step, num_exports_kept(ckpt), ckpt.keep_interval)


@contextmanager
def new_directory(target: Path, mesh: Mesh) -> Iterator[Path]:
    """A temporary directory that is renamed to `target` once all ranks of the mesh have written into it."""
    directory = target.with_name(target.name + ".part")
    if mesh.is_lead:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    mesh.barrier()
    try:
        yield directory
    except (OSError, SafetensorError) as cause:
        first = (str(cause).splitlines() or [""])[0]
        raise EngineError(f"{directory}: cannot be written: {first}; is the disk full?") from cause
    mesh.barrier()
    if mesh.is_lead:
        put_in_place(directory, target, is_durable=True)


def _write(weights: TrainedWeights, directory: Path, tokenizer_dir: Path) -> None:
    """Write a model directory: of a language model, or of a classifier with one label."""
    names: dict[str, str] = {}
    config, tensors = weights.policy.config.hf, None
    if has_value_head(module := weights.policy):
        assert isinstance(module, Decoder)
        names, config = {HEAD_NAME: SCORE_NAME}, classification_config(module)
    if isinstance(weights, MasterWeights):
        tensors = ((names.get(name, name), tensor) for name, tensor in hub.export_tensors(weights.policy))
    else:
        save_weights(weights, directory, names)
    if weights.mesh.is_lead:
        hub.save_model_directory(weights.export_dtype, directory, tokenizer_dir, config, tensors)
