"""What a command may not say about machines where a cluster chooses them."""

from __future__ import annotations

from typing import Any

from stretto.config.root import InferenceConfig
from stretto.config.rules.rule import At, Problem, Problems


def placed_by_cluster(cfg: Any, at: At, section: str, way_out: str) -> Problems:
    """Keys that name machines, although `section` has a cluster choose them."""
    is_inference, owner = isinstance(cfg, InferenceConfig), at(section)
    for name in ("hosts", "node_rank"):
        key = at(name if is_inference else f"deployment.{name}")
        if key.held is not None:
            rule = f"with [{section}] the job's nodes are not known before it starts; leave it out; {way_out}"
            yield Problem((key, owner), f"{key.path}: {rule}")
    router = getattr(cfg if is_inference else getattr(cfg, "inference", None), "router", None)
    if router is not None and router.type == "llm-d" and router.address is not None:
        key = at("router.address" if is_inference else "inference.router.address")
        rule = "llm-d's gateway finds engines by their labels in Kubernetes, and does not see those of this job"
        yield Problem((key, owner), f"{key} with [{section}]: {rule}; leave it out: vllm-router is started then")
