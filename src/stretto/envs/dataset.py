"""dataset: prompts and labels from files of your own; a reward by name, or a function of yours.

    [[orchestrator.env]]
    id = "dataset"
    args = { path = "train.jsonl", eval_path = "test.jsonl", reward = "math" }

A record has a prompt (text, or messages in OpenAI's shape), and perhaps a label, metadata and tools, under keys
that are arguments here. Records are shuffled anew every epoch by the run's seed; where a run resumes it goes on
where it was. `generate` and `reward` may be functions by import path, in vime's terms (hooks/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.data.records import from_json, read_records
from stretto.envs.base import (
    Message,
    RolloutContext,
    RolloutResult,
    RunInfo,
    SingleTurnEnv,
    Split,
    TaskSource,
    scored,
)
from stretto.envs.math_reward import MathVerifier
from stretto.hooks.arguments import Arguments, address_of
from stretto.hooks.calls import Hook
from stretto.hooks.convert import sample_of, trained_tokens
from stretto.hooks.engine import playing
from stretto.hooks.sample import Sample, Status
from stretto.records.rollout import Group, Task

REWARDS = ("exact", "math")
STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


@dataclass(frozen=True)
class Settings:
    """The arguments of `dataset`."""

    path: str | list[str]
    """File, `file@[a:b]`, directory, or several of them."""
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
    reward: str = "exact"
    """`exact` (the reply is the label), `math` (equal as mathematics), or `module:function`: `rm(args, sample)`."""
    group_reward: bool = False
    """The function is given all samples of a group at once, `rm(args, samples)`, and returns as many rewards."""
    reward_key: str | None = None
    """Entry of a reward that is a dictionary."""
    generate: str | None = None
    """`module:function`: `generate(args, sample, sampling_params)` makes the reply."""
    hook_args: dict[str, Any] = field(default_factory=dict)
    """More attributes of `args`."""


def dataset(
    path: str | list[str],
    eval_path: str | list[str] | None = None,
    input_key: str = "prompt",
    label_key: str | None = "label",
    metadata_key: str | None = "metadata",
    tool_key: str | None = "tools",
    apply_chat_template: bool = True,
    max_prompt_tokens: int | None = None,
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
        reward,
        group_reward,
        reward_key,
        generate,
        hook_args or {},
    )
    is_plain = apply_chat_template and generate is None and not group_reward
    source = Records(settings, run or RunInfo())
    if is_plain and not source.has_tools:
        return OneRequestDataset(settings, source)
    return Dataset(settings, source)


class Records:
    """The records of both splits, read and checked, and what hooks are told of the run."""

    def __init__(self, settings: Settings, run: RunInfo) -> None:
        self.settings, self.run = settings, run
        if (
            settings.max_prompt_tokens is not None or not settings.apply_chat_template
        ) and run.encode is None:
            raise ConfigError(
                "dataset: max_prompt_tokens and apply_chat_template = false need the policy's tokenizer, which "
                "worker processes do not have; leave num_workers out"
            )
        self.train = self._read(settings.path, "path")
        self.eval = None if settings.eval_path is None else self._read(settings.eval_path, "eval_path")
        self.has_tools = any(
            record["tools"] for records in (self.train, self.eval or ()) for record in records
        )

    def of(self, split: Split) -> list[dict[str, Any]]:
        """Raises: ConfigError where no held-out records were named."""
        if split == "train":
            return self.train
        if self.eval is None:
            raise ConfigError("dataset: evaluation needs held-out records; name them as eval_path in `args`")
        return self.eval

    def encode(self, text: str) -> np.ndarray:
        """int32 tokens of a text, with nothing around it."""
        assert self.run.encode is not None, "checked when the environment was made"
        return self.run.encode(text)

    def _is_long(self, row: dict[str, Any]) -> bool:
        limit, prompt = self.settings.max_prompt_tokens, row["prompt"]
        if limit is None:
            return False
        assert self.run.count_tokens is not None, "checked when the environment was made"
        tokens = (
            len(self.encode(prompt))
            if isinstance(prompt, str)
            else self.run.count_tokens(prompt, row["tools"])
        )
        return tokens > limit

    def _read(self, sources: str | list[str], setting: str) -> list[dict[str, Any]]:
        settings, found, num_long = self.settings, [], 0
        for source in [sources] if isinstance(sources, str) else sources:
            for where, record in read_records(source, f"dataset: {setting}"):
                row = self._row(record, where)
                if self._is_long(row):
                    num_long += 1
                else:
                    found.append(row)
        if not found:
            raise DataError(
                f"dataset: {setting}: all {num_long} prompts are longer than max_prompt_tokens = "
                f"{settings.max_prompt_tokens}; raise it"
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
        metadata = {} if settings.metadata_key is None else record.get(settings.metadata_key) or {}
        if not isinstance(metadata, dict):
            raise DataError(
                f"{where}: {settings.metadata_key!r} must be an object, got {type(metadata).__name__}"
            )
        tools = None if settings.tool_key is None else record.get(settings.tool_key)
        if isinstance(tools, str):
            tools = from_json(tools, f"{where}: {settings.tool_key}")
        if tools is not None and not isinstance(tools, list):
            raise DataError(
                f"{where}: {settings.tool_key!r} must be a list of tools, got {type(tools).__name__}"
            )
        prompt = self._prompt(record[settings.input_key], where)
        return {"prompt": prompt, "label": label, "metadata": metadata, "tools": tools or None}

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
        for i, message in enumerate(prompt):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(f"{where}: {settings.input_key}[{i}] must be an object with role and content")
        # Columns of a parquet file have every key in every row; masks of SFT data say nothing about prompts.
        return [
            {key: value for key, value in message.items() if value is not None and key != "step_loss_mask"}
            for message in prompt
        ]


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

        return TaskSource(make, len(records))

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        if self._generate is not None:
            with playing(ctx):
                samples = as_samples(await self._called(self._generate, task, self._rendered(task)))
            for each in samples:
                if each.status in (Status.ABORTED, Status.FAILED):
                    raise EnvError(f"the sample's status is {each.status.name}")
            ctx.keep([trained_tokens(each) for each in samples])
        else:
            samples = [await self._played(task, self._sample(task), ctx)]
        rewards = [await self._reward_of(each) for each in samples]
        is_truncated = any(each.status is Status.TRUNCATED for each in samples)
        return RolloutResult(reward=sum(rewards) / len(rewards), is_truncated=is_truncated)

    async def score_group(self, group: Group, texts: Sequence[str]) -> list[float] | None:
        """Rewards of all members at once, where a function is asked for them; None: they have theirs."""
        if not self.settings.group_reward or self._reward is None:
            return None
        samples = [sample_of(rollout, text) for rollout, text in zip(group.rollouts, texts, strict=True)]
        returned = await self._reward.call(self.args, samples)
        if not isinstance(returned, Sequence) or len(returned) != len(samples):
            raise EnvError(
                f"{self._reward.where} returned {returned!r}; return a reward for each of {len(samples)} samples"
            )
        for sample, reward in zip(samples, returned):
            sample.reward = reward
        return [sample.get_reward_value(self.args) for sample in samples]

    # -- one sample --

    def _sample(self, task: Task) -> Sample:
        data = task.data
        metadata = dict(data["metadata"]) | ({"tools": data["tools"]} if data["tools"] else {})
        return Sample(prompt=data["prompt"], label=data["label"], metadata=metadata)

    def _rendered(self, task: Task) -> Sample:
        """A sample whose prompt is text, as whoever generates expects it; the messages are in its metadata."""
        sample = self._sample(task)
        if not isinstance(sample.prompt, str):
            assert self.records.run.render is not None, "checked when the environment was made"
            sample.metadata.setdefault("messages", sample.prompt)
            sample.prompt = self.records.run.render(sample.prompt, task.data["tools"])
        return sample

    async def _called(self, hook: Hook, task: Task, sample: Sample) -> Any:
        sampling = self.records.run.sampling_params()
        if hook.takes("evaluation"):
            is_eval = task.task_id.startswith("eval-")
            return await hook.call(self.args, sample, sampling, evaluation=is_eval)
        return await hook.call(self.args, sample, sampling)

    async def _played(self, task: Task, sample: Sample, ctx: RolloutContext) -> Sample:
        prompt = task.data["prompt"]
        if isinstance(prompt, str):
            reply = await ctx.generate(self.records.encode(prompt))
        else:
            reply = await ctx.chat(prompt, task.data["tools"])
        sample.response = reply.text
        sample.response_length = len(reply.token_ids)
        sample.status = STATUS_OF.get(reply.finish_reason, Status.COMPLETED)
        return sample

    async def _reward_of(self, sample: Sample) -> float:
        if sample.reward is None:
            if self.settings.group_reward:
                return 0.0  # until the group is there
            sample.reward = await self._judged(sample)
        return sample.get_reward_value(self.args)

    async def _judged(self, sample: Sample) -> Any:
        if self._reward is not None:
            return await self._reward.call(self.args, sample)
        if self.verifier is not None:
            return float(await self.verifier.verify(sample.response, str(sample.label)))
        return float(sample.response.strip() == str(sample.label).strip())


class OneRequestDataset(Dataset, SingleTurnEnv):
    """The same where the samples of a group can be one request: a prompt of messages, and one reply."""

    def prompt(self, task: Task) -> list[Message]:
        return task.data["prompt"]

    async def score(self, task: Task, text: str) -> RolloutResult:
        sample = self._sample(task)
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
    return Arguments(**known | address_of(run.engine_url) | settings.hook_args)


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
