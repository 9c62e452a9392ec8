"""What the documents show works as it stands: configurations train, commands end well, scripts run.

Each block runs in a copy of a folder in which the demo has been run (conftest.py), in `make test-all`. In `make test`
are the configurations of `QUICK`, and of the rest what trains nothing. tests/pages names the blocks that
cannot be run on one machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pages.blocks import CONFIG_VERBS, VIEW_VERBS, Block, Command, blocks, commands
from pages.workplace import DEMO_STEPS, link_models, whole_config
from processes import forked
from runs import DEADLINE_S, start, wait

from stretto.base.paths import RunDir
from stretto.ledger.audit import audit

QUICK = ('id = "my_envs:Shout"\nargs',)
"""Pieces of the configurations that train in `make test`: a reader's first environment."""
NEEDED = {"reasoning-gym": "reasoning_gym", "capitals-v1": "verifiers", '"vllm"': "vllm"}
"""Packages by what stands in a configuration."""
_SHORT_REPLIES = ("--max-steps", "3", "--seq-len", "64", "--orchestrator.train.sampling.max-completion-tokens", "16")
FLAGS = {
    "max_completion_tokens = 1024": (*_SHORT_REPLIES, "--orchestrator.batch-size", "64"),
    "num_critic_only_steps = 20": ("--max-steps", "22"),
    "[eval]\ninterval": ("--max-steps", "3", "--eval.interval", "2"),
}
"""How a configuration is made short where three steps are not enough for it, or take long."""
WHOLE = ("examples/python_code/sft.toml",)
"""Warm-ups that are not made short: a network that cannot write an expression earns nothing in any group, and each of
its replies is another program for the sandbox."""


def cases(kind: str, is_quick: Callable[[Block], bool], is_meant: Callable[[Block], bool]) -> list[Any]:
    """The blocks of a kind that are run here, marked slow where they are."""
    return [
        pytest.param(block, id=str(block), marks=() if is_quick(block) else pytest.mark.slow)
        for block in blocks(kind)
        if block.reason is None and is_meant(block)
    ]


def is_run(command: Command) -> bool:
    return command.reason is None and not command.is_dry and command.verb in (*CONFIG_VERBS, *VIEW_VERBS)


def shortened(command: Command) -> list[str]:
    """The words after the verb, for a few steps, and over what the folder has under that name already."""
    words = list(command.words[1:])
    if command.verb not in ("rl", "sft") or any(name in words for name in WHOLE):
        return words
    if "--max-steps" in words:
        at = words.index("--max-steps")
        del words[at : at + 2]
    if "--resume" in words:
        return [*words, "--max-steps", str(DEMO_STEPS + 2)]
    return [*words, "--max-steps", "3", "--clean"]


@pytest.mark.parametrize("block", cases("toml", lambda b: any(piece in b.text for piece in QUICK), lambda _: True))
def test_a_configuration_trains(block: Block, workplace: Path) -> None:
    for piece, package in NEEDED.items():
        if piece in block.text and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    verb, text = whole_config(block)
    (workplace / "block.toml").write_text(text)
    flags = next((flags for piece, flags in FLAGS.items() if piece in text), ("--max-steps", "3"))
    runs = link_models(workplace / "outputs", workplace / "trained")
    words = ["@", "block.toml", *flags, "--output-dir", "trained"]
    code, output = wait(start(verb, words, workplace), 3 * DEADLINE_S)
    assert code == 0, output
    [run] = [path for path in runs.iterdir() if not path.is_symlink()]
    assert verb == "sft" or audit(RunDir(run)) == []


def only_looks(block: Block) -> bool:
    return all(command.verb in VIEW_VERBS for command in commands(block))


@pytest.mark.parametrize("block", cases("bash", only_looks, lambda b: any(map(is_run, commands(b)))))
def test_the_commands_of_a_block_end_well(block: Block, workplace: Path) -> None:
    for command in filter(is_run, commands(block)):
        code, output = wait(start(command.verb, shortened(command), workplace))
        assert code == 0, f"{command}:\n{output}"


@pytest.mark.parametrize(
    "block",
    cases("python", lambda b: ".rl(" not in b.text, lambda b: "stretto." in b.text.replace("from stretto.", "")),
)
def test_a_script_runs(block: Block, workplace: Path) -> None:
    (workplace / "look.py").write_text(block.text)
    words, pipe = [sys.executable, "look.py"], subprocess.PIPE
    popen = forked.Popen(words, cwd=workplace, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    code, output = wait(popen)
    assert code == 0, output
