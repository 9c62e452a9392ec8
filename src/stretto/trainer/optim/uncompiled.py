"""torch's optimizers without what torch.compile would need of them.

Their methods import torch._dynamo when they are called first, which takes most of a second of the time to the first
step. Nothing here is compiled, and no update is differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim


def _unwrapped(method: Any) -> Any:
    return getattr(method, "__wrapped__", method)


class Uncompiled(optim.Optimizer):
    """Base class of our optimizers."""

    add_param_group = _unwrapped(optim.Optimizer.add_param_group)


class AdamW(Uncompiled, optim.AdamW):
    step = torch.no_grad()(_unwrapped(optim.AdamW.step))


class SGD(Uncompiled, optim.SGD):
    step = torch.no_grad()(_unwrapped(optim.SGD.step))
