"""The network of trainer.backend = "megatron": a GPTModel of Megatron-Core, trained by its schedules and optimizer.

Megatron has the forward and backward passes, pipeline stages, sums of gradients, and AdamW over the ranks of dp and cp.
Losses, learning rates, clipping, checkpoints and publication are those of every other network, by our names
(weights.py). The model is described in model.py, its rows in rows.py, and scores in scores.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import AdamWOptim, MegatronSection, Optim
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.moe import mixtures
from stretto.models.tensor_map import TensorSlice
from stretto.models.value_head import has_value_head
from stretto.records.sample import MicroBatch
from stretto.records.weight_manifest import probe_scale
from stretto.trainer.batch.pass_inputs import IDLE_MICRO_BATCH, PassInputs, build_pass_inputs
from stretto.trainer.network import Network, PassCounts, ScoreFunction, Scores, TokenMask, Wanted
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state.learner_state import TensorInfo, add_prefix, check_same_model, select_prefix
from stretto_megatron.model import build_chunks, build_config, seed_megatron, value_head
from stretto_megatron.moments import MOMENTS
from stretto_megatron.rows import Row, build_row
from stretto_megatron.scores import Head, compute_scores
from stretto_megatron.weights import MegatronWeights

_PLAIN = Wanted()


@dataclass(frozen=True)
class _Pass:
    """index: of the micro batch; None for a pass whose result is not used."""

    index: int | None
    inputs: PassInputs
    row: Row


class MegatronNetwork(Network):
    """A model of ours as Megatron-Core trains it; the arguments are those of a NetworkBuilder."""

    weights: MegatronWeights

    def __init__(
        self,
        module: Decoder,
        *,
        section: MegatronSection,
        model: ModelSection,
        optim: Optim,
        mesh: Mesh | None = None,
        reference: Decoder | None = None,
        router_replay: bool | None = None,
        error_prefix: str = "",
        lr_key: str = "[optim] lr",
    ) -> None:
        """Raises: ConfigError for what Megatron does not compute as we do, and without a GPU."""
        assert not router_replay, "refused by the dry run"
        self.mesh = mesh or Mesh.single_rank(module.output_weight.device)
        check_device()
        if not isinstance(optim, AdamWOptim):
            raise ConfigError(f'[optim] type = {optim.type!r}: trainer.backend = "megatron" has "adamw" only')
        self.optim, self.error_prefix, self.lr_key = optim, error_prefix, lr_key
        open_parallel_state(self.mesh, section)
        seed_megatron(torch.initial_seed() % 2**31)
        self._dtype = hub.dtype_of(model.dtype, self.mesh.device)
        self._config = build_config(module.config, self._dtype, section, model.ac)
        self._has_values = has_value_head(module)
        self._chunk = model.fused_lm_head_token_chunk_size
        for mixture in mixtures(module).values() if model.freeze_moe_router else ():
            mixture.gate.weight.requires_grad_(False)
        bare = self._build_chunks(module, self._config)
        self.weights = MegatronWeights(bare, module, self.mesh)
        self.weights.load(module)
        self._chunks = self._wrap(bare, model)
        self.optimizer = self._build_optimizer(optim)
        self.weights.optimizer, self.weights.chunks = self.optimizer, self._chunks
        self._scheduler = _build_scheduler(self.optimizer, optim)
        self.weights.zero_grad()
        self._is_finished = False
        self._reference_chunks: list[Any] = []
        if reference is not None:
            config = build_config(reference.config, self._dtype, section, None)
            self._reference_chunks = self._build_chunks(reference, config)
            MegatronWeights(self._reference_chunks, reference, self.mesh).load(reference)
            for chunk in self._reference_chunks:
                chunk.requires_grad_(False)
            _free(reference)
        self.reference = reference
        _free(module)

    def _wrap(self, chunks: list[Any], model: ModelSection) -> list[Any]:
        """Chunks whose gradients Megatron sums over ranks, when it is asked to."""
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=model.reduce_dtype == "float32", use_distributed_optimizer=True
        )
        return [DistributedDataParallel(self._config, wrapping, chunk) for chunk in chunks]

    def _build_optimizer(self, optim: AdamWOptim) -> Any:
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas1,
                adam_beta2=optim.betas2,
                adam_eps=optim.eps,
                clip_grad=0.0,  # weights.py clips
                params_dtype=self._dtype,
                bf16=self._dtype is torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            self._chunks,
            config_overrides={},  # every weight decays, as in our own trainer
            use_gloo_process_groups=False,
        )

    def _build_chunks(self, module: Decoder, config: Any) -> list[Any]:
        chunks = build_chunks(module.config, config, self.mesh.device)
        if has_value_head(module) and chunks[-1].post_process:
            chunks[-1].output_layer = value_head(config, self.mesh.device)
        return chunks

    @property
    def module(self) -> list[Any]:
        """Megatron's model: the chunks of this rank."""
        return self._chunks

    @property
    def reference_module(self) -> list[Any]:
        return self._reference_chunks

    @property
    def schedule(self) -> OptimizerParamScheduler:
        return self._scheduler

    # -- passes --

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        score: ScoreFunction,
        *,
        is_training: bool,
        wanted: Wanted = _PLAIN,
        token_mask: TokenMask | None = None,
        counts: PassCounts | None = None,
        of_reference: bool = False,
    ) -> None:
        if counts is None:
            counts = PassCounts.of(self.mesh.reduce(self.count_passes(micro_batches, token_mask)))
        passes = self._passes(micro_batches, token_mask, wanted, counts.num_passes)
        if not passes:
            return
        assert not self._is_finished or not is_training, "gradients of an update that was not made"
        references: dict[int, Tensor] = {}
        if wanted.reference:

            def keep(number: int, hidden: Tensor) -> Tensor:
                references[number] = self._score(passes[number], hidden, _PLAIN, of_reference=True).values
                return hidden.new_zeros(())

            self._schedule(passes, keep, self._reference_chunks, is_training=False)

        def finish(number: int, hidden: Tensor) -> Tensor:
            each = passes[number]
            scores = self._score(each, hidden, wanted, of_reference=of_reference)
            if each.index is None:
                return (scores.values * 0.0).sum()
            loss = score(each.index, each.inputs, scores._replace(reference=references.get(number)))
            assert loss is not None or not is_training, "training needs a loss"
            return hidden.new_zeros(()) if loss is None else loss

        chunks = self._reference_chunks if of_reference else self._chunks
        self._schedule(passes, finish, chunks, is_training=is_training)

    def _passes(
        self, micro_batches: Sequence[MicroBatch], token_mask: TokenMask | None, wanted: Wanted, count: int
    ) -> list[_Pass]:
        """As many on every rank, and for an interleaved pipeline a multiple of its stages."""
        build = partial(
            build_pass_inputs,
            vocab_size=self.policy.config.vocab_size,
            device=self.mesh.device,
            with_samples=wanted.samples,
        )
        degrees = self.mesh.degrees
        # Products of 8 bits take multiples of 16 tokens.
        share = degrees.tp * (16 if self._config.fp8 else 1)
        row_of = partial(build_row, cp=degrees.cp, cp_rank=self.mesh.cp_rank, tp=share)
        masks = (None if token_mask is None else token_mask(mb) for mb in micro_batches)
        built = [(index, build(mb, is_scored=mask)) for index, (mb, mask) in enumerate(zip(micro_batches, masks))]
        found: list[tuple[int | None, PassInputs]] = [(i, inputs) for i, inputs in built if inputs is not None]
        if is_interleaved := self._config.virtual_pipeline_model_parallel_size is not None:
            count = -(-count // degrees.pp) * degrees.pp
        if len(found) < count:
            idle = build(IDLE_MICRO_BATCH)
            assert idle is not None
            found += [(None, idle)] * (count - len(found))
        # Interleaved stages do not tell each other lengths.
        least = max(row_of(each).packed.bounds[-1] for _, each in found) if found and is_interleaved else 0
        return [_Pass(index, inputs, row_of(inputs, least=least)) for index, inputs in found]

    def _schedule(
        self, passes: Sequence[_Pass], finish: Callable[[int, Tensor], Tensor], chunks: list[Any], *, is_training: bool
    ) -> None:
        """Run Megatron's schedule; finish: of the last stage, called with the number of a pass and hidden states."""
        token_count = torch.ones((), dtype=torch.int, device=self.mesh.device)

        def step(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict]]]:
            number = next(numbers)
            row = passes[number].row
            hidden = chunk(
                row.token_ids, row.positions, None, packed_seq_params=row.packed, output_processor=_hidden_states
            )
            return hidden, lambda last: (finish(number, last), token_count, {})

        numbers = [iter(range(len(passes))) for _ in chunks]
        with torch.set_grad_enabled(is_training):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=numbers if len(chunks) > 1 else numbers[0],
                model=chunks,
                num_microbatches=len(passes),
                seq_length=passes[0].row.packed.bounds[-1],  # of interleaved stages; others tell each other
                micro_batch_size=1,
                forward_only=not is_training,
            )

    def _score(self, each: _Pass, hidden: Tensor, wanted: Wanted, *, of_reference: bool) -> Scores:
        last = (self._reference_chunks if of_reference else self._chunks)[-1]
        last = getattr(last, "module", last)
        is_tied = last.share_embeddings_and_output_weights
        weight = last.shared_embedding_or_output_weight() if is_tied else last.output_layer.weight
        head = Head(
            weight,
            start=parallel_state.get_tensor_model_parallel_rank() * len(weight),
            vocab_size=self.policy.config.vocab_size,
            chunk=self._chunk,
            has_values=self._has_values and not of_reference,
        )
        return compute_scores(hidden, head, each.row, each.inputs, wanted, splits_tokens=self._config.sequence_parallel)

    # -- updates --

    def finish_gradients(self) -> None:
        """Sum gradients over the ranks that have the same weights; afterwards an update must follow."""
        if not self._is_finished:
            finalize_model_grads(self._chunks)
            self._is_finished = True

    def update(self, step: int, lr: float, *, is_skipped: bool = False) -> float:
        self.finish_gradients()
        self._is_finished = False
        return super().update(step, lr, is_skipped=is_skipped)

    def apply_gradients(self, lr: float) -> None:
        self._scheduler.max_lr = lr
        for group in self.optimizer.param_groups:
            group["max_lr"] = lr
        self._scheduler.step(1)
        self.optimizer.step_with_ready_grads()
        self.weights.num_updates += 1
        self.weights.zero_grad()

    # -- state --

    def state(self) -> dict[str, TensorSlice]:
        weights = self.weights
        parts = add_prefix("model", weights.slices())
        if weights.num_updates:
            for key in MOMENTS:
                parts |= add_prefix(f"optim.{key}", weights.gathered(key))
            step = torch.tensor(float(weights.num_updates))
            parts |= {f"optim.step.{name}": TensorSlice.whole(step.clone()) for name in weights.names}
        return parts

    def targets(self, saved: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
        weights = self.weights
        check_same_model(weights.shapes(), select_prefix("model", saved))
        parts = add_prefix("model", weights.targets("param"))
        if optimizer := select_prefix("optim", saved):
            for key in MOMENTS:
                check_same_model(weights.shapes(), select_prefix(key, optimizer))
                parts |= add_prefix(f"optim.{key}", weights.targets(key))
            parts[f"optim.step.{weights.names[0]}"] = weights.step_target()
        return parts

    # -- for others --

    def tensors(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield from (each for each in (buffer.param_data, buffer.grad_data) if each is not None)
        for each in self.optimizer.chained_optimizers:
            for state in each.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
        for chunk in self._reference_chunks:
            yield from (parameter.detach() for parameter in chunk.parameters())

    @contextmanager
    def scaled(self) -> Iterator[None]:
        kept = [held.parameter.detach().clone() for held in self.weights.held]
        self.weights.scale(probe_scale)
        try:
            yield
        finally:
            with torch.no_grad():
                for held, value in zip(self.weights.held, kept):
                    held.parameter.copy_(value)


def _build_scheduler(optimizer: Any, optim: AdamWOptim) -> OptimizerParamScheduler:
    """Megatron's scheduler for a user's functions; the network gives it the rates of our own schedule."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=optim.lr,
        max_lr=optim.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def check_device() -> None:
    """Raises: ConfigError without a GPU, which Megatron-Core cannot do without."""
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError) as cause:
        raise ConfigError(
            f'trainer.backend = "megatron" needs a GPU for every trainer rank ({cause}); leave it out'
        ) from cause


def open_parallel_state(mesh: Mesh, section: MegatronSection) -> None:
    """Megatron's process groups for a mesh, once for all networks of this process."""
    degrees = mesh.degrees
    stages = section.virtual_stages if section.virtual_stages > 1 else None
    sizes = degrees.tp, degrees.pp, stages, degrees.cp, degrees.ep, section.etp
    if parallel_state.is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        assert found == sizes, f"one mesh for all networks of a process: {found} and {sizes}"
        return
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        degrees.tp,
        degrees.pp,
        stages,
        context_parallel_size=degrees.cp,
        expert_model_parallel_size=degrees.ep,
        expert_tensor_parallel_size=section.etp,
        order="tp-cp-ep-dp-pp",  # as our mesh: tp is the fastest axis, pp the slowest
        create_gloo_process_groups=False,
    )


def _hidden_states(*, hidden_states: Tensor, **_: Any) -> Tensor:
    return hidden_states


def _free(module: Decoder) -> None:
    """Free the weights of a model that is trained elsewhere; names, shapes and config stay."""
    _ = module.tensor_map
    module.to("meta")
