"""Experts that are chosen by sigmoid scores, without groups, on a CPU.

vLLM 0.32's router for CPUs computes sigmoid scores only if experts are in groups; otherwise the engine fails at its
first step. One group with all experts gives the same choices.
"""

from __future__ import annotations

from typing import Any

from stretto_vllm.patches.wrap import run_after


def group_sigmoid_experts() -> None:
    """Make routers without groups use one group."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    run_after(CPURouter, "__init__", _use_one_group)


def _use_one_group(router: Any) -> None:
    if router.scoring_func == "sigmoid" and router.custom_routing_function is None:
        router.use_grouped_topk = True
        router.num_expert_group = router.num_expert_group or 1
        router.topk_group = router.topk_group or 1
