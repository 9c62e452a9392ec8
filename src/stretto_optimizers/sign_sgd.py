"""Sign SGD: every weight moves by lr in the direction of its gradient's sign.

Source: signSGD, arXiv:1802.04434, algorithm 1. Differs: decoupled weight decay, as in AdamW.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stretto.trainer.optim.uncompiled import Uncompiled

if TYPE_CHECKING:
    from stretto.config.sections.trainer import SignSgdOptim
    from stretto.trainer.optim.build import TrainedWeights


class SignSgd(Uncompiled):
    """No state: a resumed run needs none."""

    def __init__(self, named: dict[str, nn.Parameter], cfg: SignSgdOptim, weights: TrainedWeights) -> None:
        super().__init__(named.values(), {"lr": cfg.lr, "weight_decay": cfg.weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(parameter.grad.sign().mul_(group["lr"]))
