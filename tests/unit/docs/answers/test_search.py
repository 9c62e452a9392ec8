"""The search of the site, as the theme runs it in a browser, finds the answer to common questions in three results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from pages.blocks import ROOT

NODE = shutil.which("node")
pytestmark = [pytest.mark.heavy, pytest.mark.skipif(NODE is None, reason="no node on this machine")]

QUESTIONS = {
    "model as judge": "judge.html",
    "reward model api key": "judge.html",
    "tool with several turns": "environments.html#tools",
    "warm-up rows of my own task": "environments.html#warm-up-rows-for-a-task-of-your-own",
    "sft_rows": "environments.html#warm-up-rows-for-a-task-of-your-own",
    "phrases": "environments.html#warm-up-rows-for-a-task-of-your-own",
    "how do I chat with a checkpoint": "inference.html#chat-with-a-checkpoint-talk-to-a-model",
    "talk to a model": "inference.html#chat-with-a-checkpoint-talk-to-a-model",
    "curl": "inference.html#with-an-openai-client",
    "openai client": "inference.html#with-an-openai-client",
    "system prompt": "data.html#a-system-prompt",
    "several rewards": "data.html#several-rewards-with-weights",
    "weighted rewards": "data.html#several-rewards-with-weights",
    "best checkpoint": "orchestrator.html#the-best-version-and-an-early-stop",
    "early stop": "orchestrator.html#the-best-version-and-an-early-stop",
    "gradient accumulation": "algorithms.html#batch-words-and-gradient-accumulation",
    "micro batch size": "algorithms.html#batch-words-and-gradient-accumulation",
    "out of memory": "debugging.html",
    "coming from TRL": "from_trl.html",
    "num_generations": "from_trl.html",
    "coming from verl": "from_verl.html",
    "ppo_mini_batch_size": "from_verl.html",
    "learning rate for which model size": "planning.html",
    "which GPU do I need": "planning.html",
    "what is the cost of a run": "planning.html#what-a-run-costs",
    "how to resume a run": "checkpoints.html#continuing-how-to-resume-a-run",
    "wandb offline": "seeing.html#trackers",
    "mlflow": "seeing.html#trackers",
    "swanlab": "seeing.html#trackers",
    "merge adapter": "lora.html",
    "my reward does not rise": "reward_does_not_rise.html",
    "own reward function": "data.html",
    "several nodes": "deployment.html",
    "Slurm": "deployment.html#slurm",
    "recipes": "recipes.html",
    "teacher distillation": "algorithms.html#distillation",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Per question the results, each the places on one page, best first."""
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, capture_output=True)
    script = ROOT / "tests" / "pages" / "search.js"
    asked = subprocess.run(
        [str(NODE), str(script), str(site)], input="\n".join(QUESTIONS), capture_output=True, text=True, check=True
    )
    answers = map(json.loads, asked.stdout.splitlines())
    return dict(zip(QUESTIONS, answers, strict=True))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_among_the_first_three_results(question, found):
    page, _, section = (wanted := QUESTIONS[question]).partition("#")
    first = found[question][:3]
    places = [place for result in first for place in result]
    assert wanted in places if section else page in {place.partition("#")[0] for place in places}, first
