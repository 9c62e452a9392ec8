"""dataset: prompts and labels from files of your own; a reward by name, or a function of yours.

    [[orchestrator.env]]
    id = "dataset"
    args = { path = "train.jsonl", eval_path = "test.jsonl", reward = "math" }

A record has a prompt (text, or messages in OpenAI's shape), and perhaps a label, metadata and tools, under keys
that are arguments here. Records are shuffled anew every epoch by the run's seed; where a run resumes it goes on
where it was, with the same records. `generate` and `reward` may be functions by import path, in vime's terms (hooks/).
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import msgspec
import numpy as np

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.data.messages import parse_messages, parse_tools, shown
from stretto.data.records import read_records
from stretto.envs.base import (
    Episode,
    Message,
    RolloutContext,
    RolloutResult,
    RunInfo,
    SingleTurnEnv,
    Split,
    TaskSource,
    scored,
)
from stretto.envs.math_reward import MathVerifier, boxed, number
from stretto.hooks.arguments import Arguments, addresses_of
from stretto.hooks.calls import Hook
from stretto.hooks.convert import sample_of, trained_tokens
from stretto.hooks.engine import playing
from stretto.hooks.sample import Sample, Status
from stretto.records.rollout import Group, Task

logger = logging.getLogger(__name__)

REWARDS = ("exact", "math")
KINDS = {
    "str | list[str] | None": "a file, or a list of files",
    "str": "text",
    "str | None": "text",
    "bool": "true or false",
    "int | None": "a whole number > 0",
    "dict[str, Any]": "a table",
}
"""What a message calls the kinds of arguments."""
STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


@dataclass(frozen=True)
class Settings:
    """The arguments of `dataset`."""

    path: str | list[str] | None
    """File, `file@[a:b]`, directory, or several of them; None: for evals only."""
    eval_path: str | list[str] | None = None
    """Held-out records, as `path`."""
    input_key: str = "prompt"
    label_key: str | None = "label"
    metadata_key: str | None = "metadata"
    tool_key: str | None = "tools"
    apply_chat_template: bool = True
    """False: a prompt is text, and what the policy is given are its tokens and nothing else."""
    max_prompt_tokens: int | None = None
    """Longer prompts are left out."""
    shuffle: bool = True
    """Every epoch anew; False: in the order of the files."""
    reward: str = "exact"
    """`exact` (the reply is the label), `math` (so is what its last box holds, as mathematics; see docs/data.md), or
    `module:function`: `rm(args, sample)`."""
    group_reward: bool = False
    """The function is given all samples of a group at once, `rm(args, samples)`, and returns as many rewards."""
    reward_key: str | None = None
    """Entry of a reward that is a dictionary."""
    generate: str | None = None
    """`module:function`: `generate(args, sample, sampling_params)` makes the reply."""
    hook_args: dict[str, Any] = field(default_factory=dict)
    """More attributes of `args`."""

    def check(self) -> None:
        """Raises: ConfigError for an argument of another kind."""
        hints = get_type_hints(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            try:
                msgspec.convert(value, hints[each.name])
            except msgspec.ValidationError:
                is_wrong = True
            else:
                is_wrong = each.name == "max_prompt_tokens" and value is not None and value < 1
            if is_wrong:
                raise ConfigError(
                    f"dataset: {each.name} = {value!r} must be {KINDS[str(each.type)]}; change `args`"
                )


def dataset(
    path: str | list[str] | None = None,
    eval_path: str | list[str] | None = None,
    input_key: str = "prompt",
    label_key: str | None = "label",
    metadata_key: str | None = "metadata",
    tool_key: str | None = "tools",
    apply_chat_template: bool = True,
    max_prompt_tokens: int | None = None,
    shuffle: bool = True,
    reward: str = "exact",
    group_reward: bool = False,
    reward_key: str | None = None,
    generate: str | None = None,
    hook_args: dict[str, Any] | None = None,
    run: RunInfo | None = None,
) -> Dataset:
    """The environment of these files; `run` is filled in by whoever loads it.

    Raises: ConfigError, DataError for settings and records that do not fit, with file and line.
    """
    settings = Settings(
        path,
        eval_path,
        input_key,
        label_key,
        metadata_key,
        tool_key,
        apply_chat_template,
        max_prompt_tokens,
        shuffle,
        reward,
        group_reward,
        reward_key,
        generate,
        {} if hook_args is None else hook_args,
    )
    settings.check()
    is_plain = apply_chat_template and generate is None and reward in REWARDS
    source = Records(settings, run or RunInfo())
    if is_plain and not source.has_tools:
        return OneRequestDataset(settings, source)
    return Dataset(settings, source)


class Records:
    """The records of both splits, read and checked, and what hooks are told of the run."""

    def __init__(self, settings: Settings, run: RunInfo) -> None:
        self.settings, self.run = settings, run
        needs = {
            "max_prompt_tokens": settings.max_prompt_tokens is not None,
            "apply_chat_template = false": not settings.apply_chat_template,
            "generate": settings.generate is not None,
        }
        if run.encode is None and (wanted := [name for name, is_set in needs.items() if is_set]):
            raise ConfigError(
                f"dataset: {' and '.join(wanted)} needs the policy's tokenizer, which neither worker processes nor "
                'servers without tokens have; leave out num_workers, or client.api = "chat"'
            )
        if settings.group_reward and not run.engine_urls:
            raise ConfigError(
                "dataset: group_reward needs all samples of a group, and worker processes have one; leave out "
                "num_workers"
            )
        if not settings.path and not settings.eval_path:
            raise ConfigError("dataset: name a file as path, or for evals as eval_path, in `args`")
        self.fingerprints: dict[Split, int] = {"train": 0, "eval": 0}
        self._of: dict[Split, list[dict[str, Any]] | None] = {
            "train": self._read(settings.path, "train"),
            "eval": self._read(settings.eval_path, "eval"),
        }
        self.has_tools = any(row["tools"] for rows in self._of.values() for row in rows or ())

    def of(self, split: Split) -> list[dict[str, Any]]:
        """Raises: ConfigError where no such records were named."""
        records = self._of[split]
        if records is None:
            what = {
                "train": "training needs records; name them as path",
                "eval": "evaluation needs held-out records; name them as eval_path",
            }[split]
            raise ConfigError(f"dataset: {what} in `args`")
        return records

    def encode(self, text: str) -> np.ndarray:
        """int32 tokens of a text, with nothing around it."""
        assert self.run.encode is not None, "checked when the environment was made"
        return self.run.encode(text)

    def _is_long(self, row: dict[str, Any]) -> bool:
        limit, prompt = self.settings.max_prompt_tokens, row["prompt"]
        if limit is None:
            return False
        tokens = self.prompt_ids(prompt, row["tools"])
        assert tokens is not None, "checked when the environment was made"
        return len(tokens) > limit

    def prompt_ids(self, prompt: str | list[Message], tools: list[dict] | None) -> np.ndarray | None:
        """int32 tokens that the policy is given; None where its tokenizer is not here."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        return None if self.run.prompt_ids is None else self.run.prompt_ids(prompt, tools)

    def _read(self, sources: str | list[str] | None, split: Split) -> list[dict[str, Any]] | None:
        if not sources:
            return None
        setting = "dataset: " + {"train": "path", "eval": "eval_path"}[split]
        found, num_long, limit = [], 0, self.settings.max_prompt_tokens
        for source in [sources] if isinstance(sources, str) else sources:
            for where, record in read_records(source, setting):
                row = self._row(record, where)
                if self._is_long(row):
                    num_long += 1
                    continue
                found.append(row)
                self.fingerprints[split] = zlib.crc32(_as_json(row, where), self.fingerprints[split])
        if not found:
            raise DataError(
                f"{setting}: all {num_long} prompts are longer than max_prompt_tokens = {limit}; raise it"
            )
        if num_long:
            logger.info(
                "%s: %d of %d prompts are longer than max_prompt_tokens = %d and left out",
                setting,
                num_long,
                num_long + len(found),
                limit,
            )
        return found

    def _row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        settings = self.settings
        if settings.input_key not in record:
            keys = ", ".join(sorted(record)) or "nothing"
            raise DataError(f"{where}: no {settings.input_key!r} (input_key); the record has {keys}")
        needs_label = settings.reward in REWARDS
        label = None if settings.label_key is None else record.get(settings.label_key)
        if needs_label and label is None:
            rule = f'reward = "{settings.reward}" compares replies with it'
            raise DataError(f"{where}: no {settings.label_key!r} (label_key); {rule}")
        if needs_label and not is_comparable(label):
            rule = f'reward = "{settings.reward}" compares replies with it'
            raise DataError(
                f"{where}: {settings.label_key!r} must be text or a number, got {shown(label)}; {rule}"
            )
        metadata = {} if settings.metadata_key is None else record.get(settings.metadata_key) or {}
        if not isinstance(metadata, dict):
            raise DataError(
                f"{where}: {settings.metadata_key!r} must be an object, got {type(metadata).__name__}"
            )
        tools = None
        if settings.tool_key is not None:
            tools = parse_tools(record.get(settings.tool_key), settings.tool_key, where)
        prompt = self._prompt(record[settings.input_key], where)
        return {"prompt": prompt, "label": label, "metadata": metadata, "tools": tools}

    def _prompt(self, prompt: Any, where: str) -> str | list[Message]:
        settings = self.settings
        if isinstance(prompt, str) and prompt:
            return [{"role": "user", "content": prompt}] if settings.apply_chat_template else prompt
        if not settings.apply_chat_template:
            raise DataError(
                f"{where}: with apply_chat_template = false {settings.input_key!r} must be text, got "
                f"{type(prompt).__name__}"
            )
        if not isinstance(prompt, list) or not prompt:
            raise DataError(f"{where}: {settings.input_key!r} must be text or a list of messages")
        messages = parse_messages(prompt, settings.input_key, where)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: {settings.input_key}[{len(messages) - 1}] is said by the assistant; a prompt ends where the "
                "policy is to reply, so leave it out (it may be the label)"
            )
        # Masks of SFT data say nothing about prompts.
        return [{k: v for k, v in message.items() if k != "step_loss_mask"} for message in messages]


