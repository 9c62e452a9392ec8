"""Loads and saves model directories, and exports the named tensors of a model.

A directory is one that transformers and vLLM load: config.json, model.safetensors (or shards and an index),
generation_config.json, tokenizer files. Tensors are read one at a time into the module's memory, so loading needs no
second copy; a rank with slices of parameters reads the bytes of these only (`load_slices`). tensor_map.py maps names.
Names and shapes are checked for completeness; errors in a directory are DataErrors that name the file.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.base.errors import DataError
from stretto.base.status import report
from stretto.config.sections.model import Dtype, ScratchSection, dtype_on
from stretto.families.shape import ModelConfig
from stretto.families.table import FAMILIES, family_of
from stretto.models.config import parse_config, scratch_config
from stretto.models.decoder import Decoder
from stretto.models.fp8.checkpoint import BlockLayout, from_8_bits, lazily_from_8_bits, parse_layout, round_inputs
from stretto.models.lora import MergedWeights
from stretto.models.parts.initial import initialise
from stretto.models.safetensors_file import read_file
from stretto.models.tensor_map import CheckpointReader, LazyTensor, TensorMap, TensorSlice, as_whole_slices

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_of(dtype: Dtype, device: torch.device | str) -> torch.dtype:
    """The torch dtype of a config's dtype, which for "auto" depends on the device."""
    return DTYPES[dtype_on(dtype, is_gpu=torch.device(device).type != "cpu")]


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files beside the weights that define how text and pictures become tokens."""
MAX_SHARD_BYTES = 5 * 10**9

SHOWN_AFTER_S = 0.5
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a model directory needs it") from None
    except ValueError as cause:
        raise DataError(f"{path}: not valid JSON ({cause}); write the file again") from cause


def load_config(directory: str | Path, *, may_be_quantized: bool = False) -> ModelConfig:
    """The config.json of a model directory, as ModelConfig.

    may_be_quantized: True if the caller reads the weights by `load_layout`; else a quantized model is refused.
    """
    path = Path(directory) / "config.json"
    hf = read_json(path)
    if may_be_quantized:
        hf.pop("quantization_config", None)
    return parse_config(hf, str(path))


def load_layout(directory: str | Path) -> BlockLayout | None:
    """Which weights of a model directory are in 8 bits; None if it is not quantized.

    Only the names of its tensors are read: from its index, or from its one file.

    Raises: DataError for quantization of another kind.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if (quantization := read_json(path).get("quantization_config")) is None:
        return None
    if (directory / _INDEX).is_file():
        return parse_layout(quantization, read_json(directory / _INDEX).get("weight_map", {}), str(path))
    if (directory / _SINGLE).is_file():
        return parse_layout(quantization, (name for name, _ in read_file(directory / _SINGLE)), str(path))
    raise DataError(f"{directory}: neither {_SINGLE} nor {_INDEX}, so it is unknown which weights are in 8 bits")


def has_custom_module(directory: str | Path) -> bool:
    """True if our decoder supports the model of a directory; impl = "auto" then means "custom"."""
    path = Path(directory) / "config.json"
    hf = read_json(path)
    if family_of(hf) not in FAMILIES:
        return False
    try:
        parse_config(hf, str(path))
    except DataError:
        return False
    return True


def build_model(cfg: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """A decoder with uninitialised weights, which `load_tensors` or `load_slices` sets."""
    with torch.device("meta"):
        model = Decoder(cfg).to(dtype)
    # nn.Module.to_empty asks the meta device for what is like a tensor there, which imports sympy: half a second.
    return model._apply(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))


def build_meta_model(directory: str | Path, dtype: torch.dtype) -> Decoder:
    """A decoder on the meta device with a `checkpoint_reader` of its weights (`load_slices`)."""
    directory = Path(directory)
    with torch.device("meta"):
        model = Decoder(load_config(directory))
    model.checkpoint_reader = CheckpointReader(directory, lambda: read_tensors(directory))
    return model.to(dtype)


def build_tensor_map(cfg: ModelConfig) -> TensorMap:
    """The TensorMap of a model with this config, without allocating its weights."""
    with torch.device("meta"):
        return Decoder(cfg).tensor_map


