"""LoRA from `sft` to `rl`: only the adapter is trained, sent and kept; what comes out is a model as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from runs import Ended, fine_tuned, merged, rl, sorting
from safetensors.numpy import load_file

from stretto.trainer.state.slice_files import SliceFiles

NUM_STEPS = 6
LORA = {"rank": 4, "alpha": 16}


def run(directory: Path, model: Path, *words: str, **more: Any) -> Ended:
    adapter = {"model": {"lora": LORA}, "ckpt": {"interval": 3, "weights": {"save_adapter_separately": True}}}
    return rl(directory, merged(sorting(model, NUM_STEPS, lr=5e-3), adapter, more), *words)


def changed(before: Path, after: Path) -> set[str]:
    old, new = (load_file(path / "model.safetensors") for path in (before, after))
    assert old.keys() == new.keys()
    return {name for name in old if (old[name] != new[name]).any()}


@pytest.fixture(scope="module")
def through(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(tmp_path_factory.mktemp("through"), sorter, weight_broadcast={"type": "shm"})


def test_an_adapter_trains_over_shared_memory(sorter: Path, through: Ended) -> None:
    check_adapter(sorter, through)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["filesystem", "collective", "changes"])
def test_an_adapter_trains_over_every_other_transport(sorter: Path, tmp_path: Path, transport: str) -> None:
    broadcast: dict[str, Any] = {"type": transport}
    if transport == "changes":
        broadcast = {"type": "filesystem", "delta": {}}
    if transport == "collective":
        broadcast["port"] = free_ports(1)[0]
    check_adapter(sorter, run(tmp_path, sorter, weight_broadcast=broadcast))


def check_adapter(model: Path, ended: Ended) -> None:
    """Engine and trainer agree; the adapter alone was trained and kept, and what is exported has it merged."""
    assert all(0 <= value < 1e-6 for value in ended.column("mismatch_kl/max"))
    errors = ended.column("canary/error")
    assert len(errors) >= NUM_STEPS - 1 and max(errors) < 1e-4
    weights = ended.run.weights_step(NUM_STEPS)
    names = changed(model, weights)
    assert names and all(name.endswith("_proj.weight") for name in names)
    adapter = load_file(weights / "lora_adapters" / "adapter_model.safetensors")
    assert len(adapter) == 2 * len(names)
    checkpoint = SliceFiles(ended.run.checkpoint(NUM_STEPS) / "trainer").tensors
    assert any("lora_" in name for name in checkpoint)
    assert not [name for name in checkpoint if name.startswith("model.") and "lora_" not in name]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(sorter: Path, through: Ended, tmp_path: Path) -> None:
    run(tmp_path, sorter, max_steps=3)
    resumed = run(tmp_path, sorter, "--resume")
    assert through.weights(NUM_STEPS) == resumed.weights(NUM_STEPS)


def test_sft_trains_an_adapter(sorter: Path, tmp_path: Path) -> None:
    settings = {
        "max_steps": 20,
        "run": {"name": "run"},
        "model": {"name": str(sorter), "lora": LORA | {"dropout": 0.1}},
        "ckpt": {"weights": {"save_adapter_separately": True}},
    }
    weights = fine_tuned(tmp_path, **settings)
    assert changed(sorter, weights) and (weights / "lora_adapters" / "adapter_config.json").is_file()
