"""Our general plugin of vLLM: registers weight transfer and patches in every vLLM process."""

from __future__ import annotations

import os

from stretto.inference.vllm.command import (
    CHOICES_VARIABLE,
    CPU_EXPERTS_VARIABLE,
    CPU_ROUTERS_VARIABLE,
    CPU_STAGES_VARIABLE,
    LEASES_VARIABLE,
    PLAIN_EXPERTS_VARIABLE,
    SUPPORTS_VARIABLE,
    WEIGHTS_BACKEND,
)


def register() -> None:
    """Called by vLLM once or more in each of its processes, even if stretto did not start them."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHTS_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHTS_BACKEND, "stretto.inference.vllm.weights", "StrettoWeights"
        )
    from stretto.inference.vllm.patches.loaders import name_loaders

    name_loaders()
    if os.environ.get(CHOICES_VARIABLE):
        from stretto.inference.vllm.patches.choices import install

        install()
    if os.environ.get(CPU_EXPERTS_VARIABLE):
        from stretto.inference.vllm.patches.experts import enable_experts_on_cpus

        enable_experts_on_cpus()
    if os.environ.get(CPU_ROUTERS_VARIABLE):
        from stretto.inference.vllm.patches.routers import group_sigmoid_experts

        group_sigmoid_experts()
    if os.environ.get(CPU_STAGES_VARIABLE):
        from stretto.inference.vllm.patches.stages import allocate_stage_buffers

        allocate_stage_buffers()
    if os.environ.get(LEASES_VARIABLE):
        from stretto.inference.vllm.patches.leases import keep_leases_in_pauses

        keep_leases_in_pauses()
    if (where := os.environ.get(SUPPORTS_VARIABLE)) is not None:
        from stretto.inference.vllm.patches import supports

        supports.install(where)
    if os.environ.get(PLAIN_EXPERTS_VARIABLE):
        from stretto.inference.vllm.patches.adapters import disable_expert_adapters

        disable_expert_adapters()