class Dataset:
    """Prompts from files; every rollout is played by itself."""

    def __init__(self, settings: Settings, records: Records) -> None:
        self.name = "dataset"
        self.settings, self.records = settings, records
        self.args = arguments(settings, records.run)
        self.verifier = MathVerifier() if settings.reward == "math" else None
        self._reward = self._generate = None
        if settings.reward not in REWARDS:
            if not {":", "."} & set(settings.reward):
                known = ", ".join(f'"{name}"' for name in REWARDS)
                raise ConfigError(
                    f'dataset: reward = "{settings.reward}": known are {known}, or a function as `module:function`'
                )
            self._reward = Hook.load(settings.reward, "dataset: reward", 2)
        elif settings.group_reward or settings.reward_key is not None:
            key = "group_reward" if settings.group_reward else "reward_key"
            raise ConfigError(f'dataset: {key} does nothing with reward = "{settings.reward}"; drop it')
        if settings.generate is not None:
            self._generate = Hook.load(settings.generate, "dataset: generate", 3)

    def tasks(self, split: Split) -> TaskSource:
        """The records, by their place in the files."""
        records = self.records.of(split)

        def make(index: int) -> Task:
            return Task(env=self.name, task_id=f"{split}-{index}", data=records[index])

        fingerprint = self.records.fingerprints[split]
        return TaskSource(make, len(records), not self.settings.shuffle, fingerprint)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        if self._generate is not None:
            with playing(ctx, self.records.run.engine_urls):
                samples = as_samples(await self._called(self._generate, task, ctx))
            for each in samples:
                if each.status in (Status.ABORTED, Status.FAILED):
                    raise EnvError(f"the sample's status is {each.status.name}")
            ctx.keep([trained_tokens(each) for each in samples])
        else:
            samples = [await self._played(task, self._sample(task, ctx.episode), ctx)]
        is_truncated = any(each.status is Status.TRUNCATED for each in samples)
        if self.settings.group_reward:  # it has one when the group is there
            return RolloutResult(reward=0.0, is_truncated=is_truncated, note=samples)
        rewards = [await self._reward_of(each) for each in samples]
        return RolloutResult(reward=sum(rewards) / len(rewards), is_truncated=is_truncated)

    async def score_group(self, group: Group, notes: Sequence[list[Sample]]) -> list[float] | None:
        """Rewards of all members at once, where a function is asked for them; None: they have theirs.

        notes: the samples of each member. Those that have a reward already keep it.
        """
        if not self.settings.group_reward or self._reward is None:
            return None
        if self._generate is None:  # what the run has written down; who generates says it by himself
            for rollout, (sample,) in zip(group.rollouts, notes, strict=True):
                known = sample_of(rollout, sample.response)
                sample.tokens, sample.loss_mask = known.tokens, known.loss_mask
                sample.rollout_log_probs = known.rollout_log_probs
                sample.weight_versions = known.weight_versions
        samples = [sample for played in notes for sample in played]
        if any(sample.reward is None for sample in samples):
            returned = await self._reward.call(self.args, samples)
            if not isinstance(returned, Sequence) or len(returned) != len(samples):
                rule = f"return a reward for each of {len(samples)} samples"
                raise EnvError(f"{self._reward.where} returned {returned!r}; {rule}")
            for sample, reward in zip(samples, returned):
                sample.reward = reward if sample.reward is None else sample.reward
        rewards = [[sample.get_reward_value(self.args) for sample in played] for played in notes]
        return [sum(each) / len(each) for each in rewards]

    # -- one sample --

    def _sample(self, task: Task, episode: Episode | None) -> Sample:
        data = task.data
        metadata = dict(data["metadata"]) | ({"tools": data["tools"]} if data["tools"] else {})
        sample = Sample(prompt=data["prompt"], label=data["label"], metadata=metadata)
        if episode is not None:
            sample.group_index, sample.index = episode.group_id, episode.member
            sample.rollout_id = episode.rollout_id
        return sample

    def _rendered(self, task: Task, episode: Episode | None) -> Sample:
        """A sample whose prompt is text, as whoever generates expects it; the messages are in its metadata."""
        sample = self._sample(task, episode)
        if not isinstance(sample.prompt, str):
            assert self.records.run.render is not None, "checked when the environment was made"
            sample.metadata.setdefault("messages", sample.prompt)
            sample.prompt = self.records.run.render(sample.prompt, task.data["tools"])
        return sample

    async def _called(self, hook: Hook, task: Task, ctx: RolloutContext) -> Any:
        sample, sampling = self._rendered(task, ctx.episode), sampling_params(ctx)
        if hook.takes("evaluation"):
            is_eval = task.task_id.startswith("eval-")
            return await hook.call(self.args, sample, sampling, evaluation=is_eval)
        return await hook.call(self.args, sample, sampling)

    async def _played(self, task: Task, sample: Sample, ctx: RolloutContext) -> Sample:
        prompt, tools = task.data["prompt"], task.data["tools"]
        if isinstance(prompt, str):
            reply = await ctx.generate(self.records.encode(prompt))
        else:
            reply = await ctx.chat(prompt, tools)
        if self._reward is not None and (given := self.records.prompt_ids(prompt, tools)) is not None:
            sample.tokens = [*given.tolist(), *reply.token_ids.tolist()]
        sample.response = reply.text
        sample.response_length = len(reply.token_ids)
        sample.status = STATUS_OF.get(reply.finish_reason, Status.COMPLETED)
        return sample

    async def _reward_of(self, sample: Sample) -> float:
        if sample.reward is None:
            sample.reward = await self._judged(sample)
        return sample.get_reward_value(self.args)

    async def _judged(self, sample: Sample) -> Any:
        if self._reward is not None:
            return await self._reward.call(self.args, sample)
        if self.verifier is not None:
            gold, reply = str(sample.label), sample.response
            if number(reply) is not None:  # all that it says is its answer
                reply = f"\\boxed{{{reply}}}"
            return float(await self.verifier.verify(reply, boxed(gold) or gold))
        return float(sample.response.strip() == str(sample.label).strip())