def load_model(
    directory: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", may_be_quantized: bool = False
) -> Decoder:
    """Our decoder with the weights of a model directory (for `impl = "hf"` see hf.py).

    may_be_quantized: weights in 8 bits are expanded to dtype, and their products round their inputs.

    Raises: DataError when the directory is missing, incomplete, truncated, or of an unknown family.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(f"model {str(directory)!r}: no such directory")
    layout = load_layout(directory) if may_be_quantized else None
    model = build_model(load_config(directory, may_be_quantized=may_be_quantized), dtype, device)
    sources = read_tensors(directory)
    load_slices(
        model.tensor_map,
        as_whole_slices(model.named_parameters()),
        sources if layout is None else lazily_from_8_bits(sources, layout),
        model.config,
        str(directory),
    )
    if layout is not None:
        model.layout = layout
        round_inputs(model, layout.names, model.tensor_map)
    return model


def random_model(scratch: ScratchSection, vocab_size: int, **token_ids: int | list[int] | None) -> Decoder:
    """A freshly initialised network of this shape (float32, CPU), the same for the same seed.

    `token_ids` (eos_token_id, pad_token_id, bos_token_id) go into its config.json; so does image_token_id, which a
    model with images needs.
    """
    if scratch.vision is not None:
        assert token_ids.get("image_token_id") is not None, "a model with images needs the tokenizer's placeholder"
    cfg = scratch_config(scratch, vocab_size, **token_ids)
    model = build_model(cfg, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(scratch.seed)
    initialise(model, cfg.initializer_range, generator)
    return model


class OtherConfig(Protocol):
    """What is needed of the config of a model that is not ours."""

    @property
    def family(self) -> str: ...
    @property
    def hf(self) -> dict[str, Any]: ...


class SelfExporting(Protocol):
    """A model that knows itself how its weights are saved (hf.py)."""

    @property
    def config(self) -> OtherConfig: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def export_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


def export_tensors(model: Decoder | SelfExporting) -> Iterator[tuple[str, Tensor]]:
    """Every weight by Hugging Face name, detached, in a fixed order; adapters are merged."""
    if not isinstance(model, Decoder):
        return model.export_tensors()
    return model.tensor_map.export(MergedWeights(model))


def load_tensors(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named tensors into the model in place; every weight must be among them once.

    Raises: DataError if one is missing, unknown or has a wrong shape. The model is then partly overwritten.
    """
    sources = ((name, tuple(tensor.shape), tensor) for name, tensor in from_8_bits(tensors))
    load_slices(model.tensor_map, as_whole_slices(model.named_parameters()), sources, model.config, "weights")


@torch.no_grad()
def load_slices(
    table: TensorMap,
    targets: Mapping[str, TensorSlice],
    sources: Iterable[tuple[str, tuple[int, ...], LazyTensor]],
    cfg: ModelConfig | OtherConfig,
    where: str,
) -> None:
    """Copy checkpoint tensors (name, shape, lazy tensor) into slices of parameters.

    Only the parts that the targets need are read: a rank reads the bytes of its slices.

    Raises: DataError if one is missing, unknown or has a wrong shape. The targets are then partly overwritten.
    """
    needed = table.find_needed(targets)
    missing = set(needed)
    for name, shape, source in sources:
        if name not in table.their_shapes:
            if isinstance(cfg, ModelConfig) and is_redundant(name, cfg):
                continue
            raise DataError(f"{where}: tensor {name!r} is not part of a {cfg.family} of this config.json")
        if name not in needed:
            continue
        if getattr(source, "dtype", None) is torch.float8_e4m3fn:
            raise DataError(f"{where}: tensor {name!r} is in 8 bits, and its scales are unknown")
        try:
            table.copy_in(name, shape, source, targets)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        missing.discard(name)
    if missing:
        first = ", ".join(sorted(missing)[:4])
        raise DataError(f"{where}: {len(missing)} of {len(needed)} tensors are missing: {first} ...")


