"""Weights whose loader has no name, as in vLLM 0.32's minimax_m2: a reload asks every loader for one and fails.

The name is only compared with that of the reload's own loaders.
"""

from __future__ import annotations

import functools
from typing import Any


def name_loaders() -> None:
    """Let a reload find a name at every loader; called once or more in every vLLM process."""
    from vllm.model_executor.model_loader.reload import layerwise

    find = layerwise._get_weight_loader
    if getattr(find, "_stretto_names", False):
        return

    @functools.wraps(find)
    def find_named(tensor: Any) -> Any:
        loader = find(tensor)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = "partial"
        return loader

    find_named._stretto_names = True
    layerwise._get_weight_loader = find_named
