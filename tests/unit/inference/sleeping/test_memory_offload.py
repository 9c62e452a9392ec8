"""Offloading tensors frees their memory; restoring brings their contents back at the same addresses."""

from __future__ import annotations

import psutil
import pytest
import torch

from stretto.models.device.memory_offload import MemoryOffload

MIB = 1 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.heavy
@pytest.mark.parametrize("keeps", [True, False])
def test_the_memory_is_given_back_and_contents_that_are_kept_return(keeps, tmp_path):
    tensors = [torch.arange(n * MIB // 4, dtype=torch.float32) + 1 for n in (8, 16, 24)]
    tensors.append(tensors[0].view(2, -1)[1])  # shares the memory of another
    before, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    held, memory = resident(), MemoryOffload(tmp_path)
    assert memory.offload(tensors, keeps=keeps) == 48 * MIB and memory.is_offloaded
    assert held - resident() > 40 * MIB
    memory.restore()
    assert [tensor.data_ptr() for tensor in tensors] == places and not memory.is_offloaded
    assert all(map(torch.equal, tensors, before)) == keeps
    for tensor in tensors:
        tensor.fill_(3.0)
    assert tensors[2].sum() == 3 * 24 * MIB / 4 and not list(tmp_path.iterdir())


def test_neighbours_in_memory_are_left_alone():
    block = torch.arange(64 << 10, dtype=torch.uint8)
    small = torch.full((100,), 7, dtype=torch.uint8)
    memory = MemoryOffload()
    memory.offload([small], keeps=False)
    memory.restore()
    assert torch.equal(block, torch.arange(64 << 10, dtype=torch.uint8))


def test_moves_that_do_not_exist_are_faults():
    memory = MemoryOffload()
    with pytest.raises(AssertionError, match="is not offloaded"):
        memory.restore()
    memory.offload([torch.zeros(10)], keeps=True)
    with pytest.raises(AssertionError, match="is offloaded already"):
        memory.offload([torch.zeros(10)], keeps=True)
