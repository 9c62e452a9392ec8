"""Reads a model's files for the checks before a start: config.json, and the headers of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, reason_of
from stretto.data.hub_model import find_config, find_local
from stretto.data.weight_files import HeaderTensor, find_embedding, read_weight_files
from stretto.families import table
from stretto.families.table import FAMILIES, family_of
from stretto.families.values import wrong_values


def read_model_file(directory: Path) -> dict[str, Any]:
    """The contents of config.json in a model directory.

    Raises: ConfigError if it cannot be read, is not JSON, or is no table of keys and values.
    """
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as cause:
        raise ConfigError(
            f"{path}: cannot be read: {reason_of(cause)}; copy the model's config.json here again"
        ) from cause
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: a {type(found).__name__} where a table of keys and values belongs; copy the "
            "model's config.json here again"
        )
    if not isinstance(found.get("model_type"), str | None):
        raise ConfigError(f"{path}: model_type = {found['model_type']!r:.60} must be a text: the name of a family")
    for name in ("text_config", "vision_config", "quantization_config"):
        if not isinstance(found.get(name), dict | None):
            raise ConfigError(f"{path}: {name} = {found[name]!r:.60} must be a table of keys and values")
    if family_of(found) in FAMILIES and (wrong := next(wrong_values(found), None)):
        raise ConfigError(f"{path}: {wrong}; copy the model's config.json here again")
    return found


@dataclass(frozen=True)
class ModelFile:
    """A model directory with the contents of its config.json."""

    directory: Path
    found: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> ModelFile:
        """Raises: ConfigError as `read_model_file`."""
        return cls(directory, read_model_file(directory))

    @property
    def path(self) -> Path:
        return self.directory / "config.json"

    @property
    def family(self) -> str:
        """The family that it names; "" if it names none."""
        return family_of(self.found)

    @property
    def is_own(self) -> bool:
        """Whether families/own or an add-on has its family, or it names none."""
        return not self.family or self.family in FAMILIES

    @property
    def is_classifier(self) -> bool:
        """Whether it gives labels of a text, as reward models do, and no tokens."""
        return table.is_classifier(self.found)

    @property
    def text(self) -> dict[str, Any]:
        """The numbers of its decoder: models with images have them in a table of their own."""
        return dict(self.found) | (self.found.get("text_config") or {})

    @property
    def num_heads(self) -> int:
        """Query heads that each of its layers is a multiple of; 0 if it does not say."""
        found = self.text
        return math.gcd(*found.get("num_attention_heads_per_layer") or [found.get("num_attention_heads") or 0])

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values; 0 if it does not say."""
        return self.text.get("num_key_value_heads") or self.num_heads


def has_own_family(name: str) -> bool:
    """Whether it is of a family of ours; True if its config.json is missing or cannot be read."""
    directory = find_config(name)
    try:
        return directory is None or ModelFile.read(directory).is_own
    except ConfigError:
        return True  # the process that loads the model says what is wrong with it


def find_model_file(name: str) -> ModelFile | None:
    """The config.json of a model; None if it is missing or cannot be read."""
    directory = find_config(name)
    try:
        return None if directory is None else ModelFile.read(directory)
    except ConfigError:
        return None


def is_classifier(name: str) -> bool:
    """Whether a model gives labels of a text; False if its config.json is missing or cannot be read."""
    directory = find_config(name)
    try:
        return directory is not None and ModelFile.read(directory).is_classifier
    except ConfigError:
        return False


@dataclass(frozen=True)
class LocalModel:
    """A model that is on this machine, with its weights' headers by name."""

    file: ModelFile
    tensors: Mapping[str, HeaderTensor]
    embedding: HeaderTensor | None


def read_local_model(name: str) -> LocalModel | None:
    """A model that is on this machine; None if it is not.

    Raises: DataError for weights that are missing or damaged, ConfigError for a config.json that is.
    """
    directory = find_local(name)
    if directory is None or not (directory / "config.json").is_file():
        return None
    files = read_weight_files(directory).values()
    tensors = {each: tensor for file in files for each, tensor in file.tensors.items()}
    return LocalModel(ModelFile.read(directory), tensors, find_embedding(tensors))
