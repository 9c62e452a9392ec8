"""Published clients and coding agents, unchanged: what the policy samples for them is trained, token by token."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from programs import CALL, RESULT, play, write_records
from published_clients import CLIENTS
from turns import scripted, text_of

from stretto.records.rollout import RolloutStatus

pytestmark = [pytest.mark.heavy, pytest.mark.slow]
PROGRAM = str(Path(__file__).parent / "published_clients.py")
PACKAGES = {"openai-agents": "agents", "openai-agents-chat": "agents"}
"""Where a client is not named like its package."""
CODEX = '{name="policy", base_url="{base_url}", env_key="OPENAI_API_KEY"}'
SWE_AGENT = ["mini", "-t", "{prompt}", "-y", "-l", "0", "--exit-immediately", "-o", "trajectory.json"]
SUBMIT = '!bash{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'
AGENTS = {
    "claude": (["claude", "-p", "{prompt}", "--allowedTools", "Bash"], "Bash", "command", ""),
    "codex": (
        [
            *("codex", "exec", "-m", "policy", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("--disable", "multi_agent", "-c", 'web_search="disabled"', "-c", "model_provider=policy"),
            *("-c", f"model_providers.policy={CODEX}", "{prompt}"),
        ],
        "exec_command",
        "cmd",
        "",
    ),
    "mini": ([*SWE_AGENT, "-m", "openai/gpt-4o"], "bash", "command", SUBMIT),
    "mini-anthropic": ([*SWE_AGENT, "-m", "anthropic/claude-sonnet-4-5"], "bash", "command", SUBMIT),
}
"""The command, its tool for commands, the tool's argument, and how a reply says that it is the last."""


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_published_client_trains_what_was_sampled_for_it(name, is_streamed, tmp_path):
    package = PACKAGES.get(name, name.partition("-")[0])
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, PROGRAM, name, "{prompt}", *["stream"] * is_streamed]
    policy = scripted("so~" + CALL, "then~" + RESULT)
    [rollout] = play(command, write_records(tmp_path), policy, output_dir=str(tmp_path / "kept")).rollouts
    assert RESULT in next((tmp_path / "kept").rglob("*.txt")).read_text().splitlines()
    assert rollout.status is RolloutStatus.FINISHED and rollout.reward == 1.0, rollout.error
    [branch] = rollout.branches
    assert text_of(branch, is_sampled=True) == f"so~{CALL}.then~{RESULT}."
    assert text_of(branch, is_sampled=False) == f"U47*86=.AT{RESULT}.A"


@pytest.mark.parametrize("name", AGENTS)
def test_a_published_coding_agent_plays_a_task_through_its_command_line(name, tmp_path):
    (program, *words), tool, argument, submit = AGENTS[name]
    found = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    first = f'so~I compute!{tool}{{"{argument}": "echo $((47*86))", "description": "x"}}'

    def says(prompt, rng, version):
        return f"there~{RESULT}{submit}" if RESULT in prompt else first

    settings = ["env", f"HOME={tmp_path}", "MSWEA_CONFIGURED=true"]
    [rollout] = play([*settings, found, *words], write_records(tmp_path), says, seq_len=400_000).rollouts
    assert rollout.status is RolloutStatus.FINISHED and rollout.reward == 1.0, rollout.error
    [branch] = rollout.branches
    assert text_of(branch, is_sampled=True) == f"{first}.there~{RESULT}{submit}."
