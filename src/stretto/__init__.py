"""stretto: asynchronous reinforcement learning for language models.

run = stretto.rl("rl.toml")             train; also sft, evaluate
stretto.Run("outputs/demo").metrics()   look at a run; also rollouts, evals, plot
stretto.compare(["outputs/a", "outputs/b"])   also plot
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "compare", "evaluate", "plot", "rl", "sft"]

_HOMES = {"Run": "run", "compare": "run", "plot": "run", "rl": "script", "sft": "script", "evaluate": "script"}


def __getattr__(name: str) -> Any:
    """The Python interface is imported when it is asked for: a command needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"stretto.api.{_HOMES[name]}"), name)
