"""Python imports this when it starts, if this folder is on its path: Megatron-Core then runs on the CPU."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cpu

warnings.simplefilter("ignore")  # Megatron-Core warns of all that is not installed
cpu.stand_in_for_cuda()
if "-c" not in sys.orig_argv:  # a short program that only looks at what there is
    cpu.stand_in_for_megatron()
