"""The weights into which vLLM merges adapters: right for every version, and read from disk once per host."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import randomly_adapted

from stretto.config.sections.model import LoRASection, ScratchSection
from stretto.models.hub import export_tensors, random_model, save_hf
from stretto.models.lora import Adapter
from stretto_broadcast import host_copy
from stretto_vllm import base
from stretto_vllm.base import BaseWeights

SCALING = 2.0


def build(family: str = "qwen3_moe"):
    return random_model(ScratchSection(family=family, num_experts=4, moe_intermediate_size=16), 40)


@pytest.fixture
def model_dir(tmp_path):
    save_hf(build(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def memory(tmp_path):
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def adapted(seed: int, *targets: str):
    return randomly_adapted(build(), LoRASection(rank=2, alpha=4.0, target_modules=targets), seed, 0.2)


def merge(weights: BaseWeights, model) -> dict[str, torch.Tensor]:
    found = weights.merge(Adapter.of(model).tensors(), 2, SCALING, torch.device("cpu"))
    return {name: tensor.clone() for name, tensor in found}


def assert_merged(found: dict[str, torch.Tensor], model, running: dict[str, torch.Tensor]) -> None:
    """The running model, with what was found loaded into it, is this model."""
    running.update(found)
    for name, tensor in export_tensors(model):
        torch.testing.assert_close(running[name], tensor, atol=1e-6, rtol=1e-6)


def test_every_version_is_the_base_with_its_adapter_and_loads_no_other_module(model_dir, memory):
    weights, running = BaseWeights(model_dir, memory), dict(export_tensors(build()))
    first, second = adapted(1, "q_proj", "experts"), adapted(2, "o_proj")
    assert_merged(merge(weights, first), first, running)
    back = merge(weights, second)
    assert any("experts" in name for name in back), "experts are those of the base model again"
    assert_merged(back, second, running)
    alone = merge(weights, second)
    assert alone and all(".self_attn." in name for name in alone), "nothing else has changed"
    weights.mark_all_changed()
    whole = merge(weights, second)
    assert whole.keys() == running.keys()
    assert_merged(whole, second, {name: torch.zeros_like(tensor) for name, tensor in running.items()})
    weights.close()


def test_later_versions_do_not_read_the_files(model_dir, memory):
    weights = BaseWeights(model_dir, memory)
    model = adapted(1, "q_proj", "experts")
    expected = merge(weights, model)
    for file in model_dir.glob("*.safetensors"):
        with file.open("r+b") as damaged:  # the mapping of a file shows what is written to it
            damaged.write(bytes(file.stat().st_size))
    found = merge(weights, model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    weights.close()


def test_workers_share_one_copy_and_the_last_one_removes_it(model_dir, memory):
    workers, model = [BaseWeights(model_dir, memory) for _ in range(2)], adapted(1, "q_proj")
    found = [merge(worker, model) for worker in workers]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    copies = [path for path in memory.iterdir() if path.suffix not in (".users", ".lock")]
    assert len(copies) == 1
    for worker in workers:
        assert any(memory.iterdir())
        worker.close()
    assert not any(memory.iterdir())


def test_without_room_in_memory_versions_come_from_the_files_and_this_is_said_once(
    model_dir, memory, caplog, monkeypatch
):
    monkeypatch.setattr(base, "available_bytes", lambda: 1000)
    weights, model = BaseWeights(model_dir, memory), adapted(1, "q_proj")
    with caplog.at_level(logging.WARNING):
        found = [merge(weights, model) for _ in range(2)]
    assert_merged(found[1], model, dict(export_tensors(build())))
    assert sum("do not fit into" in record.message for record in caplog.records) == 1
    weights.close()


def test_workers_that_merge_at_once_share_one_copy(model_dir, memory, caplog, monkeypatch):
    """Locks hold between open files, so threads meet as processes do; the copy of one leaves no room for others."""
    copies = lambda: [path for path in memory.iterdir() if path.suffix not in (".users", ".lock")]
    is_full = lambda: any(path.stat().st_size for path in copies())
    monkeypatch.setattr(base, "available_bytes", lambda: 0 if is_full() else 1 << 40)
    bytes_of = base._bytes_of
    monkeypatch.setattr(base, "_bytes_of", lambda tensor: met.wait(10) and bytes_of(tensor))
    met = threading.Event()  # the copy has been begun when the other workers look at the memory
    workers, model = [BaseWeights(model_dir, memory) for _ in range(3)], adapted(1, "q_proj", "experts")
    with ThreadPoolExecutor(len(workers)) as pool:
        found = [pool.submit(merge, workers[0], model)]
        while not is_full():
            assert not found[0].done()
        available = base.available_bytes
        looked = threading.Barrier(len(workers) - 1, action=met.set)
        monkeypatch.setattr(base, "available_bytes", lambda: (looked.wait(10), available())[1])
        found += [pool.submit(merge, worker, model) for worker in workers[1:]]
    assert "do not fit" not in caplog.text
    assert len(copies()) == 1
    for tensors in found:
        assert_merged(tensors.result(), model, dict(export_tensors(build())))
    for worker in workers:
        worker.close()
    assert not any(memory.iterdir())


def test_a_copy_that_cannot_be_opened_stops_no_update(model_dir, memory, caplog, monkeypatch):
    """As another user's in the same directory."""

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_copy, "open_locked", refuse)
    weights, model = BaseWeights(model_dir, memory), adapted(1, "q_proj")
    assert_merged(merge(weights, model), model, dict(export_tensors(build())))
    assert "Permission denied" in caplog.text
    weights.close()


def test_what_a_killed_worker_wrote_is_removed_by_the_next(model_dir, memory):
    """Its locks end with it, and the files alone are left."""
    model = adapted(1, "q_proj")

    def merge_and_die() -> None:
        merge(BaseWeights(model_dir, memory), model)
        os.kill(os.getpid(), signal.SIGKILL)

    worker = multiprocessing.get_context("fork").Process(target=merge_and_die)
    worker.start()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    assert any(memory.iterdir())
    weights = BaseWeights(model_dir, memory)
    assert_merged(merge(weights, model), model, dict(export_tensors(build())))
    weights.close()
    assert not any(memory.iterdir())
