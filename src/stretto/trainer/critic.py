"""The critic of PPO: the policy's kind of network with an output of one number, and its own optimizer.

It says, at every trained token, what score the sample will get, as far as the text before the token tells. It
runs over the policy's mesh, on the same batches. On disk it is what transformers calls a model for sequence
classification with one label, so that a reward model can be its start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.algorithms.losses import weighted_sum
from stretto.algorithms.value_loss import value_loss
from stretto.base.errors import ConfigError, EngineError
from stretto.config.model import ModelSection
from stretto.config.trainer import ConstantScheduler, CriticSection, Optim
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.lm_head import head_logits
from stretto.models.tensor_map import Source, whole
from stretto.records.sample import MicroBatch
from stretto.trainer.mesh import Mesh, num_ranks, training_device
from stretto.trainer.metrics import Reduce, StepSums, alone
from stretto.trainer.optim import (
    Masters,
    build_optimizer,
    make_optimizer_parts,
    optimizer_parts,
)
from stretto.trainer.parallel import context
from stretto.trainer.parallel.memory import prepare_blocks
from stretto.trainer.parallel.shard import parallelise
from stretto.trainer.precision import round_products
from stretto.trainer.rows import IDLE, Membership, Rows, build_rows
from stretto.trainer.schedule import learning_rate
from stretto.trainer.state import Described, Part, part_of, under

logger = logging.getLogger(__name__)

HEAD, SCORE = "lm_head.weight", "score.weight"
"""The output's name here, and in a model for sequence classification."""


def with_value_head(policy: Decoder) -> Decoder:
    """The same network, with an output of one number that is 0 for every text; `policy` is used up."""
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


def load_critic(directory: str | Path, *, dtype: torch.dtype, may_be_outline: bool = False) -> Decoder:
    """A critic from a model directory: with its own output where it has `score.weight`, with a new one elsewhere.

    may_be_outline: on several ranks it may come without memory, for `Critic` to load its shards into.

    Raises: ConfigError for a model that scores with several labels; DataError for a damaged directory.
    """
    directory = hub.find_model(str(directory))
    cfg = replace(hub.load_config(directory), tie_word_embeddings=False)
    with torch.device("meta"):
        critic = Decoder(cfg)
        critic.lm_head = nn.Linear(cfg.hidden_size, 1, bias=False)
    critic = critic.to(dtype)

    def read() -> Iterator[tuple[str, tuple[int, ...], Source]]:
        is_scorer = False
        for name, shape, source in hub.read_tensors(directory):
            if name == SCORE:
                if shape != (1, cfg.hidden_size):
                    raise ConfigError(
                        f"trainer.critic.load = {str(directory)!r}: {SCORE} has shape {shape}; a critic "
                        f"has one label, (1, {cfg.hidden_size})"
                    )
                is_scorer = True
                yield HEAD, shape, source
            elif name != HEAD:
                yield name, shape, source
        if not is_scorer:
            yield HEAD, (1, cfg.hidden_size), torch.zeros(1, cfg.hidden_size, dtype=dtype)
        logger.info(
            "critic from %s, with %s", directory, "its output" if is_scorer else "an output that says 0"
        )

    if may_be_outline and num_ranks() > 1:
        critic.origin = hub.Origin(directory, read)
        return critic
    critic = critic.to_empty(device=training_device())
    targets = whole((name, p) for name, p in critic.named_parameters())
    hub.fill(critic.tensor_map, targets, read(), cfg, str(directory))
    return critic


