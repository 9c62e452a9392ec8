"""What `sft` asks about pairs: their rows, the model and learner that train on them, and how rows are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stretto.chat.tokenizer import Tokenizer
from stretto.config.root import SFTConfig
from stretto.config.sections.sft import RewardSection
from stretto.models.hf import Policy
from stretto.trainer.learner import Learner
from stretto.trainer.learner import load_policy as load_language_model
from stretto_preference.learner import PairLearner, load_reward_model, reference_of
from stretto_preference.rows import Pairs, find_padding, load_rows, pack_pairs

__all__ = ["adapt", "build_learner", "build_packer", "load_policy", "load_rows"]


def load_policy(cfg: SFTConfig, **tokens: Any) -> Policy:
    """The network that is trained: a language model, or one with a reward as its output."""
    if isinstance(cfg.pair_loss, RewardSection):
        return load_reward_model(cfg.model, **tokens)
    return load_language_model(cfg.model, may_be_meta=True, **tokens)


def adapt(cfg: SFTConfig, policy: Policy, tokenizer: Tokenizer, pairs: Pairs) -> None:
    """Give a reward model's config.json the padding by which others find the end of a text."""
    if isinstance(cfg.pair_loss, RewardSection):
        policy.config.hf["pad_token_id"] = find_padding(policy.config.hf, tokenizer, pairs)


def build_learner(cfg: SFTConfig, policy: Policy, **common: Any) -> PairLearner:
    """The learner of pairs; common: the arguments of a Learner."""
    assert cfg.pair_loss is not None, "[data] has pairs"
    return PairLearner(policy, pair_loss=cfg.pair_loss, **common)


def build_packer(
    cfg: SFTConfig, learner: Learner, pairs: Pairs, kept: Path, wanted: Iterable[int]
) -> Callable[[Sequence[int]], list[Any]]:
    """What packs pairs into micro batches, by their indices.

    wanted: the pairs that will be asked for; the start's log-probabilities of them are computed now, and kept.
    """
    assert isinstance(learner, PairLearner)
    reference = None
    if learner.needs_reference:
        start = cfg.model.name if cfg.model.scratch is None else f"scratch, seed {cfg.seed}"
        reference = reference_of(learner, pairs, wanted, cfg.seq_len, kept=kept, start=start)
    return lambda indices: pack_pairs(pairs, indices, cfg.seq_len, reference)
