"""Sums over the tokens of a step, collected on the device, and the means that are reported.

Names that begin with `max/` are maxima; all others are summed over micro batches and ranks. The names of the
metrics are those of prime-rl; if a batch has several environments there are also means per environment, such as
`mismatch_kl/<env>/mean`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms import kl
from stretto.algorithms.sample_index import SampleIndex
from stretto.records.sample import MicroBatch
from stretto.trainer.batch.pass_inputs import PassInputs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

Reduce = Callable[[dict[str, float]], dict[str, float]]
"""Combines the sums of all ranks by name: the maximum for `max/`, else the sum. A rank may lack a name."""


class StepSums:
    """Collects sums of a step; tensors stay on their device, so that only `pop_*` waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._numbers: dict[str, float] = {}

    def add(self, sums: Mapping[str, Shaped[Tensor, ""] | float]) -> None:
        """Add to the sums; a name must always be a tensor, all on one device, or always a number."""
        for name, value in sums.items():
            is_max = name.startswith("max/")
            if isinstance(value, Tensor):
                before = self._sums.get(name)
                if before is not None:
                    value = torch.maximum(before, value) if is_max else before + value
                self._sums[name] = value
            else:
                number = self._numbers.get(name, value if is_max else 0.0)
                self._numbers[name] = max(number, value) if is_max else number + value

    def pop_means(self, reduce: Reduce) -> dict[str, float]:
        """The metrics of the step over all ranks; the sums start again from zero."""
        return _means(self.pop_sums(reduce))

    def pop_sums(self, reduce: Reduce) -> dict[str, float]:
        """The sums over all ranks; they start again from zero."""
        names = list(self._sums)
        values = torch.stack([value.double() for value in self._sums.values()]).tolist() if names else []
        sums = dict(zip(names, values)) | self._numbers
        self._sums, self._numbers = {}, {}
        return reduce(sums)


AGES = {0: "0", 1: "1", 2: "2", 3: "3-4", 5: "5-8", 9: "9+"}
"""Names of the spans of ages, in versions, by their least one."""


@torch.no_grad()
def ratio_sums(
    mb: MicroBatch, inputs: PassInputs, logprobs: Float[Tensor, " trained"], version: int = 0
) -> dict[str, Shaped[Tensor, ""]]:
    """Sums of the ratios of trained policy and sampler and of their squares, of tokens and of samples (products).

    If the micro batch knows the versions of its documents, also by their ages: how many versions before the trained
    `version` the first token of a document was sampled, so how old the oldest cache is that its tokens have read.
    """
    streams = inputs.streams
    log_ratio = (logprobs - streams.behavior_logprobs).masked_fill(~streams.is_sampled, 0.0)
    lengths = torch.from_numpy(np.bincount(inputs.documents)).to(logprobs.device)
    samples = SampleIndex.of(lengths)
    has_sampled = samples.count(streams.is_sampled) > 0
    sums: dict[str, Tensor] = {"samples": has_sampled.sum()}
    values: dict[str, tuple[Tensor, Tensor]] = {}
    for name, logs, is_member in (
        ("tokens", log_ratio, streams.is_sampled),
        ("rollouts", samples.sum(log_ratio), has_sampled),
    ):
        ratio = logs.clamp(-kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO).double().exp() * is_member
        values[name] = (ratio, is_member)
        sums |= {f"ratio/{name}": ratio.sum(), f"ratio_squared/{name}": ratio.square().sum()}
    if mb.first_versions:
        ages = _ages(mb, version)[: len(lengths)]
        sums |= _sums_by_age(ages, samples, values, kl.k3(log_ratio) * streams.is_sampled)
    return sums


def _ages(mb: MicroBatch, version: int) -> Int[np.ndarray, " documents"]:
    """For each document the index of its span of AGES; documents without versions, as padding, have the first one."""
    ages = version - np.array(mb.first_versions)
    spans = np.searchsorted(list(AGES), np.maximum(ages, 0), side="right") - 1
    return np.concatenate([spans, np.zeros(len(mb.cu_seqlens) - 1 - len(spans), spans.dtype)])


