"""A run with a ledger, a tokenizer and a configuration, and nothing else; and rewards for its replies."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.paths import RunDir
from stretto.chat.render import build_renderer
from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.algorithm import GrpoAlgo
from stretto.ledger import Ledger
from stretto.orchestrator.groups.advantages import assign_advantages
from stretto.records.generate import VersionSpan
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus, Task

MEMBERS = 8
Reply = Callable[[int, int], str]


def word(group: int, member: int) -> str:
    """A reply of random letters and length, the same in each process."""
    source = random.Random(1000 * group + member)
    return "".join(source.choices("abc", k=source.randint(1, 40)))


def write_run(
    path: Path,
    num_groups: int,
    *,
    reply: Reply = word,
    reward: Callable[[str], float] = lambda text: float("a" in text[:2]),
    per_step: int = 4,
    order: Sequence[int] | None = None,
    logprob: Callable[[int], float] = lambda step: -0.5,
    config: dict[str, Any] | None = None,
    first_task: int = 0,
    fingerprint: Callable[[int], str | None] = lambda version: None,
    is_cut: Callable[[str], bool] = lambda text: False,
    prompt: Callable[[int], str] = lambda group: "Say a word.",
    has_messages: bool = True,
) -> Path:
    """Groups of MEMBERS replies, `per_step` of which are the batch of a step; order: which, if not in draw order.

    has_messages: whether tasks have the messages of their prompt, as records do and environments need not.
    """
    run = RunDir(path)
    renderer = build_renderer(build_letters_tokenizer(run.tokenizer))
    run.configs.mkdir()
    resolved = {"orchestrator": {"algo": {"type": "grpo"}, "group_size": MEMBERS}, "seed": 0} | (config or {})
    run.config("run").write_text(json.dumps(resolved))
    ledger = Ledger(run)
    ledger.run_started({"max_off_policy_steps": 8})
    ledger.version_published(0)
    with ledger.transaction():
        for number in range(num_groups):
            asked = [{"role": "user", "content": prompt(number)}]
            ids = renderer.render_prompt(asked)
            data = {"label": "abc", "metadata": {"kind": number}} | ({"prompt": asked} if has_messages else {})
            task = Task(env="words", task_id=f"train-{number + first_task}", data=data)
            ledger.task_drawn(number, task)
            ledger.rollouts_started(number, range(MEMBERS), 0)
            texts = [reply(number, member) for member in range(MEMBERS)]
            step = number // per_step + 1
            members = tuple(
                Rollout(
                    rollout_id=f"g{number}.{member}", group_id=number, member=member, task=task,
                    status=RolloutStatus.TRUNCATED if is_cut(text) else RolloutStatus.FINISHED,
                    reward=reward(text), num_turns=1,
                    branches=(_branch(ids, renderer.encode(text + "<|im_end|>" * (not is_cut(text))), logprob(step)),),
                )
                for member, text in enumerate(texts)
            )  # fmt: skip
            group, _ = assign_advantages(Group(group_id=number, task=task, rollouts=members), GrpoAlgo())
            ledger.groups_finished([group])
    drawn = list(order if order is not None else range(num_groups))
    for start in range(0, num_groups, per_step):
        step = start // per_step + 1
        ledger.batch_shipped(step, drawn[start : start + per_step])
        ledger.step_trained(step, {"loss": 0.1})
        ledger.version_published(step, fingerprint(step))
    ledger.close()
    return path


def _branch(prompt: np.ndarray, reply: np.ndarray, logprob: float) -> Branch:
    tokens = np.concatenate([prompt, reply]).astype(np.int32)
    is_sampled = np.arange(len(tokens)) >= len(prompt)
    return Branch(
        token_ids=tokens,
        is_sampled=is_sampled,
        logprobs=np.where(is_sampled, logprob, 0.0).astype(np.float32),
        temperature=1.0,
        versions=(VersionSpan(0, len(prompt), len(tokens)),),
    )


# -- rewards, as `stored_runs:NAME` --

FLIPS = 0.2


def same(args: Any, sample: Any) -> float:
    return float("a" in sample.response[:2])


async def same_of_completion(completion: Any, answer: str) -> float:
    assert answer == "abc"
    return float("a" in completion[0]["content"][:2])


def same_of_group(prompts: Any, completions: Any, kind: Any) -> list[float]:
    assert len(set(kind)) == 1
    return [float("a" in each[0]["content"][:2]) for each in completions]


def noisy(args: Any, sample: Any) -> float:
    """The same, but wrong for a share FLIPS of the replies."""
    is_wrong = random.Random(sample.index).random() < FLIPS
    return float(("a" in sample.response[:2]) != is_wrong)


def longer(args: Any, sample: Any) -> float:
    return float(len(sample.response))


def is_short(args: Any, sample: Any) -> float:
    return float(len(sample.response) < 20)


def in_parts(args: Any, sample: Any) -> dict[str, float]:
    return {"score": 0.01 + 5.0 * len(sample.response), "format": 0.01, "length": 5.0 * len(sample.response)}


def of_sample(sample: Any) -> float:
    return 1.0


def raises(args: Any, sample: Any) -> float:
    if sample.index % 10 == 3:
        raise ValueError("no such word")
    return 1.0


def blocks(args: Any, sample: Any) -> float:
    if sample.index in (9, 10):
        time.sleep(60)
    return 1.0


def slow(args: Any, sample: Any) -> float:
    time.sleep(0.01)
    return 1.0


def ends(args: Any, sample: Any) -> float:
    if sample.group_index == 2:
        os._exit(7)
    return 1.0
