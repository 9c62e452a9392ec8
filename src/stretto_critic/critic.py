"""The critic of PPO: a network like the policy with one output, and its own optimizer.

For every trained token it predicts the return of the sample from the text before the token. It is trained on the
policy's ranks, or on ranks of its own (ranks.py). Its network and files are models/value_head.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms.losses import weighted_sum
from stretto.base.errors import DataError
from stretto.config.root import TrainerConfig
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import ConstantScheduler, CriticSection, Optim
from stretto.data.hub_model import fetch
from stretto.models.decoder import Decoder
from stretto.models.tensor_map import TensorSlice
from stretto.models.value_head import load_value_model
from stretto.records.sample import MicroBatch
from stretto.trainer.batch.metrics import StepSums
from stretto.trainer.batch.pass_inputs import PassInputs
from stretto.trainer.network import Network, NetworkBuilder, Scores, TorchNetwork
from stretto.trainer.optim.schedule import learning_rate
from stretto.trainer.publish.export import export_model, prune_exports
from stretto.trainer.ranks.mesh import Mesh, num_ranks, training_device
from stretto.trainer.state.learner_state import LearnerState, StateSource, TensorInfo, add_prefix, select_prefix
from stretto.trainer.updates import rl_token_mask
from stretto.trainer.valuer import NAME, Valuer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

logger = logging.getLogger(__name__)


def load_critic(directory: str | Path, *, dtype: torch.dtype, may_be_meta: bool = False) -> Decoder:
    """A critic from a model directory, with the head that it has or a new one.

    may_be_meta: on several ranks it may be on the meta device; `Critic` then loads its shards.

    Raises: ConfigError for a model with several labels; DataError for a damaged directory.
    """
    return load_value_model(
        fetch(str(directory)),
        dtype=dtype,
        device=training_device(),
        is_meta=may_be_meta and num_ranks() > 1,
        key="trainer.critic.load",
    )


class ValueLoss(NamedTuple):
    """A loss per token, and the tokens whose loss is clipped."""

    loss: Float[Tensor, " tokens"]
    is_clipped: Bool[Tensor, " tokens"]


def value_loss(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    *,
    clip: float | None,
) -> ValueLoss:
    """max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2); without a clip (V - R)^2.

    V_old is the critic's value before the step. The clipped term has no gradient once V has moved by more than
    `clip`, so a value stops after it has moved that far towards its return.

    Source: the value loss of PPO's authors, described in arXiv:2005.12729, section 3. Differs: no factor 1/2.
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueLoss(torch.maximum(plain, bounded), (bounded > plain).detach())


