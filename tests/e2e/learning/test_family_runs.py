"""Each family that can be made from scratch, from nothing to `rl` on a CPU with the embedded engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import MOVING, has_moved, merged, rl, sorting

from stretto.families.table import FAMILIES, VISION_FAMILIES

DENSE = {"llama", "qwen2", "qwen3", "glm4", "qwen3_5_text"}
ELSEWHERE = {"llama", "qwen2", "qwen3", "qwen3_moe", *VISION_FAMILIES}
NUM_STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ELSEWHERE))
def test_a_family_warms_up_and_trains_on_what_it_has_sampled(
    family: str, warmed_up: Callable[..., Path], tmp_path: Path
) -> None:
    """The trainer finds the log-probabilities that the engine has sampled with, before and after updates."""
    scratch = {"family": family, "num_layers": 4, "moe_intermediate_size": 32, "sliding_window": 24}
    model = warmed_up(max_steps=60, seq_len=1024, model={"scratch": scratch})
    settings = merged(sorting(model, NUM_STEPS), MOVING)
    settings["trainer"]["enable_router_replay"] = family not in DENSE
    ended = rl(tmp_path, settings)
    assert len(ended.column("reward/mean")) == NUM_STEPS
    assert all(0 <= value < 1e-6 for value in ended.column("mismatch_kl/max"))
    assert has_moved(ended) and all(norm > 0 for norm in ended.column("optim/grad_norm", "trainer"))
