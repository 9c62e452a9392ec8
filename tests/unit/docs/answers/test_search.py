"""The search of the site, as the theme runs it in a browser, finds the answer to common questions in three results."""

from __future__ import annotations

import json
import shutil
import subprocess

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
    "use a huggingface dataset": "questions.html#how-do-i-use-a-hugging-face-dataset",
    "list of dicts as dataset": "questions.html#can-the-dataset-be-a-list-of-dicts-or-a-pandas-dataframe",
    "pandas dataframe rollouts": "questions.html#how-do-i-get-rollouts-as-a-pandas-dataframe",
    "log to tensorboard": "questions.html#how-do-i-log-to-tensorboard-wb-or-mlflow",
    "how to write a reward function": "data.html#a-reward-function-and-a-generate-function",
    "reward per function metric": "questions.html#where-is-the-metric-of-each-reward",
    "stop sequences": "questions.html#where-do-stop-sequences-and-other-sampling-parameters-go",
    "length penalty": "questions.html#is-there-a-length-penalty",
    "learning rate warmup": "questions.html#where-do-learning-rate-and-warmup-stand",
    "curriculum difficulty": "questions.html#is-there-a-curriculum-easy-tasks-before-difficult-ones",
    "callback": "questions.html#are-there-callbacks",
    "best model sft": "questions.html#how-do-i-keep-the-best-model-of-sft-or-of-rl",
    "load adapter with peft": "questions.html#how-do-i-load-an-adapter-with-peft",
    "lm_eval": "python.html#the-weights-elsewhere",
    "push to hub": "questions.html#how-do-i-push-weights-to-the-hub",
    "share a rollout with a colleague": "questions.html#how-do-i-share-a-rollout-or-a-curve-with-a-colleague",
    "DPO preference data": "questions.html#can-i-make-preference-data-for-dpo-from-a-run",
    "how long does it take": "questions.html#how-long-does-a-run-take-and-on-which-machine",
    "seed reproducibility": "questions.html#is-a-run-reproducible-with-the-same-seed",
    "environment variables": "questions.html#how-do-i-set-environment-variables",
    "shell completion": "questions.html#how-do-i-get-shell-completion",
    "out of disk space": "questions.html#what-fills-the-disk-space-and-how-do-i-keep-less",
    "macOS": "questions.html#does-it-run-on-macos-windows-or-gpus-of-amd-rocm",
    "AMD ROCm": "questions.html#does-it-run-on-macos-windows-or-gpus-of-amd-rocm",
    "multi-turn environment": "environments.html",
    "see completions during training": "seeing.html",
    "jupyter notebook": "examples/notebooks/index.html",
    "tool calling": "environments.html#tools",
    "rate limit judge": "judge.html",
    "reward hacking": "reward_does_not_rise.html",
}


@pytest.fixture(scope="module")
def found(site) -> dict[str, list[list[str]]]:
    """Per question the results, each the places on one page, best first."""
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
