"""Counts of weights by shape alone, against the modules of every family."""

from __future__ import annotations

import pytest
import torch

from stretto.config.sections.model import ScratchSection
from stretto.families.table import FAMILIES, VISION_FAMILIES
from stretto.models.config import scratch_config
from stretto.models.decoder import Decoder
from stretto_plan.network import NetworkSize


def built(cfg) -> tuple[int, int]:
    """All weights of a decoder, and those in its blocks."""
    with torch.device("meta"):
        model = Decoder(cfg)
    count = lambda module: sum(p.numel() for p in module.parameters())
    return count(model), count(model.model.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_modules(family) -> None:
    more = {"vision": {}} if family in VISION_FAMILIES else {}
    sizes = {"num_layers": 4, "moe_intermediate_size": 96}  # square experts of qwen3_vl_moe are refused
    cfg = scratch_config(ScratchSection(family=family, has_expert_bias=True, **sizes, **more), 97)
    size = NetworkSize.of(cfg)
    assert (size.total, sum(layer.total for layer in size.layers)) == built(cfg)
