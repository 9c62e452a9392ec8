"""`rl` with a model of transformers' on two ranks: engines get its weights and compute what it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import MOVING, has_moved, merged, rl, untrained_model

from stretto.ledger.audit import audit


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_two_ranks_of_transformers_train_publish_save_and_export(tmp_path: Path, lora):
    model = {"name": untrained_model(tmp_path), "impl": "hf"}
    settings = {
        "max_steps": 2,
        "seq_len": 128,
        "model": model if lora is None else model | {"lora": lora},
        "weight_broadcast": {"type": "shm", "canary_interval": 1},
        "orchestrator": {
            "batch_size": 8,
            "group_size": 4,
            "max_async_level": 0,
            "num_train_workers": 2,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
        "trainer": {"optim": {"lr": 1e-3}},
    }
    (tmp_path / "rl").mkdir()
    ended = rl(tmp_path / "rl", merged(settings, MOVING))
    assert has_moved(ended)
    assert max(ended.column("canary/error")) < 1e-5 and max(ended.column("mismatch_kl/mean", "trainer")) < 1e-6
    assert len(list(ended.run.weights_step(2).glob("model-*.safetensors"))) == 2
    assert ended.run.complete_checkpoints() == [2] and audit(ended.run) == []
