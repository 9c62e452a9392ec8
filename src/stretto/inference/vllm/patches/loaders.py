"""Weight loaders without a name, as in vLLM 0.32's minimax_m2, with which a reload fails.

A reload compares the name of every loader with those of its own loaders.
"""

from __future__ import annotations

import functools
from typing import Any


def name_loaders() -> None:
    """Give every loader a name that a reload can compare."""
    from vllm.model_executor.model_loader.reload import layerwise

    find = layerwise._get_weight_loader

    @functools.wraps(find)
    def find_named(tensor: Any) -> Any:
        loader = find(tensor)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = "partial"
        return loader

    layerwise._get_weight_loader = find_named
