"""The learner: a policy with optimizer and schedule, which `sft` and `rl` train.

A step is `forward_backward` over the micro batches of a batch, then `optim_step`. Losses are divided by the
token counts of the whole step over all ranks, so the packing of documents into micro batches does not matter. With the
same weights, state and batch, a step is bit-identical. Micro batches are numpy arrays (pass_inputs.py turns them into
tensors); the loss is algorithms/losses.py; waiting, publishing and files belong to rl.py and sft.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto.algorithms.custom import load_loss
from stretto.algorithms.losses import UserFunctions, needs_samples, total_loss
from stretto.base.errors import ConfigError, DataError
from stretto.base.paths import RunDir
from stretto.chat.choice import given_template
from stretto.chat.placeholders import PLACEHOLDER
from stretto.chat.scratch import build_scratch_files
from stretto.chat.templates import DEFAULT
from stretto.chat.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from stretto.check.checkpoint import network_of
from stretto.check.degrees import check_vision
from stretto.config.sections.algorithm import CustomLoss, DefaultLoss, LossSection
from stretto.config.sections.model import ModelSection, TokenizerSection
from stretto.config.sections.trainer import Optim, Scheduler
from stretto.data.hub_model import fetch, find_local
from stretto.models import hub
from stretto.models.hf import Policy, build_meta_hf_model, load_hf_model
from stretto.models.lora import ADAPTABLE, is_adapter_parameter
from stretto.models.tensor_map import TensorSlice
from stretto.records.sample import MicroBatch
from stretto.records.token_counts import TokenCounts, counts_of_step, has_signal, weigh_by_rollout
from stretto.records.weight_manifest import AdapterInfo
from stretto.trainer.batch.metrics import StepSums, ratio_sums, sums_by_env
from stretto.trainer.batch.pass_inputs import PassInputs, count_inputs
from stretto.trainer.network import Network, NetworkBuilder, PassCounts, Scores, TorchNetwork, Wanted
from stretto.trainer.optim.schedule import learning_rate
from stretto.trainer.parallel.weights import Publication
from stretto.trainer.ranks.mesh import Mesh, num_ranks, run_on_lead, training_device
from stretto.trainer.state.learner_state import LearnerState, StateSource, select_prefix
from stretto.trainer.valuer import NAME, Valuer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Observer = Callable[[int, MicroBatch, PassInputs, Tensor, Tensor], None]
"""Called with (step, micro batch, its inputs, log-probabilities, entropy) after every training pass."""


def load_policy(
    section: ModelSection,
    *,
    vocab_size: int | None = None,
    may_be_meta: bool = False,
    **token_ids: int | list[int] | None,
) -> Policy:
    """The model of [model] on this rank's device, from its directory or random.

    may_be_meta: on several ranks the model may be on the meta device; the learner then loads its shards.
    vocab_size and token_ids (eos_token_id, ...) are needed for a scratch model only: see `find_tokens`.
    With every `impl` the model has `hidden(token_ids, layout)`, `output_weight` and `config`.
    """
    device, is_meta = training_device(), may_be_meta and num_ranks() > 1
    dtype = hub.dtype_of(section.dtype, device)
    if section.scratch is not None:
        if section.impl == "hf":
            raise ConfigError('[model] impl = "hf" cannot start from [model.scratch]; remove one of them')
        check_vision(section, section.scratch.family)
        assert vocab_size is not None, "a scratch model needs the tokenizer's vocabulary size"
        return hub.random_model(section.scratch, vocab_size, **token_ids).to(device=device, dtype=dtype)
    directory = fetch(section.name)
    if section.impl != "hf":
        check_vision(section, hub.read_json(directory / "config.json").get("model_type", "model of text"))
    if section.impl == "hf" or (section.impl == "auto" and not hub.has_custom_module(directory)):
        remote = section.trust_remote_code
        if is_meta:
            model = build_meta_hf_model(directory, dtype=dtype, trust_remote_code=remote)
            if model is not None:
                return model
        return load_hf_model(directory, dtype=dtype, device=device, trust_remote_code=remote)
    if is_meta:
        return hub.build_meta_model(directory, dtype)
    return hub.load_model(directory, dtype=dtype, device=device)


def _config_file(model: ModelSection) -> Mapping[str, Any]:
    """The model's config.json, with which a resume is compared: transformers may have made another of it."""
    directory = None if model.scratch is not None else find_local(model.name)
    path = directory and directory / "config.json"
    return hub.read_json(path) if path and path.is_file() else {}


