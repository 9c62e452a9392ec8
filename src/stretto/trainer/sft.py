"""The verb `sft` as a script, which torchrun starts on every rank: `torchrun src/stretto/trainer/sft.py @ sft.toml`."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "sft")
    runpy.run_module("stretto", run_name="__main__")
