"""`stretto convert`: a checkpoint of Megatron-Core becomes a Hugging Face directory, and the other way round."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.base.errors import ConfigError, DataError, meant_path
from stretto.config.reading.plain import PlainParser
from stretto.families.table import FAMILIES, check_installed, family_of
from stretto_megatron.places import METADATA, POINTER, find_iteration, is_megatron

if TYPE_CHECKING:
    from stretto.families.shape import ModelConfig
    from stretto.models.safetensors_file import TensorEntry

_PARTIAL = ".partial"


def convert(words: list[str]) -> int:
    """Write a model in the other format."""
    parser = PlainParser("convert", "a checkpoint of Megatron as a Hugging Face directory, or the other way round")
    parser.add_argument(
        "source", type=Path, help="Megatron checkpoint (torch_dist or torch), or Hugging Face directory"
    )
    parser.add_argument("target", type=Path, help="the directory to write")
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory with config.json and tokenizer for Megatron's"
    )
    parser.add_argument("--step", type=int, metavar="N", help="iteration of a Megatron checkpoint; its latest")
    options = parser.parse_args(words)
    source, target = options.source.expanduser(), options.target.expanduser()
    if not source.is_dir():
        what = "this is a file" if source.exists() else f"there is no such directory{meant_path(source)}"
        raise ConfigError(f"{source}: {what}; give the directory of a checkpoint of Megatron, or of Hugging Face")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already; name another directory, or delete it")
    try:
        if is_megatron(source):
            if options.model is None:
                what = "name a Hugging Face directory with its config.json and tokenizer as --model"
                raise ConfigError(f"{source} is a checkpoint of Megatron: {what}")
            to_hugging_face(source, options.model.expanduser(), target, step=options.step)
        elif options.step is not None or options.model is not None:
            raise ConfigError(f"{source} is no checkpoint of Megatron, which --step and --model are for")
        else:
            to_megatron(source, target)
    except DataError as error:
        raise ConfigError(str(error)) from None
    sys.stderr.write(f"written to {target}\n")
    return 0


def to_hugging_face(source: Path, model: Path, target: Path, *, step: int | None = None) -> None:
    """Write the weights of a Megatron checkpoint as a Hugging Face directory, with the other files of `model`.

    One tensor is in memory at a time. The directory is complete or not there.

    Raises: DataError if the checkpoint does not have the weights that config.json asks for.
    """
    from stretto.models import hub
    from stretto.models.safetensors_file import StreamWriter, TensorEntry
    from stretto_megatron.checkpoints import as_hugging_face

    place, cfg = find_iteration(source, step), _config_of(model)
    named = list(as_hugging_face(place, cfg, hub.build_tensor_map(cfg)))
    dtypes = (tensor.dtype for _, _, tensor in named)  # type: ignore[attr-defined]  # all that are made here have one
    entries = [TensorEntry(name, dtype, shape) for (name, shape, _), dtype in zip(named, dtypes)]
    partial = _emptied(target)
    config = hub.read_json(model / "config.json")
    config.pop("quantization_config", None)  # of its own weights, which are not these
    hub.save_model_directory(entries[0].dtype, partial, model, config, None)
    tensors = {name: tensor for name, _, tensor in named}
    files = list(_split(entries, hub.MAX_SHARD_BYTES))
    places: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if files[1:] else "model.safetensors"
        places |= {entry.name: name for entry in part}
        with StreamWriter(partial / name, part) as writer:
            for entry in part:
                writer.add(tensors[entry.name][tuple(slice(0, size) for size in entry.shape)])
    if files[1:]:
        hub.write_index(partial, places, sum(entry.num_bytes for entry in entries))
    partial.rename(target)


def _split(entries: list[TensorEntry], most_bytes: int) -> Iterator[list[TensorEntry]]:
    """Entries by file, in their order; a file of several has at most so many bytes."""
    part: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if part and size + entry.num_bytes > most_bytes:
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.num_bytes
    yield part


def check_megatron(source: Path, model: Path) -> None:
    """Raises: DataError if a Megatron checkpoint lacks a file, or a weight that the config.json of `model` asks for."""
    from stretto_megatron.checkpoints import read_megatron
    from stretto_megatron.torch_dist import TorchDist

    if ((place := find_iteration(source)) / METADATA).exists():
        TorchDist(place).check_files()
    for _ in read_megatron(source, _config_of(model)):
        pass


def _config_of(model: Path) -> ModelConfig:
    """The config of a Hugging Face directory.

    Raises: DataError for a family that has no modules here, whose tensors have no names of Megatron's.
    """
    from stretto.models import hub
    from stretto_megatron.names import OTHERWISE

    family = family_of(hub.read_json(model / "config.json"))
    check_installed(family, f"{model}, of family {family},")
    if family not in FAMILIES:
        raise DataError(
            f"{model}: Megatron's checkpoints of a {family} cannot be read, for it has no modules here; {OTHERWISE}"
        )
    return hub.load_config(model, may_be_quantized=True)


def to_megatron(source: Path, target: Path) -> None:
    """Write a Hugging Face directory as a checkpoint of Megatron (torch_dist, `release`), chunk by chunk.

    Raises: DataError for weights that are missing, or that have no place there.
    """
    from stretto.models import hub
    from stretto_megatron.checkpoints import as_megatron, has_equal_layers
    from stretto_megatron.torch_dist import write_torch_dist

    cfg = hub.load_config(source)
    sources = [each for each in hub.read_tensors(source) if not hub.is_redundant(each[0], cfg)]
    named = list(as_megatron(sources, cfg, hub.build_tensor_map(cfg), str(source)))
    partial = _emptied(target)
    num_experts = 0 if cfg.moe is None else cfg.moe.num_experts
    write_torch_dist(partial / "release", named, is_stacked=has_equal_layers(named), num_experts=num_experts)
    (partial / POINTER).write_text("release")
    partial.rename(target)


def _emptied(target: Path) -> Path:
    """The directory in which `target` is written; what an earlier try has left is deleted."""
    partial = target.with_name(target.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        target.rmdir()
    return partial
