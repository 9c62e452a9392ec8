"""Muon: orthogonalised momentum for the matrices of the blocks, AdamW for all other weights.

A matrix is orthogonalised as a whole, however it is sharded (whole_matrices.py). A stack of experts counts as one
matrix per expert; gate and up of an expert, which are stacked in one parameter, count as two.

Source: Muon, https://kellerjordan.github.io/posts/muon; scale of the steps: Moonlight, arXiv:2502.16982,
equation 4. Differs: on CPUs the iteration runs in float32, on GPUs in bfloat16 as in the original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from stretto.models.moe import Experts
from stretto.trainer.optim.uncompiled import Uncompiled
from stretto_optimizers.whole_matrices import apply_to_whole

if TYPE_CHECKING:
    from jaxtyping import Float

    from stretto.config.sections.trainer import MuonOptim
    from stretto.trainer.optim.build import TrainedWeights

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
RMS = 0.2
"""Root mean square of an update of a matrix at lr = 1, about that of AdamW."""


def find_matrices(policy: nn.Module) -> dict[str, int]:
    """Names of the weights that Muon updates -> how many matrices each has in its rows."""
    num_matrices = {}
    for path, module in policy.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            is_stack = parameter.dim() == 3 and path.endswith("experts")
            is_matrix = parameter.dim() == 2 and not name.endswith("bias")  # experts' biases are [experts, out]
            if (is_matrix or is_stack) and parameter is not policy.output_weight:
                is_pair = (
                    isinstance(module, Experts) and name.endswith("gate_up_proj") and not module.shape.is_transposed
                )
                num_matrices[name] = 2 if is_pair else 1
    return num_matrices


@torch.no_grad()
def orthogonalise(matrices: Float[Tensor, "*stack rows cols"]) -> Float[Tensor, "*stack rows cols"]:
    """The nearest matrices with orthonormal rows (or columns), approximately; in the same dtype.

    Singular values of the result are about 0.7 to 1.2.
    Source: Newton-Schulz iteration of degree 5 with the coefficients of Muon.
    """
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


def muon_step(matrices: Float[Tensor, "*stack rows cols"], stacked: int) -> Float[Tensor, "*stack rows cols"]:
    """The update of whole weights at lr = 1, from their momentum.

    `stacked` matrices are stacked in their rows.
    """
    split = matrices.unflatten(-2, (stacked, -1))
    scale = RMS * max(split.shape[-2:]) ** 0.5
    return (orthogonalise(split) * scale).flatten(-3, -2)


class Muon(Uncompiled):
    """One parameter group of these weights; Muon updates those that are matrices."""

    def __init__(self, named: dict[str, nn.Parameter], cfg: MuonOptim, weights: TrainedWeights) -> None:
        super().__init__(list(named.values()), {"lr": cfg.lr})
        self._named, self._cfg, self._weights = named, cfg, weights
        self._matrices = find_matrices(weights.module)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's takes a closure
        """One update of every weight that has a gradient."""
        assert closure is None, "Muon takes no closure"
        lr = self.param_groups[0]["lr"]
        live = {name: p for name, p in self._named.items() if p.grad is not None}
        self._step_matrices({name: p for name, p in live.items() if name in self._matrices}, lr)
        self._step_rest([p for name, p in live.items() if name not in self._matrices], lr)

    def _step_matrices(self, named: dict[str, nn.Parameter], lr: float) -> None:
        momenta = {}
        for name, parameter in named.items():
            state, grad = self.state[parameter], parameter.grad
            assert grad is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            state["momentum_buffer"].lerp_(grad, 1 - self._cfg.mu)
            momenta[name] = grad.lerp(state["momentum_buffer"], self._cfg.mu)
        update = lambda name, whole: muon_step(whole, self._matrices[name])
        updates = apply_to_whole(self._weights, momenta, update)
        for name, parameter in named.items():
            parameter.mul_(1 - lr * self._cfg.weight_decay)
            parameter.add_(updates[name], alpha=-lr)

    def _step_rest(self, parameters: list[nn.Parameter], lr: float) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[p] for p in parameters]
        adamw(
            [*parameters],
            [p.grad for p in parameters if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=self._cfg.betas1,
            beta2=self._cfg.betas2,
            lr=lr,
            weight_decay=self._cfg.weight_decay,
            eps=self._cfg.eps,
            maximize=False,
        )
