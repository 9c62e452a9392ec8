"""Pairs of a run, a reward model of them, and a run that it rewards: each in processes of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import merged, rl, sorting
from sft_runs import undisturbed_threads_and_logging  # noqa: F401

from stretto.chat.render import build_renderer
from stretto.config.root import SFTConfig
from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.models.value_head import load_value_model
from stretto_preference.scorer import score_texts
from stretto_sft import training as sft


@pytest.mark.slow
def test_a_reward_model_of_pairs_rewards_a_run_that_has_no_code(sorter: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        letters = "".join(rng.choice(list("abcdefgh"), 6))
        good = "".join(sorted(letters))
        rows.append({"prompt": letters, "chosen": good, "rejected": good[::-1]})
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source: dict[str, Any] = {"type": "preference", "name": str(pairs)}
    keys = {"output_dir": str(tmp_path), "run": {"name": "rm"}, "model": {"name": str(sorter)}, "data": source}
    keys |= {"loss": {"type": "reward"}, "max_steps": 30, "num_threads": 1, "optim": {"lr": 1e-3}}
    cfg = SFTConfig.model_validate(keys)
    sft.main(cfg)
    directory = cfg.run_dir.latest_weights

    env = {"id": "dataset", "name": "letters", "args": {"path": str(pairs), "reward": "models.rm"}}
    given = {"models": {"rm": {"model": str(directory), "device": "cpu"}}, "orchestrator": {"env": [env]}}
    (tmp_path / "rl").mkdir()
    ended = rl(tmp_path / "rl", merged(sorting(sorter, 3), given))
    model = load_value_model(directory.resolve(), dtype=torch.float32, device="cpu")
    renderer = build_renderer(directory)
    with LedgerReader(ended.run) as ledger:
        ids = [row["group_id"] for row in ledger.rows("SELECT DISTINCT group_id FROM live_rollouts")][:3]
        rollouts = [each for group in map(ledger.group, ids) for each in group.rollouts if each.is_counted]
    assert len(rollouts) >= 12
    for rollout in rollouts:
        branch = rollout.branches[-1]
        reply = renderer.parse(branch.token_ids[branch.is_sampled])["content"]
        said = {"role": "assistant", "content": reply}
        text = renderer.render_leading([*rollout.task.data["prompt"], said])
        assert rollout.reward == pytest.approx(score_texts(model, [text])[0], abs=1e-3)
    assert np.std([each.reward for each in rollouts]) > 0
    assert audit(ended.run) == []
