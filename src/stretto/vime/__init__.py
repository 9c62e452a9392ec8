"""A user's functions in vime's terms: what those about a sample get, and how they are called.

    from stretto.vime import Sample, post

A run names functions by import path: those about one sample in the `args` of the environment `dataset`, those about
groups, batches and training in [orchestrator.hooks] and [trainer.hooks]. docs/data.md lists them all. What only the
latter use is found in an add-on.
"""

from typing import Any

from stretto import addons
from stretto.vime.arguments import Arguments, get_model_url
from stretto.vime.sample import Sample

__all__ = ["Arguments", "Sample", "get_model_url"]


def __getattr__(name: str) -> Any:
    """Another name that functions import.

    Raises: AttributeError, so that `hasattr` is False, also without the add-on; the text says which one is missing.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        names = addons.load("stretto.hooks", "names", f"stretto.vime.{name}")
    except addons.MissingError as missing:
        raise AttributeError(str(missing)) from None
    return getattr(names, name)
