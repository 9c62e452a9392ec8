"""The learner: a policy, its optimizer and its schedule; where weights change, for `sft` and `rl`.

A step is `forward_backward` over the micro batches of a batch, then `optim_step`. Losses are divided by
token counts of the whole step, over all ranks, so how documents were packed into micro batches does not
matter. Given the same weights, state and batch, a step gives the same bits. What is learned from arrives as
numpy (rows.py turns it into tensors); the loss is algorithms/losses.py; waiting, publishing and files
belong to rl.py and sft.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stretto.algorithms.custom import load_loss
from stretto.algorithms.losses import TokenCounts, needs_samples, total_loss
from stretto.base.errors import ConfigError, DataError, EngineError
from stretto.base.paths import RunDir
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.algorithm import CustomLoss, DefaultLoss, LossSection
from stretto.config.model import ModelSection, TokenizerSection
from stretto.config.trainer import Optim, Scheduler
from stretto.models import hub
from stretto.models.lm_head import token_logprobs
from stretto.models.lora import Adapter, attach
from stretto.records.sample import MicroBatch
from stretto.records.weights import AdapterInfo
from stretto.trainer.critic import Critic
from stretto.trainer.mesh import Mesh, num_ranks, training_device
from stretto.trainer.metrics import Reduce, StepSums, alone, sums_by_env
from stretto.trainer.optim import (
    Masters,
    build_optimizer,
    make_optimizer_parts,
    optimizer_parts,
)
from stretto.trainer.parallel import context
from stretto.trainer.parallel.memory import prepare_blocks
from stretto.trainer.parallel.shard import parallelise
from stretto.trainer.parallel.weights import Publication
from stretto.trainer.precision import round_products
from stretto.trainer.routing import build_routers
from stretto.trainer.rows import IDLE, Rows, build_rows, count_tokens, trains
from stretto.trainer.schedule import learning_rate
from stretto.trainer.state import Described, Part, State, StateSource, check_same_model, part_of, under

Observer = Callable[[int, MicroBatch, Rows, Tensor, Tensor], None]
"""Sees (step, micro batch, its rows, log-probabilities, entropy) of every forward pass that is trained."""


def load_policy(
    section: ModelSection,
    *,
    vocab_size: int | None = None,
    may_be_outline: bool = False,
    **token_ids: int | list[int] | None,
) -> nn.Module:
    """The network of [model] on this rank's device: from its directory, or random with a scratch section.

    may_be_outline: on several ranks it may come without memory, for the learner to load its shards into.

    vocab_size and token_ids (eos_token_id, ...) are the tokenizer's and needed for a scratch model only.
    What comes back has `hidden(token_ids, layout)`, `output_weight` and `config`, whichever `impl` it is.
    """
    dtype, device = hub.DTYPES[section.dtype], training_device()
    if section.scratch is not None:
        if section.impl == "hf":
            raise ConfigError('[model] impl = "hf" cannot start from [model.scratch]; remove one of them')
        assert vocab_size is not None, "a scratch model needs the tokenizer's vocabulary size"
        return hub.random_model(section.scratch, vocab_size, **token_ids).to(device=device, dtype=dtype)
    directory = hub.find_model(section.name)
    if section.impl == "hf" or (section.impl == "auto" and not hub.has_own_module(directory)):
        from stretto.models.hf import load_hf_model, outline_hf_model

        remote = section.trust_remote_code
        outline = None
        if may_be_outline and num_ranks() > 1:
            outline = outline_hf_model(directory, dtype=dtype, trust_remote_code=remote)
        if outline is not None:
            return outline
        return load_hf_model(directory, dtype=dtype, device=device, trust_remote_code=remote)
    if may_be_outline and num_ranks() > 1:
        return hub.outline(directory, dtype)
    return hub.load_model(directory, dtype=dtype, device=device)


def find_tokenizer(model: ModelSection, tokenizer: TokenizerSection, run_dir: RunDir) -> Path:
    """The tokenizer's directory; a scratch model's is built in the run directory."""
    if tokenizer.name is not None:
        return hub.find_model(tokenizer.name)
    if model.scratch is not None:
        return build_letters_tokenizer(run_dir.tokenizer, phrases=model.scratch.phrases)
    return hub.find_model(model.name)


class Learner:
    """Trains `policy` in place. `step` counts the optimizer steps done; it is the policy's version."""

    def __init__(
        self,
        policy: nn.Module,
        *,
        model: ModelSection,
        optim: Optim,
        scheduler: Scheduler,
        max_steps: int | None,
        loss: LossSection | None = None,
        reference: nn.Module | None = None,
        reduce: Reduce = alone,
        observe: Observer | None = None,
        enable_router_replay: bool = False,
        mesh: Mesh | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.policy, self._lora = policy, model.lora
        self.critic = critic
        self._routers = build_routers(policy, model, is_replaying=enable_router_replay)
        for network in (policy, reference):
            if network is not None:
                round_products(network, model)
        if model.lora is not None:
            attach(policy, model.lora, seed=torch.initial_seed() % 2**63)
        prepare_blocks(policy, model)
        self._is_replaying = enable_router_replay
        self.step = 0
        self._optim, self._scheduler, self._max_steps = optim, scheduler, max_steps
        self._loss = loss or DefaultLoss()
        if isinstance(self._loss, CustomLoss):
            load_loss(self._loss)
        assert reference is not None or self._loss.reference_kl is None, "a loss without its reference"
        self._reference = reference
        self._chunk = model.fused_lm_head_token_chunk_size
        self.mesh, self._cp_style = mesh, model.cp_style
        self._reduce = reduce if mesh is None else mesh.reduce
        self._observe = observe if mesh is None or mesh.is_counted else None
        self._device = policy.output_weight.device if mesh is None else mesh.device
        self._publication: Publication | None = None
        if mesh is None:
            self._masters = Masters(policy, hub.DTYPES[model.optimization_dtype])
        else:
            self._masters = parallelise(policy, mesh, model)
            self._publication = Publication(self._masters)
            if reference is not None:
                parallelise(reference, mesh, model)
        self._optimizer = build_optimizer(self._masters, optim, offloads_state=model.optim_cpu_offload)
        self._sums = StepSums()
        self._updates: list[tuple[float, float]] = []
        # On a GPU one flash kernel over whole documents is faster than a call for every shape of segment.
        models = (policy,) if reference is None else (policy, reference)
        self._shares_prefixes = self._device.type == "cpu" and all(m.shares_prefixes for m in models)
        if self._is_cut_by_tokens and model.cp_style == "ring":
            self._shares_prefixes = False

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the gradients of one step's batch; every rank must call it once a step.

        Raises: DataError when a batch does not fit the model, or trains no token at all.
        """
        with_samples, by_sample = needs_samples(self._loss), self._loss.reduction != "token"
        sums = self._reduce(
            count_tokens(micro_batches, by_sample=by_sample)._asdict()
            | {"max/passes": sum(trains(mb) for mb in micro_batches)}
        )
        num_idle = int(sums.pop("max/passes")) - sum(trains(mb) for mb in micro_batches)
        counts = TokenCounts(**sums)
        if not any(counts):
            raise DataError(
                f"the batch of step {self.step + 1} trains no token: every loss mask and weight is 0"
            )
        for mb in micro_batches:
            if self._is_replaying:
                self._routers.check(mb)
            rows = build_rows(
                mb,
                self._vocab_size,
                self._device,
                share_prefixes=self._shares_prefixes,
                with_samples=with_samples,
                with_routes=self._is_replaying,
            )
            if rows is None:
                continue
            logprobs, entropy = self._score(rows, entropy_grad=self._loss.entropy_coef is not None)
            loss, sums = total_loss(
                logprobs,
                rows.streams,
                counts,
                self._loss,
                entropy=entropy,
                reference_logprobs=self._reference_logprobs(rows),
            )
            loss.backward()
            entropy = entropy.detach()
            sums["loss"] = loss.detach()
            sums["entropy"] = (entropy * rows.streams.is_sampled).sum()
            if len(set(mb.envs)) > 1:
                sums |= sums_by_env(mb, rows, logprobs.detach(), entropy)
            self._sums.add(sums)
            if self._observe is not None:
                self._observe(self.step + 1, mb, rows, logprobs, entropy)
        for _ in range(num_idle):
            # Ranks gather each other's shards in every pass, so all must make equally many.
            self._idle()
        self._masters.collect()

    def optim_step(self) -> dict[str, float]:
        """Clip, update the weights, and give the metrics of the step, which ends.

        Raises: EngineError when the gradient is not finite; the weights are then as before.
        """
        self.update()
        return self.end_step()

    def update(self) -> None:
        """Clip and update the weights; more updates of the same step may follow.

        Raises: EngineError when the gradient is not finite; the weights are then as before.
        """
        grad_norm = float(self._masters.clip(self._optim.max_norm))
        if not np.isfinite(grad_norm):
            self._masters.zero_grad()
            raise EngineError(
                f"step {self.step + 1}: gradient norm is {grad_norm}; lower [optim] lr = {self._optim.lr}, "
                "or train in float32. The weights are those of the step before."
            )
        lr = learning_rate(self.step + 1, self._optim.lr, self._scheduler, self._max_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._masters.zero_grad()
        self._masters.write_back()
        self._updates.append((lr, grad_norm))

    def end_step(self) -> dict[str, float]:
        """The metrics of the step, over its updates (there may be none); the next one begins."""
        self.step += 1
        if not self._updates:
            self._sums.take(self._reduce)
            return {}
        rates, norms = zip(*self._updates)
        self._sums.add({"max/updates": torch.tensor(float(len(norms)))})
        metrics = self._sums.take(self._reduce)
        metrics |= {"optim/lr": rates[-1], "optim/grad_norm": sum(norms) / len(norms)}
        if len(norms) > 1:
            metrics["optim/updates"] = len(norms)
        self._updates = []
        if self._routers is None:
            return metrics
        return metrics | self._routers.finish(self._reduce if self.mesh is None else self.mesh.reduce_tokens)

    @torch.no_grad()
    def scores(self, micro_batches: Sequence[MicroBatch], *, is_reference: bool = False) -> list[np.ndarray]:
        """Of each micro batch, float32 [tokens]: log-probabilities of its trained tokens, 0 elsewhere.

        Under the policy as it is, or the reference. Every rank must call it.
        """
        policy = self._reference if is_reference else None
        mine, found = sum(trains(mb) for mb in micro_batches), []
        # Ranks gather each other's shards in every pass, so all must make equally many.
        most = int(self._reduce({"max/passes": float(mine)})["max/passes"])
        for mb in micro_batches:
            out = np.zeros(len(mb.token_ids), np.float32)
            rows = build_rows(
                mb,
                self._vocab_size,
                self._device,
                share_prefixes=self._shares_prefixes,
                with_routes=self._is_replaying,
            )
            if rows is not None:
                out[rows.sources] = self._score(rows, policy)[0].cpu().numpy()
            found.append(out)
        for _ in range(most - mine):
            self._score(self._idle_rows(), policy)
        self._masters.settle()
        return found

    @torch.no_grad()
    def logprobs(self, mb: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and entropy at every token given those before it; 0 at a document's first token."""
        is_scored = np.ones(len(mb.token_ids), dtype=bool)
        is_scored[np.asarray(mb.cu_seqlens[:-1])[np.diff(mb.cu_seqlens) > 0]] = False
        out = np.zeros((2, len(mb.token_ids)), dtype=np.float32)
        rows = build_rows(
            mb, self._vocab_size, self._device, is_scored=is_scored, with_routes=self._is_replaying
        )
        if rows is not None:
            for stream, values in zip(out, self._score(rows)):
                stream[rows.sources] = values.cpu().numpy()
            self._masters.settle()
        return out[0], out[1]

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Mean negative log-likelihood of the ce tokens, in nats, without touching weights or metrics.

        Every rank gives its own micro batches, and gets the mean over all.
        """
        passes = [mb for mb in micro_batches if mb.ce_weights is not None and np.any(mb.ce_weights)]
        most = int(self._reduce({"max/passes": len(passes)})["max/passes"])
        total, num_tokens = 0.0, 0
        for mb in passes:
            rows = build_rows(mb, self._vocab_size, self._device)
            assert rows is not None and rows.streams.ce_weights is not None
            is_member = rows.streams.ce_weights != 0
            total -= float(self._score(rows)[0][is_member].double().sum())
            num_tokens += int(is_member.sum())
        for _ in range(most - len(passes)):
            self._score(self._idle_rows())
        self._masters.settle()
        sums = self._reduce({"nll": total, "tokens": float(num_tokens)})
        return {"nll": sums["nll"] / max(sums["tokens"], 1.0), "tokens": sums["tokens"]}

    def export_tensors(self, *, is_merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """What engines are sent, as it is now: weights by Hugging Face name, of LoRA the adapter by PEFT's.

        is_merged: weights, with the adapter added to them. Of several ranks each gives the tensors that it owns,
        and every rank must go through them.
        """
        is_adapter = self._lora is not None and not is_merged
        if self._publication is not None:
            return self._publication.adapter() if is_adapter else self._publication.weights()
        return Adapter.of(self.policy).tensors() if is_adapter else hub.export_tensors(self.policy)

    def adapter_info(self) -> AdapterInfo | None:
        """What a manifest says about the tensors that are published; None: they are the whole policy."""
        return (
            None if self._lora is None else AdapterInfo(self._lora.rank, self._lora.alpha / self._lora.rank)
        )

    def state(self) -> State:
        """All that decides the next step: this rank's parts of tensors, and plain values.

        What every rank holds alike may be left out on all but the lead.
        """
        parts = under("model", self._weight_parts()) | under(
            "optim", optimizer_parts(self._optimizer, self._masters)
        )
        if self._routers is not None:
            parts |= under("routers", {n: Part.whole(t) for n, t in self._routers.state().items()})
        if self.critic is not None:
            parts |= under("critic", self.critic.state())
        if self.mesh is None or self.mesh.is_lead:
            parts["rng.cpu"] = Part.whole(torch.get_rng_state())
            if self._device.type == "cuda":
                parts["rng.cuda"] = Part.whole(torch.cuda.get_rng_state(self._device))
        values = {"step": self.step, "optim": self._optim.type}
        info = self.adapter_info()
        return State(parts, values if info is None else values | {"adapter_scaling": info.scaling})

    @torch.no_grad()
    def load_state(self, source: StateSource) -> None:
        """Continue where `state` was taken, on this mesh or another.

        Raises: DataError when it belongs to another model or optimizer; the learner is then unusable.
        """
        values, saved = source.values, source.tensors
        if values["optim"] != self._optim.type:
            raise DataError(
                f"state of optimizer {values['optim']!r}, but [optim] type = {self._optim.type!r}"
            )
        info, scaling = self.adapter_info(), values.get("adapter_scaling")
        if info is not None and scaling not in (None, info.scaling):
            raise DataError(
                f"state of an adapter with alpha / rank = {scaling:g}, but [model.lora] has {info.scaling:g}"
            )
        check_same_model(self._masters.shapes(), part_of("model", saved))
        targets = under("model", self._weight_parts())
        optimizer = make_optimizer_parts(self._optimizer, self._masters, part_of("optim", saved))
        targets |= under("optim", optimizer)
        if self._routers is not None:
            targets |= under("routers", {n: Part.whole(t) for n, t in self._routers.state().items()})
        targets |= under("critic", self._critic_targets(part_of("critic", saved)))
        random = {"rng.cpu": torch.get_rng_state()}
        if self._device.type == "cuda" and "rng.cuda" in saved:
            random["rng.cuda"] = torch.cuda.get_rng_state(self._device)
        source.read(targets | {name: Part.whole(tensor) for name, tensor in random.items() if name in saved})
        torch.set_rng_state(random["rng.cpu"])
        if "rng.cuda" in random:
            torch.cuda.set_rng_state(random["rng.cuda"], self._device)
        self.step = values["step"]
        self._masters.write_back()
        if self.critic is not None:
            self.critic.masters.write_back()

    def _weight_parts(self) -> dict[str, Part]:
        masters = self._masters
        return {n: masters.part(n, p.detach()) for n, p in zip(masters.names, masters.parameters)}

    def _critic_targets(self, saved: dict[str, Described]) -> dict[str, Part]:
        if self.critic is None:
            if saved:
                raise DataError("state of a critic, but there is no [trainer.critic]")
            return {}
        if not saved:
            raise DataError("no state of a critic, but there is [trainer.critic]")
        check_same_model(self.critic.masters.shapes(), part_of("model", saved))
        return self.critic.targets(saved)

    @property
    def _vocab_size(self) -> int:
        return self.policy.output_weight.shape[0]

    @property
    def _is_cut_by_tokens(self) -> bool:
        return self.mesh is not None and self.mesh.degrees.cp > 1

    def _idle_rows(self) -> Rows:
        """Two tokens, for a pass whose result nobody takes."""
        rows = build_rows(IDLE, self._vocab_size, self._device)
        assert rows is not None
        return rows

    def _idle(self) -> None:
        """A pass that adds zeros to the gradients."""
        rows = self._idle_rows()
        logprobs, _ = self._score(rows, is_measured=False)
        self._reference_logprobs(rows)
        (logprobs * 0.0).sum().backward()

    def _score(
        self,
        rows: Rows,
        policy: nn.Module | None = None,
        *,
        entropy_grad: bool = False,
        is_measured: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every trained token under a policy (None: the one that learns)."""
        is_measured = is_measured and torch.is_grad_enabled()
        routing = None
        if policy is None and self._routers is not None:
            routing = self._routers.routing(rows, is_measured=is_measured)
        policy = policy or self.policy
        if self._is_cut_by_tokens:
            scores = context.score(
                policy, rows, self.mesh, self._cp_style, routing, self._chunk, entropy_grad=entropy_grad
            )
        else:
            seen = {} if routing is None else {"routing": routing}
            picked = policy.hidden(rows.token_ids, rows.layout, rows.rows, **seen)
            picked = picked.index_select(0, rows.predictors)
            weight, targets, temperatures = policy.output_weight, rows.targets, rows.temperatures
            scores = token_logprobs(
                picked, weight, targets, temperatures, self._chunk, entropy_grad=entropy_grad
            )
        if routing is not None and is_measured:
            self._routers.add(routing)
        return scores

    @torch.no_grad()
    def _reference_logprobs(self, rows: Rows) -> Tensor | None:
        return None if self._loss.reference_kl is None else self._score(rows, self._reference)[0]
