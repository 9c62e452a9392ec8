"""Megatron's weights by our names: which part of which of our parameters each of this rank's parameters has.

Megatron's matrices lie otherwise than ours (names.py): queries, keys and values by group, gate and up in one matrix,
experts each by itself. So a slice of ours is a copy, put together from pieces. The distributed optimizer has a range of
each flattened parameter; states of it are gathered over the ranks that share the parameter, one parameter at a time,
and each of them keeps some rows, so that checkpoints have everything once and any mesh can read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from stretto.families.shape import ModelConfig
from stretto.models import hub
from stretto.models.decoder import Decoder
from stretto.models.tensor_map import Region, Shape, TensorMap, TensorSlice, region_of
from stretto.trainer.optim.build import TrainedWeights
from stretto.trainer.ranks.mesh import Mesh
from stretto_megatron.names import EXPERTS, LAYERS, expert_order, megatron_map, spellings
from stretto_megatron.order import swapped

if TYPE_CHECKING:
    from jaxtyping import Shaped

_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<a>\d+)\.)?(?P<part>linear_fc[12])\.(?P<kind>weight|bias)(?P<b>\d*)"
)


@dataclass(frozen=True)
class Piece:
    """A box that one of this rank's parameters and one of ours have in common."""

    ours: str
    start: Shape
    """In our whole parameter."""
    shape: Shape
    local: Region
    """In this rank's parameter, seen with one more dim in front if it is an expert."""

    def overlap(self, part: TensorSlice) -> tuple[Region, Region] | None:
        """What it has in common with a slice of ours: as regions of this rank's parameter and of part.tensor."""
        low = [max(a, b) for a, b in zip(self.start, part.start)]
        ends = zip(self.start, self.shape, part.start, part.tensor.shape)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        if any(a >= b for a, b in zip(low, high)):
            return None
        local = zip(low, high, self.start, self.local)
        return (
            tuple(slice(a - s + box.start, b - s + box.start) for a, b, s, box in local),
            tuple(slice(a - s, b - s) for a, b, s in zip(low, high, part.start)),
        )


@dataclass(frozen=True)
class Held:
    """A parameter of this rank and its pieces; is_expert: it is one expert, and they have one more dim in front.

    is_swapped, is_in_turn: how our stacked experts lie otherwise (`expert_order`).
    """

    name: str
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    is_expert: bool
    is_swapped: bool = False
    is_in_turn: bool = False

    def view(self, values: Shaped[Tensor, " ..."]) -> Shaped[Tensor, " ..."]:
        """Values of this parameter's shape, as pieces see them, but for the order of gate and up."""
        values = values[None] if self.is_expert else values
        return values.mT if self.is_swapped else values

    def pairs(self, values: Tensor, parts: Mapping[str, TensorSlice]) -> Iterator[tuple[Tensor, Tensor]]:
        """What values of this parameter's shape and slices of ours have in common: views of both, alike in shape."""
        for piece in self.pieces:
            if (overlap := piece.overlap(parts[piece.ours])) is None:
                continue
            local, own = overlap
            theirs, ours = self.view(values)[local], parts[piece.ours].tensor[own]
            if self.is_in_turn:
                assert ours.shape[-1] == self.view(values).shape[-1], "gate and up of an expert are on one rank"
                theirs, ours = theirs.unflatten(-1, (2, -1)), ours.unflatten(-1, (-1, 2)).mT
            yield theirs, ours

    @property
    def group(self) -> Any:
        """The ranks that have the same parameter."""
        if not getattr(self.parameter, "allreduce", True):  # Megatron's word for experts that ranks divide
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


