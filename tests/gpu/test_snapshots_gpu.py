"""Snapshots of a GPU's memory: what a step allocates is in its file, also when the step fails."""

from __future__ import annotations

import pickle

import pytest
import torch

from stretto.models.tracing.snapshots import MemorySnapshots

pytestmark = pytest.mark.gpu


def sizes(path) -> list[int]:
    """Bytes of the allocations that a snapshot has."""
    snapshot = pickle.loads(path.read_bytes())
    return [event["size"] for trace in snapshot["device_traces"] for event in trace if event["action"] == "alloc"]


def test_each_step_has_a_file_with_its_own_allocations(tmp_path):
    snapshots = MemorySnapshots(tmp_path, "trainer")
    kept = []
    for step, num in ((1, 3), (2, 5)):
        with snapshots.step(step):
            kept.append(torch.zeros(num << 20, dtype=torch.uint8, device="cuda"))
    first, second = (sizes(tmp_path / f"step_{step}_trainer.pickle") for step in (1, 2))
    assert 3 << 20 in first and 5 << 20 not in first
    assert 5 << 20 in second and 3 << 20 not in second


def test_a_step_that_runs_out_of_memory_has_one_too(tmp_path):
    snapshots = MemorySnapshots(tmp_path, "trainer")
    with pytest.raises(torch.OutOfMemoryError), snapshots.step(7):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert (tmp_path / "step_7_trainer.pickle").stat().st_size > 0
