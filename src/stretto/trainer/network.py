"""A trained module on a mesh, the weights that its optimizer updates, and the optimizer.

The policy (learner.py) and a valuer (valuer.py) are trained through a `Network`, which computes passes over micro
batches and their gradients, updates weights, and has a state. What a loss is they say themselves. `TorchNetwork` is
that of our own modules, of one rank or sharded; an add-on may offer others (`addons.py`, stretto.networks), which train
the same model in their own way and give weights and state by our names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import EngineError
from stretto.config.sections.model import ModelSection, SharedPrefixes
from stretto.config.sections.trainer import Optim
from stretto.families.shape import VisionShape
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.models.lora import attach_adapters
from stretto.models.tensor_map import TensorSlice
from stretto.models.value_head import has_value_head
from stretto.records.sample import MicroBatch
from stretto.records.weight_manifest import probe_scale
from stretto.trainer.batch.pass_inputs import IDLE_MICRO_BATCH, PassInputs, build_pass_inputs, has_trained_tokens
from stretto.trainer.batch.routing import Routers, build_routers
from stretto.trainer.optim.build import (
    MasterWeights,
    TrainedWeights,
    allocate_optimizer_slices,
    build_optimizer,
    optimizer_slices,
)
from stretto.trainer.parallel.memory import prepare_blocks
from stretto.trainer.parallel.precision import apply_fp8
from stretto.trainer.parallel.scores import compute_logprobs, compute_values, sharing_of
from stretto.trainer.parallel.shard import local_tensor, parallelise
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state.learner_state import TensorInfo, add_prefix, check_same_model, select_prefix

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped

TokenMask = Callable[[MicroBatch], "Bool[np.ndarray, ' tokens']"]


class PassCounts(NamedTuple):
    """What the passes of all ranks have in common: as many as any rank needs, and images if any rank has some."""

    num_passes: int
    has_images: bool

    @classmethod
    def of(cls, reduced: dict[str, float]) -> PassCounts:
        """From the reduced values of `Network.count_passes`, which are removed from the dictionary."""
        return cls(int(reduced.pop("max/passes")), bool(reduced.pop("max/images")))


@dataclass(frozen=True)
class Wanted:
    """What passes compute beside the values of their scored tokens."""

    samples: bool = False
    """Which tokens belong to one sample, in the inputs."""
    entropy_grad: bool = False
    """The gradient of the entropy."""
    alternatives: bool = False
    """Log-probabilities of the alternatives of a token, if it has some."""
    logits: bool = False
    reference: bool = False
    """Log-probabilities by the reference."""
    shares_prefixes: bool = True
    """Compute once what documents begin with alike, as far as the network does that."""


class Scores(NamedTuple):
    """What a pass computes for its scored tokens, in the order of `PassInputs.sources`."""

    values: Float[Tensor, " scored"]
    """Log-probability of each token in nats; of a network with a value head, the value before it."""
    entropy: Float[Tensor, " scored"] | None = None
    """In nats; None with a value head."""
    alternatives: Float[Tensor, "scored others"] | None = None
    """None if not wanted, or if the tokens have none."""
    logits: Float[Tensor, "scored vocab"] | None = None
    """float32, before the temperature; None if not wanted."""
    reference: Float[Tensor, " scored"] | None = None
    """None if not wanted."""


ScoreFunction = Callable[[int, PassInputs, Scores], Tensor | None]
"""Called with the index of a micro batch, its inputs and scores; its loss, if the network is trained."""


class Network(ABC):
    """What a learner trains.

    weights: the trained weights, by our names. optimizer: has the param_groups whose learning rates `update` sets.
    sharing: which tokens that samples begin with alike are computed once. vision: the shape of the module's tower.
    routers: what records and replays the choices of experts; None without experts of our own. reference: the frozen
    model that scores are compared with, if there is one. error_prefix ("the critic's ") and lr_key are for messages.
    """

    weights: TrainedWeights
    optimizer: Any
    optim: Optim
    mesh: Mesh
    sharing: SharedPrefixes = "off"
    vision: VisionShape | None = None
    routers: Routers | None = None
    reference: Policy | None = None
    error_prefix: str = ""
    lr_key: str = "[optim] lr"

    # -- passes --

    def count_passes(
        self, micro_batches: Sequence[MicroBatch], token_mask: TokenMask | None = None
    ) -> dict[str, float]:
        """This rank's values for PassCounts, to be reduced over all ranks."""
        has_pass = lambda mb: has_trained_tokens(mb) if token_mask is None else bool(token_mask(mb).any())
        return {
            "max/passes": float(sum(map(has_pass, micro_batches))),
            "max/images": float(any(mb.images for mb in micro_batches)),
        }

    @abstractmethod
    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        score: ScoreFunction,
        *,
        is_training: bool,
        wanted: Wanted = Wanted(),
        token_mask: TokenMask | None = None,
        counts: PassCounts | None = None,
        of_reference: bool = False,
    ) -> None:
        """A pass for each micro batch that has scored tokens; all ranks must call it, each with its micro batches.

        score: called after each forward pass, on ranks of the last pipeline stage only (`Mesh.is_last_stage`). If
        is_training, it returns the loss, whose gradients are added up over micro batches and ranks with no further
        factor, and are complete when this returns. Else gathered weights are freed, and what it returns is not used.
        token_mask: gives bool [tokens] for a micro batch, its scored tokens; None: those that it trains. counts: over
        all ranks; None: computed here. of_reference: the scores are those of the reference.
        """

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
                f"step {step}: {self.error_prefix}gradient norm is {norm}; lower {self.lr_key} = {self.optim.lr:g}, "
                "or train in float32. The weights are those of the previous step."
            )
        if is_skipped:
            self.weights.zero_grad()
            return norm
        self.apply_gradients(lr)
        return norm

    def apply_gradients(self, lr: float) -> None:
        """A step of the optimizer with this learning rate; the gradients are dropped."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.weights.zero_grad()
        self.weights.copy_to_model()

    def check_finite(self, version: int) -> None:
        """Check every trained weight of this rank.

        Raises: EngineError when one is NaN or infinite.
        """
        if (name := self.weights.find_not_finite()) is not None:
            raise EngineError(
                f"weights of version {version} are not finite ({self.error_prefix}{name}); they are neither saved nor "
                f"exported. Lower {self.lr_key} = {self.optim.lr:g}, and continue from the last checkpoint with "
                "--resume."
            )

    # -- state --

    @abstractmethod
    def state(self) -> dict[str, TensorSlice]:
        """This rank's slices of weights and optimizer state, as `model.<name>` and `optim.<key>.<name>`.

        They may be copies.
        """

    @abstractmethod
    def targets(self, saved: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
        """The slices for saved state; the caller fills them, then calls weights.copy_to_model.

        Raises: DataError when the state belongs to another model.
        """

    # -- for others --

    @property
    def policy(self) -> Policy:
        """The model as we compute it: its config, and the names and shapes of its weights."""
        return self.weights.policy

    @property
    @abstractmethod
    def module(self) -> Any:
        """What a user's function gets as the model."""

    @property
    def reference_module(self) -> Any:
        """What a user's function gets as the frozen model; None if there is none."""
        return self.reference

    @property
    def schedule(self) -> Any:
        """What a user's function gets as the schedule of the learning rate; None: there is none but ours."""
        return None

    @abstractmethod
    def tensors(self) -> Iterator[Shaped[Tensor, " ..."]]:
        """Tensors of this rank whose memory an engine on the same GPU may use while it generates."""

    def scaled(self) -> AbstractContextManager[None]:
        """`scaled` for all weights of the network."""
        return scaled(self.weights.all_slices().values())


