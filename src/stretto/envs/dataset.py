"""The environment `dataset`: prompts and labels from files or the Hub, and a reward by name or by function.

    [[orchestrator.env]]
    id = "dataset"
    args = { path = "train.jsonl", eval_path = "test.jsonl", reward = "math" }

A record has a prompt (text, or messages in OpenAI's format), and optionally a label, metadata and tools, under keys
that are arguments here, and images (data/image_columns.py). Every epoch has the records in a new order, drawn from the
run's seed. A run that is resumed continues at the record where it stopped and checks that the records are the same.
`generate` and `reward` may be import paths of functions in vime's terms (stretto.vime).
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import numpy as np

from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.data.image_columns import column_of, with_images
from stretto.data.messages import parse_messages, parse_tools, short_repr
from stretto.data.pictures import image_parts
from stretto.data.records import read_records
from stretto.envs.base import (
    EpisodeInfo,
    Message,
    RolloutContext,
    RolloutResult,
    RunInfo,
    SingleTurnEnv,
    Split,
    TaskSource,
    checked_score,
)
from stretto.envs.pictures import Pictures
from stretto.envs.rewards.math_reward import MathVerifier, boxed, number
from stretto.records.rollout import Group, Task
from stretto.vime.arguments import Arguments, addresses_of
from stretto.vime.calls import Hook
from stretto.vime.convert import sample_of, trained_tokens
from stretto.vime.engine import requests_as_turns
from stretto.vime.sample import Sample, Status

if TYPE_CHECKING:
    from jaxtyping import Int32

logger = logging.getLogger(__name__)

REWARDS = ("exact", "math")
GIVEN = "given"
"""No reward of the environment's: the function that makes a sample rewards it."""
TYPE_NAMES = {
    "str | list[str] | None": "a file, or a list of files",
    "list[str] | str | None": "a key, or a list of keys",
    "str": "text",
    "str | None": "text",
    "bool": "true or false",
    "int | None": "a whole number > 0",
    "dict[str, Any]": "a table",
}
"""What an error message calls the types of arguments."""
STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}


@dataclass(frozen=True)
class DatasetSettings:
    """The arguments of the environment `dataset`."""

    path: str | list[str] | None
    """File, `file@[a:b]`, directory, data set of the Hub `ORG/NAME:CONFIG[SPLIT]`, or a list of these; None if the
    environment is for evals only."""
    eval_path: str | list[str] | None = None
    """Held-out records, written like `path`."""
    streaming: bool = False
    """Data sets of the Hub are read without a copy on disk."""
    convert: str | None = None
    """`module:function`: makes each record another, before its keys are read."""
    input_key: str = "prompt"
    label_key: str | None = "label"
    metadata_key: list[str] | str | None = "metadata"
    """Key of an object, or a list of keys that become one."""
    tool_key: str | None = "tools"
    prompt_template: str | None = None
    """The prompt's text, in which `{prompt}` stands for that of the record."""
    label_pattern: str | None = None
    """Regular expression with one group: the label is what the group matches in that of the record."""
    apply_chat_template: bool = True
    """False: a prompt is text, and the policy gets its tokens and nothing else."""
    max_prompt_tokens: int | None = None
    """Longer prompts are skipped."""
    shuffle: bool = True
    """True: a new order in every epoch. False: the order of the files."""
    reward: str = "exact"
    """`exact` (the reply equals the label), `math` (the content of its last box equals the label as mathematics, see
    docs/data.md), `given` (`generate`, or a rollout function, sets sample.reward), or `module:function`:
    `rm(args, sample)`."""
    group_reward: bool = False
    """The function gets all samples of a group at once, `rm(args, samples)`, and returns one reward for each."""
    reward_key: str | None = None
    """Entry to use if the reward is a dictionary."""
    generate: str | None = None
    """`module:function`: `generate(args, sample, sampling_params)` generates the reply."""
    hook_args: dict[str, Any] = field(default_factory=dict)
    """Additional attributes of `args`."""

    def check(self) -> None:
        """Check the types of all arguments.

        Raises: ConfigError for the first that is wrong.
        """
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
                    f"dataset: {each.name} = {value!r} must be {TYPE_NAMES[str(each.type)]}; change `args`"
                )
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise ConfigError(
                "dataset: prompt_template has no {prompt}, in the place of the record's prompt; add it"
            )
        self.check_label_pattern()

    def check_label_pattern(self) -> None:
        """Raises: ConfigError if it is no regular expression with one group."""
        if self.label_pattern is None:
            return
        try:
            num_groups = re.compile(self.label_pattern).groups
        except re.error as cause:
            raise ConfigError(f"dataset: label_pattern = {self.label_pattern!r}: {cause}") from None
        if num_groups != 1:
            rule = "must have one group, (...), around the label"
            raise ConfigError(f"dataset: label_pattern = {self.label_pattern!r} {rule}; it has {num_groups}")


