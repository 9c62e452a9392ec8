"""DeepEP trains like one rank for any order of rows, with and without chunks; without the library it is refused."""

from __future__ import annotations

import pytest
import torch
from mesh_runs import NUM_STEPS
from ranks import run_ranks
from test_meshes import alone

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ModelSection
from stretto.trainer.parallel.token_dispatcher import DeepEPDispatcher, build_token_dispatcher


def test_rows_that_come_in_another_order_train_like_one_rank(tmp_path):
    out = tmp_path / "results.pt"
    run_ranks("deep_ep_runs.py", out, world_size=2, log=tmp_path / "log")
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
    with pytest.raises(ConfigError, match=r'needs GPUs.*"torch"'):
        build_token_dispatcher(section, _Mesh())
    with pytest.raises(ConfigError, match=r"DeepEP cannot be imported"):
        DeepEPDispatcher(_Mesh(), 20, None)
