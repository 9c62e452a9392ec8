"""A batch becomes the updates of one step: advantages are estimated, samples dealt out, the models updated.

    as the step began: log-probabilities, the reference's, the critic's values -> advantages and returns
    epochs x updates: a share of the samples -> critic -> policy

Most algorithms need none of it: their batch has its advantages, and is trained on once, whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from stretto.algorithms import kl
from stretto.algorithms.advantages import discounted_returns, gae, token_rewards, whitened
from stretto.config.algorithm import Advantages, GaeAdvantages, ReturnsAdvantages
from stretto.config.trainer import TrainerSection
from stretto.records.sample import MicroBatch
from stretto.trainer.critic import is_valued
from stretto.trainer.learner import Learner
from stretto.trainer.metrics import Reduce

logger = logging.getLogger(__name__)


class Updates:
    """Trains a learner, and its critic where it has one, on one batch a step."""

    def __init__(self, learner: Learner, section: TrainerSection, reduce: Reduce) -> None:
        self.learner, self.critic = learner, learner.critic
        self.section = section
        self._reduce = reduce
        self._has_warned = False
        self._is_plain = (
            section.advantages is None
            and section.critic is None
            and section.updates_per_step == section.epochs_per_step == 1
        )

    def train(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One step on this rank's batch; its metrics. Every rank must call it."""
        learner, section = self.learner, self.section
        if self._is_plain:
            learner.forward_backward(micro_batches)
            return learner.optim_step()
        step = learner.step + 1
        micro_batches, metrics = self._estimated(list(micro_batches))
        is_critic_only = section.critic is not None and step <= section.critic.num_critic_only_steps
        for epoch in range(section.epochs_per_step):
            order = None
            if section.epochs_per_step > 1:
                order = np.random.default_rng((section.seed, step, epoch))
            for part in self._deal(micro_batches, order):
                if self.critic is not None:
                    self.critic.forward_backward(part)
                    self.critic.optim_step(step)
                if not is_critic_only:
                    learner.forward_backward(part)
                    learner.update()
        metrics |= learner.end_step()
        return metrics if self.critic is None else metrics | self.critic.take_metrics()

    def _estimated(self, micro_batches: list[MicroBatch]) -> tuple[list[MicroBatch], dict[str, float]]:
        """The batch with what is known of it only as the step begins."""
        section, learner = self.section, self.learner
        cfg, uses_engines = section.advantages, section.loss.use_rollout_logprobs
        has_price = cfg is not None and cfg.kl_coef > 0
        has_several = section.updates_per_step * section.epochs_per_step > 1
        old = [mb.logprobs for mb in micro_batches]
        if not uses_engines and (has_several or has_price):
            old = learner.scores(micro_batches)
            micro_batches = [
                msgspec.structs.replace(mb, old_logprobs=logprobs) for mb, logprobs in zip(micro_batches, old)
            ]
        if cfg is None:
            return micro_batches, {}
        reference = learner.scores(micro_batches, is_reference=True) if has_price else None
        values = None if self.critic is None else self.critic.values(micro_batches)
        return estimate(micro_batches, cfg, old, reference, values, self._reduce)

    def _deal(
        self, micro_batches: list[MicroBatch], order: np.random.Generator | None
    ) -> list[list[MicroBatch]]:
        """The batch of each update; every rank gets as many."""
        num_samples = sum(mb.num_samples for mb in micro_batches)
        if self.section.updates_per_step == 1 and order is None:
            return [micro_batches]
        most = int(self._reduce({"max/samples": float(num_samples)})["max/samples"])
        num_updates = max(1, min(self.section.updates_per_step, most))
        if num_updates < self.section.updates_per_step and not self._has_warned:
            self._has_warned = True
            text = "updates_per_step = %d, and this batch has %d samples on the rank that has most: it makes %d updates"
            logger.warning(text, self.section.updates_per_step, most, num_updates)
        return deal(micro_batches, num_updates, order)


