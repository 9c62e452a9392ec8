"""Our general plugin of vLLM: registers weight transfer and patches in every vLLM process."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module

from stretto_vllm.command import PATCHES_VAR, WEIGHTS_BACKEND
from stretto_vllm.patches.devices import find_gpus_by_name
from stretto_vllm.patches.loaders import name_loaders


@cache  # vLLM calls it several times in some processes
def register() -> None:
    """Called by vLLM in each of its processes, even if stretto did not start them."""
    find_gpus_by_name()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(WEIGHTS_BACKEND, "stretto_vllm.weights", "StrettoWeights")
    name_loaders()
    for patch in os.environ.get(PATCHES_VAR, "").split():
        module, _, function = patch.partition(".")
        getattr(import_module(f"stretto_vllm.patches.{module}"), function)()
