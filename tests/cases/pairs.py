"""What tests of pairs share: random pairs, a learner of each loss, what a reply scores alone."""

from __future__ import annotations

import numpy as np
import torch
from tiny import VOCAB, build_policy

from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.sft import DpoSection, RewardSection
from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.value_head import with_value_head
from stretto_preference.learner import PairLearner
from stretto_preference.rows import Pair, Pairs, scored_example
from stretto_sft.rows import Example

PAIR_LOSSES = {
    "dpo": DpoSection(beta=0.5),
    "ipo": DpoSection(loss_type="ipo", beta=0.2),
    "free": DpoSection(reference_free=True, label_smoothing=0.1),
    "with_nll": DpoSection(beta=0.5, nll_coef=0.7),
    "reward": RewardSection(center_rewards_coefficient=0.05),
}
PAIR_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def random_pairs(seed: int = 0, count: int = 10, *, is_scored: bool) -> Pairs:
    """Prompts of some tokens, with two replies each."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 9))
        replies = []
        for _ in range(2):
            ids = np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(1, 8))]).astype(np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            replies.append(scored_example(ids) if is_scored else Example(ids, mask))
        found.append(Pair((replies[0], replies[1]), float(rng.random()) if is_scored else 0.0))
    return Pairs(tuple(found))


def build_pair_learner(loss: str, *, lora: bool = False, model: dict | None = None, mesh=None, **shape) -> PairLearner:
    """A learner whose head, if it has one, is not 0."""
    torch.manual_seed(0)  # adapters begin with it
    policy = build_policy(seed=3, **PAIR_SHAPE | shape)
    if isinstance(PAIR_LOSSES[loss], RewardSection):
        policy = with_value_head(policy)
        policy.lm_head.weight.data = torch.linspace(-0.5, 0.5, PAIR_SHAPE["hidden_size"])[None]
    section = ModelSection(
        dtype="float32", lora=LoRASection(rank=4, alpha=12.0) if lora else None, **{} if model is None else model
    )
    return PairLearner(
        policy,
        pair_loss=PAIR_LOSSES[loss],
        model=section,
        optim=AdamWOptim(lr=1e-3, max_norm=0.5, eps=1e-3),
        scheduler=ConstantScheduler(warmup_steps=0),
        max_steps=None,
        mesh=mesh,
    )


def score_alone(policy: Decoder, example: Example) -> torch.Tensor:
    """The log-probability of a reply's trained tokens, or its score: one document, by itself."""
    ids = torch.from_numpy(example.token_ids.astype(np.int64))
    hidden = policy.hidden(ids, PackedLayout((0, len(ids)), ids.device))
    logits = hidden @ policy.output_weight.T
    if logits.shape[1] == 1:
        return logits[-2, 0]
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(example.is_trained[1:])].sum()
