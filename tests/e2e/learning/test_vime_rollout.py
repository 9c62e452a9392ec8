"""vime's own rollout function, with only its imports changed, makes the batches and the evals of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import vime_rollout
from runs import Ended, start, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

# The engine takes two groups at a time, so that others are still being sampled when a batch is full. How old tokens are
# goes by the machine's speed, so the rate is one at which two versions move none of them far.
FLAGS = """
--hf-checkpoint {model} --prompt-data rows.jsonl --input-key prompt --label-key label --apply-chat-template
--rm-type f1 --rollout-function-path own_rollout.generate_rollout --num-rollout 3 --rollout-batch-size 2
--n-samples-per-prompt 4 --over-sampling-batch-size 4 --partial-rollout --rollout-max-response-len 12
--rollout-max-context-len 64 --vllm-max-num-seqs 8 --advantage-estimator grpo --lr 1e-4
--actor-num-gpus-per-node 0 --rollout-num-gpus 0 --eval-interval 3 --eval-prompt-data mine rows.jsonl
--eval-temperature 0.7 --save runs/it
"""


def test_vimes_rollout_function_runs_with_only_its_imports_changed(tmp_path):
    model = untrained_model(tmp_path)
    shutil.copy(vime_rollout.__file__, tmp_path / "own_rollout.py")
    rows = [{"prompt": [{"role": "user", "content": word}], "label": word} for word in ("a b", "be", "cab", "deaf")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = wait(start("vime", FLAGS.format(model=model).split(), tmp_path))
    assert code == 0, output
    run = RunDir(Path(tmp_path / "runs" / "it"))
    ended = Ended(code, output, run)
    assert len(ended.column("reward/mean")) == 3 and audit(run) == []
    assert sum(ended.column("rollout/num_partial")) > 0
    assert ended.column("eval/mine/sampled/mean")
    assert all(value < 1e-6 for value in ended.column("mismatch_kl/age/0", "trainer"))
    assert all(value < 1e-3 for value in ended.column("mismatch_kl/max", "trainer"))
