"""The example smollm2 with its real weights: three steps, a kill in the middle, and the export in other programs."""

from __future__ import annotations

import json
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from ports import free_port
from published import smollm2
from runs import LONG_S, Ended, start, until, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit
from stretto_python.run import Run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
EXAMPLE = "examples/smollm2"
SHORT = [
    "--max-steps", "3", "--ckpt.interval", "1", "--orchestrator.max-async-level", "0",
    "--orchestrator.batch-size", "16", "--orchestrator.eval", "None",
    "--trainer.scheduler.warmup-steps", "1", "--trainer.scheduler.decay-steps", "1",
]  # fmt: skip
THINGS = ("old bridge", "small cat", "round table")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Three steps of the example with 16 rollouts each; killed after the first, and resumed."""
    output = tmp_path_factory.mktemp("smollm2")
    words = ["@", f"{EXAMPLE}/rl.toml", "--model.name", str(smollm2()), "--output-dir", str(output), *SHORT]
    run = RunDir(output / "smollm2")
    killed = start("rl", words, ROOT)
    until(lambda: bool(run.latest_complete_checkpoint()), killed, "first checkpoint", every_s=0.1)
    killed.kill()
    killed.communicate()
    code, printed = wait(start("rl", [*words, "--resume"], ROOT), deadline_s=LONG_S)
    assert code == 0, printed
    assert "resumed from step" in printed
    return Ended(code, printed, run)


def test_a_run_with_real_weights_that_was_killed_goes_on_and_trains_no_rollout_twice(ended: Ended) -> None:
    assert list(ended.steps()) == [1, 2, 3] and audit(ended.run) == []
    assert all(row["mismatch_kl/max"] < 1e-6 for row in ended.steps().values())
    for rollout in Run(ended.run.path).rollouts():
        assert rollout["status"] in ("finished", "truncated"), rollout["error"]
        # A reply ends with the model's end token, or was cut.
        assert rollout["reply"].endswith("<|im_end|>") == (rollout["status"] == "finished")


def test_transformers_gives_the_tokens_of_rollouts_the_probabilities_that_they_were_sampled_with(ended: Ended) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ended.run.weights_step(2), dtype=torch.float32).eval()
    rollouts = [row for row in Run(ended.run.path).rollouts() if row["first_version"] == row["last_version"] == 2]
    assert len(rollouts) >= 16
    for row in rollouts[:16]:
        ids = torch.tensor(row["token_ids"].tolist())
        is_sampled = np.asarray(row["is_sampled"], bool)[1:]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        sampled = np.asarray(row["logprobs"], np.float32)[1:]
        np.testing.assert_allclose(logprobs[is_sampled], sampled[is_sampled], atol=2e-4, rtol=0)


@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=needs_vllm)])
def test_engines_that_serve_the_export_write_the_greedy_replies_of_transformers(
    engine: str, ended: Ended, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, port = ended.run.latest_weights, free_port()
    words = ["--model", str(directory), "--server.port", str(port), "--engine", engine, "--max-model-len", "256"]
    served = start("inference", [*words, "--output-dir", str(tmp_path)], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), served, "answer", every_s=0.5)
        for thing in THINGS:
            messages = [{"role": "user", "content": f"Write 5 words about the {thing}."}]
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with torch.no_grad():
                ids = model.generate(**prompt, do_sample=False, max_new_tokens=16, pad_token_id=0)
            expected = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            assert chat(port, messages) == expected
    finally:
        served.terminate()
        wait(served, deadline_s=LONG_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status == 200
    except OSError:
        return False


def chat(port: int, messages: list[dict[str, str]]) -> str:
    """The greedy reply of an engine."""
    body = {"model": name_of(port), "messages": messages, "temperature": 0, "max_tokens": 16}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LONG_S) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def name_of(port: int) -> str:
    """The name of the model that an engine serves."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=LONG_S) as reply:
        return json.load(reply)["data"][0]["id"]
