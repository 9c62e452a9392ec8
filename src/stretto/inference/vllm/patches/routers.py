"""Experts that are chosen by sigmoid scores, without groups, on a CPU.

vLLM 0.32's router for CPUs computes sigmoid scores only if experts are in groups, and the engine ends at its first step
otherwise. All experts in one group is the same choice.
"""

from __future__ import annotations

from typing import Any

from stretto.inference.vllm.patches.wrap import run_after


def group_sigmoid_experts() -> None:
    """Let routers without groups have one; called once or more in every vLLM process."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    if not getattr(CPURouter, "_stretto_groups", False):
        CPURouter._stretto_groups = True
        run_after(CPURouter, "__init__", _use_one_group)


def _use_one_group(router: Any) -> None:
    if router.scoring_func == "sigmoid" and router.custom_routing_function is None:
        router.use_grouped_topk = True
        router.num_expert_group = router.num_expert_group or 1
        router.topk_group = router.topk_group or 1
