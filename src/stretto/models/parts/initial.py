"""Initial weights of a network from scratch, and embedding tables without initial weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from stretto.models.parts.norm import CentredRMSNorm

_SHORTEST_STEP, _LONGEST_STEP = 0.001, 0.1
_FASTEST_RATE = 16.0


def build_embedding(num_rows: int, dim: int) -> nn.Embedding:
    """A table with uninitialised weights.

    torch.nn.Embedding draws random numbers, which on the meta device imports torch._dynamo; that takes a second.
    """
    return nn.Embedding.from_pretrained(torch.empty(num_rows, dim), freeze=False)


@torch.no_grad()
def initialise(model: nn.Module, std: float, generator: torch.Generator) -> None:
    """Draw the weights of a network from scratch.

    Matrices are normal with deviation std, biases and sinks 0, norms 1, recurrent mixers as Mamba 2's.

    Per head of a recurrent mixer the rate exp(A_log) is uniform in [1, 16] and the step size, the softplus of dt_bias,
    log-uniform in [0.001, 0.1], so that heads forget at different speeds.

    Source: Mamba-2, arXiv:2405.21060, section 7. Differs: the same for the gated delta rule.
    """
    centred = {f"{path}.weight" for path, part in model.named_modules() if isinstance(part, CentredRMSNorm)}
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind == "A_log":
            parameter.uniform_(1.0, _FASTEST_RATE, generator=generator).log_()
        elif kind == "dt_bias":
            _fill_steps(parameter, generator)
        elif name.endswith("conv1d.weight"):
            bound = parameter.shape[-1] ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
        elif name.endswith(("bias", "sinks")) or name in centred:
            parameter.zero_()
        elif parameter.ndim >= 2:
            parameter.normal_(0.0, std, generator=generator)
        else:
            parameter.fill_(1.0)


def _fill_steps(parameter: Tensor, generator: torch.Generator) -> None:
    step = parameter.uniform_(math.log(_SHORTEST_STEP), math.log(_LONGEST_STEP), generator=generator).exp()
    parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
