"""The learner of preference pairs: DPO of a policy, or a reward model.

It has the steps, state and files of a Learner. What a pass gives is a number for each reply: the log-probability of its
trained tokens, or the score at its end; the loss is that of loss.py, a mean over the pairs of the step
on all ranks. Both replies of a pair are in one row (rows.py), and on every mesh a pass gives the numbers of all
tokens of the row to each of its ranks, so any mesh computes the loss of one rank.

The reference of DPO is the policy before its first step: what it says of each pair is computed once, before training,
and kept in RUN/reference_logprobs.npz, because a resumed run has the start's weights no more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.files import atomic_path
from stretto.config.sections.model import ModelSection
from stretto.config.sections.sft import DpoSection, RewardSection
from stretto.data.hub_model import fetch
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.value_head import has_value_head, load_value_model, with_value_head
from stretto.trainer.batch.metrics import StepSums
from stretto.trainer.batch.pass_inputs import PassInputs
from stretto.trainer.learner import Learner, load_policy
from stretto.trainer.network import PassCounts, Scores
from stretto.trainer.ranks.mesh import num_ranks, run_on_lead, training_device
from stretto_preference.loss import bradley_terry_loss, dpo_loss
from stretto_preference.rows import PairBatch, Pairs, pack_pairs

if TYPE_CHECKING:
    from jaxtyping import Float

logger = logging.getLogger(__name__)

PAIRS_PER_BLOCK = 64
"""Pairs that the reference scores together: always the same ones, so that a resumed run finds the same bits."""


def load_reward_model(section: ModelSection, **tokens: Any) -> Decoder:
    """The network of [model] with one output, which is 0 for every text unless the directory has its own.

    Raises: ConfigError for a model that cannot have one.
    """
    if section.scratch is not None:
        policy = load_policy(section, **tokens)
        assert isinstance(policy, Decoder), "a scratch model is our own"
        return _checked(with_value_head(policy), section)
    directory = fetch(section.name)
    if section.impl == "hf" or not hub.has_custom_module(directory):
        raise ConfigError(
            f'[loss] type = "reward" needs a model that stretto computes itself, and {section.name} is one of '
            "transformers; give a model of another family (docs/models.md lists them)"
        )
    dtype, is_meta = hub.dtype_of(section.dtype, training_device()), num_ranks() > 1
    return _checked(
        load_value_model(directory, dtype=dtype, device=training_device(), is_meta=is_meta, key="model.name"), section
    )


def _checked(module: Decoder, section: ModelSection) -> Decoder:
    if module.config.vision is not None:
        raise ConfigError(
            f'[loss] type = "reward": {section.name} sees images, and a reward model reads text; give a model of text'
        )
    return module


class PairLearner(Learner):
    """Trains `policy` on pairs; a policy with a value head is a reward model."""

    def __init__(self, policy: Policy, *, pair_loss: DpoSection | RewardSection, **common: Any) -> None:
        """common: the arguments of a Learner."""
        super().__init__(policy, **common)
        self.pair_loss = pair_loss
        assert has_value_head(policy) == isinstance(pair_loss, RewardSection), (
            "a reward needs a value head, DPO a vocabulary"
        )
        self._pair_sums = StepSums()

    @property
    def needs_reference(self) -> bool:
        """True if the pairs to train on need what the reference says of them."""
        return isinstance(self.pair_loss, DpoSection) and not self.pair_loss.reference_free

    def forward_backward(self, batches: Sequence[PairBatch]) -> None:  # type: ignore[override]
        """Add the gradients of a step; all ranks must call it, each with its share of the rows."""
        rows = [batch.micro_batch for batch in batches]
        local = {"pairs": float(sum(len(batch.indices) for batch in batches))}
        sums = self.mesh.reduce(local | self.network.count_passes(rows))
        num_pairs = sums.pop("pairs")

        def score(index: int, inputs: PassInputs, scores: Scores) -> Tensor:
            losses, facts = self._losses(scores.values, inputs, batches[index])
            self._pair_sums.add(facts)
            return losses.sum() / num_pairs

        self.network.run(rows, score, is_training=True, counts=PassCounts.of(sums))

    def evaluate(self, batches: Sequence[PairBatch]) -> dict[str, float]:  # type: ignore[override]
        """Means over the pairs of all ranks, `loss` among them; weights and metrics do not change."""
        found = StepSums()

        def score(index: int, inputs: PassInputs, scores: Scores) -> None:
            found.add(self._losses(scores.values, inputs, batches[index])[1])

        self.network.run([batch.micro_batch for batch in batches], score, is_training=False)
        return _means(found.pop_sums(self.mesh.reduce))

    def reply_scores(self, batches: Sequence[PairBatch]) -> list[Float[np.ndarray, "pairs 2"]]:
        """Both replies' log-probability (nats) or score of each pair of this rank's rows; all ranks must call it."""
        found = [np.zeros((len(batch.indices), 2)) for batch in batches]

        def score(index: int, inputs: PassInputs, scores: Scores) -> None:
            found[index] = self._by_reply(scores.values, inputs, len(found[index])).double().cpu().numpy()

        self.network.run([batch.micro_batch for batch in batches], score, is_training=False)
        return self.mesh.from_last_stage(found, list[np.ndarray])

    def _by_reply(
        self, values: Float[Tensor, " trained"], inputs: PassInputs, num_pairs: int
    ) -> Float[Tensor, "pairs 2"]:
        """Sums over the trained tokens of each reply."""
        documents = torch.from_numpy(inputs.documents).to(values.device)
        return values.new_zeros(2 * num_pairs).index_add(0, documents, values).view(-1, 2)

    def _losses(
        self, values: Float[Tensor, " trained"], inputs: PassInputs, batch: PairBatch
    ) -> tuple[Float[Tensor, " pairs"], dict[str, Tensor | float]]:
        """The loss of each pair of a row, and sums for metrics."""
        loss, num_pairs = self.pair_loss, len(batch.indices)
        replies = self._by_reply(values, inputs, num_pairs)
        facts: dict[str, Tensor | float] = {"pairs": float(num_pairs)}
        if isinstance(loss, DpoSection):
            ratios = replies
            if self.needs_reference:
                assert batch.reference is not None, "the reference has not scored these pairs"
                ratios = replies - torch.from_numpy(batch.reference).to(replies.device, replies.dtype)
            counts = np.bincount(inputs.documents, minlength=2 * num_pairs).reshape(-1, 2)
            num_tokens = torch.from_numpy(counts).to(replies.device, replies.dtype)
            losses = dpo_loss(
                ratios, num_tokens, loss_type=loss.loss_type, beta=loss.beta, label_smoothing=loss.label_smoothing
            )
            if loss.nll_coef is not None:  # Source: RPO, arXiv:2404.19733, equation 1
                losses = losses - loss.nll_coef * replies[:, 0] / num_tokens[:, 0].clamp(min=1)
            rewards = loss.beta * ratios.detach()
            facts |= {"logps/chosen": replies[:, 0].detach().sum(), "logps/rejected": replies[:, 1].detach().sum()}
        else:
            margins = torch.from_numpy(batch.margins).to(replies.device, replies.dtype)
            losses = bradley_terry_loss(replies, margins, center_coefficient=loss.center_rewards_coefficient)
            rewards = replies.detach()
        facts |= {
            "loss": losses.detach().sum(),
            "rewards/chosen": rewards[:, 0].sum(),
            "rewards/rejected": rewards[:, 1].sum(),
            "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).sum(),
            "rewards/margins": (rewards[:, 0] - rewards[:, 1]).sum(),
        }
        return losses, facts

    def _pop_means(self) -> dict[str, float]:
        self._sums.pop_sums(self.mesh.reduce)
        means = _means(self._pair_sums.pop_sums(self.mesh.reduce))
        return {"loss/mean": means.pop("loss")} | means


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Sums divided by the number of pairs."""
    num_pairs = max(sums.pop("pairs"), 1.0)
    return {name: value / num_pairs for name, value in sums.items()}