class OneRequestDataset(Dataset, SingleTurnEnv):
    """The same where the samples of a group can be one request: a prompt of messages, and one reply."""

    def prompt(self, task: Task) -> list[Message]:
        return task.data["prompt"]

    async def score(self, task: Task, text: str) -> RolloutResult:
        sample = self._sample(task, None)
        sample.response, sample.status = text, Status.COMPLETED
        return await scored(await self._reward_of(sample))


def arguments(settings: Settings, run: RunInfo) -> Arguments:
    """What hooks are told of the run."""
    known = {
        "hf_checkpoint": run.tokenizer,
        "encode": None if run.encode is None else lambda text: run.encode(text).tolist(),
        "prompt_data": settings.path,
        "input_key": settings.input_key,
        "label_key": settings.label_key,
        "metadata_key": settings.metadata_key,
        "tool_key": settings.tool_key,
        "apply_chat_template": settings.apply_chat_template,
        "reward_key": settings.reward_key,
        "n_samples_per_prompt": run.group_size,
        "rollout_max_response_len": run.max_completion_tokens,
        "rollout_max_context_len": run.seq_len,
        "rollout_temperature": run.temperature,
        "rollout_top_p": run.top_p,
        "rollout_top_k": run.top_k,
        "rollout_seed": run.seed,
        "seed": run.seed,
    }
    return Arguments(**known | addresses_of(run.engine_urls, run.model_urls) | settings.hook_args)


def sampling_params(ctx: RolloutContext) -> dict[str, Any]:
    """How the policy is sampled in this rollout, by vime's names."""
    sampling = ctx.sampling
    assert sampling is not None, "checked when the environment was made"
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "max_new_tokens": sampling.max_completion_tokens,
    }


def is_comparable(label: Any) -> bool:
    """Can a reply be equal to it? Text and finite numbers; a column with gaps has NaN in them."""
    return isinstance(label, str | int) or (isinstance(label, float) and math.isfinite(label))


def _as_json(row: dict[str, Any], where: str) -> bytes:
    """Raises: DataError for what a ledger of JSON cannot hold, such as the dates and bytes of parquet files."""
    try:
        return json.dumps(row).encode()
    except (TypeError, ValueError) as cause:
        raise DataError(
            f"{where}: {cause}; prompt, label, metadata and tools hold text, numbers, lists and objects only"
        ) from None


def as_samples(returned: Any) -> list[Sample]:
    """What `generate` returned, as a list.

    Raises: EnvError when it is no sample, or parts of one do not fit together.
    """
    samples = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise EnvError(
            f"generate returned {type(returned).__name__}; return the sample, or a list of samples"
        )
    for sample in samples:
        sample.check()
    return samples
