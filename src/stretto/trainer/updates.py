"""Turns a batch into the updates of a step: advantages, samples per update, policy, valuer.

    at the start: log-probabilities of policy and reference, values of the valuer -> advantages and returns
    epochs x updates: some of the samples -> valuer -> policy

Most algorithms need none of this: their batch has its advantages already and is one update.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from stretto.algorithms import kl
from stretto.algorithms.advantages import discounted_returns, gae, token_rewards
from stretto.algorithms.credit import whiten
from stretto.config.sections.algorithm import Advantages, GaeAdvantages, ReturnsAdvantages
from stretto.config.sections.trainer import TrainerSection
from stretto.records.alternatives import concat_alternatives
from stretto.records.row_packing import PrefixTree, pack_rows, pack_tree
from stretto.records.sample import MicroBatch, images_by_document
from stretto.records.support import concat_supports
from stretto.records.token_counts import ComponentWeights, find_documents
from stretto.trainer.batch.metrics import Reduce
from stretto.trainer.hooks import Schedule, TrainerHooks, load_hooks
from stretto.trainer.learner import Learner

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

logger = logging.getLogger(__name__)


class Updates:
    """Trains a learner, and its valuer if it has one, on one batch per step."""

    def __init__(self, learner: Learner, section: TrainerSection, *, hooks: TrainerHooks | None = None) -> None:
        self.learner, self._valuer = learner, learner.valuer
        self._hooks = load_hooks(section.hooks) if hooks is None else hooks
        learner.user = self._hooks.in_loss
        self.section = section
        self._reduce = learner.mesh.reduce
        self._has_warned = False
        self._has_single_update = (
            section.advantages is None
            and learner.valuer is None
            and section.updates_per_step == section.epochs_per_step == 1
            and not self._hooks
        )

    def train(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One step on this rank's batch; its metrics. All ranks must call it."""
        learner, section, valuer = self.learner, self.section, self._valuer
        if self._has_single_update:
            learner.forward_backward(micro_batches)
            return learner.optim_step()
        step = learner.step + 1
        if valuer is not None:
            valuer.start_step(step, micro_batches)
        micro_batches, metrics = self._estimate(list(micro_batches))
        micro_batches = self._hooks.process(step - 1, micro_batches)
        num_updates = self._count_updates(micro_batches)
        if valuer is not None:
            valuer.start_updates(micro_batches, num_updates)
        parts = parts_of_step(micro_batches, section, step, num_updates, shares_prefixes=learner.shares_prefixes)
        for number, part in enumerate(parts):
            if valuer is not None:
                valuer.train(part, step)
            if step > learner.frozen_steps:
                network = learner.network
                schedule = network.schedule or Schedule(learner.next_lr)
                self._hooks.call("before_train_step", step - 1, number, network.module, network.optimizer, schedule)
                learner.forward_backward(part)
                learner.update()
        metrics |= learner.end_step()
        return metrics if valuer is None else metrics | valuer.pop_metrics()

    def _estimate(self, micro_batches: list[MicroBatch]) -> tuple[list[MicroBatch], dict[str, float]]:
        """The batch with log-probabilities, advantages, values and returns before the first update; metrics."""
        section, learner = self.section, self.learner
        cfg, uses_rollout_logprobs = section.advantages, section.loss.use_rollout_logprobs
        has_kl_penalty = cfg is not None and cfg.kl_coef > 0
        has_several_updates = section.updates_per_step * section.epochs_per_step > 1
        is_compared_later = has_several_updates or has_kl_penalty or self._hooks.needs_logprobs
        if is_compared_later:
            self._hooks.call("before_log_prob", learner.network.module, "")
        if is_compared_later and (not uses_rollout_logprobs or self._has_unknown(micro_batches)):
            computed = learner.trained_logprobs(micro_batches)
            micro_batches = [
                _with_trainer_logprobs(mb, logprobs, is_old=not uses_rollout_logprobs)
                for mb, logprobs in zip(micro_batches, computed)
            ]
        old = [mb.logprobs if mb.old_logprobs is None else mb.old_logprobs for mb in micro_batches]
        if cfg is None:
            return micro_batches, {}
        if has_kl_penalty:
            self._hooks.call("before_log_prob", learner.network.reference_module, "ref_")
        reference = learner.trained_logprobs(micro_batches, is_reference=True) if has_kl_penalty else None
        values = None if self._valuer is None else self._valuer.values(micro_batches)
        return estimate_advantages(micro_batches, cfg, old, reference, values, self._reduce)

    def _has_unknown(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """True if the sampler's log-probability of some token is unknown, on any rank."""
        is_here = any(np.isnan(mb.logprobs).any() for mb in micro_batches)
        return bool(self._reduce({"max/unknown": float(is_here)})["max/unknown"])

    def _count_updates(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Updates of an epoch, the same on every rank: no more than a rank has samples."""
        if self.section.updates_per_step == 1:
            return 1
        num_samples = sum(mb.num_samples for mb in micro_batches)
        most = int(self._reduce({"max/samples": float(num_samples)})["max/samples"])
        num_updates = max(1, min(self.section.updates_per_step, most))
        if num_updates < self.section.updates_per_step and not self._has_warned:
            self._has_warned = True
            text = "updates_per_step = %d, but no rank has more than %d samples of this batch: it makes %d updates"
            logger.warning(text, self.section.updates_per_step, most, num_updates)
        return num_updates


def parts_of_step(
    micro_batches: Sequence[MicroBatch],
    section: TrainerSection,
    step: int,
    num_updates: int,
    *,
    shares_prefixes: bool = False,
) -> Iterator[list[MicroBatch]]:
    """The micro batches of each update of a step, on one rank; shares_prefixes as in `split_samples`."""
    if num_updates == section.epochs_per_step == section.updates_per_step == 1:
        yield list(micro_batches)
        return
    for epoch in range(section.epochs_per_step):
        order = None
        if section.epochs_per_step > 1:
            order = np.random.default_rng((section.seed, step, epoch))
        yield from split_samples(micro_batches, num_updates, order, shares_prefixes=shares_prefixes)


def rl_token_mask(mb: MicroBatch) -> Bool[np.ndarray, " tokens"]:
    """True for tokens of the rl component."""
    rl = ComponentWeights.of(mb).rl
    return np.zeros(len(mb.token_ids), bool) if rl is None else rl != 0


def _with_trainer_logprobs(mb: MicroBatch, computed: Float[np.ndarray, " tokens"], *, is_old: bool) -> MicroBatch:
    """The micro batch with the trainer's log-probabilities where the sampler's are unknown.

    is_old: the loss compares with the trainer's everywhere.
    """
    filled = np.where(np.isnan(mb.logprobs), computed, mb.logprobs).astype(np.float32)
    return msgspec.structs.replace(mb, logprobs=filled, old_logprobs=computed if is_old else None)


def estimate_advantages(
    micro_batches: Sequence[MicroBatch],
    cfg: Advantages,
    old_logprobs: Sequence[Float[np.ndarray, " _"]],
    reference_logprobs: Sequence[Float[np.ndarray, " _"]] | None,
    values: Sequence[Float[np.ndarray, " _"]] | None,
    reduce: Reduce,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """Micro batches with an advantage per rl token, values and returns; and metrics.

    A sample's score is the advantage that it has on arrival. Whitening is over the batch of all ranks.
    """
    tokens = [np.flatnonzero(rl_token_mask(mb)) for mb in micro_batches]
    known: Sequence[np.ndarray | None] = [None] * len(micro_batches) if values is None else values
    advantages, returns, kl_sum = [], [], 0.0
    for i, mb in enumerate(micro_batches):
        token_kl = None
        if reference_logprobs is not None:
            old, reference = old_logprobs[i][tokens[i]], reference_logprobs[i][tokens[i]]
            token_kl = _kl_to_reference(old, reference, cfg.kl_estimator)
            kl_sum += float(token_kl.sum())
        of_tokens = _advantages_and_returns(mb, tokens[i], cfg, token_kl, known[i])
        advantages.append(of_tokens[0])
        returns.append(of_tokens[1])
    if cfg.whiten:
        sizes = np.array([len(each) for each in advantages], np.int64)
        whitened = whiten(np.concatenate([np.zeros(0), *advantages]), reduce)
        advantages = np.split(whitened, np.cumsum(sizes)[:-1])
    sums = reduce({"kl": kl_sum, "tokens": float(sum(map(len, tokens)))})
    metrics = {}
    if reference_logprobs is not None:
        metrics["reference_kl/mean"] = sums["kl"] / max(sums["tokens"], 1.0)
    return list(map(_replace_streams, micro_batches, known, tokens, advantages, returns)), metrics


def _advantages_and_returns(
    mb: MicroBatch, tokens: np.ndarray, cfg: Advantages, token_kl: np.ndarray | None, values: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Advantages of these tokens, float64, and their returns if a valuer learns from them."""
    advantages = mb.advantages[tokens].astype(np.float64)
    if not isinstance(cfg, (GaeAdvantages, ReturnsAdvantages)):
        return advantages if token_kl is None else advantages - cfg.kl_coef * token_kl, None
    documents = find_documents(tokens, mb.cu_seqlens)
    lengths = np.bincount(documents, minlength=len(mb.cu_seqlens) - 1)
    scores = np.zeros(len(lengths))
    scores[documents] = advantages
    rewards = token_rewards(scores, token_kl, lengths, cfg.kl_coef)
    if mb.token_rewards is not None:
        rewards += mb.token_rewards[tokens]
    if isinstance(cfg, ReturnsAdvantages):
        return discounted_returns(rewards, lengths, cfg.gamma), None
    assert values is not None, "checked with the config"
    return gae(rewards, values[tokens], lengths, gamma=cfg.gamma, lambd=cfg.lambd)


def _kl_to_reference(old: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    log_ratio = torch.from_numpy(reference.astype(np.float64) - old).clamp(-kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO)
    return kl.ESTIMATORS[estimator](log_ratio).numpy()


def _replace_streams(
    mb: MicroBatch, values: np.ndarray | None, tokens: np.ndarray, advantages: np.ndarray, returns: np.ndarray | None
) -> MicroBatch:
    def spread(numbers: np.ndarray) -> np.ndarray:
        out = np.zeros(len(mb.token_ids), np.float32)
        out[tokens] = numbers
        return out

    more = {} if returns is None else {"returns": spread(returns), "values": values}
    return msgspec.structs.replace(mb, advantages=spread(advantages), **more)


def split_samples(
    micro_batches: Sequence[MicroBatch],
    num_parts: int,
    order: np.random.Generator | None = None,
    *,
    shares_prefixes: bool = False,
) -> list[list[MicroBatch]]:
    """Split samples into num_parts batches of rows, none longer than the longest given.

    Sample i goes to part i % num_parts, in the order given or shuffled by `order`. Packing puts long samples first, so
    the parts are about equal. Padding is dropped. shares_prefixes: tokens that samples of a row begin with alike count
    once in its length, as they are computed once.
    """
    samples = [(mb, document) for mb in micro_batches for document in range(mb.num_samples)]
    if order is not None:
        samples = [samples[i] for i in order.permutation(len(samples))]
    if shares_prefixes:
        sizes = [_tree_of([(mb, document) for document in range(mb.num_samples)]).num_tokens for mb in micro_batches]
    else:
        sizes = [mb.num_tokens for mb in micro_batches]
    parts = [samples[part::num_parts] for part in range(num_parts)]
    return [_pack_samples(part, max(sizes, default=0), shares_prefixes=shares_prefixes) for part in parts]


def _tree_of(samples: Sequence[tuple[MicroBatch, int]]) -> PrefixTree:
    """What samples begin with: tokens, recorded experts, and all images of a sample together."""
    found = []
    numbers: dict[tuple[str, ...], int] = {}
    for mb, document in samples:
        place = slice(int(mb.cu_seqlens[document]), int(mb.cu_seqlens[document + 1]))
        shown = tuple(image.hash for image in mb.images_of(document))
        number = np.full(place.stop - place.start, numbers.setdefault(shown, len(numbers)), np.int32)
        routes = [] if mb.routed_experts is None else [mb.routed_experts[place]]
        found.append([mb.token_ids[place], number, *routes])
    return PrefixTree.of(found)


def _pack_samples(
    samples: Sequence[tuple[MicroBatch, int]], max_tokens: int, *, shares_prefixes: bool
) -> list[MicroBatch]:
    lengths = np.array([mb.cu_seqlens[d + 1] - mb.cu_seqlens[d] for mb, d in samples], np.int64)
    if shares_prefixes:
        rows = pack_tree(_tree_of(samples), lengths, max_tokens)
    else:
        rows = pack_rows(lengths, max_tokens)
    return [_merge_documents([samples[i] for i in row]) for row in rows]


def _merge_documents(samples: Sequence[tuple[MicroBatch, int]]) -> MicroBatch:
    """One micro batch of these documents, each given as (micro batch, index)."""
    places = [slice(int(mb.cu_seqlens[d]), int(mb.cu_seqlens[d + 1])) for mb, d in samples]
    lengths = [place.stop - place.start for place in places]
    supports = [
        None if mb.support is None else mb.support.part(place.start, place.stop)
        for (mb, _), place in zip(samples, places)
    ]
    alternatives = [
        None if mb.alternatives is None else mb.alternatives.part(place.start, place.stop)
        for (mb, _), place in zip(samples, places)
    ]
    streams = {}
    for name in STREAMS:
        parts = [getattr(mb, name) for mb, _ in samples]
        known = next((part for part in parts if part is not None), None)
        if known is None:
            continue
        # Expert choices may be missing for some samples: the largest value of the dtype marks that (NO_EXPERT).
        missing = np.iinfo(known.dtype).max if name == "routed_experts" else 0
        streams[name] = np.concatenate(
            [
                np.full((length, *known.shape[1:]), missing, known.dtype) if part is None else part[place]
                for part, place, length in zip(parts, places, lengths)
            ]
        )
    return MicroBatch(
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        sample_ids=tuple(mb.sample_ids[d] for mb, d in samples),
        support=concat_supports(supports, lengths),
        alternatives=concat_alternatives(alternatives, lengths),
        envs=tuple(mb.envs[d] for mb, d in samples),
        **images_by_document([mb.images_of(d) for mb, d in samples]),
        rollout_tokens=tuple(mb.rollout_tokens[d] for mb, d in samples if mb.rollout_tokens),
        first_versions=tuple(mb.first_versions[d] for mb, d in samples if mb.first_versions),
        **streams,
    )


NO_STREAMS = {
    "cu_seqlens", "sample_ids", "envs", "rollout_tokens", "first_versions", "support", "alternatives", "images",
    "num_images",
}  # fmt: skip
STREAMS = tuple(name for name in MicroBatch.__struct_fields__ if name not in NO_STREAMS)
"""Fields of a micro batch that are arrays with one entry per token."""
