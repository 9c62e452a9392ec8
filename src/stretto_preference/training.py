"""What `sft` asks about pairs: their rows, the model and learner that train on them, and how rows are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stretto.chat.render import Renderer
from stretto.chat.tokenizer import Tokenizer
from stretto.config.root import SFTConfig
from stretto.config.sections.sft import PreferenceData, RewardSection
from stretto.models.hf import Policy
from stretto.trainer.learner import Learner
from stretto.trainer.learner import load_policy as load_language_model
from stretto_preference.learner import PairLearner, load_reward_model, reference_of
from stretto_preference.rows import Pairs, find_padding, load_pairs, pack_pairs, tokens_per_reply


def load_policy(cfg: SFTConfig, **tokens: Any) -> Policy:
    """The network that is trained: a language model, or one with a reward as its output."""
    if isinstance(cfg.pair_loss, RewardSection):
        return load_reward_model(cfg.model, **tokens)
    return load_language_model(cfg.model, may_be_meta=True, **tokens)


def load_rows(cfg: SFTConfig, data: PreferenceData, renderer: Renderer, longest: int, limit: str) -> Pairs:
    """The pairs of a data section as tokens; longest: of one sequence, as the key `limit` says."""
    is_scored = isinstance(cfg.pair_loss, RewardSection)
    limit, most = f"{limit} = {longest}", tokens_per_reply(cfg.seq_len, is_scored=is_scored)
    if most < longest:
        longest, limit = most, f"seq_len = {cfg.seq_len}"
    return load_pairs(data, renderer, cfg.loss_mask, longest, is_scored=is_scored, limit=limit)


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
