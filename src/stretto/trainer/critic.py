"""The critic of PPO: a network like the policy with one output, and its own optimizer.

For every trained token it predicts the return of the sample from the text before the token. It is trained on the
policy's ranks, or on ranks of its own (critic_ranks.py). Its files are those of a transformers model for sequence
classification with one label, so a critic can start from a reward model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.algorithms.losses import weighted_sum
from stretto.algorithms.value_loss import value_loss
from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import ConstantScheduler, CriticSection, Optim
from stretto.data.hub_model import fetch
from stretto.families.table import FAMILIES
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.tensor_map import CheckpointReader, LazyTensor, TensorSlice, as_whole_slices
from stretto.records.sample import MicroBatch
from stretto.records.token_counts import ComponentWeights
from stretto.trainer.batch.metrics import StepSums
from stretto.trainer.batch.pass_inputs import PassInputs
from stretto.trainer.network import Network
from stretto.trainer.optim.schedule import learning_rate
from stretto.trainer.parallel.scores import compute_values
from stretto.trainer.ranks.mesh import Mesh, num_ranks, training_device
from stretto.trainer.state.learner_state import LearnerState, StateSource, TensorInfo, add_prefix, select_prefix

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

logger = logging.getLogger(__name__)

HEAD_NAME, SCORE_NAME = "lm_head.weight", "score.weight"
"""The name of the output weight here, and in a model for sequence classification."""


def with_value_head(policy: Decoder) -> Decoder:
    """A critic with the policy's blocks and a new output that is 0 for every text.

    It shares memory with `policy`, which must not be used afterwards.
    """
    cfg = replace(policy.config, tie_word_embeddings=False)
    with torch.device("meta"):
        critic = Decoder(cfg)
    critic.model = policy.model
    critic.lm_head = _head(cfg.hidden_size, policy.output_weight.dtype, policy.output_weight.device)
    return critic


def _head(hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> nn.Linear:
    head = nn.Linear(hidden_size, 1, bias=False, dtype=dtype, device=device)
    nn.init.zeros_(head.weight)
    return head


def load_critic(directory: str | Path, *, dtype: torch.dtype, may_be_meta: bool = False) -> Decoder:
    """A critic from a model directory; without `score.weight` it gets a new output that is 0.

    may_be_meta: on several ranks it may be on the meta device; `Critic` then loads its shards.

    Raises: ConfigError for a model with several labels; DataError for a damaged directory.
    """
    directory = fetch(str(directory))
    cfg = replace(hub.load_config(directory), tie_word_embeddings=False)
    with torch.device("meta"):
        critic = Decoder(cfg)
        critic.lm_head = nn.Linear(cfg.hidden_size, 1, bias=False)
    critic = critic.to(dtype)

    def read() -> Iterator[tuple[str, tuple[int, ...], LazyTensor]]:
        is_scorer = False
        for name, shape, source in hub.read_tensors(directory):
            if name == SCORE_NAME:
                if shape != (1, cfg.hidden_size):
                    raise ConfigError(
                        f"trainer.critic.load = {str(directory)!r}: {SCORE_NAME} has shape {shape}; a critic "
                        f"has one label, (1, {cfg.hidden_size})"
                    )
                is_scorer = True
                yield HEAD_NAME, shape, source
            elif name != HEAD_NAME:
                yield name, shape, source
        if not is_scorer:
            yield HEAD_NAME, (1, cfg.hidden_size), torch.zeros(1, cfg.hidden_size, dtype=dtype)
        logger.info("critic from %s, with %s", directory, "its own output" if is_scorer else "a new output that is 0")

    if may_be_meta and num_ranks() > 1:
        critic.checkpoint_reader = CheckpointReader(directory, read)
        return critic
    critic = critic.to_empty(device=training_device())
    targets = as_whole_slices((name, p) for name, p in critic.named_parameters())
    hub.load_slices(critic.tensor_map, targets, read(), cfg, str(directory))
    return critic


class Critic:
    """Trains a critic on returns; call `forward_backward`, then `optim_step`."""

    def __init__(
        self, module: Decoder, *, section: CriticSection, model: ModelSection, optim: Optim, mesh: Mesh | None = None
    ) -> None:
        model = model if section.ac is None else model.model_copy(update={"ac": section.ac})
        self.section, self._model = section, model
        optim = section.optim or optim.model_copy(update={"lr": section.lr or optim.lr})
        self._warmup = ConstantScheduler(warmup_steps=section.lr_warmup_steps)
        self.network = Network(
            module, model=model, optim=optim, mesh=mesh, error_prefix="the critic's ", lr_key="trainer.critic.lr"
        )
        self.module, self.mesh = module, self.network.mesh
        self.step = 0
        """The last step of the run in which it was trained."""
        self._sums = StepSums()

    def start_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Do nothing: `values` computes them when it is called."""

    def start_updates(self, micro_batches: Sequence[MicroBatch], num_updates: int) -> None:
        """Do nothing: `train` is called for every update."""

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

    def state(self) -> LearnerState:
        """This rank's slices of weights and optimizer state, named as in a learner's state."""
        slices = add_prefix("critic", self.network.state())
        return LearnerState(slices, {"step": self.step, "optim": self.network.optim.type})

    def targets(self, saved: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
        """The slices for the critic among saved tensors; the caller fills them, then calls weights.copy_to_model.

        Raises: DataError when there is none, or it is of another model.
        """
        if not (of_critic := select_prefix("critic", saved)):
            raise DataError("the state has no critic, but there is a [trainer.critic]")
        return add_prefix("critic", self.network.targets(of_critic))

    @torch.no_grad()
    def load_state(self, source: StateSource) -> None:
        """Load what `state` returned, or the critic of a learner's state.

        Raises: DataError when it belongs to another model or optimizer.
        """
        source.read(self.targets(source.tensors))
        self.step = source.values["step"]
        self.network.weights.copy_to_model()

    @torch.no_grad()
    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Float[np.ndarray, " _"]]:
        """Per micro batch, float32 [tokens]: the value before each rl token, 0 elsewhere."""
        by_micro_batch = [np.zeros(len(mb.token_ids), np.float32) for mb in micro_batches]
        for index, inputs in self.network.passes(micro_batches, token_mask=rl_token_mask):
            values = compute_values(self.module, inputs, self.mesh, self._model)
            if index is not None:
                by_micro_batch[index][inputs.sources] = values.cpu().numpy()
        self.network.weights.reshard()
        return by_micro_batch

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the gradients of one update; all ranks must call it.

        Micro batches must have values and returns.
        """
        num_tokens = sum(int(np.count_nonzero(rl_token_mask(mb))) for mb in micro_batches)
        count = self.mesh.reduce({"tokens": float(num_tokens)})["tokens"]
        self._has_gradient = count > 0  # a batch may have no rl token, as in distillation
        for index, inputs in self.network.passes(micro_batches, token_mask=rl_token_mask):
            values = compute_values(self.module, inputs, self.mesh, self._model)
            if index is None:
                (values * 0.0).sum().backward()
                continue
            mb = micro_batches[index]
            assert mb.values is not None and mb.returns is not None, "estimate values before training on them"
            old, returns = (self._picked(stream, inputs) for stream in (mb.values, mb.returns))
            losses = value_loss(values, old, returns, clip=self.section.value_clip)
            loss = weighted_sum(losses.loss, torch.ones_like(values)) / count
            loss.backward()
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
        self.network.weights.collect_gradients()

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

    def hf_config(self) -> dict[str, Any]:
        """The config.json of a critic, for `load_critic` and transformers."""
        cfg = self.module.config
        return cfg.hf | {
            "architectures": [FAMILIES[cfg.family].architecture.replace("CausalLM", "SequenceClassification")],
            "num_labels": 1,
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
            "tie_word_embeddings": False,
        }

    def _picked(self, stream: np.ndarray, inputs: PassInputs) -> Tensor:
        return torch.from_numpy(stream[inputs.sources]).to(self.mesh.device)


def rl_token_mask(mb: MicroBatch) -> Bool[np.ndarray, " tokens"]:
    """True for tokens of the rl component."""
    rl = ComponentWeights.of(mb).rl
    return np.zeros(len(mb.token_ids), bool) if rl is None else rl != 0