def reference_of(
    learner: PairLearner, pairs: Pairs, wanted: Iterable[int], row_tokens: int, *, kept: Path, start: str
) -> Float[np.ndarray, "pairs 2"]:
    """What the learner says now of the wanted pairs; NaN for others. All ranks must call it, before the first step.

    kept: a file that has what an earlier start of the run found, and gets what is found now. start: what names the
    weights, so that those of others are not read.
    """
    key = f"{pairs.fingerprint()} of {len(pairs)} by {start}"
    found = run_on_lead(lambda: _read(kept, key, len(pairs)), np.ndarray)
    found = np.array(found)  # what a message holds cannot be written to
    blocks = sorted({i // PAIRS_PER_BLOCK for i in wanted if np.isnan(found[i, 0])})
    if not blocks:
        return found
    logger.info("the start's log-probabilities are computed, of %d blocks of %d pairs", len(blocks), PAIRS_PER_BLOCK)
    for block in blocks:
        members = range(block * PAIRS_PER_BLOCK, min((block + 1) * PAIRS_PER_BLOCK, len(pairs)))
        rows = learner.mesh.local_items(pack_pairs(pairs, members, row_tokens))
        scored = zip(rows, learner.reply_scores(rows))
        mine = [np.column_stack([row.indices, values]) for row, values in scored] or [np.zeros((0, 3))]
        for of_rank in learner.mesh.gather(np.concatenate(mine), np.ndarray):
            found[of_rank[:, 0].astype(np.int64)] = of_rank[:, 1:]
    run_on_lead(lambda: _write(kept, key, found), type(None))
    return found


def _read(path: Path, key: str, num_pairs: int) -> np.ndarray:
    """What a file has; NaN if it is of other pairs or damaged, or there is none."""
    try:
        if path.is_file():
            with path.open("rb") as opened, np.load(opened) as file:
                if str(file["key"]) == key and file["logprobs"].shape == (num_pairs, 2):
                    return np.asarray(file["logprobs"])
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        logger.warning("%s is damaged (%s): the start's log-probabilities are computed again", path, error)
    return np.full((num_pairs, 2), np.nan)


def _write(path: Path, key: str, found: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part, part.open("wb") as file:
        np.savez(file, key=np.array(key), logprobs=found)
