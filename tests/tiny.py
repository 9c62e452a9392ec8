"""What the trainer's tests share: a tiny policy, batches of random documents, a learner."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from stretto.base.paths import RunDir
from stretto.config.sections.model import LoRASection, ModelSection, ScratchSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models.config import parse_config
from stretto.models.decoder import Decoder
from stretto.models.hub import build_model, random_model
from stretto.models.lora import attach_adapters
from stretto.models.parts.initial import initialise
from stretto.records.alternatives import Alternatives
from stretto.records.sample import MicroBatch
from stretto.trainer.learner import Learner
from stretto.trainer.state.checkpoint import Saver

VOCAB = 40


def build_policy(seed: int = 0, hf=None, **shape) -> Decoder:
    """Weights larger than at initialisation, so that distributions are not flat and errors show.

    hf: other values for keys of its config.json.
    """
    policy = random_model(ScratchSection(seed=seed, max_position_embeddings=256, **shape), VOCAB, eos_token_id=1)
    if hf:
        policy = build_model(parse_config(policy.config.hf | hf, "tiny"), torch.float32, "cpu")
        initialise(policy, policy.config.initializer_range, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5)
            else:
                parameter.add_(torch.linspace(-0.2, 0.2, len(parameter)))
    return policy


def randomly_adapted(policy, lora: LoRASection, seed: int, scale: float):
    """The policy with an adapter beside it that changes what it computes."""
    attach_adapters(policy, lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, scale, generator=generator)
    return policy


def build_learner(policy: Decoder | None = None, *, optim=None, scheduler=None, **settings) -> Learner:
    model = ModelSection(
        dtype=settings.pop("dtype", "float32"), optimization_dtype=settings.pop("optimization_dtype", "float32")
    )
    return Learner(
        policy or build_policy(),
        model=model,
        optim=optim or AdamWOptim(lr=1e-2),
        scheduler=scheduler or ConstantScheduler(warmup_steps=0),
        max_steps=settings.pop("max_steps", None),
        **settings,
    )


def document(rng: np.random.Generator, prompt: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """A prompt and `length` sampled tokens, in the alignment of records/sample.py."""
    tokens = len(prompt) + length
    is_sampled = np.arange(tokens) >= len(prompt)
    return {
        "token_ids": np.concatenate((prompt, rng.integers(0, VOCAB, length))).astype(np.int32),
        "loss_mask": is_sampled,
        "logprobs": np.where(is_sampled, -3 * rng.random(tokens), 0).astype(np.float32),
        "advantages": np.where(is_sampled, rng.standard_normal(tokens), 0).astype(np.float32),
        "temperatures": np.full(tokens, rng.choice([0.7, 1.0, 1.3]), dtype=np.float32),
    }


def documents(seed: int = 0, *, num_groups: int = 3, group_size: int = 4) -> list[dict[str, np.ndarray]]:
    """Groups of documents that share a prompt each."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 9))
        out += [document(rng, prompt, int(rng.integers(1, 7))) for _ in range(group_size)]
    return out


def branches(seed: int = 0, *, width: int = 3, turns: int = 3, first_turns: int = 20) -> list[dict[str, np.ndarray]]:
    """Samples of conversations that part after each turn: an observation, then a trained reply.

    What they share is trained in all of them, with the log-probabilities and advantages of each.
    """
    rng = np.random.default_rng(seed)
    turn = lambda: (rng.integers(0, VOCAB, first_turns + rng.integers(6)), rng.integers(0, VOCAB, 4 + rng.integers(9)))
    paths = [[turn()] for _ in range(2)]
    for _ in range(turns - 1):
        paths = [[*path, turn()] for path in paths for _ in range(width - (rng.random() < 0.5))]
    docs = []
    for path in paths:
        ids = np.concatenate([part for pair in path for part in pair]).astype(np.int32)
        mask = np.concatenate([np.full(len(part), is_reply) for pair in path for is_reply, part in enumerate(pair)])
        is_sampled = mask.astype(bool)
        docs.append({
            "token_ids": ids,
            "loss_mask": is_sampled,
            "logprobs": np.where(is_sampled, -3 * rng.random(len(ids)), 0).astype(np.float32),
            "advantages": np.where(is_sampled, rng.standard_normal(len(ids)), 0).astype(np.float32),
            "temperatures": np.full(len(ids), rng.choice([1.0, 1.0, 1.3]), dtype=np.float32),
        })  # fmt: skip
    return docs


def pack(docs: list[dict[str, np.ndarray]], *, padding: int = 0, envs: list[str] | None = None) -> MicroBatch:
    """One micro batch of these documents, in order, and a last document that trains nothing."""
    streams = {name: [d[name] for d in docs] for name in docs[0]}
    if padding:
        for name, parts in streams.items():
            parts.append(np.zeros(padding, dtype=parts[0].dtype) + (name == "temperatures"))
    lengths = [len(ids) for ids in streams["token_ids"]]
    return MicroBatch(
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        sample_ids=tuple(f"g{i}.0/0" for i in range(len(docs))),
        envs=tuple(envs or ["env"] * len(docs)),
        **{name: np.concatenate(parts) for name, parts in streams.items()},
    )


def scored(seed: int = 0, **shape) -> list[dict[str, np.ndarray]]:
    """Documents whose tokens all have the score of their document, as the orchestrator sends them."""
    docs = documents(seed, **shape)
    for doc in docs:
        doc["advantages"][:] = doc["loss_mask"] * doc["advantages"].sum()
    return docs


def interrupted(doc: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same document with the text of a tool between sampled tokens."""
    sampled = np.flatnonzero(doc["loss_mask"])
    if len(sampled) > 2:
        for name in ("loss_mask", "advantages", "logprobs"):
            doc[name][sampled[1]] = 0
    return doc


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in learner.policy.named_parameters()}


def save_checkpoint(run: RunDir, learner: Learner, cursor: dict | None = None) -> None:
    """Write the trainer's half of a checkpoint and wait for it; every rank must call it."""
    Saver(run, is_async=False, on_written=lambda step: None).save(learner, cursor)


def with_streams(mb, seed=0):
    """Per-token weights of all three components, also outside the loss mask; alternatives for half of ref_kl."""
    rng = np.random.default_rng(seed)
    firsts = np.zeros(len(mb.token_ids), dtype=bool)
    firsts[mb.cu_seqlens[:-1]] = True
    sparse = lambda: np.where(firsts | (rng.random(len(firsts)) < 0.5), 0, rng.random(len(firsts))).astype(np.float32)
    ref_kl = sparse()
    return replace(
        mb,
        rl_weights=sparse(),
        ce_weights=sparse(),
        ref_kl_weights=ref_kl,
        ref_logprobs=-rng.random(len(firsts)).astype(np.float32),
        alternatives=some_alternatives(np.flatnonzero(ref_kl)[::2], rng),
    )


def some_alternatives(positions, rng, vocab=VOCAB, teachers=2, most=3):
    """Two teachers' likeliest tokens at these positions; some have fewer."""
    shape = (len(positions), teachers, most)
    ids = np.stack([rng.permutation(vocab)[: teachers * most] for _ in positions]).reshape(shape).astype(np.int32)
    ids[:, :, -1][rng.random(shape[:2]) < 0.3] = -1
    shares = rng.random(shape) / most
    return Alternatives(
        positions=positions.astype(np.int32),
        ids=ids,
        logprobs=np.where(ids < 0, 0, np.log(shares)).astype(np.float32),
        weights=np.tile(np.array([0.25, 0.75], np.float32), (len(positions), 1)),
        is_forward=rng.random(len(positions)) < 0.5,
    )
