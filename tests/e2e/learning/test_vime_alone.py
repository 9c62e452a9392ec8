"""One half of a run alone: rollouts are saved without a trainer, and trained on without engines."""

from __future__ import annotations

import json

from runs import Ended, start, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

FLAGS = """
--hf-checkpoint {model} --prompt-data rows.jsonl --input-key prompt --label-key label --apply-chat-template
--rm-type f1 --num-rollout 3 --rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 8
--rollout-max-context-len 64 --lr 1e-3 --actor-num-gpus-per-node 0 --rollout-num-gpus 0
"""


def test_rollouts_are_saved_without_a_trainer_and_trained_on_without_engines(tmp_path):
    model = untrained_model(tmp_path)
    rows = [
        {"prompt": [{"role": "user", "content": word}], "label": word}
        for word in ("a b", "be", "cab", "deaf")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words, file = FLAGS.format(model=model).split(), "saved/{rollout_id}.pt"
    first = ["--debug-rollout-only", "--save-debug-rollout-data", file, "--save", "runs/rollouts"]
    code, output = wait(start("vime", [*words, *first], tmp_path))
    assert code == 0, output
    run = RunDir(tmp_path / "runs" / "rollouts")
    assert len(Ended(code, output, run).column("reward/mean")) == 3 and audit(run) == []
    assert not (run.logs / "trainer.log").exists()
    saved = [json.loads((tmp_path / "saved" / f"{number}.pt").read_text()) for number in range(3)]
    assert [len(each["samples"]) for each in saved] == [8, 8, 8]
    second = ["--load-debug-rollout-data", file, "--save", "runs/training"]
    code, output = wait(start("vime", [*words, *second], tmp_path))
    assert code == 0, output
    ended = Ended(code, output, RunDir(tmp_path / "runs" / "training"))
    rewards = [sum(sample["reward"] for sample in each["samples"]) / 8 for each in saved]
    assert ended.column("reward/mean") == rewards
    assert len(ended.column("loss/mean", "trainer")) == 3
    assert max(ended.column("mismatch_kl/max", "trainer")[:1]) < 1e-4
