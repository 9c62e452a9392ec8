"""Pipeline stages on CPUs, which vLLM 0.32 does not support by itself.

A stage after the first receives hidden states into a buffer that vLLM allocates while it profiles memory. On a CPU
with a fixed cache size there is no profiling, and the engine ends at its first step.
"""

from __future__ import annotations

import functools
from typing import Any


def allocate_stage_buffers() -> None:
    """Allocate that buffer after the model has been loaded; called once per process."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if getattr(CPUModelRunner, "_stretto_stages", False):
        return
    CPUModelRunner._stretto_stages = True
    load_model = CPUModelRunner.load_model

    @functools.wraps(load_model)
    def load_and_allocate(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = load_and_allocate
