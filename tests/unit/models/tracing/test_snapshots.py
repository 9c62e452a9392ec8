"""Snapshots of memory are of GPUs: without one they are refused, and without a directory nothing happens."""

import pytest
import torch

from stretto.base.errors import ConfigError
from stretto.models.tracing.snapshots import MemorySnapshots


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_without_a_gpu_refuses_to_record(tmp_path):
    with pytest.raises(ConfigError, match=r"memory_profiler_path = .*GPUs only"):
        MemorySnapshots(tmp_path, "trainer")


def test_without_a_directory_a_step_is_only_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MemorySnapshots(None, "trainer").step(1):
        pass
    assert not list(tmp_path.iterdir())