class Critic(Valuer):
    """Trains a critic on returns; call `forward_backward`, then `optim_step`."""

    network: Network

    def __init__(
        self,
        module: Decoder,
        *,
        section: CriticSection,
        model: ModelSection,
        optim: Optim,
        mesh: Mesh | None = None,
        build: NetworkBuilder = TorchNetwork,
    ) -> None:
        """build: makes the network that computes and updates the module."""
        model = model if section.ac is None else model.model_copy(update={"ac": section.ac})
        self.section = section
        optim = section.optim or optim.model_copy(update={"lr": section.lr or optim.lr})
        self._warmup = ConstantScheduler(warmup_steps=section.lr_warmup_steps)
        self.network = build(
            module, model=model, optim=optim, mesh=mesh, error_prefix="the critic's ", lr_key="trainer.critic.lr"
        )
        self.module, self.mesh = module, self.network.mesh
        self.step = 0
        """The last step of the run in which it was trained."""
        self._sums = StepSums()

    def train(self, part: Sequence[MicroBatch], step: int) -> None:
        """One update in step `step` of the run; all ranks must call it."""
        self.forward_backward(part)
        self.optim_step(step)
        self.step = step

    def begin_anew(self) -> None:
        """Count steps from 0; weights and the optimizer's state stay."""
        self.step = 0

    def begin_schedule(self) -> None:
        """Do nothing: after its warm-up the learning rate is constant."""

    def check_finite(self) -> None:
        """Raises: EngineError when a weight is NaN or infinite."""
        self.network.check_finite(self.step)

    def slices(self) -> dict[str, TensorSlice]:
        """This rank's slices of weights and optimizer state, named as in a learner's state."""
        return add_prefix(NAME, self.network.state())

    def state(self) -> LearnerState:
        """What a checkpoint of a critic on ranks of its own has."""
        return LearnerState(self.slices(), {"step": self.step, "optim": self.network.optim.type})

    def targets(self, saved: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
        """The slices for the critic among saved tensors; the caller fills them, then calls weights.copy_to_model.

        Raises: DataError when there is none, or it is of another model.
        """
        if not (of_critic := select_prefix(NAME, saved)):
            raise DataError("the state has no critic, but there is a [trainer.critic]")
        return add_prefix(NAME, self.network.targets(of_critic))

    @torch.no_grad()
    def load_state(self, source: StateSource) -> None:
        """Load what `state` returned, or the critic of a learner's state.

        Raises: DataError when it belongs to another model or optimizer.
        """
        source.read(self.targets(source.tensors))
        self.step = source.values["step"]
        self.network.weights.copy_to_model()

    def export(self, cfg: TrainerConfig, step: int, tokenizer_dir: Path) -> None:
        """Write it as a classification model with one label, beside those that [ckpt] keeps; all ranks must call it."""
        start, folder = time.perf_counter(), self.section.save or cfg.run_dir.critic
        target = folder / f"step_{step}"
        export_model(self.network.weights, target, tokenizer_dir)
        if self.mesh.is_lead:
            logger.info("exported the critic to %s in %.2fs", target, time.perf_counter() - start)
        if cfg.ckpt is not None:
            prune_exports(folder, cfg.ckpt, step, self.mesh)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Float[np.ndarray, " _"]]:
        """Per micro batch, float32 [tokens]: the value before each rl token, 0 elsewhere."""
        by_micro_batch = [np.zeros(len(mb.token_ids), np.float32) for mb in micro_batches]

        def score(index: int, inputs: PassInputs, scores: Scores) -> None:
            by_micro_batch[index][inputs.sources] = scores.values.cpu().numpy()

        self.network.run(micro_batches, score, is_training=False, token_mask=rl_token_mask)
        return self.mesh.from_last_stage(by_micro_batch, list[np.ndarray])

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the gradients of one update; all ranks must call it.

        Micro batches must have values and returns.
        """
        num_tokens = sum(int(np.count_nonzero(rl_token_mask(mb))) for mb in micro_batches)
        count = self.mesh.reduce({"tokens": float(num_tokens)})["tokens"]
        self._has_gradient = count > 0  # a batch may have no rl token, as in distillation

        def score(index: int, inputs: PassInputs, scores: Scores) -> Tensor:
            mb, values = micro_batches[index], scores.values
            assert mb.values is not None and mb.returns is not None, "estimate values before training on them"
            old, returns = (self._picked(stream, inputs) for stream in (mb.values, mb.returns))
            losses = value_loss(values, old, returns, clip=self.section.value_clip)
            loss = weighted_sum(losses.loss, torch.ones_like(values)) / count
            values = values.detach()
            self._sums.add(
                {
                    "loss": loss.detach(),
                    "tokens": float(len(values)),
                    "errors": (values - returns).square().sum(),
                    "values": values.sum(),
                    "returns": returns.sum(),
                    "squares": returns.double().square().sum(),
                    "is_clipped": losses.is_clipped.sum(),
                }
            )
            return loss

        self.network.run(micro_batches, score, is_training=True, token_mask=rl_token_mask)

    def optim_step(self, step: int) -> None:
        """Update the weights, in step `step` of the run.

        Raises: EngineError when the gradient is not finite; the weights are then unchanged.
        """
        if not self._has_gradient:
            self.network.weights.zero_grad()
            return
        lr = learning_rate(step, self.network.optim.lr, self._warmup, None)
        self._last = {"critic/lr": lr, "critic/grad_norm": self.network.update(step, lr)}

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call over all updates and ranks; empty if no token had a return."""
        sums = self._sums.pop_sums(self.mesh.reduce)
        if not sums:
            return {}
        count = sums["tokens"]
        mean = sums["returns"] / count
        variance = sums["squares"] / count - mean**2
        metrics = {
            "critic/value_loss": sums["errors"] / count,
            "critic/value/mean": sums["values"] / count,
            "critic/return/mean": mean,
            "critic/is_clipped/mean": sums["is_clipped"] / count,
        }
        if variance > 1e-12:
            metrics["critic/explained_variance"] = 1 - sums["errors"] / count / variance
        return metrics | self._last

    def _picked(self, stream: np.ndarray, inputs: PassInputs) -> Tensor:
        return torch.from_numpy(stream[inputs.sources]).to(self.mesh.device)
