"""DeepEP: trains like one rank in whatever order its rows come, whole and in parts; refused where it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mesh_runs import NUM_STEPS
from test_meshes import alone, free_port

from stretto.base.errors import ConfigError
from stretto.config.model import ModelSection
from stretto.trainer.parallel.token_wire import DeepEPWire, build_token_wire


def test_rows_that_come_in_another_order_train_like_one_rank(tmp_path):
    script, out, port = Path(__file__).with_name("deep_ep_runs.py"), tmp_path / "results.pt", str(free_port())
    command = [sys.executable, "-W", "error", str(script), str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        ranks = [
            subprocess.Popen([*command, str(rank), port], env=env, stdout=log, stderr=log) for rank in (0, 1)
        ]
        try:
            for rank in ranks:
                rank.wait(120)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert out.exists(), (tmp_path / "log").read_text()[-6000:]
    results, expected = torch.load(out, weights_only=False), alone("replay")["metrics"]
    for metrics, _, num_sms in results.values():
        assert len(metrics) == NUM_STEPS and num_sms == 24
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert results[5][1] > 2 * results[None][1]  # in parts it is asked more often


class _Mesh:
    class degrees:
        ep = 2

    ep_group = None
    device = torch.device("cpu")


def test_it_is_refused_without_gpus_and_without_the_package():
    section = ModelSection(ep_comm_backend="deepep", dtype="bfloat16")
    with pytest.raises(ConfigError, match='needs GPUs, and this rank is on the cpu; use "torch"'):
        build_token_wire(section, _Mesh())
    with pytest.raises(ConfigError, match=r"DeepEP cannot be imported .*; build it for this CUDA"):
        DeepEPWire(_Mesh(), 20, None)
