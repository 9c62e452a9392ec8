"""What stretto adds to every process of vLLM's: the transfer of weights. Loaded by vLLM as a general plugin."""

from __future__ import annotations

import os

from stretto.inference.vllm.command import CHOICES_VARIABLE, PLAIN_EXPERTS_VARIABLE, WEIGHTS_BACKEND


def register() -> None:
    """Called once or more in every vLLM process, also in those of users who never heard of stretto."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHTS_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHTS_BACKEND, "stretto.inference.vllm.weights", "StrettoWeights"
        )
    if os.environ.get(CHOICES_VARIABLE):
        from stretto.inference.vllm.choices import install

        install()
    if os.environ.get(PLAIN_EXPERTS_VARIABLE):
        from stretto.inference.vllm.adapters import leave_experts_alone

        leave_experts_alone()
