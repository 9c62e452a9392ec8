"""The shape of a model: from [model.scratch], its config.json, or the file of --model-config. Weights are not needed.

The shapes of a few public models are in a table here, so that their examples can be planned without the Hub. A plan
that uses the table says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer
from stretto.config.sections.model import ModelSection
from stretto.data.hub_model import find_config
from stretto.data.model_file import read_model_file
from stretto.families.shape import ModelConfig
from stretto.families.table import FAMILIES
from stretto.models.config import parse_config, scratch_config

KNOWN: dict[str, dict[str, Any]] = {
    model: {"model_type": name, **config}
    for name, family in FAMILIES.items()
    for model, config in family.traits.public.items()
}
"""What the config.json of these models says, by name. Source: transformers' classes of these families, and the models'
cards."""


@dataclass(frozen=True)
class FoundShape:
    """A model's shape, whether its checkpoint is in 8 bits, and the source of both."""

    shape: ModelConfig
    is_quantized: bool
    source: str


def find_shape(section: ModelSection, given: Path | None = None) -> FoundShape:
    """The shape of the model of a section; `given`: a config.json, or a directory with one, to use instead.

    Raises: ConfigError if there is none, or if it is of no family that is known here.
    """
    if given is not None:
        return _parse(_read(given), str(given), f"config.json of {given}")
    if section.scratch is not None:
        with TemporaryDirectory() as directory:
            tokenizer = load_tokenizer(build_letters_tokenizer(directory, phrases=section.scratch.phrases))
        shape = scratch_config(section.scratch, tokenizer.vocab_size)
        return FoundShape(shape, is_quantized=False, source="[model.scratch]")
    return named_shape(section.name)


def named_shape(name: str) -> FoundShape:
    """The shape of a model directory or of a model of the Hub.

    Raises: ConfigError if its config.json cannot be had.
    """
    if (directory := find_config(name)) is not None:
        return _parse(read_model_file(directory), name, f"config.json of {name}")
    if name in KNOWN:
        source = f"the table of this version of stretto; the Hub has not answered for {name}"
        return _parse(KNOWN[name], name, source)
    where = "there is no config.json in that directory" if Path(name).is_dir() else "it is not here"
    raise ConfigError(
        f"[model] name = {name!r}: a plan needs the model's config.json, but {where}, and the Hub did not send it; "
        "copy that one file here and pass it with --model-config FILE. Weights are not needed."
    )


def _read(given: Path) -> dict[str, Any]:
    directory = given.parent if given.name == "config.json" or given.is_file() else given
    if given.is_file() and given.name != "config.json":
        raise ConfigError(f"--model-config {given}: give a file named config.json, or its directory")
    return read_model_file(directory)


def _parse(raw: dict[str, Any], where: str, source: str) -> FoundShape:
    is_quantized = raw.get("quantization_config") is not None
    try:
        shape = parse_config({key: v for key, v in raw.items() if key != "quantization_config"}, where)
    except DataError as error:
        text = str(error).replace('use impl = "hf"', "a plan knows our own families only")
        raise ConfigError(f"no plan for this model: {text}") from None
    except (KeyError, TypeError, ValueError) as cause:
        raise ConfigError(f"{where}: its config.json cannot be understood: {cause!r}") from cause
    return FoundShape(shape, is_quantized, source)
