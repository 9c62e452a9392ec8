"""The built-in rewards, by the names of vime's --rm-type: from a reply, its label and its metadata.

    math        the content of the last box equals the label as mathematics: 1 or 0
    deepscaler  the same for what follows the model's thinking; 0 if its thinking did not end
    dapo        the line `Answer: ...` near the end equals the label: {"score": 1 or -1, "acc", "pred"}
    f1          share of common words of reply and label
    gpqa        the letter (or the text) of the choice
    ifbench     all instructions of the metadata are followed: 1 or 0
    remote_rm   the answer of the server at `args.rm_url`
    random      0 or 1

`models.NAME` is the score of the reward model [models.NAME] for prompt and reply, any number.

With `boxed_` before a name the content of the reply's last box is taken as the reply. `metadata["rm_type"]` of a record
has precedence over the name in the environment's arguments, and the function `sample.custom_rm_path` over both.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from stretto.base.errors import EnvError
from stretto.envs.rewards.answers import dapo, f1, gpqa, solution_after_thinking
from stretto.envs.rewards.instructions import follows_all
from stretto.envs.rewards.math_reward import MathVerifier, boxed, number
from stretto.vime.calls import Hook
from stretto.vime.requests import send
from stretto.vime.reward_types import BOXED, RM_TYPES, is_rm_type
from stretto.vime.sample import Sample

MODELS = "models."
"""Before the name of a reward model of the run."""
READ_BOX = ("math", "deepscaler")
"""Rewards that read the last box of a reply themselves."""


async def async_rm(args: Any, sample: Sample, *, verifier: MathVerifier | None = None) -> float | dict[str, Any]:
    """The reward of a sample by its own function, its metadata's `rm_type`, or `args.rm_type`.

    Raises: EnvError if there is no such type, or it lacks what it compares with.
    """
    if (path := getattr(sample, "custom_rm_path", None)) is not None:
        return await _function(path).call(args, sample)
    name = str(sample.metadata.get("rm_type") or getattr(args, "rm_type", None) or "").strip()
    if not is_rm_type(name):
        known = ", ".join(RM_TYPES)
        raise EnvError(f"rm_type = {name!r}: there is no such reward; use {known}, or boxed_ and one of them")
    kind, reply = name.removeprefix(BOXED), sample.response
    if name.startswith(BOXED) and kind not in READ_BOX:
        reply = boxed(reply) or ""
    if kind == "remote_rm":
        return await _ask_server(args, sample)
    if kind == "random":
        return float(random.randint(0, 1))
    if kind == "gpqa":
        return gpqa(reply, sample.label, sample.metadata)
    if kind == "ifbench":
        return float(follows_all(reply, sample.metadata, prompt=sample.prompt))
    if sample.label is None:
        raise EnvError(f"rm_type = {name!r} compares replies with a label, and the record has none; set label_key")
    label = str(sample.label)
    if kind == "dapo":
        return dapo(reply, label)
    if kind == "f1":
        return f1(reply, label)
    if kind == "deepscaler":
        found = solution_after_thinking(reply)
        if found is None:
            return 0.0
        reply = found
    return await _compare(reply, label, verifier or _verifier())


def scored_by(reward: str) -> str | None:
    """The name in `models.NAME`, the reward that [models.NAME] gives; None for another reward."""
    return reward.removeprefix(MODELS) if reward.startswith(MODELS) else None


async def model_score(args: Any, name: str, sample: Sample) -> float:
    """The score of a reward model of the run for a sample's conversation.

    Raises: EnvError if the prompt is text, which has no messages; what `score` of the model raises.
    """
    messages = sample.metadata.get("messages") or sample.prompt
    if not isinstance(messages, list):
        raise EnvError(
            f"reward {MODELS}{name} scores messages, and the prompt is text; leave apply_chat_template = false out, or "
            f"give a function that asks args.model({name!r}).score"
        )
    reply = {"role": "assistant", "content": sample.response}
    return float(await args.model(name).score([*messages, reply], sample.metadata.get("tools")))


async def unlabelled(args: Any, sample: Sample) -> float:
    """0: what a reply is worth that is to be compared with a label, where no record has one."""
    return 0.0


async def batched_async_rm(args: Any, samples: Sequence[Sample]) -> list[float | dict[str, Any]]:
    """The rewards of several samples; by `args.custom_rm_path` all at once, if there is one."""
    if (path := getattr(args, "custom_rm_path", None)) is not None:
        return list(await _function(path).call(args, list(samples)))
    return list(await asyncio.gather(*(async_rm(args, sample) for sample in samples)))


async def _compare(reply: str, label: str, verifier: MathVerifier) -> float:
    if number(reply) is not None:  # the whole reply is the answer
        reply = f"\\boxed{{{reply}}}"
    return float(await verifier.verify(reply, boxed(label) or label))


async def _ask_server(args: Any, sample: Sample) -> float | dict[str, Any]:
    url = getattr(args, "rm_url", None)
    if url is None:
        raise EnvError("rm_type = 'remote_rm' needs the address of the reward's server: --rm-url, or hook_args.rm_url")
    return await send(url, {"prompt": sample.prompt, "response": sample.response, "label": sample.label})


@cache
def _verifier() -> MathVerifier:
    return MathVerifier()


@cache
def _function(path: str) -> Hook:
    return Hook.load(path, "custom_rm_path", 2)