def _sums_by_age(
    ages: Int[np.ndarray, " documents"],
    samples: SampleIndex,
    values: Mapping[str, tuple[Shaped[Tensor, " items"], Bool[Tensor, " items"]]],
    mismatch: Float[Tensor, " trained"],
) -> dict[str, Shaped[Tensor, ""]]:
    """Numbers of tokens and samples, ratios, their squares and mismatch of each span of ages.

    values: of tokens and of rollouts, the ratios and which of them count.
    """
    sums: dict[str, Tensor] = {}
    (token_ratio, is_sampled), (ratio, has_sampled) = values["tokens"], values["rollouts"]
    found = np.unique(ages).tolist()
    of_document = torch.from_numpy(ages).to(token_ratio.device)
    for span in found:
        name = list(AGES.values())[span]
        is_here: Tensor = torch.ones_like(has_sampled) if len(found) == 1 else of_document == span
        is_token = is_sampled if len(found) == 1 else samples.spread(is_here) & is_sampled
        sums |= {
            f"age/{name}/tokens": is_token.sum(),
            f"age/{name}/rollouts": (is_here & has_sampled).sum(),
            f"age/{name}/mismatch_kl": (mismatch * is_token).sum(),
        }
        for what, each in (("tokens", token_ratio * is_token), ("rollouts", ratio * is_here)):
            sums |= {f"age/{name}/ratio/{what}": each.sum(), f"age/{name}/squared/{what}": each.square().sum()}
    return sums


def _by_age(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of each span of ages."""
    metrics = {}
    for age in AGES.values():
        if not (tokens := sums.get(f"age/{age}/tokens")):
            continue
        metrics[f"age/{age}"] = tokens / sums["sampled_tokens"]
        metrics[f"mismatch_kl/age/{age}"] = sums[f"age/{age}/mismatch_kl"] / tokens
        for what, name in (("tokens", f"ess/tokens/age/{age}"), ("rollouts", f"ess/rollouts/age/{age}")):
            squares = sums[f"age/{age}/{what}"] * sums[f"age/{age}/squared/{what}"]
            metrics[name] = sums[f"age/{age}/ratio/{what}"] ** 2 / squares
    return metrics


@torch.no_grad()
def sums_by_env(
    mb: MicroBatch, inputs: PassInputs, logprobs: Float[Tensor, " trained"], entropy: Float[Tensor, " trained"]
) -> dict[str, Shaped[Tensor, ""]]:
    """Sampled tokens, and sums of their mismatch KL and entropy, per environment."""
    names = sorted(set(mb.envs))
    env_of_document = np.array([names.index(env) for env in mb.envs])
    env_of_token = torch.from_numpy(env_of_document[inputs.documents]).to(logprobs.device)
    streams = inputs.streams
    mismatch = kl.k3((logprobs - streams.behavior_logprobs).masked_fill(~streams.is_sampled, 0.0))
    sums: dict[str, Tensor] = {}
    for i, name in enumerate(names):
        is_here = streams.is_sampled & (env_of_token == i)
        sums[f"env/{name}/tokens"] = is_here.sum()
        sums[f"env/{name}/mismatch_kl"] = mismatch[is_here].sum()
        sums[f"env/{name}/entropy"] = entropy[is_here].sum()
    return sums


def _means(sums: dict[str, float]) -> dict[str, float]:
    total = defaultdict(float, sums)
    sampled = max(total["sampled_tokens"], 1.0)
    metrics = {
        "loss/mean": total["loss"] / max(total["max/updates"], 1.0),
        "entropy/mean": total["entropy"] / sampled,
        "batch/sampled_tokens": total["sampled_tokens"],
    }
    if total["sampled_tokens"]:
        metrics["mismatch_kl/mean"] = total["mismatch_kl"] / sampled
        metrics["mismatch_kl/max"] = total["max/mismatch_kl"]
        if total["ratio_squared/tokens"]:
            metrics["ess/tokens"] = total["ratio/tokens"] ** 2 / (sampled * total["ratio_squared/tokens"])
        if total["ratio_squared/rollouts"]:
            squares = total["samples"] * total["ratio_squared/rollouts"]
            metrics["ess/rollouts"] = total["ratio/rollouts"] ** 2 / squares
        metrics |= _by_age(sums)
    if total["rl_tokens"]:
        low, high = (total[name] / total["rl_tokens"] for name in ("is_masked_low", "is_masked_high"))
        metrics |= {"is_masked/mean": low + high, "is_masked_low/mean": low, "is_masked_high/mean": high}
        for name in sums:
            if name.startswith("rl/"):
                metrics[f"{name.removeprefix('rl/')}/mean"] = sums[name] / total["rl_tokens"]
    if total["ce_tokens"]:
        metrics["nll/mean"] = total["nll"] / total["ce_tokens"]
    if total["ref_kl_tokens"]:
        metrics["teacher_kl/mean"] = total["teacher_kl"] / total["ref_kl_tokens"]
    for name, tokens in sums.items():
        if name.startswith("env/") and name.endswith("/tokens") and tokens:
            env = name[len("env/") : -len("/tokens")]
            metrics[f"mismatch_kl/{env}/mean"] = sums[f"env/{env}/mismatch_kl"] / tokens
            metrics[f"entropy/{env}/mean"] = sums[f"env/{env}/entropy"] / tokens
    return metrics
