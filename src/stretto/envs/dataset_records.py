"""The arguments of the environment `dataset`, and its records: read, and checked against the arguments."""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from stretto import addons
from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.data.image_columns import column_of, with_images
from stretto.data.messages import parse_messages, parse_tools, refuse_unread, short_repr
from stretto.data.pictures import image_parts
from stretto.data.records import read_records
from stretto.data.values import checked_json, refuse_surrogates
from stretto.envs.base import Message, NeedsTokenizer, RunInfo, Split
from stretto.envs.picture_store import Pictures
from stretto.envs.rewards.builtin import scored_by
from stretto.vime.arguments import Arguments
from stretto.vime.reward_types import BOXED, LABELLED, RM_TYPES, WITH_ENTRIES, is_rm_type

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32

logger = logging.getLogger(__name__)

BY_RECORD = "by_record"
"""The reward that the metadata of each record names as `rm_type`."""
GIVEN = "given"
"""The function that makes a sample also rewards it."""
TYPE_NAMES = {
    "str | list[str] | None": "a file, or a list of files",
    "list[str] | str | None": "a key, or a list of keys",
    "str": "text",
    "str | None": "text",
    "bool": "true or false",
    "int | None": "a whole number > 0",
    "dict[str, Any] | None": "a table",
    "dict[str, float] | None": "a table of weights by reward, such as { math = 1.0 }",
    "list[str] | None": "a list of texts",
}
"""What an error message calls the types of arguments."""
_LOOKED_AT = 100
"""First records of a split whose prompts are rendered, to refuse with its place what the model cannot take."""