def dataset(
    path: str | list[str] | None = None,
    eval_path: str | list[str] | None = None,
    streaming: bool = False,
    convert: str | None = None,
    input_key: str = "prompt",
    label_key: str | None = "label",
    metadata_key: list[str] | str | None = "metadata",
    tool_key: str | None = "tools",
    prompt_template: str | None = None,
    label_pattern: str | None = None,
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
    """Build the environment for these files; `load_environment` fills in `run`.

    Raises: ConfigError for arguments that do not fit; DataError for records that do not fit, with file and line.
    """
    settings = DatasetSettings(
        path,
        eval_path,
        streaming,
        convert,
        input_key,
        label_key,
        metadata_key,
        tool_key,
        prompt_template,
        label_pattern,
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
        return SingleTurnDataset(settings, source)
    return Dataset(settings, source)


class Records:
    """The records of both splits, read and checked, and the tokenizer of the run."""

    def __init__(self, settings: DatasetSettings, run: RunInfo) -> None:
        self.settings, self.run = settings, run
        needs = {
            "max_prompt_tokens": settings.max_prompt_tokens is not None,
            "apply_chat_template = false": not settings.apply_chat_template,
            "generate": settings.generate is not None,
        }
        if run.encode is None and (wanted := [name for name, is_set in needs.items() if is_set]):
            raise ConfigError(
                f"dataset: {' and '.join(wanted)} needs the policy's tokenizer, which neither worker processes nor "
                'engines with the chat API have; remove num_workers, or client.api = "chat"'
            )
        if settings.group_reward and not run.engine_urls:
            raise ConfigError(
                "dataset: group_reward needs all samples of a group, but a worker process has only one; remove "
                "num_workers"
            )
        if not settings.path and not settings.eval_path:
            raise ConfigError("dataset: name a file as path, or for evals as eval_path, in `args`")
        self.pictures = Pictures()  # those that are not files
        self.fingerprints: dict[Split, int] = {"train": 0, "eval": 0}
        self._rows: dict[Split, list[dict[str, Any]] | None] = {
            "train": self._read(settings.path, "train"),
            "eval": self._read(settings.eval_path, "eval"),
        }
        self.has_tools = any(row["tools"] for rows in self._rows.values() for row in rows or ())

    def rows(self, split: Split) -> list[dict[str, Any]]:
        """The records of a split.

        Raises: ConfigError if no path was given for it.
        """
        records = self._rows[split]
        if records is None:
            what = {
                "train": "training needs records; name them as path",
                "eval": "evaluation needs held-out records; name them as eval_path",
            }[split]
            raise ConfigError(f"dataset: {what} in `args`")
        return records

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """int32 tokens of a text, without special tokens or a template."""
        assert self.run.encode is not None, "checked when the environment was built"
        return self.run.encode(text)

    def _is_too_long(self, row: dict[str, Any]) -> bool:
        limit, prompt = self.settings.max_prompt_tokens, row["prompt"]
        if limit is None:
            return False
        tokens = self.prompt_ids(prompt, row["tools"])
        assert tokens is not None, "checked when the environment was built"
        return len(tokens) > limit

    def prompt_ids(
        self, prompt: str | list[Message], tools: list[dict] | None
    ) -> Int32[np.ndarray, " tokens"] | None:
        """int32 tokens of a prompt as the policy gets it; None if its tokenizer is not available here."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if self.run.prompt_ids is None:
            return None
        return self.run.prompt_ids(self.pictures.filled_in(prompt), tools)

    def _read(self, sources: str | list[str] | None, split: Split) -> list[dict[str, Any]] | None:
        if not sources:
            return None
        setting = "dataset: " + {"train": "path", "eval": "eval_path"}[split]
        found, num_long, limit = [], 0, self.settings.max_prompt_tokens
        for source in [sources] if isinstance(sources, str) else sources:
            records = read_records(
                source, setting, is_streamed=self.settings.streaming, convert=self.settings.convert
            )
            for where, record in records:
                row = self._row(record, where)
                if self._is_too_long(row):
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
                "%s: skipped %d of %d prompts that are longer than max_prompt_tokens = %d",
                setting,
                num_long,
                num_long + len(found),
                limit,
            )
        return found

    def _row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        settings = self.settings
        if settings.input_key not in record:
            raise DataError(
                f"{where}: no {settings.input_key!r} (input_key); {_keys_of(record, settings.input_key)}"
            )
        needs_label = settings.reward in REWARDS
        label = None if settings.label_key is None else record.get(settings.label_key)
        if settings.label_pattern is not None and label is not None:
            label = self._label_within(label, where)
        if needs_label and label is None:
            rule = f'reward = "{settings.reward}" compares replies with it'
            raise DataError(f"{where}: no {settings.label_key!r} (label_key); {rule}")
        if needs_label and not is_comparable(label):
            rule = f'reward = "{settings.reward}" compares replies with it'
            raise DataError(
                f"{where}: {settings.label_key!r} must be text or a number, got {short_repr(label)}; {rule}"
            )
        metadata = self._metadata(record, where)
        tools = None
        if settings.tool_key is not None:
            tools = parse_tools(record.get(settings.tool_key), settings.tool_key, where)
        prompt = self._prompt(record[settings.input_key], where)
        if isinstance(prompt, str) and column_of(record):
            raise DataError(f"{where}: with apply_chat_template = false prompts are text, without images")
        if not isinstance(prompt, str):
            prompt = self.pictures.taken_out(with_images(prompt, record, where), where)
        return {"prompt": prompt, "label": label, "metadata": metadata, "tools": tools}

    def _label_within(self, label: Any, where: str) -> str:
        pattern = self.settings.label_pattern
        assert pattern is not None
        match = re.search(pattern, str(label))
        if match is None or match[1] is None:
            raise DataError(
                f"{where}: {self.settings.label_key!r} has nothing that label_pattern = {pattern!r} matches: "
                f"{short_repr(label)}"
            )
        return match[1].strip()

    def _metadata(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        key = self.settings.metadata_key
        if isinstance(key, list):
            if missing := [each for each in key if each not in record]:
                keys = _keys_of(record, missing[0])
                raise DataError(f"{where}: no {missing[0]!r} (metadata_key); {keys}")
            return {each: record[each] for each in key}
        metadata = {} if key is None else record.get(key) or {}
        if not isinstance(metadata, dict):
            raise DataError(f"{where}: {key!r} must be an object, got {type(metadata).__name__}")
        return metadata

    def _prompt(self, prompt: Any, where: str) -> str | list[Message]:
        settings = self.settings
        if settings.prompt_template is not None and isinstance(prompt, str) and prompt:
            prompt = settings.prompt_template.replace("{prompt}", prompt)
        elif settings.prompt_template is not None:
            raise DataError(
                f"{where}: prompt_template needs text under {settings.input_key!r}, got {short_repr(prompt)}"
            )
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
                f"{where}: {settings.input_key}[{len(messages) - 1}] is an assistant message; a prompt ends where the "
                "policy replies, so remove it (it may be the label)"
            )
        # step_loss_mask is for SFT and has no meaning in prompts.
        return [{k: v for k, v in message.items() if k != "step_loss_mask"} for message in messages]


class Dataset:
    """Prompts from files; each rollout has its own requests."""

    def __init__(self, settings: DatasetSettings, records: Records) -> None:
        self.name = "dataset"
        self.settings, self.records = settings, records
        self.args = build_arguments(settings, records.run)
        self.verifier = MathVerifier() if settings.reward == "math" else None
        self._reward = self._generate = None
        if settings.reward not in (*REWARDS, GIVEN):
            if not {":", "."} & set(settings.reward):
                known = ", ".join(f'"{name}"' for name in (*REWARDS, GIVEN))
                raise ConfigError(
                    f'dataset: reward = "{settings.reward}": use {known}, or a function as `module:function`'
                )
            self._reward = Hook.load(settings.reward, "dataset: reward", 2)
        elif settings.group_reward or settings.reward_key is not None:
            key = "group_reward" if settings.group_reward else "reward_key"
            raise ConfigError(f'dataset: {key} does nothing with reward = "{settings.reward}"; remove it')
        if settings.generate is not None:
            self._generate = Hook.load(settings.generate, "dataset: generate", 3)

    def tasks(self, split: Split) -> TaskSource:
        """The records of a split, in the order of the files."""
        records = self.records.rows(split)

        def make(index: int) -> Task:
            return Task(env=self.name, task_id=f"{split}-{index}", data=records[index])

        fingerprint = self.records.fingerprints[split]
        return TaskSource(make, len(records), not self.settings.shuffle, fingerprint)

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        if self._generate is not None:
            with requests_as_turns(ctx, self.records.run.engine_urls):
                samples = as_samples(await self._call_generate(self._generate, task, ctx))
            for each in samples:
                if each.status in (Status.ABORTED, Status.FAILED):
                    raise EnvError(f"the sample's status is {each.status.name}")
            ctx.keep([trained_tokens(each) for each in samples])
        else:
            samples = [await self._request_reply(task, self._sample(task, ctx.episode), ctx)]
        is_truncated = any(each.status is Status.TRUNCATED for each in samples)
        if self.settings.group_reward:  # `score_group` gives the reward when the group is complete
            return RolloutResult(reward=0.0, is_truncated=is_truncated, note=samples)
        rewards = [await self._reward_of(each) for each in samples]
        return RolloutResult(reward=sum(rewards) / len(rewards), is_truncated=is_truncated)

    async def score_group(self, group: Group, notes: Sequence[list[Sample]]) -> list[float] | None:
        """With group_reward: the rewards of all members, from the function. Otherwise None: members keep theirs.

        notes: the samples of each member. A sample that already has a reward keeps it.
        """
        if not self.settings.group_reward or self._reward is None:
            return None
        if self._generate is None:  # as the run has recorded it; `generate` sets these fields itself
            for rollout, (sample,) in zip(group.rollouts, notes, strict=True):
                known = sample_of(rollout, sample.response)
                sample.tokens, sample.loss_mask = known.tokens, known.loss_mask
                sample.rollout_log_probs = known.rollout_log_probs
                sample.weight_versions = known.weight_versions
        samples = [sample for of_member in notes for sample in of_member]
        if any(sample.reward is None for sample in samples):
            returned = await self._reward.call(self.args, samples)
            if not isinstance(returned, Sequence) or len(returned) != len(samples):
                rule = f"return a reward for each of {len(samples)} samples"
                raise EnvError(f"{self._reward.where} returned {returned!r}; {rule}")
            for sample, reward in zip(samples, returned):
                sample.reward = reward if sample.reward is None else sample.reward
        where = self._reward.where
        rewards = [[sample.get_reward_value(self.args, where) for sample in of_member] for of_member in notes]
        return [sum(each) / len(each) for each in rewards]

    # -- one sample --

    def _sample(self, task: Task, episode: EpisodeInfo | None) -> Sample:
        data = task.data
        metadata = dict(data["metadata"]) | ({"tools": data["tools"]} if data["tools"] else {})
        sample = Sample(prompt=data["prompt"], label=data["label"], metadata=metadata)
        if episode is not None:
            sample.group_index, sample.index = episode.group_id, episode.member
            sample.rollout_id = episode.rollout_id
        return sample

    def _rendered_sample(self, task: Task, episode: EpisodeInfo | None) -> Sample:
        """A sample whose prompt is text, as `generate` functions expect it; its metadata has the messages.

        Raises: EnvError if the prompt has images, for which a text has no place.
        """
        if not isinstance(task.data["prompt"], str) and any(image_parts(task.data["prompt"])):
            raise EnvError(
                f"task {task.task_id}: `generate` gets text, and this prompt has images; remove generate"
            )
        sample = self._sample(task, episode)
        if not isinstance(sample.prompt, str):
            assert self.records.run.render is not None, "checked when the environment was built"
            sample.metadata.setdefault("messages", sample.prompt)
            sample.prompt = self.records.run.render(sample.prompt, task.data["tools"])
        return sample

    async def _call_generate(self, hook: Hook, task: Task, ctx: RolloutContext) -> Any:
        sample, sampling = self._rendered_sample(task, ctx.episode), sampling_params(ctx)
        if hook.takes("evaluation"):
            is_eval = task.task_id.startswith("eval-")
            return await hook.call(self.args, sample, sampling, evaluation=is_eval)
        return await hook.call(self.args, sample, sampling)

    async def _request_reply(self, task: Task, sample: Sample, ctx: RolloutContext) -> Sample:
        prompt, tools = task.data["prompt"], task.data["tools"]
        if isinstance(prompt, str):
            reply = await ctx.generate(self.records.encode(prompt))
        else:
            reply = await ctx.chat(self.records.pictures.filled_in(prompt), tools)
        if self._reward is not None and (given := self.records.prompt_ids(prompt, tools)) is not None:
            sample.tokens = [*given.tolist(), *reply.token_ids.tolist()]
        sample.response = reply.text
        sample.response_length = len(reply.token_ids)
        sample.status = STATUS_OF.get(reply.finish_reason, Status.COMPLETED)
        return sample

    async def _reward_of(self, sample: Sample) -> float:
        if sample.reward is None:
            sample.reward = await self._compute_reward(sample)
        return sample.get_reward_value(self.args, "" if self._reward is None else self._reward.where)

    async def _compute_reward(self, sample: Sample) -> Any:
        if self._reward is not None:
            return await self._reward.call(self.args, sample)
        if self.settings.reward == GIVEN:
            raise EnvError(
                'dataset: reward = "given", and the sample has none; set sample.reward in your function'
            )
        if self.verifier is not None:
            gold, reply = str(sample.label), sample.response
            if number(reply) is not None:  # the whole reply is the answer
                reply = f"\\boxed{{{reply}}}"
            return float(await self.verifier.verify(reply, boxed(gold) or gold))
        return float(sample.response.strip() == str(sample.label).strip())


class SingleTurnDataset(Dataset, SingleTurnEnv):
    """A dataset whose groups are one request each: a prompt of messages, and one reply."""

    def prompt(self, task: Task) -> list[Message]:
        return self.records.pictures.filled_in(task.data["prompt"])

    async def score(self, task: Task, text: str) -> RolloutResult:
        sample = self._sample(task, None)
        sample.response, sample.status = text, Status.COMPLETED
        return await checked_score(await self._reward_of(sample), f"environment {self.name}: score")


def _keys_of(record: Mapping[str, Any], wanted: str) -> str:
    """What a record has, and which of it may have been meant."""
    near = difflib.get_close_matches(wanted, record, n=1)
    meant = f"did you mean {near[0]!r}?" if near else "name one of them"
    return f"the record has {', '.join(sorted(record))}; {meant}" if record else "the record has nothing"


def build_arguments(settings: DatasetSettings, run: RunInfo) -> Arguments:
    """`args` of hooks: what they may know of the run."""
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
    """The sampling settings of this rollout, by vime's names."""
    sampling = ctx.sampling
    assert sampling is not None, "checked when the environment was built"
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "max_new_tokens": sampling.max_completion_tokens,
    }


def is_comparable(label: Any) -> bool:
    """Can a reply equal this label? True for text and finite numbers; parquet columns with gaps hold NaN."""
    return isinstance(label, str | int) or (isinstance(label, float) and math.isfinite(label))


def _as_json(row: dict[str, Any], where: str) -> bytes:
    """A record as JSON, which is the form in which the ledger stores it.

    Raises: DataError for values that JSON cannot hold, such as dates and bytes of parquet files.
    """
    try:
        return json.dumps(row).encode()
    except (TypeError, ValueError) as cause:
        raise DataError(
            f"{where}: {cause}; prompt, label, metadata and tools hold text, numbers, lists and objects only"
        ) from None


def as_samples(returned: Any) -> list[Sample]:
    """The return value of `generate` as a list of samples.

    Raises: EnvError if it is no sample, or the fields of one do not fit together.
    """
    samples = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise EnvError(
            f"generate returned {type(returned).__name__}; return the sample, or a list of samples"
        )
    for sample in samples:
        sample.check()
    return samples
