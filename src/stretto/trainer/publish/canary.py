"""The trainer's part of the canary: log-probabilities of fixed tokens per version.

orchestrator/versions/canary_check.py compares them with an engine's after the update. Faults in loading weights appear
at the start or after a change, so the first versions are all checked, and later ones at an interval or at the
orchestrator's request. With a vision tower there is an image among the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from stretto.base.errors import EngineError
from stretto.families.shape import VisionShape
from stretto.models.fp8.checkpoint import BlockLayout, round_inputs, stop_rounding
from stretto.records.sample import MicroBatch, images_by_document
from stretto.records.weight_manifest import Canary, CanaryImage
from stretto.trainer.learner import Learner

if TYPE_CHECKING:
    from jaxtyping import Int

NUM_ALWAYS_CHECKED = 10
"""The first versions that a process publishes, which are all checked."""


def is_canary_due(
    version: int, num_published: int, interval: int | None, *, is_wanted: bool, since: int | None = None
) -> bool:
    """True if this version is to be checked.

    num_published: versions that this process published before it; since: the newest of them, if not the one before.
    """
    if interval is None:
        return False
    since = version - 1 if since is None else since
    return is_wanted or num_published < NUM_ALWAYS_CHECKED or version // interval > since // interval


def score_canary(
    learner: Learner, num_tokens: int, layout: BlockLayout | None = None, *, with_probe: bool = False
) -> Canary:
    """The log-probabilities of fixed tokens, which are the same for every version of a run; all ranks must call it.

    with_probe: those under scaled weights too. An adapter has no probe: half of its matrices are 0 at first.
    layout: that of engines in 8 bits. An engine rounds weights and the rows that they are multiplied with. Both have
    the same relative error, and are independent, so the error of both is sqrt(2) times that of rounded rows alone, with
    which the tokens are scored once more.

    Raises: EngineError when they are not finite: no engine could agree with them.
    """
    canary = _score(learner, num_tokens)
    if with_probe and learner.adapter_info() is None:
        with learner.network.scaled():
            canary = msgspec.structs.replace(canary, probe=_score(learner, num_tokens).logprobs)
    if layout is None:
        return canary
    policy = learner.policy
    table = getattr(policy, "tensor_map", None)
    hooks = round_inputs(policy, layout.names, table)
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled blocks would not see the hooks
            other = _score(learner, num_tokens)
    finally:
        stop_rounding(policy, hooks)
    error = np.abs(np.subtract(canary.logprobs, other.logprobs))[1:].mean()
    return msgspec.structs.replace(canary, rounding=float(error) * 2**0.5)


def _score(learner: Learner, num_tokens: int) -> Canary:
    policy = learner.policy
    token_ids = fixed_tokens(policy.output_weight.shape[0], num_tokens)
    shown = None
    if (vision := getattr(policy.config, "vision", None)) is not None:
        token_ids, shown = with_image(token_ids, vision, policy.config.hf)
    images = () if shown is None else (shown.draw(),)
    ones, length = np.ones(num_tokens, np.float32), np.array([0, num_tokens], np.int32)
    zeros = np.zeros(num_tokens, np.float32)
    logprobs, _ = learner.logprobs(
        MicroBatch(
            token_ids=token_ids,
            cu_seqlens=length,
            loss_mask=np.ones(num_tokens, bool) if shown is None else token_ids != shown.token_id,
            logprobs=zeros,
            advantages=zeros,
            temperatures=ones,
            sample_ids=("canary",),
            envs=("canary",),
            **images_by_document([images]),
        )
    )
    if not np.isfinite(logprobs).all():
        raise EngineError(
            f"weights of version {learner.step} give log-probabilities that are not finite: training has diverged. "
            "Lower [optim] lr, and continue from the last checkpoint with --resume."
        )
    return Canary(tuple(token_ids.tolist()), tuple(logprobs.tolist()), image=shown)


def with_image(
    token_ids: Int[np.ndarray, " tokens"], vision: VisionShape, hf: Mapping[str, Any]
) -> tuple[Int[np.ndarray, " tokens"], CanaryImage | None]:
    """The tokens with a small image in their middle if they are enough; no other token is a placeholder."""
    tokens, side = token_ids.copy(), 2 * vision.merge_size
    tokens[tokens == vision.image_token_id] = 0 if vision.image_token_id else 1
    around = [hf.get(f"vision_{name}_token_id") for name in ("start", "end")]
    start, end = ([] if token is None else [token] for token in around)
    image_tokens = [*start, *[vision.image_token_id] * 4, *end]
    if len(tokens) < 3 * len(image_tokens):
        return tokens, None
    middle = len(tokens) // 2
    tokens[middle : middle + len(image_tokens)] = image_tokens
    return tokens, CanaryImage((1, side, side), vision.patch_values, vision.image_token_id)


def fixed_tokens(vocab_size: int, num_tokens: int) -> Int[np.ndarray, " tokens"]:
    """Random token ids, int32; the same for the same vocabulary size."""
    return np.random.default_rng(vocab_size).integers(0, vocab_size, num_tokens, dtype=np.int32)
