"""The wrapper with which patches extend vLLM's methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def run_after(cls: type, name: str, action: Callable[[Any], object]) -> None:
    """Make method `name` of a class call action(self) before it returns."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        action(self)
        return result

    setattr(cls, name, wrapped)
