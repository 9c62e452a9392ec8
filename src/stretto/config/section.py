"""The strict base of every config section. Torch-free: a dry run on a laptop needs only pydantic."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic_config import BaseConfig


class Section(BaseConfig):
    """Unknown keys are errors; values cannot change after loading; a field's docstring is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
