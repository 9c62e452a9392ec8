"""What a command may not say about machines where a cluster chooses them; names of machines as Slurm writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from stretto.config.root import InferenceConfig
from stretto.config.rules.rule import At, Problem, Problems

_NODES = re.compile(r"([^\[\],]+)(?:\[([\d,-]+)\])?(?:,|$)")


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


def node_names(nodelist: str) -> list[str]:
    """The nodes of a list in Slurm's notation: `a[0-1,07],b` is a0, a1, a07, b.

    Raises: ValueError if it cannot be read.
    """
    names: list[str] = []
    end = 0
    while end < len(nodelist):
        if (match := _NODES.match(nodelist, end)) is None:
            raise ValueError(nodelist)
        stem, numbers = match[1], match[2]
        names += [stem] if numbers is None else [f"{stem}{number}" for number in _numbers(numbers)]
        end = match.end()
    return names


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from (str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1))
