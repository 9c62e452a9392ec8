"""`sft`, then `rl`, as a user types them, on the GPUs of the machine with the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"model": {"dtype": "float32"}},
    "ipc": {"weight_broadcast": {"type": "ipc"}},
    "turns": {"colocate": {}},
    "saves memory": {"trainer": {"model": {"ac_offloading": {}, "optim_cpu_offload": True}}},
    "lora": {"trainer": {"model": {"lora": {"rank": 4}}}},
}
"""Settings of a run, by what they try."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, fine-tuned until some of its replies are right."""
    for name in ("aiohttp", "msgspec", "zmq", "renderers"):
        pytest.importorskip(name)
    from runs import fine_tuned

    scheduler = {"type": "constant", "warmup_steps": 20}
    return str(fine_tuned(tmp_path_factory.mktemp("sft"), max_steps=100, scheduler=scheduler))


@pytest.mark.parametrize("case", CASES)
def test_a_short_run_trains_what_its_engine_samples(tmp_path: Path, record_property, case, model):
    from runs import merged, rl

    settings = {
        "max_steps": 4,
        "seq_len": 512,
        "model": {"name": model},
        "inference": {"engine": "embedded", "kv_cache_tokens": 8192, "max_num_seqs": 64},
        "orchestrator": {
            "batch_size": 16,
            "group_size": 4,
            "train": {"sampling": {"max_completion_tokens": 8}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
    }
    ended = rl(tmp_path, merged(settings, CASES[case]))
    mismatch = ended.column("mismatch_kl/mean", "trainer")
    record_property("mismatch_kl/mean", mismatch)
    assert len(mismatch) == 4 and max(mismatch) < (1e-6 if case == "float32" else 0.01)
    rewards, norms = ended.column("reward/mean"), ended.column("optim/grad_norm", "trainer")
    record_property("reward/mean", rewards)
    assert all(0 < reward < 1 for reward in rewards) and min(norms) > 0