def estimate(
    micro_batches: Sequence[MicroBatch],
    cfg: Advantages,
    old_logprobs: Sequence[np.ndarray],
    reference_logprobs: Sequence[np.ndarray] | None,
    values: Sequence[np.ndarray] | None,
    reduce: Reduce,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """The same micro batches with an advantage for each token of the rl component, and the critic's part.

    A sample's score is the advantage that it came with. Whitening is over the batch of all ranks.
    """
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
    price, num_tokens = 0.0, 0
    for i, mb in enumerate(micro_batches):
        tokens = np.flatnonzero(is_valued(mb))
        documents = np.searchsorted(mb.cu_seqlens, tokens, side="right") - 1
        lengths = np.bincount(documents, minlength=len(mb.cu_seqlens) - 1)
        divergence = None
        if reference_logprobs is not None:
            divergence = _divergence(old_logprobs[i][tokens], reference_logprobs[i][tokens], cfg.kl_estimator)
            price += float(divergence.sum())
        num_tokens += len(tokens)
        own = mb.advantages[tokens].astype(np.float64)
        returns = None
        if isinstance(cfg, (GaeAdvantages, ReturnsAdvantages)):
            scores = np.zeros(len(lengths))
            scores[documents] = own
            rewards = token_rewards(scores, divergence, lengths, cfg.kl_coef)
            if isinstance(cfg, GaeAdvantages):
                assert values is not None, "checked with the config"
                own, returns = gae(rewards, values[i][tokens], lengths, gamma=cfg.gamma, lambd=cfg.lambd)
            else:
                own = discounted_returns(rewards, lengths, cfg.gamma)
        elif divergence is not None:
            own = own - cfg.kl_coef * divergence
        found.append((tokens, own, returns))
    if cfg.whiten:
        found = _whitened(found, reduce)
    sums = reduce({"price": price, "tokens": float(num_tokens)})
    metrics = {}
    if reference_logprobs is not None:
        metrics["reference_kl/mean"] = sums["price"] / max(sums["tokens"], 1.0)
    streams = [None] * len(micro_batches) if values is None else values
    return [_with(mb, stream, *parts) for mb, stream, parts in zip(micro_batches, streams, found)], metrics


def _divergence(old: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    log_ratio = torch.from_numpy(reference.astype(np.float64) - old).clamp(
        -kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO
    )
    return kl.ESTIMATORS[estimator](log_ratio).numpy()


def _whitened(
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]], reduce: Reduce
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    sums = reduce(
        {"sum": sum(float(a.sum()) for _, a, _ in found), "count": sum(len(a) for _, a, _ in found)}
    )
    mean = sums["sum"] / max(sums["count"], 1.0)
    squares = reduce({"squares": sum(float(np.square(a - mean).sum()) for _, a, _ in found)})["squares"]
    return [
        (tokens, whitened(a, mean=mean, squares=squares, count=sums["count"]), returns)
        for tokens, a, returns in found
    ]


def _with(
    mb: MicroBatch,
    values: np.ndarray | None,
    tokens: np.ndarray,
    advantages: np.ndarray,
    returns: np.ndarray | None,
) -> MicroBatch:
    def spread(numbers: np.ndarray) -> np.ndarray:
        out = np.zeros(len(mb.token_ids), np.float32)
        out[tokens] = numbers
        return out

    more = {} if returns is None else {"returns": spread(returns), "values": values}
    return msgspec.structs.replace(mb, advantages=spread(advantages), **more)


def deal(
    micro_batches: Sequence[MicroBatch], num_parts: int, order: np.random.Generator | None = None
) -> list[list[MicroBatch]]:
    """Every sample in one of the parts, whole; rows of a part are no longer than the longest that came.

    Samples are dealt in turn, as they stand or as `order` shuffles them: packing stands long ones first, so the
    parts are even. Padding is left behind.
    """
    samples = [(mb, document) for mb in micro_batches for document in range(mb.num_samples)]
    if order is not None:
        samples = [samples[i] for i in order.permutation(len(samples))]
    room = max((mb.num_tokens for mb in micro_batches), default=0)
    return [_rows(samples[part::num_parts], room) for part in range(num_parts)]


def _rows(samples: Sequence[tuple[MicroBatch, int]], room: int) -> list[MicroBatch]:
    rows: list[list[tuple[MicroBatch, int]]] = []
    used = room
    for mb, document in samples:
        size = int(mb.cu_seqlens[document + 1] - mb.cu_seqlens[document])
        if used + size > room:
            rows.append([])
            used = 0
        rows[-1].append((mb, document))
        used += size
    return [_joined(row) for row in rows]


def _joined(samples: Sequence[tuple[MicroBatch, int]]) -> MicroBatch:
    """One micro batch of these documents of others."""
    places = [slice(int(mb.cu_seqlens[d]), int(mb.cu_seqlens[d + 1])) for mb, d in samples]
    lengths = [place.stop - place.start for place in places]
    streams = {}
    for name in STREAMS:
        parts = [getattr(mb, name) for mb, _ in samples]
        known = next((part for part in parts if part is not None), None)
        if known is None:
            continue
        # Only expert choices may be there for some samples and not for others; the largest number says so.
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
        envs=tuple(mb.envs[d] for mb, d in samples),
        **streams,
    )


STREAMS = tuple(
    name for name in MicroBatch.__struct_fields__ if name not in ("cu_seqlens", "sample_ids", "envs")
)
"""Fields of a micro batch with one entry a token."""
