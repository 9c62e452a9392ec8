"""How many CPU threads a rank takes where nobody says it."""

from __future__ import annotations

import pytest

from stretto.trainer.ranks import mesh


@pytest.mark.parametrize(
    ("configured", "environment", "num_parameters", "threads"),
    [
        (3, {"OMP_NUM_THREADS": "2"}, None, 3),
        (None, {"OMP_NUM_THREADS": "2"}, 130_000, 2),
        (None, {}, None, 16),
        (None, {"LOCAL_WORLD_SIZE": "4"}, None, 4),
        (None, {}, 130_000, 1),
        (None, {}, 20_000_000, 4),
        (None, {}, 600_000_000, 16),
        (None, {"OMP_NUM_THREADS": ""}, 600_000_000, 16),
    ],
)
def test_what_is_said_counts_and_a_small_model_takes_few(configured, environment, num_parameters, threads, monkeypatch):
    monkeypatch.setattr(mesh, "num_cores", lambda: 16)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert mesh.choose_threads(configured, num_parameters) == threads
