"""Directories with published tokenizers: each is planned, and does three steps of `sft` and of `rl`.

The weights are random and small; what is tried is that messages, end tokens and vocabularies fit.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from published import tiny_model
from runs import MOVING, has_moved, merged, rl, start, toml, wait

from stretto.ledger.audit import audit
from stretto_python.run import Run

pytestmark = pytest.mark.slow
OWN = {"qwen3": "qwen3", "qwen2_5": "qwen2", "llama3_1": "llama", "llama2": "llama", "yi": "llama"}
FOREIGN = {
    "gemma2": "gemma2", "gemma3": "gemma3_text", "mistral": "llama2", "olmo2": "qwen2_5", "smollm3": "qwen2_5",
    "granite": "qwen2_5",
}  # fmt: skip
"""Families that only transformers has, which vLLM samples; the last four with a tokenizer that is borrowed."""
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`")
CASES = [*OWN, *(pytest.param(name, marks=needs_vllm) for name in FOREIGN)]


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name = request.param
    if name in OWN or name in ("gemma2", "gemma3"):
        return tiny_model(name, tmp_path / name)
    return tiny_model(FOREIGN[name], tmp_path / name, family=name)


@pytest.mark.parametrize("model", CASES, indirect=True)
def test_a_directory_is_planned_fine_tuned_and_trained(model: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}, then {i + 1}"},
                      {"role": "user", "content": "Again."}, {"role": "assistant", "content": str(i)}]}
        for i in range(16)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "max_steps": 3, "seq_len": 128, "batch_size": 8, "model": {"name": str(model)}, "data": {"name": "rows.jsonl"},
        "output_dir": str(tmp_path), "run": {"name": "sft"}, "num_threads": 1,
    }  # fmt: skip
    (tmp_path / "sft.toml").write_text(toml(settings))
    code, output = wait(start("sft", ["@", "sft.toml"], tmp_path))
    assert code == 0, output
    env = {"id": "dataset", "args": {"path": str(tmp_path / "tasks.jsonl"), "reward": "exact"}}
    tasks = [{"prompt": f"Say {i}.", "label": str(i)} for i in range(16)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    run = {
        "max_steps": 3, "seq_len": 128, "model": {"name": str(tmp_path / "sft" / "weights" / "latest")},
        "orchestrator": {
            "batch_size": 8, "group_size": 4, "filter_zero_advantages": False, "env": [env],
            "train": {"sampling": {"max_completion_tokens": 8}},
        },
    }  # fmt: skip
    ended = rl(tmp_path, merged(run, MOVING))
    assert list(ended.steps()) == [1, 2, 3] and has_moved(ended) and audit(ended.run) == []
    assert all(row["mismatch_kl/max"] < 1e-4 for row in ended.steps().values())
    replies = [r for r in Run(ended.run.path).rollouts() if r["status"] in ("finished", "truncated")]
    assert len(replies) >= 24
