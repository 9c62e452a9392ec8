"""The state of Megatron's optimizer as a checkpoint of ours, at which a run may begin (`resume.dir`, `skip_progress`).

Megatron's distributed optimizer saves in one of two ways: `fully_reshardable` has its weights and moments by the names
of the weights, and any mesh can read them; `dp_reshardable`, its default, has the buffers of its own mesh. Only the
first is read here. A tensor is read and written chunk by chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from stretto.base.errors import DataError
from stretto.base.files import write_atomic
from stretto.base.paths import RunDir
from stretto.families.shape import ModelConfig
from stretto.models import hub
from stretto.models.tensor_map import LazyTensor, Region, Shape, SharedSlice, TensorMap
from stretto_megatron.checkpoints import Named, named_tensors, read_megatron, translated
from stretto_megatron.names import megatron_map
from stretto_megatron.places import METADATA
from stretto_megatron.torch_dist import TorchDist, chunk_items, write_items

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
_BIAS = ".gate.expert_bias"
"""A parameter of ours that no optimizer updates."""
Kind = Literal["by_name", "other", "none"]


def find_optimizer(place: Path) -> Kind:
    """What an iteration has of its optimizer: states by the names of weights, others, or none.

    Raises: DataError if the checkpoint cannot be read.
    """
    if not (place / METADATA).exists():
        return "other"  # one file of the format `torch` per rank, with the buffers of its mesh
    if all(any(TorchDist(place, state=state).names()) for state in ("param", *MOMENTS)):
        return "by_name"
    return "other" if TorchDist(place).has_optimizer else "none"


def check_state(place: Path, model: Path) -> None:
    """Raises: DataError as `write_state`, and for a file that is missing or too short; no tensor is read."""
    TorchDist(place).check_files()
    updates, _ = _counts(place)
    for _ in _tensors(place, hub.load_config(model, may_be_quantized=True), updates):
        pass


def write_state(place: Path, model: Path, run: RunDir) -> None:
    """Write the weights and moments of an iteration as the only checkpoint of `run`, which has nothing else.

    model: a directory with its config.json.

    Raises: DataError if a state is missing, or has another shape than the weight.
    """
    from stretto.check.checkpoint import SCHEMA
    from stretto.trainer.state.checkpoint import finish_directory

    check_state(place, model)
    cfg = hub.load_config(model, may_be_quantized=True)
    updates, step = _counts(place)
    directory = run.checkpoint(step) / "trainer"
    part, items, sources = directory.with_name("trainer.part"), [], {}
    for name, shape, tensor in _tensors(place, cfg, updates):
        for item, source in chunk_items(name, shape, tensor, torch.float32):
            items.append(item)
            sources[item.index] = source
    write_items(part, items, sources)
    values = {"step": step, "optim": "adamw", "schedule_start": step, "schema": SCHEMA, "cursor": {}}
    finish_directory(part, directory, values)
    content = json.dumps({"step": step}).encode()  # all that the other half knows: no step of this run was made here
    write_atomic(directory.with_name("orchestrator.json"), content)
    write_atomic(run.complete_marker(step), content)


def _counts(place: Path) -> tuple[int, int]:
    """Updates of the optimizer, and the iteration, which is at least 1."""
    common = TorchDist(place).common()
    updates = next(_values(common.get("optimizer"), "step"), None) if isinstance(common, dict) else None
    if updates is None:
        raise DataError(f"{place}: how many updates its optimizer has made is not said")
    iteration = common.get("iteration")
    return updates, max(iteration if isinstance(iteration, int) else 1, 1)


def _values(found: Any, key: str) -> Iterator[int]:
    """The whole numbers under this key, however deep."""
    if isinstance(found, dict):
        value = found.get(key)
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            yield int(value)
        found = list(found.values())
    for each in found if isinstance(found, list) else ():
        yield from _values(each, key)


@dataclass(frozen=True)
class _Float32:
    """A tensor in float32, in which checkpoints have weights and moments."""

    source: LazyTensor

    def __getitem__(self, region: Region) -> Shaped[Tensor, " ..."]:
        return self.source[region].float()


def _tensors(place: Path, cfg: ModelConfig, updates: int) -> Iterator[Named]:
    """The tensors of a learner's state, by their names there."""
    table = megatron_map(cfg, str(place))
    shapes = {name: shape for name, shape in table.shapes.items() if not name.endswith(_BIAS)}
    biases = {name: shape for name, shape in table.shapes.items() if name.endswith(_BIAS)}
    expected = {
        name: shape for name, shape in table.their_shapes.items() if table.slices_of(name)[0].ours not in biases
    }
    for prefix, state in (("model", "param"), *((f"optim.{key}", key) for key in MOMENTS)):
        sources = dict(named_tensors(TorchDist(place, state=state), place, cfg, expected))
        for name, shape, tensor in translated(sources, table, _as_they_are(shapes)):
            yield f"{prefix}.{name}", shape, _Float32(tensor)
    for name in shapes:
        yield f"optim.step.{name}", (), torch.tensor(float(updates))
    if biases:
        for name, shape, tensor in translated(dict(read_megatron(place, cfg)), table, _as_they_are(biases)):
            yield f"routers.{name}", shape, _Float32(tensor)


def _as_they_are(shapes: dict[str, Shape]) -> TensorMap:
    """A map whose tensors are our parameters themselves."""
    parts = ((name, shape, (0,) * len(shape)) for name, shape in shapes.items())
    return TensorMap.of(shapes, [SharedSlice(name, start, shape, name, start, 0) for name, shape, start in parts])
