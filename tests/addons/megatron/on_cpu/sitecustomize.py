"""Python imports this when it starts, if this folder is on its path: Megatron-Core then runs on the CPU."""

import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
warnings.simplefilter("ignore")

from cpu import stand_in  # noqa: E402

stand_in()