@dataclass(frozen=True)
class DatasetSettings:
    """The arguments of the environment `dataset`."""

    path: str | list[str] | None = None
    """File, `file@[a:b]`, directory, data set of the Hub `ORG/NAME:CONFIG[SPLIT]`, or a list of these; None if the
    environment is for evals only."""
    eval_path: str | list[str] | None = None
    """Held-out records, written like `path`."""
    data_source: str | None = None
    """`module:Class`: a source of samples in vime's terms, instead of `path`; it is read once, as the run starts."""
    streaming: bool = False
    """Data sets of the Hub are read without a copy on disk."""
    convert: str | None = None
    """`module:function`: it gets each record before its keys are read, and returns the record to use."""
    input_key: str = "prompt"
    label_key: str | None = "label"
    metadata_key: list[str] | str | None = "metadata"
    """Key of an object, or a list of keys that become one."""
    tool_key: str | None = "tools"
    image_key: str | None = None
    """Key of the images, one or a list; None: `images` and `image`. A message shows the next one at `<image>`."""
    prompt_template: str | None = None
    """Text of the prompt; `{prompt}` in it is replaced by the prompt of the record."""
    label_pattern: str | None = None
    """Regular expression with one group; the label is what the group matches in the label of the record."""
    apply_chat_template: bool = True
    """False: a prompt is text, and the policy gets its tokens and nothing else."""
    max_prompt_tokens: int | None = None
    """Longer prompts are skipped."""
    shuffle: bool = True
    """True: a new order in every epoch. False: the order of the files."""
    reward: str = "exact"
    """`exact` (the reply equals the label), `math` (the content of its last box equals the label as mathematics, see
    docs/data.md), another of rewards/builtin.py (`dapo`, `deepscaler`, `f1`, `gpqa`, `ifbench`, `remote_rm`, `random`;
    `boxed_` before it: the last box is the reply), `models.NAME` (the score of the reward model [models.NAME]),
    `by_record` (the one that `metadata.rm_type` names), `given` (`generate`, or a rollout function, sets
    sample.reward), or `module:function`: `rm(args, sample)`."""
    rewards: dict[str, float] | None = None
    """Several rewards instead of `reward`: weights by name, or by `module:function`. The reward is the weighted sum."""
    group_reward: bool = False
    """The function gets all samples of a group at once, `rm(args, samples)`, and returns one reward for each."""
    reward_key: str | None = None
    """Entry to use if the reward is a dictionary."""
    generate: str | None = None
    """`module:function`: `generate(args, sample, sampling_params)` generates the reply."""
    sample_hooks: list[str] | None = None
    """`module:function` each: `hook(args, sample, *, rollout_id, evaluation)` sees every finished sample, and may
    return another."""
    metadata_overrides: dict[str, Any] | None = None
    """Entries that replace those of every record's metadata."""
    hook_args: dict[str, Any] | None = None
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
            raise ConfigError("dataset: prompt_template has no {prompt}, in the place of the record's prompt; add it")
        self.check_label_pattern()
        self.check_rewards()

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The rewards that are computed."""
        return (self.reward,) if self.rewards is None else tuple(self.rewards)

    def check_rewards(self) -> None:
        """Raises: ConfigError for weights that are none, or with keys that are about a single reward."""
        if self.rewards is None:
            return
        wrong = [name for name, weight in self.rewards.items() if not math.isfinite(weight) or weight == 0]
        if not self.rewards or wrong:
            which = f"the weight of {wrong[0]!r} is {self.rewards[wrong[0]]}" if wrong else "it is empty"
            raise ConfigError(f"dataset: rewards: {which}; give weights that are not 0, as in {{ math = 1.0 }}")
        if named := [name for name in self.rewards if name in (BY_RECORD, GIVEN, "random")]:
            raise ConfigError(f"dataset: rewards: {named[0]!r} is not one of several; use reward for it")
        if self.reward != "exact" or self.group_reward:
            key = "group_reward" if self.group_reward else f'reward = "{self.reward}"'
            raise ConfigError(f"dataset: {key} does nothing beside rewards; leave one of them out of `args`")

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


class Records:
    """The records of both splits, read and checked, and the tokenizer of the run."""

    def __init__(self, settings: DatasetSettings, run: RunInfo, args: Arguments) -> None:
        """args: of the user's data source, if there is one.

        Raises: ConfigError for arguments that do not fit; DataError for records that do not fit; EnvError for whatever
        the data source raises.
        """
        self.settings, self.run = settings, run
        needs = {
            "max_prompt_tokens": settings.max_prompt_tokens is not None,
            "apply_chat_template = false": not settings.apply_chat_template,
            "generate": settings.generate is not None,
        }
        if run.encode is None and (names := [name for name, is_set in needs.items() if is_set]):
            raise NeedsTokenizer(
                f"dataset: {' and '.join(names)} needs the policy's tokenizer, which neither worker processes nor "
                'engines with the chat API have; remove num_workers, or client.api = "chat"'
            )
        if settings.group_reward and not run.engine_urls:
            raise ConfigError(
                "dataset: group_reward needs all samples of a group, but a worker process has only one; remove "
                "num_workers"
            )
        if not settings.path and not settings.eval_path and settings.data_source is None:
            raise ConfigError("dataset: name a file as path, or for evals as eval_path, in `args`")
        if settings.path and settings.data_source is not None:
            raise ConfigError("dataset: path and data_source both give the records; leave one of them out of `args`")
        if settings.data_source is not None and not settings.eval_path:
            given = {"streaming": settings.streaming, "convert": settings.convert is not None}
            if unused := [name for name, is_given in given.items() if is_given]:
                raise ConfigError(
                    f"dataset: {' and '.join(unused)} in `args`: data_source has no file to read so; leave it out"
                )
        self.pictures = Pictures()  # all that are not files
        self.fingerprints: dict[Split, int] = {"train": 0, "eval": 0}
        of_samples = None
        if settings.data_source is not None:
            read_source = addons.load("stretto.hooks", "data_source", "dataset: data_source")
            of_samples = self._rows_of("dataset: data_source", read_source(settings, args), "train")
        self._rows: dict[Split, list[dict[str, Any]] | None] = {
            "train": of_samples or self._read(settings.path, "train"),
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

    def _num_tokens(self, row: dict[str, Any], where: str) -> int:
        """Tokens of a row's prompt; 0 without the policy's tokenizer.

        Raises: DataError and others of ours, with the row's place, if the model cannot take the prompt.
        """
        try:
            tokens = self.prompt_ids(row["prompt"], row["tools"])
        except StrettoError as cause:
            raise type(cause)(f"{where}: {cause}") from cause
        return 0 if tokens is None else len(tokens)

    def prompt_ids(self, prompt: str | list[Message], tools: list[dict] | None) -> Int32[np.ndarray, " tokens"] | None:
        """int32 tokens of a prompt as the policy gets it; None if its tokenizer is not available here."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if self.run.prompt_ids is None:
            return None
        return self.run.prompt_ids(self.pictures.restore(prompt), tools)

    def _read(self, sources: str | list[str] | None, split: Split) -> list[dict[str, Any]] | None:
        if not sources:
            return None
        setting = "dataset: " + {"train": "path", "eval": "eval_path"}[split]
        is_streamed, convert = self.settings.streaming, self.settings.convert
        files = [sources] if isinstance(sources, str) else sources
        records = itertools.chain.from_iterable(
            read_records(source, setting, is_streamed=is_streamed, convert=convert) for source in files
        )
        return self._rows_of(setting, records, split)

    def _rows_of(
        self, setting: str, records: Iterable[tuple[str, dict[str, Any]]], split: Split
    ) -> list[dict[str, Any]]:
        """The rows of records that are not too long; each changes the fingerprint of the split."""
        found, num_long, limit = [], 0, self.settings.max_prompt_tokens
        for number, (where, record) in enumerate(records):
            row = self._row(record, where)
            encoded = _as_json(row, where)  # first: a tokenizer refuses some texts without saying where
            if limit is not None or (number < _LOOKED_AT and not _has_images(row)):
                num_tokens = self._num_tokens(row, where)
                if limit is not None and num_tokens > limit:
                    num_long += 1
                    continue
            found.append(row)
            self.fingerprints[split] = zlib.crc32(encoded, self.fingerprints[split])
        if not found and not num_long:
            raise DataError(f"{setting}: it has no record")
        if not found:
            raise DataError(f"{setting}: all {num_long} prompts are longer than max_prompt_tokens = {limit}; raise it")
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
            raise DataError(f"{where}: no {settings.input_key!r} (input_key); {_keys_of(record, settings.input_key)}")
        label = None if settings.label_key is None else record.get(settings.label_key)
        if settings.label_pattern is not None and label is not None:
            label = self._label_within(label, where)
        metadata = self._metadata(record, where) | (settings.metadata_overrides or {})
        names = settings.reward_names if settings.rewards else (self._reward_name(metadata, where),)
        if reward := next((name for name in names if name.removeprefix(BOXED) in ("exact", *LABELLED)), ""):
            rule = f'reward = "{reward}" compares replies with it'
            if label is None:
                raise DataError(
                    f"{where}: no {settings.label_key!r} (label_key); {rule}; "
                    f"{_keys_of(record, settings.label_key or '')}"
                )
            if not is_comparable(label):
                raise DataError(
                    f"{where}: {settings.label_key!r} must be text or a number, got {short_repr(label)}; {rule}"
                )
        tools = None
        if settings.tool_key is not None:
            tools = parse_tools(record.get(settings.tool_key), settings.tool_key, where)
        prompt = self._prompt(record[settings.input_key], where)
        images = column_of(record if settings.image_key is None else {"images": record.get(settings.image_key)})
        if isinstance(prompt, str) and images:
            raise DataError(f"{where}: with apply_chat_template = false prompts are text, without images")
        named = settings.metadata_key if isinstance(settings.metadata_key, list) else [settings.metadata_key]
        read = (settings.input_key, settings.label_key, settings.tool_key, settings.image_key, *named)
        refuse_unread(record, prompt, read, where)
        if not isinstance(prompt, str):
            prompt = self.pictures.replace_by_names(with_images(prompt, images, where), where)
        return {"prompt": prompt, "label": label, "metadata": metadata, "tools": tools}

    def _reward_name(self, metadata: Mapping[str, Any], where: str) -> str:
        """The reward of a record, by its metadata or by the settings.

        Raises: DataError if its metadata names an unknown reward, or has to name one and does not.
        """
        reward, named = self.settings.reward, metadata.get("rm_type")
        if reward != BY_RECORD and (named is None or not is_rm_type(reward)):
            return reward
        if isinstance(named, str) and is_rm_type(named):
            return named
        known = ", ".join(RM_TYPES)
        raise DataError(
            f"{where}: metadata.rm_type is {short_repr(named)}, and it says how the reply is rewarded; use {known}"
        )

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
            way = "remove this record" if prompt in ("", [], None) else "write it as text, in quotes"
            got = "null" if prompt is None else short_repr(prompt)
            raise DataError(f"{where}: {settings.input_key!r} must be text or a list of messages, got {got}; {way}")
        messages = parse_messages(prompt, settings.input_key, where)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: {settings.input_key}[{len(messages) - 1}] is an assistant message; a prompt ends where the "
                "policy replies, so remove it (it may be the label)"
            )
        # step_loss_mask is for SFT and has no meaning in prompts.
        return [{k: v for k, v in message.items() if k != "step_loss_mask"} for message in messages]


