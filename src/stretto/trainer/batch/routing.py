"""Routers of mixtures of experts in training, and indexers of attention to chosen keys.

Routers: replay, statistics, balancing, freezing. Indexers: the factor of their loss, and its mean.

Per step: every forward pass gets a `Routing` (models/moe.py); the tokens per expert are summed over passes and
ranks; `end_step` turns the sums into metrics and, if the model has expert biases, moves them towards balance. A prompt
that several documents share is computed once and counted once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import ModelSection
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.moe import mixtures, update_expert_bias
from stretto.models.parts.router import Routing
from stretto.models.tensor_map import TensorSlice
from stretto.records.sample import MicroBatch
from stretto.trainer.batch.pass_inputs import PassInputs


class Routers:
    """The routers of one policy."""

    def __init__(self, policy: Decoder, rate: float | None) -> None:
        """rate: step size of the expert biases; None if they do not move."""
        self._policy, self._rate = policy, rate
        self._names, self._mixtures = list(mixtures(policy)), list(mixtures(policy).values())
        shape = policy.config.moe
        assert shape is not None, "a dense policy has no routers"
        self.num_experts, self.top_k, self.num_layers = (shape.num_experts, shape.top_k, policy.config.num_layers)
        self._loads: Tensor | None = None
        self._confidence: Tensor | None = None
        self._index_sums = [0.0, 0.0]  # the sum of losses, and the number of pairs of token and layer in it
        self.index_loss_scale: float | None = None
        """Factor on the loss of the indexers in the next passes; None if they are frozen."""

    def routing(self, inputs: PassInputs, *, is_measured: bool) -> Routing:
        """The Routing of one forward pass, which replays the expert choices in the inputs, if any."""
        scale = self.index_loss_scale
        if scale is not None and not is_measured:
            scale = 0.0  # other ranks have gradients for these weights, so that this one needs them, too
        return Routing(replay=inputs.routes, is_measuring=is_measured, index_loss_scale=scale)

    def add(self, routing: Routing) -> None:
        """Add the loads and confidence of one measured pass to the sums of the step."""
        if routing.loads:  # a mixture's config may leave all blocks dense
            loads = torch.stack([routing.loads[layer] for layer in sorted(routing.loads)])
            confidence = torch.stack([routing.confidence[layer] for layer in sorted(routing.loads)])
            self._loads = loads if self._loads is None else self._loads + loads
            self._confidence = confidence if self._confidence is None else self._confidence + confidence
        for layer, loss in routing.index_losses.items():
            self._index_sums[0] += float(loss)
            self._index_sums[1] += len(routing.key_choices[layer])

    def check(self, mb: MicroBatch) -> None:
        """Raises: DataError when expert choices in a micro batch cannot come from this model."""
        if mb.routed_experts is None:
            return
        expected = (len(mb.token_ids), self.num_layers, self.top_k)
        if mb.routed_experts.shape != expected:
            raise DataError(
                f"micro batch: routed_experts has shape {list(mb.routed_experts.shape)}, the policy needs "
                f"{list(expected)} [tokens, layers, top_k]; does the engine serve the same model?"
            )
        # NO_EXPERT is allowed only if all entries of a token and layer have it.
        wrong = (mb.routed_experts >= self.num_experts).any(axis=-1)
        if (mb.routed_experts[wrong] != mb.routed_experts[wrong][:, :1]).any():
            raise DataError(
                f"micro batch: routed_experts names experts beyond {self.num_experts - 1}; does the engine "
                "serve the same model?"
            )

    def end_step(self, reduce: Callable[[dict[str, float]], dict[str, float]]) -> dict[str, float]:
        """Move the biases; the metrics of the step over all ranks.

        max_vio of a layer is (tokens of its busiest expert - mean) / mean: 0 is perfect balance.
        """
        sums = {}
        if self._loads is not None and self._confidence is not None:
            sums = {f"{i}": float(load) for i, load in enumerate(self._loads.flatten().tolist())}
            sums |= {f"confidence/{i}": value for i, value in enumerate(self._confidence.tolist())}
        self._loads = self._confidence = None
        if self.index_loss_scale is not None:
            sums |= {"index/kl": self._index_sums[0], "index/tokens": self._index_sums[1]}
            self._index_sums = [0.0, 0.0]
        sums = reduce(sums)
        if not sums:
            return {}
        num = len(self._mixtures)
        loads = torch.tensor([sums[f"{i}"] for i in range(num * self.num_experts)]).view(num, -1)
        confidence = torch.tensor([sums[f"confidence/{i}"] for i in range(num)])
        if self._rate is not None:
            update_expert_bias(self._policy, loads.to(self._mixtures[0].gate.weight.device), self._rate)
        max_vio = loads.max(dim=1).values / loads.mean(dim=1) - 1
        tokens = loads.sum(dim=1) / self.top_k
        return {
            "max_vio/mean": float(max_vio.mean()),
            "max_vio/max": float(max_vio.max()),
            "routing_confidence/mean": float((confidence / tokens).mean()),
        } | ({"indexer_kl/mean": sums["index/kl"] / sums["index/tokens"]} if sums.get("index/tokens") else {})

    def slices(self) -> dict[str, TensorSlice]:
        """The expert biases, which the optimizer does not update, by their names in a learner's state."""
        named = zip(self._names, self._mixtures)
        return {
            f"routers.{name}.gate.expert_bias": TensorSlice.whole(mixture.gate.expert_bias.data)
            for name, mixture in named
            if mixture.gate.shape.has_expert_bias
        }


def build_routers(policy: Policy, model: ModelSection, *, is_replaying: bool) -> Routers | None:
    """The routers of a policy with experts; None for a dense policy or impl = "hf".

    Raises: ConfigError when a setting about experts is on and the policy does not support it.
    """
    moe = policy.config.moe if isinstance(policy, Decoder) else None
    if model.indexer_kl_coeff is not None:
        _unfreeze_indexers(policy, model)
    settings = {
        "[trainer] enable_router_replay = true": is_replaying,
        "[model] freeze_moe_router = true": model.freeze_moe_router,
        f"[model] moe_bias_update_rate = {model.moe_bias_update_rate}": model.moe_bias_update_rate is not None,
    }
    if not isinstance(policy, Decoder) or moe is None:
        for setting, is_on in settings.items():
            if is_on:
                raise ConfigError(
                    f"{setting}, but the policy has no experts with impl = 'custom' (it is a {policy.config.family}); "
                    "leave it out."
                )
        return None
    if model.moe_bias_update_rate is not None and not moe.has_expert_bias:
        raise ConfigError(
            f"[model] moe_bias_update_rate = {model.moe_bias_update_rate}, but this {policy.config.family} has no "
            "bias on the choice of experts, and its engine would not know one; leave it out."
        )
    for mixture in mixtures(policy).values():
        mixture.gate.weight.requires_grad_(not model.freeze_moe_router)
        if moe.has_router_bias:
            mixture.gate.bias.requires_grad_(not model.freeze_moe_router)
        mixture.experts.use_grouped_mm = model.moe_use_grouped_mm
    return Routers(policy, model.moe_bias_update_rate)


def _unfreeze_indexers(policy: Policy, model: ModelSection) -> None:
    """Raises: ConfigError if the policy has no indexers."""
    indexers = [module for name, module in policy.named_modules() if name.endswith(".indexer")]
    if not indexers:
        raise ConfigError(
            f"[model] indexer_kl_coeff = {model.indexer_kl_coeff:g}, but this {policy.config.family} has no indexers; "
            "leave it out."
        )
    for indexer in indexers:
        indexer.requires_grad_(True)
