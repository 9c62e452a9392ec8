"""One half of a run alone: rollouts are saved without a trainer, and trained on without engines."""

from __future__ import annotations

import json

import pytest
from runs import Ended, start, untrained_model, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

FLAGS = """
--hf-checkpoint {model} --prompt-data rows.jsonl --input-key prompt --label-key label --apply-chat-template
--rm-type f1 --num-rollout 3 --rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 8
--rollout-max-context-len 64 --lr 1e-3 --actor-num-gpus-per-node 0 --rollout-num-gpus 0
"""


def write_rows(directory):
    rows = [{"prompt": [{"role": "user", "content": word}], "label": word} for word in ("a b", "be", "cab", "deaf")]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


GROUPS = """
vllm:
  - name: actor
    server_groups:
      - {num_gpus: 0, overrides: {max_num_seqs: 4, kv_cache_tokens: 512}}
      - {num_gpus: 0, overrides: {max_num_seqs: 8, enable_prefix_caching: false}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    ["", "--update-weight-transport disk", pytest.param("--update-weight-transport nccl", marks=pytest.mark.slow)],
)
def test_engines_of_differing_options_sample_one_run_and_get_its_weights(tmp_path, flags):
    model = untrained_model(tmp_path)
    write_rows(tmp_path)
    (tmp_path / "groups.yaml").write_text(GROUPS)
    words = [*FLAGS.format(model=model).split(), "--vllm-config", "groups.yaml", "--router-policy", "round_robin"]
    code, output = wait(start("vime", [*words, *flags.split(), "--save", "runs/one"], tmp_path))
    assert code == 0, output
    run = RunDir(tmp_path / "runs" / "one")
    started = [json.loads(run.config(f"inference_{i}").read_text()) for i in range(2)]
    assert [each["max_num_seqs"] for each in started] == [4, 8]
    assert [each["enable_prefix_caching"] for each in started] == [True, False]
    ended = Ended(code, output, run)
    assert len(ended.column("canary/error")) >= 3 and max(ended.column("canary/error")) < 1e-4
    assert max(ended.column("mismatch_kl/max", "trainer")) < 1e-4 and audit(run) == []
    sampled = [(run.logs / f"inference_{i}.log").read_text() for i in range(2)]
    assert all("version" in text for text in sampled)


def test_rollouts_are_saved_without_a_trainer_and_trained_on_without_engines(tmp_path):
    model = untrained_model(tmp_path)
    write_rows(tmp_path)
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
