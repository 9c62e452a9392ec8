"""Whole runs of `sft` in this process, and their weights."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file

from stretto.config.root import SFTConfig

SCRATCH = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


@pytest.fixture(autouse=True)
def undisturbed_threads_and_logging():
    root = logging.getLogger()
    threads, handlers = torch.get_num_threads(), root.handlers[:]
    yield
    torch.set_num_threads(threads)
    logging.captureWarnings(False)
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers


def config(tmp_path, **changes):
    data = {
        "output_dir": str(tmp_path),
        "run": {"name": "run"},
        "model": {"scratch": SCRATCH},
        "data": {"type": "environment", "id": "sort-letters", "num_rows": 40},
        "val": {"interval": 4, "data": {"type": "environment", "id": "sort-letters", "num_rows": 8}},
        "optim": {"lr": 3e-3},
        "batch_size": 16,
        "seq_len": 128,
        "max_steps": 8,
        "num_threads": 1,
    }
    return SFTConfig.model_validate(data | changes)


def weights(cfg, step):
    return load_file(cfg.run_dir.weights_step(step) / "model.safetensors")


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