class MegatronWeights(TrainedWeights):
    """The weights of the chunks of a model, by our names."""

    def __init__(self, chunks: list[Any], decoder: Decoder, mesh: Mesh) -> None:
        """decoder: our model of the same shape."""
        self.module, self.mesh = decoder, mesh
        self._whole = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
        table = megatron_map(decoder.config, "trainer.backend", shapes=self._whole)
        self.held = [
            _find_pieces(decoder.config, table, name, parameter)
            for chunk in chunks
            for name, parameter in _global_names(chunk)
        ]
        self._boxes = _bound(self.held, self._whole)
        self._dtypes = {name: p.dtype for name, p in decoder.named_parameters()}
        self.names = [name for name, p in decoder.named_parameters() if p.requires_grad]
        trained = set(self.names)
        self._trained = [held for held in self.held if held.pieces[0].ours in trained]
        for held in self.held:
            held.parameter.requires_grad_(held.pieces[0].ours in trained)
        self.parameters = [held.parameter for held in self._trained]
        self.export_dtype = decoder.output_weight.dtype
        self.chunks: list[Any] = chunks
        self.optimizer: Any = None
        """Megatron's, once it is built."""
        self.num_updates = 0
        self._loaded: dict[str, dict[str, TensorSlice]] = {}
        self._loaded_step: Tensor | None = None

    # -- a step --

    def collect_gradients(self) -> None:
        """Do nothing: the network finishes gradients before an update."""

    def reshard(self) -> None:
        """Do nothing: weights are whole on a rank between passes."""

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Give the optimizer its gradients, and scale them so that their norm is at most max_norm; the norm before."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if max_norm is not None:
            for each in self.optimizer.chained_optimizers:
                if parameters := each.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=norm)
        return torch.tensor(norm)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def copy_to_model(self) -> None:
        """Give the model and the optimizer what `targets` was filled with; nothing if it was not called."""
        loaded, self._loaded = self._loaded, {}
        for key, parts in loaded.items():
            self._scatter(key, parts)
        if self._loaded_step is not None:
            self._set_step(int(self._loaded_step))
            self._loaded_step = None

    # -- slices --

    def all_slices(self) -> dict[str, TensorSlice]:
        """This rank's slice of every weight as a copy; an empty one of weights of other stages.

        All ranks must call it.
        """
        parts = {name: self._empty(name, self._boxes.get(name)) for name in self._whole}
        with torch.no_grad():
            for held in self.held:
                for theirs, ours in held.pairs(held.parameter.detach(), parts):
                    ours.copy_(theirs)
            self._sum_experts(parts)
        return parts

    def slices(self) -> dict[str, TensorSlice]:
        """The optimizer's weights, of which this rank has some rows."""
        return self.gathered("param")

    def shapes(self) -> dict[str, Shape]:
        return {name: self._whole[name] for name in self.names}

    def slice_of(self, name: str, value: Shaped[Tensor, " ..."]) -> TensorSlice:
        raise AssertionError("Megatron's optimizer has no parts of our parameters")

    @torch.no_grad()
    def find_not_finite(self) -> str | None:
        for held in self.held:
            if not torch.isfinite(held.parameter).all():
                return held.pieces[0].ours
        return None

    @torch.no_grad()
    def load(self, decoder: Decoder) -> None:
        """Set this rank's weights from a model, or from its checkpoint if it is on the meta device."""
        for held in self.held:
            held.parameter.zero_()  # the padding of a vocabulary
        if decoder.output_weight.is_meta:
            reader = decoder.checkpoint_reader
            targets = {name: self._empty(name, box) for name, box in self._boxes.items()}
            hub.load_slices(decoder.tensor_map, targets, reader.read(), decoder.config, str(reader.directory))
        else:
            targets = {name: TensorSlice.whole(p.detach()) for name, p in decoder.named_parameters()}
        for held in self.held:
            for theirs, ours in held.pairs(held.parameter, targets):
                theirs.copy_(ours)

    @torch.no_grad()
    def scale(self, factor_of: Callable[[Shape], float]) -> None:
        """Multiply weights by the factor of our whole parameter's shape."""
        for held in self.held:
            for piece in held.pieces:
                held.view(held.parameter)[piece.local].mul_(factor_of(self._whole[piece.ours]))

    # -- the optimizer's ranges --

    @torch.no_grad()
    def gathered(self, key: str) -> dict[str, TensorSlice]:
        """A state of the optimizer by our names: param, grad, exp_avg or exp_avg_sq; this rank keeps some rows.

        All ranks must call it.
        """
        parts = self._row_slices()
        for held in self._trained:
            optimizer = self._optimizer_of(held.parameter)
            full = torch.zeros(held.parameter.numel(), dtype=torch.float32, device=held.parameter.device)
            if (place := _range_of(optimizer, held.parameter)) is not None:
                full[place] = _state_of(optimizer, held.parameter, key).float()
            if held.group.size() > 1:
                dist.all_reduce(full, group=held.group)
            for theirs, ours in held.pairs(full.view(held.parameter.shape), parts):
                ours.copy_(theirs)
        self._sum_experts(parts)
        return parts

    def _sum_experts(self, parts: Mapping[str, TensorSlice]) -> None:
        """Put together boxes of experts, of which each rank of etp has filled its features."""
        if parallel_state.get_expert_tensor_parallel_world_size() == 1:
            return
        for name in sorted(
            {piece.ours for held in self.held if held.is_expert for piece in held.pieces} & parts.keys()
        ):
            part = parts[name].tensor
            on_device = part.to(self.mesh.device)
            dist.all_reduce(on_device, group=parallel_state.get_expert_tensor_parallel_group())
            part.copy_(on_device)

    def targets(self, key: str) -> dict[str, TensorSlice]:
        """Slices to fill for `copy_to_model`, those of `gathered`."""
        self._loaded[key] = self._row_slices()
        return self._loaded[key]

    def step_target(self) -> TensorSlice:
        """The number of updates, to fill for `copy_to_model`."""
        self._loaded_step = torch.zeros(())
        return TensorSlice.whole(self._loaded_step)

    def _set_step(self, step: int) -> None:
        self.num_updates = step
        for each in self.optimizer.chained_optimizers:
            inner = each.optimizer
            for group in inner.param_groups:
                if "step" in group or not isinstance(inner, torch.optim.AdamW):
                    group["step"] = step
                    continue
                for main in group["params"]:
                    inner.state[main]["step"] = torch.tensor(float(step))

    def _scatter(self, key: str, parts: Mapping[str, TensorSlice]) -> None:
        with torch.no_grad():
            for held in self._trained:
                parameter, optimizer = held.parameter, self._optimizer_of(held.parameter)
                full = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                for theirs, ours in held.pairs(full, parts):
                    theirs.copy_(ours)
                if held.group.size() > 1:
                    dist.all_reduce(full, group=held.group)
                if key == "param":
                    parameter.copy_(full)
                if (place := _range_of(optimizer, parameter)) is not None:
                    _state_of(optimizer, parameter, key).copy_(full.view(-1)[place])

    def _row_slices(self) -> dict[str, TensorSlice]:
        """For every parameter the rows that this rank keeps of its box, on the CPU; float32."""
        parts = {name: self._empty(name, None, torch.float32, "cpu") for name in self.names}
        for held in self._trained:
            rank, size = held.group.rank(), held.group.size()
            for name in {piece.ours for piece in held.pieces}:
                start, shape = self._boxes[name]
                low, high = (shape[0] * at // size for at in (rank, rank + 1))
                box = ((start[0] + low, *start[1:]), (high - low, *shape[1:]))
                parts[name] = self._empty(name, box, torch.float32, "cpu")
        return parts

    def _optimizer_of(self, parameter: nn.Parameter) -> Any:
        for each in self.optimizer.chained_optimizers:
            if any(parameter in getattr(buffer, "param_to_bucket", ()) for buffer in each.buffers):
                return each
        raise AssertionError("a parameter that no optimizer updates")

    def _empty(
        self,
        name: str,
        box: tuple[Shape, Shape] | None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> TensorSlice:
        whole = self._whole[name]
        start, shape = box or ((0,) * len(whole), (0, *whole[1:]))
        return TensorSlice(
            torch.zeros(shape, dtype=dtype or self._dtypes[name], device=device or self.mesh.device), start, whole
        )


def _range_of(optimizer: Any, parameter: nn.Parameter) -> slice | None:
    """This rank's range of a flattened parameter; None without one."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None
    place = optimizer._get_model_param_range_map(parameter)["param"]
    return slice(place.start, place.end)


def _state_of(optimizer: Any, parameter: nn.Parameter, key: str) -> Tensor:
    """The optimizer's tensor for its range of a parameter."""
    group, order = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    if key == "param":
        return main.detach()
    if key == "grad":
        return torch.zeros_like(main) if main.grad is None else main.grad
    return optimizer.optimizer.state[main].setdefault(key, torch.zeros_like(main, requires_grad=False))


def _global_names(chunk: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a chunk, and its biases of experts, with the numbers of layers in the whole model."""
    biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]
    for name, parameter in (*chunk.named_parameters(), *biases):
        if name.startswith(LAYERS):
            local, rest = name.removeprefix(LAYERS).split(".", 1)
            name = f"{LAYERS}{chunk.decoder.layers[int(local)].layer_number - 1}.{rest}"
        yield name, parameter


def _find_pieces(cfg: ModelConfig, table: TensorMap, name: str, parameter: nn.Parameter) -> Held:
    theirs, first = name, None
    if (expert := _EXPERT.search(name)) is not None:
        number = int(expert["a"] or expert["b"])
        per_rank = cfg.num_experts // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * per_rank + number
        layer = name[: expert.start()]
        theirs = f"{layer}{EXPERTS}{expert['part']}.{expert['kind']}"
    if name == _OUTPUT and cfg.tie_word_embeddings:
        theirs = _EMBEDDING
    found = next((known for known in table.their_shapes if theirs in spellings(known)), None)
    assert found is not None, f"no parameter of ours has the values of {name}"
    is_swapped, is_in_turn = expert_order(cfg, found)
    shape = tuple(parameter.shape) if first is None else (1, *parameter.shape)
    shape = swapped(shape) if is_swapped else shape
    pieces = []
    for own, start, size in _blocks(name, shape, table.their_shapes[found], first):
        for shared in table.slices_of(found):
            low = [max(a, b) for a, b in zip(start, shared.their_start)]
            ends = zip(start, size, shared.their_start, shared.their_shape)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if all(a < b for a, b in zip(low, high)):
                ours = tuple(a - t + s for a, t, s in zip(low, shared.their_start, shared.start))
                extent = tuple(b - a for a, b in zip(low, high))
                local = region_of((a - s + o for a, s, o in zip(low, start, own)), extent)
                pieces.append(Piece(shared.ours, ours, extent, local))
    return Held(name, parameter, tuple(pieces), first is not None, is_swapped, is_in_turn)


def _blocks(name: str, shape: Shape, whole: Shape, expert: int | None) -> Iterator[tuple[Shape, Shape, Shape]]:
    """The boxes of a parameter that are one box of Megatron's whole one: start here, start there, size.

    At most one dim is divided over ranks, each of which has the same share; a vocabulary is padded for that.
    """
    origin = [0] * len(shape)
    if expert is None:
        rank = parallel_state.get_tensor_model_parallel_rank()
        degree = parallel_state.get_tensor_model_parallel_world_size()
    else:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        degree = parallel_state.get_expert_tensor_parallel_world_size()
        origin[0] = expert
    divided = [dim for dim in range(int(expert is not None), len(shape)) if shape[dim] != whole[dim]]
    if not divided:
        yield (0,) * len(shape), tuple(origin), shape
        return
    (dim,) = divided
    parts = 2 if "linear_fc1" in name else 1  # gate and up are divided each by itself
    size = shape[dim] // parts
    for part in range(parts):
        own, start, extent = [0] * len(shape), list(origin), list(shape)
        own[dim], start[dim], extent[dim] = part * size, (part * degree + rank) * size, size
        yield tuple(own), tuple(start), tuple(extent)


def _bound(held: list[Held], whole: Mapping[str, Shape]) -> dict[str, tuple[Shape, Shape]]:
    """Start and shape of the box that a rank's pieces of each of our parameters fill.

    Features of experts that ranks divide are in the box of each: together these ranks fill it.
    """
    is_divided = parallel_state.get_expert_tensor_parallel_world_size() > 1
    pieces: dict[str, set[tuple[Shape, Shape]]] = {}
    experts: set[str] = set()
    for each in held:
        for piece in each.pieces:
            pieces.setdefault(piece.ours, set()).add((piece.start, piece.shape))
            experts |= {piece.ours} if each.is_expert else set()
    boxes = {}
    for name, of_name in pieces.items():
        start = tuple(map(min, zip(*(s for s, _ in of_name))))
        end = tuple(map(max, zip(*(tuple(map(sum, zip(s, n))) for s, n in of_name))))
        if name in experts and is_divided:
            start, end = (start[0], *(0 for _ in start[1:])), (end[0], *whole[name][1:])
        else:
            volume = sum(math.prod(shape) for _, shape in of_name)
            assert volume == math.prod(b - a for a, b in zip(start, end)), f"pieces of {name} are no box: {of_name}"
        boxes[name] = start, tuple(b - a for a, b in zip(start, end))
    return boxes
