"""A trained module on a mesh, the weights that its optimizer updates, and the optimizer.

The policy (learner.py) and the critic (critic.py) are networks. This file has what both need: preparing layers and
blocks, the same number of passes on every rank, updates, and state. What a pass computes is in their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
import torch

from stretto.base.errors import EngineError
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import Optim
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.lora import attach_adapters
from stretto.models.tensor_map import TensorSlice
from stretto.models.value_head import has_value_head
from stretto.records.sample import MicroBatch
from stretto.trainer.batch.pass_inputs import (
    IDLE_MICRO_BATCH,
    PassInputs,
    PassOptions,
    build_pass_inputs,
    has_trained_tokens,
)
from stretto.trainer.optim.build import (
    MasterWeights,
    TrainedWeights,
    allocate_optimizer_slices,
    build_optimizer,
    optimizer_slices,
)
from stretto.trainer.parallel.memory import prepare_blocks
from stretto.trainer.parallel.precision import apply_fp8
from stretto.trainer.parallel.scores import sharing_of
from stretto.trainer.parallel.shard import parallelise
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state.learner_state import TensorInfo, add_prefix, check_same_model, select_prefix

if TYPE_CHECKING:
    from jaxtyping import Bool


class PassCounts(NamedTuple):
    """What the passes of all ranks have in common: as many as any rank needs, and images if any rank has some."""

    num_passes: int
    has_images: bool

    @classmethod
    def of(cls, reduced: dict[str, float]) -> PassCounts:
        """From the reduced values of `Network.count_passes`, which are removed from the dictionary."""
        return cls(int(reduced.pop("max/passes")), bool(reduced.pop("max/images")))


class Network:
    """A module, changed in place; `weights` are its trained weights as the optimizer sees them."""

    def __init__(
        self,
        module: Policy,
        *,
        model: ModelSection,
        optim: Optim,
        mesh: Mesh | None = None,
        error_prefix: str = "",
        lr_key: str = "[optim] lr",
    ) -> None:
        """mesh: None for one rank. error_prefix ("the critic's ") and lr_key are for messages."""
        self.module, self.optim = module, optim
        self._prefix, self._lr_key = error_prefix, lr_key
        self.mesh = mesh or Mesh.single_rank(module.output_weight.device)
        apply_fp8(module, model)
        self.vision = module.config.vision if isinstance(module, Decoder) else None
        is_frozen = model.vlm is None or model.vlm.freeze_vision_encoder
        if isinstance(module, Decoder) and self.vision is not None and is_frozen:
            module.model.visual.requires_grad_(False)
        if model.lora is not None:
            attach_adapters(module, model.lora, seed=torch.initial_seed() % 2**63)
            if has_value_head(module):  # it is new, so it is trained whole
                module.output_weight.requires_grad_(True)
        prepare_blocks(module, model)
        self.weights: TrainedWeights
        if self.mesh.world_size == 1:
            self.weights = MasterWeights(module, hub.DTYPES[model.optimization_dtype])
        else:
            self.weights = parallelise(module, self.mesh, model)
        self.optimizer = build_optimizer(self.weights, optim, offloads_state=model.optim_cpu_offload)
        self.sharing = sharing_of(module, self.mesh, model)

    # -- passes --

    def build_inputs(self, mb: MicroBatch, **how: Unpack[PassOptions]) -> PassInputs | None:
        """`build_pass_inputs` for this network."""
        how = {"sharing": self.sharing, "vision": self.vision, **how}
        return build_pass_inputs(mb, self.module.config.vocab_size, self.mesh.device, **how)

    def count_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        token_mask: Callable[[MicroBatch], Bool[np.ndarray, " tokens"]] | None = None,
    ) -> dict[str, float]:
        """This rank's values for PassCounts, to be reduced over all ranks."""
        has_pass = lambda mb: has_trained_tokens(mb) if token_mask is None else bool(token_mask(mb).any())
        return {
            "max/passes": float(sum(map(has_pass, micro_batches))),
            "max/images": float(any(mb.images for mb in micro_batches)),
        }

    def passes(
        self,
        micro_batches: Sequence[MicroBatch],
        counts: PassCounts | None = None,
        *,
        token_mask: Callable[[MicroBatch], Bool[np.ndarray, " tokens"]] | None = None,
        with_samples: bool = False,
        with_routes: bool = False,
    ) -> Iterator[tuple[int | None, PassInputs]]:
        """(index, inputs) per micro batch to score, then (None, inputs) for passes without a result.

        Ranks gather each other's shards in every pass, so all do the same: counts, over all ranks (None: computed
        here). token_mask: gives bool [tokens] for a micro batch; None: its trained tokens. with_samples and
        with_routes are those of `build_pass_inputs`.
        """
        if counts is None:
            counts = PassCounts.of(self.mesh.reduce(self.count_passes(micro_batches, token_mask)))
        num_passes = counts.num_passes
        with_unused_image = counts.has_images and self.mesh.world_size > 1
        for i, mb in enumerate(micro_batches):
            inputs = self.build_inputs(
                mb,
                is_scored=None if token_mask is None else token_mask(mb),
                with_samples=with_samples,
                with_routes=with_routes,
                with_unused_image=with_unused_image,
            )
            if inputs is not None:
                num_passes -= 1
                yield i, inputs
        for _ in range(num_passes):
            inputs = self.build_inputs(IDLE_MICRO_BATCH, with_unused_image=with_unused_image)
            assert inputs is not None
            yield None, inputs

    # -- updates --

    def update(self, step: int, lr: float, *, is_skipped: bool = False) -> float:
        """Clip the gradient and update the weights; the norm of the gradient before clipping.

        is_skipped: drop the gradient instead.

        Raises: EngineError when the norm is not finite; the weights are then unchanged.
        """
        norm = float(self.weights.clip_gradients(self.optim.max_norm))
        if not np.isfinite(norm):
            self.weights.zero_grad()
            raise EngineError(
                f"step {step}: {self._prefix}gradient norm is {norm}; lower {self._lr_key} = {self.optim.lr:g}, "
                "or train in float32. The weights are those of the previous step."
            )
        if is_skipped:
            self.weights.zero_grad()
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.weights.zero_grad()
        self.weights.copy_to_model()
        return norm

    def check_finite(self, version: int) -> None:
        """Check every trained weight of this rank.

        Raises: EngineError when one is NaN or infinite.
        """
        if (name := self.weights.find_not_finite()) is not None:
            raise EngineError(
                f"weights of version {version} are not finite ({self._prefix}{name}); they are neither saved nor "
                f"exported. Lower {self._lr_key} = {self.optim.lr:g}, and continue from the last checkpoint with "
                "--resume."
            )

    # -- state --

    def state(self) -> dict[str, TensorSlice]:
        """This rank's slices of weights and optimizer state, by name."""
        optimizer = optimizer_slices(self.optimizer, self.weights)
        return add_prefix("model", self.weights.slices()) | add_prefix("optim", optimizer)

    def targets(self, saved: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
        """The slices for saved state; the caller fills them, then calls weights.copy_to_model.

        Raises: DataError when the state belongs to another model.
        """
        check_same_model(self.weights.shapes(), select_prefix("model", saved))
        optimizer = allocate_optimizer_slices(self.optimizer, self.weights, select_prefix("optim", saved))
        return add_prefix("model", self.weights.slices()) | add_prefix("optim", optimizer)
