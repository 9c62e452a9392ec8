"""Writes trained tokens with log-probabilities and advantages as JSON lines (`enable_token_export`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from stretto.records.sample import MicroBatch
from stretto.trainer.batch.pass_inputs import PassInputs

if TYPE_CHECKING:
    from jaxtyping import Float


def delete_after(directory: Path, step: int) -> None:
    """Delete the files of later steps, which a resumed run trains again."""
    for path in directory.rglob("step_*"):
        number = path.stem.removeprefix("step_")
        if path.suffix in (".bin", ".jsonl") and number.isdecimal() and int(number) > step:
            path.unlink()


def export_tokens(
    directory: Path,
    step: int,
    mb: MicroBatch,
    inputs: PassInputs,
    logprobs: Float[Tensor, " trained"],
    entropy: Float[Tensor, " trained"],
) -> None:
    """Append one line per sample to <directory>/step_N.jsonl; an observer of the learner, once it has a directory.

    Per trained token: its position in the sample, id, log-probability under trainer and sampler, entropy, advantage.
    """
    directory.mkdir(parents=True, exist_ok=True)
    trained = logprobs.detach().cpu().numpy(), entropy.cpu().numpy()
    with (directory / f"step_{step}.jsonl").open("a") as file:
        for document in np.unique(inputs.documents):
            file.write(json.dumps(_line(mb, inputs, int(document), *trained)) + "\n")


def _line(mb: MicroBatch, inputs: PassInputs, document: int, logprobs: np.ndarray, entropy: np.ndarray) -> dict:
    is_here = inputs.documents == document
    tokens = inputs.sources[is_here]
    return {
        "sample_id": mb.sample_ids[document],
        "env": mb.envs[document],
        "position": (tokens - mb.cu_seqlens[document]).tolist(),
        "token_id": mb.token_ids[tokens].tolist(),
        "trainer_logprob": logprobs[is_here].tolist(),
        "sampler_logprob": inputs.streams.behavior_logprobs.cpu().numpy()[is_here].tolist(),
        "entropy": entropy[is_here].tolist(),
        "advantage": mb.advantages[tokens].tolist(),
    }