def read_tensors(directory: Path) -> Iterator[tuple[str, tuple[int, ...], LazyTensor]]:
    """(name, shape, lazy tensor) per tensor of a directory; indexing reads the bytes.

    The progress is reported to the console if reading takes longer than SHOWN_AFTER_S.
    """
    tensors = [each for path in _weight_files(directory) for each in read_file(path)]
    text, shown_at, is_shown = f"loading {directory}", time.monotonic() + SHOWN_AFTER_S, False
    for index, (name, tensor) in enumerate(tensors):
        yield name, tensor.shape, tensor
        if (now := time.monotonic()) >= shown_at:
            report("progress", text=text, done=index, total=len(tensors))
            shown_at, is_shown = now + SHOWN_AFTER_S, True
    if is_shown:
        report("progress", text=text, done=len(tensors), total=len(tensors))


def map_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model directory by name, mapped from its files; do not write to them."""
    for path in _weight_files(directory):
        for name, tensor in read_file(path):
            yield name, tensor.mapped()


def save_hf(model: Decoder | SelfExporting, directory: str | Path, tokenizer_dir: str | Path | None = None) -> None:
    """Write a model directory for transformers and vLLM; tokenizer_dir: its files are copied."""
    dtype = next(model.parameters()).dtype
    save_model_directory(dtype, directory, tokenizer_dir, model.config.hf, export_tensors(model))


def save_model_directory(
    dtype: torch.dtype,
    directory: str | Path,
    tokenizer_dir: str | Path | None,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]] | None,
) -> None:
    """Write a model directory with this config.json and these tensors.

    tensors: None if other code writes the weights.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = config | {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    _write_json(directory / "config.json", config)
    if tensors is not None:
        _save_shards(directory, tensors)
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, directory)
    generation = Path(tokenizer_dir or directory) / "generation_config.json"
    if generation.is_file() and generation.parent != directory:
        shutil.copyfile(generation, directory / generation.name)
    elif not generation.is_file():
        ids = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
        }
        _write_json(directory / generation.name, {"_from_model_config": True} | ids)


def copy_tokenizer(source: str | Path, directory: str | Path) -> None:
    """Copy the files of tokenizer and image processor, and Python files for config.json."""
    if not Path(source).is_dir():
        raise DataError(f"tokenizer {str(source)!r}: no such directory")
    source, directory = Path(source), Path(directory)
    templates = source.glob("additional_chat_templates/*.jinja")
    for path in [*(source / name for name in TOKENIZER_FILES), *sorted(source.glob("*.py")), *templates]:
        if path.is_file() and source.resolve() != directory.resolve():
            target = directory / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def is_redundant(name: str, cfg: ModelConfig) -> bool:
    """True for tensors of some checkpoints that the network computes itself or does not have."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and cfg.tie_word_embeddings):
        return True
    if name.startswith("mtp."):
        return True
    # Layers for multi-token prediction follow the last block; they are not part of the network.
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - cfg.num_layers < cfg.num_prediction_layers


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        files = sorted(set(read_json(directory / _INDEX).get("weight_map", {}).values()))
        absent = [name for name in files if not (directory / name).is_file()]
        if absent or not files:
            raise DataError(f"{directory / _INDEX}: names {', '.join(absent) or 'no file'}, which is not there")
        return [directory / name for name in files]
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    raise DataError(f"{directory}: neither {_SINGLE} nor {_INDEX}; only safetensors checkpoints are read")


def _save_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write one file, or files of at most MAX_SHARD_BYTES with an index.

    One shard is in memory at a time.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    sizes = {"pending": 0, "total": 0}

    def flush() -> None:
        save_file(pending, directory / f"shard-{len(shards)}.tmp", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        sizes["pending"] = 0

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and sizes["pending"] + num_bytes > MAX_SHARD_BYTES:
            flush()
        pending[name] = tensor.detach().cpu().contiguous()
        sizes["pending"] += num_bytes
        sizes["total"] += num_bytes
    flush()
    if len(shards) == 1:
        (directory / "shard-0.tmp").replace(directory / _SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{i}.tmp").replace(directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(directory, weight_map, sizes["total"])


def write_index(directory: Path, weight_map: dict[str, str], num_bytes: int) -> None:
    """Write the index of a model directory: the file of each tensor."""
    _write_json(directory / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