@contextmanager
def scaled(parts: Iterable[TensorSlice]) -> Iterator[None]:
    """Scale weights by `probe_scale` of their whole shapes; afterwards they have their bits again.

    Takes the memory of their gradients, which are not there yet when a run starts.
    """
    kept = [(part, part.tensor.detach().clone()) for part in parts]
    with torch.no_grad():
        for part, _ in kept:
            part.tensor.mul_(probe_scale(part.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for part, value in kept:
                part.tensor.copy_(value)


class NetworkBuilder(Protocol):
    """Makes a network of a module: `TorchNetwork`, or what an add-on offers."""

    def __call__(
        self,
        module: Any,
        *,
        model: ModelSection,
        optim: Optim,
        mesh: Mesh | None = None,
        reference: Any = None,
        router_replay: bool | None = None,
        error_prefix: str = "",
        lr_key: str = "[optim] lr",
    ) -> Network:
        """module: has the weights to begin with; on the meta device its `checkpoint_reader` reads them.

        mesh: None for one rank. reference: a frozen module. router_replay: whether micro batches say which experts to
        use; None: choices of experts are not even recorded.
        """


class TorchNetwork(Network):
    """Our own module, changed in place: on one rank whole, on several sharded with FSDP2."""

    def __init__(
        self,
        module: Policy,
        *,
        model: ModelSection,
        optim: Optim,
        mesh: Mesh | None = None,
        reference: Policy | None = None,
        router_replay: bool | None = None,
        error_prefix: str = "",
        lr_key: str = "[optim] lr",
    ) -> None:
        """The arguments are those of a NetworkBuilder."""
        self._module, self._model, self.optim = module, model, optim
        self.error_prefix, self.lr_key = error_prefix, lr_key
        if router_replay is not None:
            self.routers = build_routers(module, model, is_replaying=router_replay)
        self._is_replaying, self._has_values = bool(router_replay), has_value_head(module)
        self.mesh = mesh or Mesh.single_rank(module.output_weight.device)
        apply_fp8(module, model)
        self.vision = module.config.vision if isinstance(module, Decoder) else None
        is_frozen = model.vlm is None or model.vlm.freeze_vision_encoder
        if isinstance(module, Decoder) and self.vision is not None and is_frozen:
            module.model.visual.requires_grad_(False)
        if model.lora is not None:
            attach_adapters(module, model.lora, seed=torch.initial_seed() % 2**63)
            if self._has_values:  # it is new, so it is trained whole
                module.output_weight.requires_grad_(True)
        prepare_blocks(module, model)
        if self.mesh.world_size == 1:
            self.weights = MasterWeights(module, hub.DTYPES[model.optimization_dtype])
        else:
            self.weights = parallelise(module, self.mesh, model)
        self.optimizer = build_optimizer(self.weights, optim, offloads_state=model.optim_cpu_offload)
        self.sharing = sharing_of(module, self.mesh, model)
        if model.indexer_kl_coeff is not None:  # the loss of an index is a mean over all tokens of all documents
            self.sharing = "off"
        if reference is not None:
            apply_fp8(reference, model)
            if not reference.shares_prefixes:
                self.sharing = "off"
            if self.mesh.world_size > 1:
                parallelise(reference, self.mesh, model)
        self.reference = reference

    @property
    def module(self) -> Policy:
        return self._module

    # -- passes --

    def build_inputs(
        self,
        mb: MicroBatch,
        token_mask: TokenMask | None = None,
        *,
        wanted: Wanted = Wanted(),
        with_unused_image: bool = False,
    ) -> PassInputs | None:
        """`build_pass_inputs` for this network."""
        return build_pass_inputs(
            mb,
            self._module.config.vocab_size,
            self.mesh.device,
            is_scored=None if token_mask is None else token_mask(mb),
            sharing=self.sharing if wanted.shares_prefixes else "off",
            with_samples=wanted.samples,
            with_routes=self._is_replaying,
            vision=self.vision,
            with_unused_image=with_unused_image,
        )

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        score: ScoreFunction,
        *,
        is_training: bool,
        wanted: Wanted = Wanted(),
        token_mask: TokenMask | None = None,
        counts: PassCounts | None = None,
        of_reference: bool = False,
    ) -> None:
        assert not (of_reference or wanted.reference) or self.reference is not None, "there is no reference"
        if counts is None:
            counts = PassCounts.of(self.mesh.reduce(self.count_passes(micro_batches, token_mask)))
        # Ranks gather each other's shards in every pass, so all do the same, images included.
        with_unused_image = counts.has_images and self.mesh.world_size > 1
        num_idle = counts.num_passes
        with torch.set_grad_enabled(is_training):
            for i, mb in enumerate(micro_batches):
                inputs = self.build_inputs(mb, token_mask, wanted=wanted, with_unused_image=with_unused_image)
                if inputs is None:
                    continue
                num_idle -= 1
                loss = score(i, inputs, self._score(inputs, wanted, of_reference=of_reference))
                if is_training:
                    assert loss is not None, "training needs a loss"
                    loss.backward()
            for _ in range(num_idle):
                inputs = self.build_inputs(IDLE_MICRO_BATCH, with_unused_image=with_unused_image)
                assert inputs is not None
                self._run_idle_pass(inputs, wanted, is_training=is_training, of_reference=of_reference)
        if is_training:
            self.weights.collect_gradients()
        else:
            self.weights.reshard()

    def _run_idle_pass(self, inputs: PassInputs, wanted: Wanted, *, is_training: bool, of_reference: bool) -> None:
        """A pass that adds zeros to the gradients: other ranks wait for its collectives."""
        only = Wanted(reference=wanted.reference)
        values = self._score(inputs, only, of_reference=of_reference, is_measured=False).values
        if is_training:
            (values * 0.0).sum().backward()

    def _score(self, inputs: PassInputs, wanted: Wanted, *, of_reference: bool, is_measured: bool = True) -> Scores:
        """is_measured: record the choices of experts, if this is a pass of training."""
        is_measured = is_measured and torch.is_grad_enabled()
        routing, routers = None, self.routers
        if routers is not None and not of_reference:
            routing = routers.routing(inputs, is_measured=is_measured)
        module: Any = self.reference if of_reference else self._module
        if self._has_values:
            scores = Scores(compute_values(module, inputs, self.mesh, self._model, routing=routing))
        else:
            logits = list[Tensor]() if wanted.logits else None
            found, entropy = compute_logprobs(
                module,
                inputs,
                self.mesh,
                self._model,
                routing=routing,
                entropy_grad=wanted.entropy_grad,
                with_alternatives=wanted.alternatives,
                logits=logits,
            )
            others = None
            if found.ndim == 2:
                found, others = found[:, 0], found[:, 1:]
            scores = Scores(found, entropy, others, logits[0] if logits else None)
        if routing is not None and routers is not None and is_measured:
            routers.add(routing)
        if wanted.reference:
            assert self.reference is not None
            with torch.no_grad():
                reference = compute_logprobs(self.reference, inputs, self.mesh, self._model)[0]
            scores = scores._replace(reference=reference)
        return scores

    # -- state --

    def state(self) -> dict[str, TensorSlice]:
        optimizer = optimizer_slices(self.optimizer, self.weights)
        return add_prefix("model", self.weights.slices()) | add_prefix("optim", optimizer)

    def targets(self, saved: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
        check_same_model(self.weights.shapes(), select_prefix("model", saved))
        optimizer = allocate_optimizer_slices(self.optimizer, self.weights, select_prefix("optim", saved))
        return add_prefix("model", self.weights.slices()) | add_prefix("optim", optimizer)

    # -- for others --

    def tensors(self) -> Iterator[Shaped[Tensor, " ..."]]:
        for module in (self._module, self.reference):
            if module is not None:
                yield from (local_tensor(each.detach()) for each in (*module.parameters(), *module.buffers()))
        yield from (local_tensor(each.detach()) for each in self.weights.parameters)
        for state in self.optimizer.state.values():
            yield from (local_tensor(each.detach()) for each in state.values() if isinstance(each, Tensor))
