"""Rules of [orchestrator.hooks] and [trainer.hooks]: one message with place, rule and way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.config import ENV, complaints

WRONG = {
    "sampling that a rollout function never hears of": (
        '[orchestrator.hooks]\nrollout_function = "mine:go"\n' + ENV + "sampling = { temperature = 0.5 }\n",
        ["c.toml:5, c.toml:2: orchestrator.env.0.sampling.temperature = 0.5 does nothing with",
        "hooks.rollout_function"]),
    "credit of turns under one advantage per sample": ('[orchestrator.hooks]\nreward_post_process = "mine:go"\n' + ENV
        + 'algo = { type = "rloo", turns = { type = "values" } }\n',
        ['orchestrator.hooks.reward_post_process = "mine:go" gives each sample one', "orchestrator.env.0.algo.turns"]),
    "a batch in tokens that a function makes": (
        '[orchestrator]\ntoken_batch_size = 64\nhooks.rollout_function = "my:play"\nbatch_size = 128\n' + ENV,
        ["c.toml:2, c.toml:3: orchestrator.token_batch_size = 64 does nothing with", "batches of batch_size rollouts"]),
    "a batch in tokens that a function chooses": (
        '[orchestrator]\ntoken_batch_size = 64\nbatch_size = 128\nhooks.buffer_filter = "my:choose"\n' + ENV,
        ["orchestrator.token_batch_size = 64 does nothing with", "it chooses batch_size rollouts"]),
    "two losses of one's own": (
        '[trainer]\nhooks.loss = "my:loss"\nloss = { type = "custom", import_path = "my:other" }\n' + ENV,
        ['trainer.hooks.loss = "my:loss"', "two losses", 'trainer.loss.type = "custom"']),
    "a loss beside the whole loss": ('[trainer]\nhooks.loss = "my:loss"\nloss.entropy_coef = 0.1\n' + ENV,
        ["trainer.loss.entropy_coef = 0.1", "does nothing", "trainer.hooks.loss", "it is the whole loss"]),
    "files of nobody": ('[trainer]\nhooks.post_write = "my:note"\n' + ENV,
        ["trainer.hooks.post_write", 'weight_broadcast.type = "shm"', "writes none", '"filesystem"']),
    "batches of whatever is done first": (
        'deterministic = true\norchestrator.hooks.rollout_function = "json:dumps"\n' + ENV,
        ["orchestrator.hooks.rollout_function", "done first, and deterministic = true"]),
    "arguments of no function": ("orchestrator.hooks.args = { a = 1 }\n" + ENV,
        ["orchestrator.hooks.args", "does nothing with", "no function is named"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_what_functions_do_not_go_with_is_one_message(mistake: str, tmp_path: Path) -> None:
    toml, parts = WRONG[mistake]
    (line,) = complaints(tmp_path, toml, "")
    for part in parts:
        assert part in line, line