def is_built_in(reward: str) -> bool:
    """Does the environment itself compute this reward, instead of a user's function?"""
    return reward in ("exact", BY_RECORD) or is_rm_type(reward) or scored_by(reward) is not None


def has_entries(reward: str) -> bool:
    """May a built-in reward be a dictionary?"""
    return reward == BY_RECORD or reward.removeprefix(BOXED) in WITH_ENTRIES


def _keys_of(record: Mapping[str, Any], missing: str) -> str:
    """For messages: the keys of a record, and the one that is most like the missing key."""
    if missing in record:
        return "it is null: give it a value in every record, or remove this one"
    near = difflib.get_close_matches(missing, record, n=1)
    meant = f"did you mean {near[0]!r}?" if near else "name one of them"
    first, dot, rest = missing.partition(".")
    if dot and isinstance(record.get(first), Mapping):
        meant = f"keys below {first!r} are not named by dots; give a function as `convert` that takes out {rest!r}"
    return f"the record has {', '.join(sorted(record))}; {meant}" if record else "the record has nothing"


def is_comparable(label: Any) -> bool:
    """Can a reply equal this label? True for text and finite numbers; parquet columns with gaps hold NaN."""
    return isinstance(label, str | int) or (isinstance(label, float) and math.isfinite(label))


def _has_images(row: dict[str, Any]) -> bool:
    return not isinstance(row["prompt"], str) and any(image_parts(row["prompt"]))


def _as_json(row: dict[str, Any], where: str) -> bytes:
    """A record as JSON, which is the form in which the ledger stores it.

    Raises: DataError for values that JSON cannot hold, such as dates and bytes of parquet files.
    """
    refuse_surrogates(row, where)
    return json.dumps({key: checked_json(value, f"{where}: {key}", DataError) for key, value in row.items()}).encode()
