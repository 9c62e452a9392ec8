"""What the backend does not compute, found before a run starts; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import MegatronSection

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
"""Families that are built of Megatron's layers."""


def check(family: str, found: Mapping[str, Any], model: ModelSection, megatron: MegatronSection) -> None:
    """Check that Megatron's layers are those of this model; found: its config.json, empty for a scratch model.

    Raises: ConfigError naming what they are not.
    """
    if family not in FAMILIES:
        raise ConfigError(
            f'trainer.backend = "megatron" computes {", ".join(FAMILIES)}, and this is a {family}; use '
            'trainer.backend = "fsdp"'
        )
