"""Sums over the tokens of a step, gathered on the device, and the means that are reported.

Names that begin with `max/` are maxima; all others add up, over micro batches and over ranks. The names of
the metrics are prime-rl's; with several environments in a batch there is also `mismatch_kl/<env>/mean` and
the like.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms import kl
from stretto.records.sample import MicroBatch
from stretto.trainer.rows import Rows

Reduce = Callable[[dict[str, float]], dict[str, float]]
"""Joins the sums of all ranks by name: `max/` by maximum, the rest by sum. A rank may lack a name."""


def alone(sums: dict[str, float]) -> dict[str, float]:
    """The `Reduce` of a single rank."""
    return sums


class StepSums:
    """Collects sums as device tensors, so that only `take` waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            before = self._sums.get(name)
            if before is not None:
                value = torch.maximum(before, value) if name.startswith("max/") else before + value
            self._sums[name] = value

    def take(self, reduce: Reduce) -> dict[str, float]:
        """Metrics of the step over all ranks; starts the next step at zero."""
        return _means(self.take_sums(reduce))

    def take_sums(self, reduce: Reduce) -> dict[str, float]:
        """The sums themselves, over all ranks."""
        names = list(self._sums)
        values = torch.stack([value.double() for value in self._sums.values()]).tolist() if names else []
        self._sums = {}
        return reduce(dict(zip(names, values)))


@torch.no_grad()
def sums_by_env(mb: MicroBatch, rows: Rows, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Sampled tokens, their mismatch and their entropy for each environment of a micro batch."""
    names = sorted(set(mb.envs))
    env_of_document = np.array([names.index(env) for env in mb.envs])
    env_of_token = torch.from_numpy(env_of_document[rows.documents]).to(logprobs.device)
    streams = rows.streams
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
