"""Puts the trainer's tiny models of tests/unit within reach."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
