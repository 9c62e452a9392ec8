"""What the kernels of stretto_triton/rows.py must give; shared by the tests of triton's interpreter and of GPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def assert_row_kernels_agree(kernels, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Norms, gates, rotations and log-probabilities, forward and backward: torch's operations in float64."""
    for case in (_norms, _gates, _rotations, _logprobs):
        case(kernels, device, dtype)


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _assert_close(found: Tensor | None, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found is not None and found.shape == wanted.shape, (found, wanted.shape)
    worst = float((found.double() - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-9)
    assert worst < TOLERANCES[dtype], worst


def _norms(kernels, device: str, dtype: torch.dtype) -> None:
    for shape, has_weight in (((1, 8), True), ((37, 96), True), ((3, 5, 128), False), ((1100, 4, 16), True)):
        x, grad = (_random(*shape, seed=seed, device=device, dtype=dtype) for seed in (0, 1))
        weight = _random(shape[-1], seed=2, device=device, dtype=dtype) if has_weight else None
        wide = [None if t is None else t.double().requires_grad_() for t in (x, weight)]
        wanted = F.rms_norm(wide[0], shape[-1:], wide[1], 1e-6)
        wanted.backward(grad.double())
        out, inverse = kernels.rms_norm(x, weight, 1e-6)
        _assert_close(out, wanted.detach(), dtype)
        needed = (True, has_weight)
        for found, leaf in zip(kernels.rms_norm_backward(x, weight, inverse, grad, needed), wide):
            if leaf is not None:
                _assert_close(found, leaf.grad, dtype)
        assert kernels.rms_norm_backward(x, weight, inverse, grad, (False, False)) == (None, None)


def _gates(kernels, device: str, dtype: torch.dtype) -> None:
    for shape in ((1, 8), (123, 88)):
        gate, up, grad = (_random(*shape, seed=seed, device=device, dtype=dtype) for seed in (3, 4, 5))
        wide = [t.double().requires_grad_() for t in (gate, up)]
        wanted = F.silu(wide[0]) * wide[1]
        wanted.backward(grad.double())
        _assert_close(kernels.gate_product(gate, up), wanted.detach(), dtype)
        for found, leaf in zip(kernels.gate_product_backward(gate, up, grad), wide):
            _assert_close(found, leaf.grad, dtype)


def _rotations(kernels, device: str, dtype: torch.dtype) -> None:
    for heads, dim in ((1, 8), (3, 24), (5, 64)):
        x = _random(17, heads, dim, seed=6, device=device, dtype=dtype)
        cos, sin = (_random(17, 1, dim, seed=seed, device=device, dtype=dtype) for seed in (7, 8))
        for sign in (1, -1):
            wanted = x.double() * cos.double() + sign * x.double().roll(dim // 2, -1) * sin.double()
            _assert_close(kernels.rotate(x, cos, sin, sign), wanted, dtype)


def _logprobs(kernels, device: str, dtype: torch.dtype) -> None:
    for vocab in (11, 4096, 9001):
        logits = 3 * _random(9, vocab, seed=9, device=device, dtype=torch.float32)
        logits[0, 0] = 200.0  # a row that is sure of one token
        temperatures = torch.linspace(0.5, 1.5, 9, device=device)
        targets = torch.arange(9, device=device) % vocab
        grads = tuple(_random(9, seed=seed, device=device, dtype=torch.float32) for seed in (10, 11))
        wide = logits.double().requires_grad_()
        scores = (wide / temperatures.double()[:, None]).log_softmax(-1)
        wanted = scores.gather(1, targets[:, None]).squeeze(1), -(scores.exp() * scores).sum(-1)
        found = kernels.logprobs(logits, targets, temperatures)
        for one, other in zip(found, wanted):
            _assert_close(one, other.detach(), torch.float32)
        of_logprob = torch.autograd.grad(wanted[0], wide, grads[0].double(), retain_graph=True)[0]
        of_both = torch.autograd.grad(wanted, wide, [grad.double() for grad in grads])[0]
        for entropy, slopes in ((None, of_logprob), ((found[1], grads[1]), of_both)):
            ours = kernels.logprob_slopes(logits, targets, temperatures, found[2], grads[0], entropy, dtype)
            assert ours.dtype is dtype
            _assert_close(ours, slopes, dtype)
