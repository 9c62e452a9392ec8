"""[model] fp8: finds this machine's kernels for 8-bit products, and uses them in a policy."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from torch import nn

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.models.decoder import Decoder
from stretto.models.fp8.reference import Kernels, use_fp8
from stretto.trainer.ranks.mesh import training_device

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)
"""The lowest compute capability of GPUs that have the 8-bit products needed here (H100, H200, B200)."""


def apply_fp8(policy: nn.Module, section: ModelSection) -> None:
    """Replace the layers of a policy's blocks as [model] fp8 says; weights and their names stay.

    Raises: ConfigError if this machine or this policy does not support it.
    """
    if not section.fp8:
        return
    if not isinstance(policy, Decoder):
        raise ConfigError('[model] fp8 works with impl = "custom" only; remove fp8 or change impl')
    kernels = Kernels() if section.fp8 == "reference" else _find_kernels(training_device())
    count = use_fp8(policy.model.layers, kernels)
    logger.info("fp8: %d layers, multiplied by %s", count, kernels.name)


def _find_kernels(device: torch.device) -> Kernels:
    slow = 'fp8 = "reference" computes the same rounding on any machine, slowly'
    rule = "needs a GPU of compute capability 9.0 or newer (H100, H200, B200), and"
    if device.type != "cuda":
        raise ConfigError(f"[model] fp8 = true {rule} this runs on the CPU; remove it. {slow}")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        raise ConfigError(f"[model] fp8 = true {rule} {name}; remove it. {slow}")
    if find_spec("triton") is None:
        raise ConfigError("[model] fp8 = true needs triton, which is not installed; pip install triton")
    kernels: Kernels = addons.load("stretto.kernels", "fp8", "[model] fp8 = true")(device)
    return kernels
