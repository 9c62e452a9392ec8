"""Pipeline stages on CPUs, which vLLM 0.32 does not support by itself.

A stage after the first receives hidden states into a buffer that vLLM allocates while it profiles memory. On a CPU
with a fixed cache size there is no profiling, and the engine fails at its first step.
"""

from __future__ import annotations

from typing import Any

from stretto_vllm.patches.wrap import run_after


def allocate_stage_buffers() -> None:
    """Allocate that buffer after the model has been loaded."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def allocate(runner: Any) -> None:
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    run_after(CPUModelRunner, "load_model", allocate)
