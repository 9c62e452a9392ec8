"""`sft`, then `rl`, as a user types them, on the GPUs of the machine with the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_short_run_trains_what_its_engine_samples(tmp_path: Path, record_property, dtype):
    for name in ("aiohttp", "orjson", "zmq", "renderers"):
        pytest.importorskip(name)
    from runs import TINY, fine_tuned, rl

    model = fine_tuned(tmp_path / "sft", max_steps=1, seq_len=256, model={"scratch": TINY})
    settings = {
        "max_steps": 4,
        "seq_len": 512,
        "model": {"name": model, "dtype": dtype},
        "inference": {"engine": "embedded", "kv_cache_tokens": 8192, "max_num_seqs": 64},
        "orchestrator": {
            "batch_size": 16,
            "group_size": 4,
            "train": {"sampling": {"max_completion_tokens": 8}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
    }
    ended = rl(tmp_path, settings)
    mismatch = ended.column("mismatch_kl/mean", "trainer")
    record_property("mismatch_kl/mean", mismatch)
    assert len(mismatch) == 4 and max(mismatch) < (1e-6 if dtype == "float32" else 0.01)