def find_tokenizer(model: ModelSection, tokenizer: TokenizerSection, run_dir: RunDir) -> Path:
    """The tokenizer's directory, found by rank 0; a scratch model's tokenizer is built in the run directory."""

    def find() -> str:
        if tokenizer.name is not None:
            found = fetch(tokenizer.name, has_weights=False)
        elif model.scratch is not None:
            found = build_scratch_files(run_dir.tokenizer, model.scratch)
        else:
            found = fetch(model.name)
        if tokenizer.chat_template is None:
            return str(found)
        return str(with_template(Path(found), tokenizer.chat_template, run_dir.tokenizer))

    return Path(run_on_lead(find, str))


def with_template(source: Path, template: str, directory: Path) -> Path:
    """A copy of a tokenizer's files that has this chat template as its own.

    Raises: ConfigError if there is no such template.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = given_template(load_tokenizer(source), template)
    hub.copy_tokenizer(source, directory)
    for name in ("config.json", "generation_config.json"):  # the end tokens
        if (source / name).is_file() and source.resolve() != directory.resolve():
            shutil.copyfile(source / name, directory / name)
    shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)
    (directory / "chat_template.jinja").write_text(files.sources[DEFAULT], encoding="utf-8")
    return directory


def find_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """The arguments of `load_policy` that a scratch model takes from the tokenizer."""
    return {
        "vocab_size": tokenizer.vocab_size,
        "eos_token_id": list(tokenizer.eos_ids),
        "pad_token_id": tokenizer.token_id(END_OF_TEXT),
        "image_token_id": tokenizer.token_id(PLACEHOLDER),
    }


class Learner:
    """Trains `policy` in place. `step` is the number of steps done, which is the policy's version."""

    def __init__(
        self,
        policy: Policy,
        *,
        model: ModelSection,
        optim: Optim,
        scheduler: Scheduler,
        max_steps: int | None,
        loss: LossSection | None = None,
        reference: Policy | None = None,
        observe: Observer | None = None,
        enable_router_replay: bool = False,
        mesh: Mesh | None = None,
        valuer: Valuer | None = None,
        build: NetworkBuilder = TorchNetwork,
    ) -> None:
        """valuer: learns beside the policy, and in the first steps alone; the policy's schedule starts after them.

        build: makes the network that computes and updates the policy.
        """
        self.policy, self._lora = policy, model.lora
        self.valuer = valuer
        self.frozen_steps = 0 if valuer is None else valuer.section.num_critic_only_steps
        self._schedule_start = 0  # the step after which the schedule began
        self._sizes = network_of(model, _config_file(model))
        self._is_replaying = enable_router_replay
        self.step = 0
        self._optim, self._scheduler, self._max_steps = optim, scheduler, max_steps
        self._loss = loss or DefaultLoss()
        if isinstance(self._loss, CustomLoss):
            load_loss(self._loss)
        assert reference is not None or self._loss.reference_kl is None, "a loss with reference_kl needs a reference"
        self.network = build(
            policy, model=model, optim=optim, mesh=mesh, reference=reference, router_replay=enable_router_replay
        )
        self.mesh, self._routers = self.network.mesh, self.network.routers
        self._index_coeff = model.indexer_kl_coeff
        self._publication = Publication(self.network.weights)
        self.user = UserFunctions()
        """A user's functions in the loss; `user.loss` also gets the micro batch, the indices of its trained tokens, and
        the logits that predict these."""
        self.observers = [observe] if observe is not None else []
        """Called on the rank that received the batch."""
        self._sums = StepSums()
        self._updates: list[tuple[float, float]] = []
        self._has_signal, self._num_skipped = True, 0

    @property
    def shares_prefixes(self) -> bool:
        """True if what samples begin with alike is computed once, to any depth, by all that learns on these ranks."""
        return all(network.sharing == "tree" for network in self.networks)

    @property
    def networks(self) -> list[Network]:
        """All that is trained on these ranks: the policy's network, then the valuer's."""
        valued = None if self.valuer is None else self.valuer.network
        return [self.network] if valued is None else [self.network, valued]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the gradients of a batch; all ranks must call it.

        Raises: DataError when a batch does not fit the model, or trains no token.
        """
        local_sums = counts_of_step(micro_batches, self._loss.reduction)._asdict()
        local_sums |= {"max/signal": float(any(map(has_signal, micro_batches)))}
        if self._index_coeff is not None:
            local_sums["inputs"] = float(sum(map(count_inputs, micro_batches)))
        sums = self.mesh.reduce(local_sums | self.network.count_passes(micro_batches))
        num_inputs, passes = sums.pop("inputs", 0.0), PassCounts.of(sums)
        self._has_signal = bool(sums.pop("max/signal")) or self._learns_without_advantages
        if self._loss.reduction == "rollout":
            micro_batches, _ = weigh_by_rollout(micro_batches)
        if self._index_coeff is not None:
            assert self._routers is not None, "a model with indexers has experts"
            self._routers.index_loss_scale = self._index_coeff / max(num_inputs, 1.0)
        counts = TokenCounts(**sums)
        if not any(counts):
            raise DataError(f"the batch of step {self.step + 1} trains no token: every loss mask and weight is 0")
        if self._is_replaying:
            assert self._routers is not None, "refused by build_routers"
            for mb in micro_batches:
                self._routers.check(mb)
        wanted = Wanted(
            samples=needs_samples(self._loss) or self.user != UserFunctions(),
            entropy_grad=self._loss.entropy_coef is not None,
            alternatives=True,
            logits=self.user.loss is not None,
            reference=self._loss.reference_kl is not None,
        )

        def score(index: int, inputs: PassInputs, scores: Scores) -> Tensor:
            return self._loss_of(micro_batches[index], inputs, scores, counts)

        self.network.run(micro_batches, score, is_training=True, wanted=wanted, counts=passes)

    def _loss_of(self, mb: MicroBatch, inputs: PassInputs, scores: Scores, counts: TokenCounts) -> Float[Tensor, ""]:
        """The loss of one pass, whose sums are added to the metrics of the step.

        counts: the trained tokens of all micro batches of all ranks.
        """
        logprobs, entropy, user = scores.values, scores.entropy, self.user
        assert entropy is not None, "a policy has a vocabulary"
        if user.loss is not None:
            user = replace(user, loss=partial(user.loss, mb, inputs.sources, scores.logits))
        inputs = replace(inputs, streams=inputs.streams.filled_in(logprobs))
        loss, token_sums = total_loss(
            logprobs,
            inputs.streams,
            counts,
            self._loss,
            entropy=entropy,
            reference_logprobs=scores.reference,
            alternative_logprobs=scores.alternatives,
            user=user,
        )
        entropy = entropy.detach()
        token_sums |= ratio_sums(mb, inputs, logprobs.detach(), self.step) | {"loss": loss.detach()}
        token_sums["entropy"] = (entropy * inputs.streams.is_sampled).sum()
        if len(set(mb.envs)) > 1:
            token_sums |= sums_by_env(mb, inputs, logprobs.detach(), entropy)
        self._sums.add(token_sums)
        for observe in self.observers if self.mesh.is_counted else ():
            observe(self.step + 1, mb, inputs, logprobs, entropy)
        return loss

    def optim_step(self) -> dict[str, float]:
        """Clip the gradient, update the weights and end the step; its metrics.

        Raises: EngineError when the gradient is not finite; the weights are then unchanged.
        """
        self.update()
        return self.end_step()

    def update(self) -> None:
        """Clip the gradient and update the weights; more updates in the same step may follow.

        Without a signal (`has_signal`) weights and the optimizer's state stay: the gradient is that of rounding, or of
        the squared log ratio alone, and Adam would make full steps of it.

        Raises: EngineError when the gradient is not finite; the weights are then unchanged.
        """
        lr = self.next_lr
        norm = self.network.update(self.step + 1, lr, is_skipped=not self._has_signal)
        self._updates.append((lr, norm))
        self._num_skipped += not self._has_signal

    @property
    def _learns_without_advantages(self) -> bool:
        """True if the loss has terms that move the policy where all advantages are 0."""
        loss = self._loss
        return (
            isinstance(loss, CustomLoss)
            or self.user.loss is not None
            or self.user.correct is not None
            or bool(loss.entropy_coef)
            or (loss.reference_kl is not None and loss.reference_kl.coef > 0)
            or self._index_coeff is not None
        )

    @property
    def next_lr(self) -> float:
        """Learning rate of the updates of the next step."""
        start = max(self.frozen_steps, self._schedule_start)
        last = None if self._max_steps is None else self._max_steps - start
        return learning_rate(self.step - start + 1, self._optim.lr, self._scheduler, last)

    def begin_schedule(self) -> None:
        """Let warm-up and decay of the learning rate begin after this step."""
        self._schedule_start = self.step

    def begin_anew(self) -> None:
        """Count steps, and with them the schedule, from 0; weights and the optimizer's state stay."""
        self.step = self._schedule_start = 0

    def end_step(self) -> dict[str, float]:
        """End the step; metrics over all its updates, empty if there were none."""
        self.step += 1
        if not self._updates:
            self._sums.pop_means(self.mesh.reduce)
            return {}
        rates, norms = zip(*self._updates)
        self._sums.add({"max/updates": float(len(norms))})
        metrics = self._pop_means()
        metrics |= {"optim/lr": rates[-1], "optim/grad_norm": sum(norms) / len(norms)}
        if len(norms) > 1:
            metrics["optim/updates"] = len(norms)
        if self._lora is not None and self._lora.dropout:
            metrics["optim/dropout"] = self._lora.dropout
        if self._num_skipped:
            metrics["optim/skipped"] = self._num_skipped
        self._updates, self._num_skipped = [], 0
        if self._routers is not None:
            metrics |= self._routers.end_step(self.mesh.reduce_token_sums)
        return metrics

    def _pop_means(self) -> dict[str, float]:
        """The means over the passes of a step, on all ranks."""
        return self._sums.pop_means(self.mesh.reduce)

    def trained_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, is_reference: bool = False
    ) -> list[Float[np.ndarray, " _"]]:
        """Per micro batch, float32 [tokens]: log-probabilities of its trained tokens, 0 elsewhere.

        They are those of the current policy, or of the reference. All ranks must call it.
        """
        by_micro_batch = [np.zeros(len(mb.token_ids), np.float32) for mb in micro_batches]

        def score(index: int, inputs: PassInputs, scores: Scores) -> None:
            by_micro_batch[index][inputs.sources] = scores.values.cpu().numpy()

        self.network.run(micro_batches, score, is_training=False, of_reference=is_reference)
        return self.mesh.from_last_stage(by_micro_batch, list[np.ndarray])

    def logprobs(self, mb: MicroBatch) -> tuple[Float[np.ndarray, " tokens"], Float[np.ndarray, " tokens"]]:
        """Log-probability and entropy of every token; 0 at a document's first token and in images.

        All ranks must call it.
        """
        out = np.zeros((2, len(mb.token_ids)), dtype=np.float32)

        def is_scored(mb: MicroBatch) -> Bool[np.ndarray, " tokens"]:
            found = np.ones(len(mb.token_ids), dtype=bool)
            found[np.asarray(mb.cu_seqlens[:-1])[np.diff(mb.cu_seqlens) > 0]] = False
            if (vision := self.network.vision) is not None:
                found &= mb.token_ids != vision.image_token_id
            return found

        def score(index: int, inputs: PassInputs, scores: Scores) -> None:
            assert scores.entropy is not None, "a policy has a vocabulary"
            for stream, values in zip(out, (scores.values, scores.entropy)):
                stream[inputs.sources] = values.cpu().numpy()

        alone = Wanted(shares_prefixes=False)
        self.network.run([mb], score, is_training=False, wanted=alone, token_mask=is_scored)
        out = self.mesh.from_last_stage(out, np.ndarray)
        return out[0], out[1]

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Mean negative log-likelihood of the ce tokens over all ranks, in nats; weights and metrics do not change.

        Every rank must call it with its share of the micro batches.
        """
        total, num_tokens = 0.0, 0

        def score(index: int, inputs: PassInputs, scores: Scores) -> None:
            nonlocal total, num_tokens
            total -= float(scores.values.double().sum())
            num_tokens += len(scores.values)

        self.network.run(micro_batches, score, is_training=False, token_mask=_ce_token_mask)
        sums = self.mesh.reduce({"nll": total, "tokens": float(num_tokens)})
        return {"nll": sums["nll"] / max(sums["tokens"], 1.0), "tokens": sums["tokens"]}

    def export_tensors(self, *, is_merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The current tensors for engines: weights by Hugging Face name, or the LoRA adapter by PEFT's names.

        is_merged: weights with the adapter added to them. A rank yields the tensors that it owns, and all ranks must
        iterate over them.
        """
        is_adapter = self._lora is not None and not is_merged
        return self._publication.adapter() if is_adapter else self._publication.weights()

    def adapter_info(self) -> AdapterInfo | None:
        """The adapter's entry in the manifest of a version; None if whole weights are published."""
        return None if self._lora is None else AdapterInfo(self._lora.rank, self._lora.alpha / self._lora.rank)

    def check_finite(self) -> None:
        """Check every trained weight of this rank, before it is saved.

        Raises: EngineError when one is NaN or infinite.
        """
        for network in self.networks:
            network.check_finite(self.step)

    def state(self) -> LearnerState:
        """Everything that the next step depends on: this rank's slices of tensors, and plain values.

        Some tensors that are equal on every rank are in the lead's state only.
        """
        parts = self.network.state()
        if self._routers is not None:
            parts |= self._routers.slices()
        if self.valuer is not None:
            parts |= self.valuer.slices()
        if self.mesh.is_lead:
            parts["rng.cpu"] = TensorSlice.whole(torch.get_rng_state())
            if self.mesh.device.type == "cuda":
                parts["rng.cuda"] = TensorSlice.whole(torch.cuda.get_rng_state(self.mesh.device))
        values: dict[str, Any] = {"step": self.step, "optim": self._optim.type, "schedule_start": self._schedule_start}
        info = self.adapter_info()
        values |= {"adapter_scaling": None if info is None else info.scaling, "has_critic": self.valuer is not None}
        values |= {"network": self._sizes, "adapter": self._adapter_values()}
        return LearnerState(parts, values)

    def _adapter_values(self) -> dict[str, Any] | None:
        """Rank and layers of the adapter, by the last parts of their names; bare: layers that could have one, too."""
        if self._lora is None:
            return None
        names = filter(is_adapter_parameter, self.network.weights.shapes())
        layers = {name.split(".")[-2] for name in names}
        modules = self.policy.named_modules()
        found = {name.rpartition(".")[2] for name, module in modules if isinstance(module, ADAPTABLE)}
        return {"rank": self._lora.rank, "layers": sorted(layers), "bare": sorted(found - layers)}

    @torch.no_grad()
    def load_state(self, source: StateSource) -> None:
        """Load the state that `state` returned, on this mesh or another.

        Raises: DataError when it belongs to another model or optimizer; the learner is then unusable.
        """
        values, saved = source.values, source.tensors
        if values["optim"] not in (None, self._optim.type):
            raise DataError(f"state of optimizer {values['optim']!r}, but [optim] type = {self._optim.type!r}")
        info, scaling = self.adapter_info(), values.get("adapter_scaling")
        if info is not None and scaling not in (None, info.scaling):
            raise DataError(
                f"state of an adapter with alpha / rank = {scaling:g}, but [model.lora] has {info.scaling:g}"
            )
        targets = self.network.targets(saved)
        if self._routers is not None:
            targets |= self._routers.slices()
        if self.valuer is not None:
            targets |= self.valuer.targets(saved)
        elif select_prefix(NAME, saved):
            raise DataError(f"the state has a {NAME}, but there is no [trainer.{NAME}]")
        random = {"rng.cpu": torch.get_rng_state()}
        if self.mesh.device.type == "cuda" and "rng.cuda" in saved:
            random["rng.cuda"] = torch.cuda.get_rng_state(self.mesh.device)
        source.read(targets | {name: TensorSlice.whole(tensor) for name, tensor in random.items() if name in saved})
        torch.set_rng_state(random["rng.cpu"])
        if "rng.cuda" in random:
            torch.cuda.set_rng_state(random["rng.cuda"], self.mesh.device)
        self.step, self._schedule_start = values["step"], values.get("schedule_start", 0)
        for network in self.networks:
            network.weights.copy_to_model()


def _ce_token_mask(mb: MicroBatch) -> Bool[np.ndarray, " tokens"]:
    """True for tokens of the ce component."""
    return np.zeros(len(mb.token_ids), bool) if mb.ce_weights is None else mb.ce_weights != 0
