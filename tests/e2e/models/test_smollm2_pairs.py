"""Preference pairs with real weights: what a reward model says of new pairs, here, in transformers and over HTTP."""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path

import pytest
import torch
from ports import free_port
from published import smollm2
from runs import LONG_S, start, until, wait

from stretto.base.paths import RunDir
from stretto.examples.smollm2.tasks import thing_of
from stretto.monitors.file import read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
FOLDER = "examples/preference/smollm2"
NUM_PAIRS, NUM_HELD_OUT = 48, 12


def asked(number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Write 4 words about the {thing_of(37 * number)}."},
    ]


def replies(number: int) -> tuple[str, str]:
    """A brief reply, and one that does not come to its end."""
    thing = thing_of(37 * number)
    return (
        f"A very {thing}.",
        f"The {thing} is a place of many stories, in which the people of the old town tell of the",
    )


def write_pairs(path: Path, numbers: range) -> Path:
    with path.open("w") as file:
        for number in numbers:
            good, bad = ([{"role": "assistant", "content": text}] for text in replies(number))
            row = {"prompt": asked(number), "chosen": good, "rejected": bad, "rejected_is_cut": True}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What all runs are given after their file."""
    directory = tmp_path_factory.mktemp("pairs")
    trained = write_pairs(directory / "pairs.jsonl", range(NUM_PAIRS))
    held_out = write_pairs(directory / "held-out.jsonl", range(NUM_PAIRS, NUM_PAIRS + NUM_HELD_OUT))
    places = ["--output-dir", str(directory), "--data.name", str(trained), "--val.data.name", str(held_out)]
    return ["--model.name", str(smollm2()), "--max-epochs", "1", "--ckpt", "None", *places]


def trained(name: str, words: list[str]) -> tuple[RunDir, dict[str, float]]:
    """A run that has ended, and its last validation."""
    code, printed = wait(start("sft", [*words, "--run.name", name], ROOT), deadline_s=LONG_S)
    assert code == 0, printed
    run = RunDir(Path(words[words.index("--output-dir") + 1]) / name)
    return run, [row for row in read_metrics(run.metrics("sft")) if "val/loss" in row][-1]


@pytest.mark.parametrize("overlay", ["dpo", "lora"])
def test_dpo_tells_new_pairs_apart(overlay: str, words: list[str]) -> None:
    files = ["@", f"{FOLDER}/dpo.toml", *(["@", f"{FOLDER}/lora.toml"] if overlay == "lora" else [])]
    _, found = trained(overlay, [*files, *words, "--eval", "None"])
    assert found["val/rewards/accuracies"] >= 0.9 and found["val/loss"] < math.log(2)


def test_a_reward_model_tells_new_pairs_apart_and_scores_the_same_in_transformers_and_when_it_is_served(
    words: list[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run, found = trained("reward", ["@", f"{FOLDER}/reward.toml", *words])
    assert found["val/rewards/accuracies"] >= 0.9
    said = [
        [*asked(number), {"role": "assistant", "content": text}]
        for number in range(NUM_PAIRS, NUM_PAIRS + 3)
        for text in replies(number)
    ]
    directory, port = run.weights / "best", free_port()
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    shown = [tokenizer.apply_chat_template(each, tokenize=False) for each in said]
    inputs = tokenizer(shown, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        theirs = model(**inputs).logits[:, 0].tolist()
    assert all(good > bad for good, bad in zip(theirs[::2], theirs[1::2]))
    options = ["--model", str(directory), "--server.port", str(port), "--output-dir", str(tmp_path)]
    served = start("inference", options, tmp_path)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), served, "answer", every_s=0.5)
        assert [score(port, each) for each in said] == pytest.approx(theirs, abs=1e-4)
    finally:
        served.terminate()
        wait(served, deadline_s=LONG_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def score(port: int, messages: list[dict[str, str]]) -> float:
    """The score of a conversation, and not its sigmoid."""
    body = json.dumps({"messages": messages, "use_activation": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/classify", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONG_S) as reply:
        return float(json.load(reply)["data"][0]["probs"][0])
