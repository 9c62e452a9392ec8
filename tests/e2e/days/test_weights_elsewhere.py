"""Trained weights open where people take them next: transformers' pipeline, peft and lm_eval say what we say.

vLLM with a published model's size is in tests/e2e/models: it has no attention for heads as narrow as these.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from letters import rows
from runs import merged, rl, sorting

pytestmark = pytest.mark.slow
NUM_STEPS = 3
WORDS = rows(0, 16)
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|im_end|>"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def weights(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of a run with an adapter, which is merged in them and stands beside them."""
    adapter = {
        "model": {"lora": {"rank": 4}},
        "ckpt": {"interval": NUM_STEPS, "weights": {"save_adapter_separately": True}},
    }
    folder = tmp_path_factory.mktemp("weights")
    return rl(folder, merged(sorting(sorter, NUM_STEPS, lr=5e-3), adapter)).run.weights_step(NUM_STEPS)


@pytest.fixture(scope="module")
def expected(weights: Path) -> list[str]:
    """Greedy replies by transformers' own `generate`, to one prompt after the other."""
    return replies_of(weights)


def replies_of(directory: Path, adapter: Path | None = None) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    if adapter is not None:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, adapter)
    said = []
    for row in WORDS:
        asked = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, enable_thinking=False, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
        said.append(tokenizer.decode(tokens, skip_special_tokens=True).strip())
    return said


def test_the_pipeline_of_transformers_opens_them(weights: Path, expected: list[str]) -> None:
    from transformers import pipeline

    generate = pipeline("text-generation", model=str(weights))
    text = generate.tokenizer.apply_chat_template(
        WORDS[0]["prompt"], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    [said] = generate(text, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert said["generated_text"].strip() == expected[0]
    assert sum(sorted(word) == sorted(row["answer"]) for word, row in zip(expected, WORDS)) >= len(WORDS) // 2


def test_peft_opens_the_adapter_on_the_model_before(weights: Path, sorter: Path, expected: list[str]) -> None:
    assert replies_of(sorter, weights / "lora_adapters") == expected


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_lm_eval_opens_them(weights: Path, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "letters.yaml").write_text(TASK)
    lines = [json.dumps({"question": row["prompt"][0]["content"], "answer": row["answer"]}) for row in WORDS]
    (tmp_path / "letters.jsonl").write_text("\n".join(lines))
    words = ["--model", "hf", "--model_args", f"pretrained={weights},enable_thinking=False", "--tasks", "letters"]
    words += ["--include_path", ".", "--apply_chat_template", "--device", "cpu", "--output_path", "out"]
    command = [sys.executable, "-m", "lm_eval", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    [found] = (tmp_path / "out").rglob("results_*.json")
    right = sum(word == row["answer"] for word, row in zip(expected, WORDS)) / len(WORDS)
    assert json.loads(found.read_text())["results"]["letters"]["exact_match,none"] == pytest.approx(right)
