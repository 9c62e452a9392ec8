"""A trainer with `is_deterministic` computes by kernels that always sum in one order, and the same weights."""

from __future__ import annotations

import os

import pytest
import torch
from sft_runs import config, same_weights, undisturbed_threads_and_logging, weights

from stretto.trainer.process import choose_kernels
from stretto_sft.training import main

__all__ = ["undisturbed_threads_and_logging"]


@pytest.fixture(autouse=True)
def usual_kernels(monkeypatch):
    """The choice of this process is undone."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filled, precision = torch.utils.deterministic.fill_uninitialized_memory, torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.set_float32_matmul_precision(precision)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_the_usual_kernels_are_not_changed(tmp_path):
    choose_kernels(config(tmp_path))
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.heavy
def test_every_step_has_a_kernel_that_sums_in_one_order(tmp_path):
    runs = []
    for name in ("a", "b"):
        cfg = config(tmp_path, run={"name": name}, is_deterministic=True)
        assert main(cfg) == 0
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        runs.append(weights(cfg, 8))
    assert same_weights(*runs)
