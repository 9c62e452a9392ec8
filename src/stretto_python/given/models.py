"""Models and tokenizers of transformers that are objects, as directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stretto.base.errors import ConfigError
from stretto.config.sections.model import Family


@dataclass
class Saved:
    """A model or tokenizer, to be saved into a directory."""

    value: Any

    @classmethod
    def of(cls, value: Any, key: str) -> Saved:
        """Raises: ConfigError for a model that cannot be saved as one of transformers, or generates no text."""
        if hasattr(value, "peft_config"):
            raise ConfigError(
                f"{key} is a {type(value).__name__} of peft; give model.merge_and_unload(), or the model under it with "
                'model={"name": ..., "lora": {"rank": 16}}, which trains a new adapter'
            )
        if is_model(value):
            _check_generates(value, key)
        return cls(value)

    def write(self, directory: Path, *, is_trial: bool) -> None:
        """Save it; is_trial: of a model its config alone."""
        directory.mkdir(parents=True, exist_ok=True)
        value = self.value
        if is_trial and hasattr(value, "config") and hasattr(value.config, "save_pretrained"):
            value = value.config
        value.save_pretrained(str(directory))


def _check_generates(model: Any, key: str) -> None:
    """Raises: ConfigError for a model without a head that gives tokens one after the other."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    family, made = getattr(model.config, "model_type", ""), type(model).__name__
    if made == CAUSAL.get(family) or made.endswith("ForCausalLM"):
        return
    families = get_args(Family)
    if family in families and made.endswith("ForConditionalGeneration"):
        return
    if family in CAUSAL:
        meant = f"load it with AutoModelForCausalLM, which makes a {CAUSAL[family]}"
    else:
        meant = f"families are {', '.join(families)}, and others that transformers' AutoModelForCausalLM loads"
    raise ConfigError(f"{key} is a {made}, which does not generate text token by token; {meant}")


def is_model(value: Any) -> bool:
    """Whether a value is a model object, and not a name or a directory."""
    return hasattr(value, "save_pretrained") and hasattr(value, "config")


def tokenizer_place(model: Any) -> str | None:
    """Where the tokenizer of a model object is: the name or directory that the model was loaded from."""
    place = getattr(model, "name_or_path", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    return str(place) if place else None
