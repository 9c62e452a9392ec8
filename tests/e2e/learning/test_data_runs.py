"""Runs on a file of one's own, with a generate function of the documented shape and a reward function."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import rl, untrained_model

from stretto.ledger.audit import audit

HOOKS = '''
from transformers import AutoTokenizer

from stretto.vime import Sample, post

TOKENIZER = None


async def generate(args, sample: Sample, sampling_params) -> Sample:
    global TOKENIZER
    if TOKENIZER is None:
        TOKENIZER = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
    prompt_token_ids = TOKENIZER(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(
        f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate",
        {
            "model": args.hf_checkpoint,
            "token_ids": prompt_token_ids,
            "sampling_params": {"max_tokens": sampling_params["max_new_tokens"]},
        },
    )
    choice = output["choices"][0]
    response_token_ids = list(choice.get("token_ids") or [])
    sample.tokens = prompt_token_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    finish_reason = choice.get("finish_reason") or "stop"
    if finish_reason == "length":
        sample.status = Sample.Status.TRUNCATED
    elif finish_reason in ("abort", "cancelled"):
        sample.status = Sample.Status.ABORTED
    else:
        sample.status = Sample.Status.COMPLETED
    sample.response = TOKENIZER.decode(response_token_ids) if response_token_ids else ""
    return sample


async def vowels(args, sample: Sample) -> float:
    """The share of vowels in what was said, for whoever asked `label`."""
    text = sample.response.removesuffix("<|im_end|>")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("model"))


def test_a_file_and_two_functions_train_a_policy(model, tmp_path):
    (tmp_path / "own_hooks.py").write_text(HOOKS)
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("a", "be", "cab", "deaf")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {
        "path": str(tmp_path / "rows.jsonl"),
        "eval_path": str(tmp_path / "rows.jsonl@[0:2]"),
        "generate": "own_hooks:generate",
        "reward": "own_hooks:vowels",
    }
    settings = {
        "max_steps": 24,
        "seq_len": 256,
        "model": {"name": model},
        "orchestrator": {
            "batch_size": 64,
            "max_async_level": 0,
            "group_size": 16,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "dataset", "name": "words", "args": args}],
            "eval": {"interval": 24, "group_size": 4, "greedy": False},
        },
        "trainer": {"optim": {"lr": 1e-2}},
    }
    ended = rl(tmp_path, settings)
    assert max(ended.column("mismatch_kl/max")) < 1e-5
    rewards = ended.column("reward/mean")
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    assert ended.summary()["reward_after"] > ended.summary()["reward_before"] + 0.2
    assert audit(ended.run) == []


@pytest.mark.slow
def test_the_documented_rollout_function_trains_what_the_engine_sampled_and_makes_the_evals(model, tmp_path):
    """Plain HTTP from a thread of the user's own, beside weights that change."""
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "my_rollouts.py" in code]
    (tmp_path / "my_rollouts.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say a", "label": ""}\n{"prompt": "say be", "label": ""}\n')
    rows = str(tmp_path / "rows.jsonl")
    settings = {
        "max_steps": 6,
        "seq_len": 256,
        "model": {"name": model},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 8,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "dataset", "args": {"path": rows, "eval_path": rows}}],
            "eval": {"group_size": 3},
            "hooks": {"rollout_function_path": "my_rollouts:generate_rollout"},
        },
        "trainer": {"optim": {"lr": 1e-3}},
    }
    ended = rl(tmp_path, settings)
    steps = ended.steps().values()
    assert [row["rollout/groups"] for row in steps] == [4.0] * 6
    # 1e-3 per step, prompts read up to 2 versions before.
    assert all(row["mismatch_kl/max"] < 1e-2 for row in steps)
    assert ended.steps()[1]["mismatch_kl/max"] < 1e-6
    for version in (0, 6):
        samples = ended.run.eval(version) / "variety-sampled.jsonl"
        assert samples.read_text().count("\n") == 6
    assert ended.summary()["reward_after"] > 0
    assert audit(ended.run) == []
