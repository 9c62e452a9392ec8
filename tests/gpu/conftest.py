"""Tests on a GPU share the models and cases of the others; without a CUDA device they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

for room in ("wires", "e2e", "contract"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
