"""The folder of a reader of the documents: what he has been told to write, and what a block needs besides."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from functools import cache
from pathlib import Path

import torch

from pages.blocks import ROOT, Block, blocks
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.model import ScratchSection
from stretto.models import hub
from stretto.models.hub import random_model, save_hf
from stretto.models.value_head import HEAD_NAME, SCORE_NAME, classification_config, with_value_head

SOLVERS = '''
import asyncio
from stretto.envs.base import RolloutResult, TaskSource
from stretto.records.rollout import Task


class Solvers:
    """Two solvers of one problem; the longer reply wins."""

    name = "solvers"

    def tasks(self, split):
        return TaskSource(lambda i: Task(env=self.name, task_id=f"{split}-{i}", data={}))

    async def rollout(self, task, ctx):
        names = ("solver/0", "solver/1")
        replies = await asyncio.gather(
            *(ctx.agent(name).chat([{"role": "user", "content": task.task_id}]) for name in names)
        )
        lengths = {name: float(len(reply.text)) for name, reply in zip(names, replies)}
        return RolloutResult(reward=sum(lengths.values()), agent_rewards=lengths)
'''
DEMO_STEPS = 52  # pages look at step 50
ENVS = {
    "episode_agents": 'id = "solvers:Solvers"',
    'type = "states"': 'id = "wordle"',
    "difficulty_pool": 'id = "dataset"\nargs = { path = "train.jsonl", reward = "math" }',
}
"""Environments of blocks that speak of more than sort-letters has, by a piece of the block."""


def whole_config(block: Block) -> tuple[str, str]:
    """The verb and the configuration of a reader who has put the block into a file, with what must be said besides.

    Models of the Hub are those of the demo.
    """
    text = re.sub(r'"Qwen/[\w.-]+"', '"outputs/sort-letters-sft/weights/latest"', block.text)
    given = tomllib.loads(text)
    has_model = "name" in given.get("model", {})
    if "users" in given.get("service", {}) or "num_ranks" in given.get("trainer", {}):
        return "serve", ("" if has_model else _MODEL) + text
    if "data" in given:
        return "sft", _MODEL + text
    if "eval" in given or "val" in given:
        return "sft", _SFT + text
    orchestrator = given.get("orchestrator", {})
    has_env = isinstance(orchestrator.get("env") or orchestrator.get("train", {}).get("env"), list)
    steps = "" if "max_steps" in given else "max_steps = 30\n"
    env = next((env for piece, env in ENVS.items() if piece in text), 'id = "sort-letters"')
    env = "" if has_env else f"[[orchestrator.env]]\n{env}\n"
    return "rl", steps + ("" if has_model else _MODEL) + env + text


_PAIRS = "".join(
    json.dumps({"prompt": f"sort {a}{b}{i}", "chosen": f"{b}{a}", "rejected": f"{a}{b}"}) + "\n"
    for i in range(20)
    for a, b in zip("bcdefghijklmno", "abcdefghijklmn")
)
_MODEL = 'model.name = "outputs/sort-letters-sft/weights/latest"\n'
_SFT = 'max_steps = 1000\nmodel.scratch = {}\ndata = { type = "environment", id = "sort-letters" }\n'


MODELS = (
    "sort-letters-sft",
    "sort-letters",
    "reverse-text-sft",
    "reverse-text",
    "teacher",
    "my-run",
    "sft",
    "maths",
    "code",
)


def build_workplace(folder: Path, models: tuple[str, ...] = MODELS) -> Path:
    """A folder as a reader of the documents has it: examples, untrained models, and the files that pages speak of."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, text in reader_files().items():
        (folder / name).write_text(text)
    tokenizer = build_letters_tokenizer(folder / "tokenizer")
    for run in models:
        model = folder / "outputs" / run / "weights" / "latest"
        model.mkdir(parents=True)
        save_hf(random_model(ScratchSection(), 112), model, tokenizer)
    _add_preferences(folder, tokenizer)
    return folder


def _add_preferences(folder: Path, tokenizer: Path) -> None:
    """Pairs that runs have left, and reward models."""
    for run, reward in (("pairs-played", "sort-letters-reward"), ("smollm2-played", "smollm2-reward")):
        pairs, best = (folder / "outputs" / path for path in (f"{run}/exports", f"{reward}/weights/best"))
        pairs.mkdir(parents=True)
        for name in ("pairs.jsonl", "pairs-held-out.jsonl"):
            (pairs / name).write_text(_PAIRS)
        module = with_value_head(random_model(ScratchSection(), 112))
        tensors = ((SCORE_NAME if n == HEAD_NAME else n, tensor) for n, tensor in hub.export_tensors(module))
        hub.save_model_directory(torch.float32, best, tokenizer, classification_config(module), tensors)


def link_models(outputs: Path, other: Path) -> Path:
    """Another directory of runs, in which the models that pages begin with are found as `{output_dir}/...`."""
    other.mkdir()
    for name in ("sort-letters-sft", "reverse-text-sft", "teacher", "maths", "code"):
        (other / name).symlink_to(outputs.resolve() / name)
    return other


@cache
def reader_files() -> dict[str, str]:
    """By name the files that the pages speak of. Python whose first line is a comment is the file named there."""
    files: dict[str, str] = {}
    for block in blocks("python"):
        named = re.match(r"# (\w+\.py)", block.text)
        name = named[1] if named else "my_envs.py" if is_environment(block) else None
        if name is not None:
            files[name] = files.get(name, "") + block.text
    [vowels] = [block for block in blocks("toml") if block.page == "docs/first_hour.md"]
    [theirs] = [block for block in blocks("toml") if block.page == "docs/from-prime-rl.md"]
    [taskset] = [block for block in blocks("python") if "vf.Taskset[" in block.text]
    env = '[[orchestrator.env]]\nid = "sort-letters"\n'
    rows = [{"prompt": f"{i % 7} + {i % 5}?", "label": str(i % 7 + i % 5)} for i in range(9100)]
    return files | {
        "vowels.toml": vowels.text,
        "theirs.toml": theirs.text,
        "capitals_v1.py": taskset.text,
        "solvers.py": SOLVERS,
        "pairs.jsonl": _PAIRS,
        "train.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        **dict.fromkeys(("rl.toml", "base.toml"), _MODEL + env),
        "mine.toml": "seed = 1\n",
        "train.toml": _MODEL,
        "orch.toml": '[[env]]\nid = "sort-letters"\n',
        "infer.toml": "",
    }


def is_environment(block: Block) -> bool:
    return "from stretto.envs" in block.text