class Critic:
    """Learns the returns of trained tokens; `forward_backward` then `optim_step`, as a learner."""

    def __init__(
        self,
        network: Decoder,
        *,
        section: CriticSection,
        model: ModelSection,
        optim: Optim,
        reduce: Reduce = alone,
        mesh: Mesh | None = None,
    ) -> None:
        self.network, self.section = network, section
        self._optim = optim.model_copy(update={"lr": section.lr or optim.lr})
        self._warmup = ConstantScheduler(warmup_steps=section.lr_warmup_steps)
        self.mesh, self._cp_style = mesh, model.cp_style
        self._reduce = reduce if mesh is None else mesh.reduce
        self._device = network.output_weight.device if mesh is None else mesh.device
        self._vocab_size = network.model.embed_tokens.weight.shape[0]
        round_products(network, model)
        prepare_blocks(network, model)
        if mesh is None:
            self.masters = Masters(network, hub.DTYPES[model.optimization_dtype])
        else:
            self.masters = parallelise(network, mesh, model)
        self.optimizer = build_optimizer(self.masters, self._optim, offloads_state=model.optim_cpu_offload)
        self._sums = StepSums()
        self._is_cut_by_tokens = mesh is not None and mesh.degrees.cp > 1
        self._shares_prefixes = self._device.type == "cpu" and not (
            self._is_cut_by_tokens and model.cp_style == "ring"
        )

    @torch.no_grad()
    def values(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Of each micro batch, float32 [tokens]: the value of the text before each rl token, 0 elsewhere."""
        found, num_idle = [], self._num_idle(micro_batches)
        for mb, rows in zip(micro_batches, self._passes(micro_batches)):
            out = np.zeros(len(mb.token_ids), np.float32)
            if rows is not None:
                out[rows.sources] = self._values(rows).cpu().numpy()
            found.append(out)
        self._idle(num_idle)
        self.masters.settle()
        return found

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the gradients of one update; micro batches carry values and returns. All ranks must call it."""
        num_tokens = sum(int(np.count_nonzero(is_valued(mb))) for mb in micro_batches)
        count = self._reduce({"tokens": float(num_tokens)})["tokens"]
        self._has_gradient = count > 0  # a batch may be distilled as a whole
        num_idle = self._num_idle(micro_batches)
        for mb, rows in zip(micro_batches, self._passes(micro_batches)):
            if rows is None:
                continue
            assert mb.values is not None and mb.returns is not None, "estimate values before training on them"
            old, returns = (self._picked(stream, rows) for stream in (mb.values, mb.returns))
            values = self._values(rows)
            losses = value_loss(values, old, returns, clip=self.section.value_clip)
            loss = weighted_sum(losses.loss, torch.ones_like(values)) / count
            loss.backward()
            values = values.detach()
            self._sums.add(
                {
                    "loss": loss.detach(),
                    "tokens": torch.tensor(float(len(values))),
                    "errors": (values - returns).square().sum(),
                    "values": values.sum(),
                    "returns": returns.sum(),
                    "squares": returns.double().square().sum(),
                    "is_clipped": losses.is_clipped.sum(),
                }
            )
        self._idle(num_idle)
        self.masters.collect()

    def optim_step(self, step: int) -> None:
        """Update the weights, as part of the run's step `step`.

        Raises: EngineError when the gradient is not finite; the weights are then as before.
        """
        if not self._has_gradient:
            self.masters.zero_grad()
            return
        norm = float(self.masters.clip(self._optim.max_norm))
        if not np.isfinite(norm):
            self.masters.zero_grad()
            rule = f"lower trainer.critic.lr = {self._optim.lr:g}, or train in float32"
            raise EngineError(f"step {step}: the critic's gradient norm is {norm}; {rule}")
        lr = learning_rate(step, self._optim.lr, self._warmup, None)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.masters.zero_grad()
        self.masters.write_back()
        self._last = {"critic/lr": lr, "critic/grad_norm": norm}

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, over all updates and ranks; nothing where no token had a return."""
        sums = self._sums.take_sums(self._reduce)
        if not sums:
            return {}
        count = sums["tokens"]
        mean = sums["returns"] / count
        spread = sums["squares"] / count - mean**2
        metrics = {
            "critic/value_loss": sums["errors"] / count,
            "critic/value/mean": sums["values"] / count,
            "critic/return/mean": mean,
            "critic/is_clipped/mean": sums["is_clipped"] / count,
        }
        if spread > 1e-12:
            metrics["critic/explained_variance"] = 1 - sums["errors"] / count / spread
        return metrics | self._last

    def state(self) -> dict[str, Part]:
        """Weights and optimizer state, this rank's parts by name."""
        return under("model", self._weights()) | under("optim", optimizer_parts(self.optimizer, self.masters))

    def targets(self, saved: dict[str, Described]) -> dict[str, Part]:
        """Where saved state goes; the caller has checked shapes, fills them, and writes masters back."""
        optimizer = make_optimizer_parts(self.optimizer, self.masters, part_of("optim", saved))
        return under("model", self._weights()) | under("optim", optimizer)

    def _weights(self) -> dict[str, Part]:
        masters = self.masters
        return {n: masters.part(n, p.detach()) for n, p in zip(masters.names, masters.parameters)}

    def hf_config(self) -> dict[str, Any]:
        """config.json of what `load_critic` and transformers' models for sequence classification load."""
        cfg = self.network.config
        return cfg.hf | {
            "architectures": [cfg.family_data.architecture.replace("CausalLM", "SequenceClassification")],
            "num_labels": 1,
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
            "tie_word_embeddings": False,
        }

    # -- passes --

    def _passes(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Rows | None]:
        for mb in micro_batches:
            yield build_rows(
                mb,
                self._vocab_size,
                self._device,
                is_scored=is_valued(mb),
                share_prefixes=self._shares_prefixes,
            )

    def _num_idle(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Ranks gather each other's shards in every pass, so all must make equally many: how many are missing here."""
        mine = sum(bool(is_valued(mb).any()) for mb in micro_batches)
        return int(self._reduce({"max/passes": float(mine)})["max/passes"]) - mine

    def _idle(self, num_passes: int) -> None:
        for _ in range(num_passes):
            rows = build_rows(IDLE, self._vocab_size, self._device)
            assert rows is not None
            values = self._values(rows)
            if torch.is_grad_enabled():
                (values * 0.0).sum().backward()

    def _values(self, rows: Rows) -> Tensor:
        if self._is_cut_by_tokens:
            return context.values(self.network, rows, self.mesh, self._cp_style)
        hidden = self.network.hidden(rows.token_ids, rows.layout, rows.rows)
        picked = hidden.index_select(0, rows.predictors)
        return head_logits(picked, self.network.output_weight).squeeze(1)

    def _picked(self, stream: np.ndarray, rows: Rows) -> Tensor:
        return torch.from_numpy(stream[rows.sources]).to(self._device)


def is_valued(mb: MicroBatch) -> np.ndarray:
    """bool [tokens]: those of the rl component."""
    rl = Membership.of(mb).rl
    return np.zeros(len(mb.token_ids), bool) if rl is None else rl != 0
