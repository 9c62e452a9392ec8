"""Shared by the engine's tests: a tiny random model, requests, and running them to their end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from stretto.config.sections.model import ScratchSection
from stretto.families.table import VISION_FAMILIES, families_with
from stretto.inference.embedded.core import CoreSettings, EngineCore
from stretto.inference.embedded.scheduler import EngineRequest, RequestState
from stretto.inference.embedded.slots import SequenceState
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.hub import random_model
from stretto.models.lm_head import head_logits
from stretto.records.generate import Completion, GenerateRequest, SamplingParams

VOCAB = 40
EOS = 1
RECURRENT = [name for name in families_with(lambda traits: traits.is_recurrent) if name not in VISION_FAMILIES]
USE_KERNELS = True  # set by the fixture both_engines


@pytest.fixture(scope="module", params=[True, False], ids=["kernels", "torch"])
def both_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests of the embedded engine that hold with kernels and with torch's operations."""
    global USE_KERNELS
    USE_KERNELS = request.param
    yield
    USE_KERNELS = True


def build_model(seed: int = 0, **shape) -> Decoder:
    """Weights larger than at initialisation, so that distributions are not flat."""
    model = random_model(ScratchSection(seed=seed, max_position_embeddings=256, **shape), VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6)
    return model


def build_varied(family: str, **shape: int) -> Decoder:
    """Norms, biases and whatever else has one dim are not as at the start."""
    generator = torch.Generator().manual_seed(1)
    model = build_model(
        **{
            "family": family, "num_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "sliding_window": 20, "index_topk": 12,
        } | shape
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def build_core(model: Decoder | None = None, **settings) -> EngineCore:
    defaults = {"kv_cache_tokens": 4096, "max_num_seqs": 64, "eos_ids": (EOS,), "use_kernels": USE_KERNELS}
    settings = defaults | settings
    return EngineCore(model or build_model(), CoreSettings(**settings))


def prompt(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(2, VOCAB, length).astype(np.int32)


def ask(name: str, prompt_ids: np.ndarray, *, n: int = 1, salt: str | None = None, scored: bool = False, **sampling):
    sampling = {"max_tokens": 12, "seed": 7, "ignore_eos": True} | sampling
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        n=n,
        sampling=SamplingParams(**sampling),
        cache_salt=salt,
        prompt_logprobs=scored,
    )


def submit(core: EngineCore, *specs: GenerateRequest) -> list[EngineRequest]:
    requests = []
    for spec in specs:
        assert core.refusal_reason(spec) is None, core.refusal_reason(spec)
        requests.append(core.build_request(spec))
        core.submit(requests[-1])
    return requests


def finish(core: EngineCore, *, is_audited: bool = True) -> None:
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
        if is_audited:
            assert audit(core) == []


def run(core: EngineCore, *specs: GenerateRequest, is_audited: bool = True) -> list[list[Completion]]:
    requests = submit(core, *specs)
    finish(core, is_audited=is_audited)
    return [request.completions for request in requests]


def audit(core: EngineCore) -> list[str]:
    """Broken invariants between slots, blocks and requests; empty if there are none."""
    slots, pool, scheduler = core.slots, core.pool, core.scheduler
    owners = np.zeros(pool.num_blocks, np.int64)
    broken = []
    for slot in np.flatnonzero((slots.num_blocks > 0) | (slots.state == SequenceState.RUNNING)).tolist():
        blocks = slots.blocks[slot, : slots.num_blocks[slot]]
        np.add.at(owners, blocks, 1)
        is_running = slots.state[slot] == SequenceState.RUNNING
        if not is_running and len(blocks):
            broken.append(f"slot {slot} holds blocks while {SequenceState(slots.state[slot]).name}")
        if is_running and len(blocks) * slots.block_size < slots.num_computed[slot]:
            broken.append(f"slot {slot} has fewer blocks than computed tokens")
        if len(set(blocks.tolist())) != len(blocks) or 0 in blocks:
            broken.append(f"slot {slot} names a block twice or the null block")
    owners[0] = 1
    if (owners != pool.refs).any():
        broken.append(f"reference counts differ at blocks {np.flatnonzero(owners != pool.refs).tolist()}")
    if pool.num_free + int((pool.refs > 0).sum()) != pool.num_blocks:
        broken.append("blocks are lost or both owned and free")
    writable = [
        int(slots.blocks[s, slots.num_computed[s] // slots.block_size])
        for s in scheduler.running.tolist()
        if slots.num_computed[s] // slots.block_size < slots.num_blocks[s]
    ]
    if (pool.refs[writable] != 1).any():
        broken.append("a block that will be written is shared")
    if any(request.state is RequestState.FINISHED for request in core.requests.values()):
        broken.append("a finished request is still listed")
    return broken


def bits(completion: Completion) -> tuple[bytes, bytes]:
    """The bytes of tokens and logprobs."""
    return completion.token_ids.tobytes(), completion.logprobs.tobytes()


def packed_logprobs(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Logprob of each token after the first, by the trainer's forward pass over the whole sequence."""
    logprobs = _forward(model, tokens)[:-1]
    return logprobs.gather(1, torch.from_numpy(tokens[1:, None].astype(np.int64))).squeeze(1).numpy()


def packed_distribution(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Logprobs of all tokens that may come next."""
    return _forward(model, tokens)[-1].numpy()


def _forward(model: Decoder, tokens: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        return torch.log_softmax(head_logits(hidden, model.output_weight), -1)
