"""Examples for supervised fine-tuning: read, rendered to tokens, drawn in order, packed.

The input is files (`messages`, or `prompt` and `completion`) or an environment's solutions, the output lists of
`MicroBatch`. All rows are checked before training starts; errors name file and line. The order depends only on the
seed and on the number of examples drawn so far, so that this number is all that a resumed run needs.
"""

from __future__ import annotations

import itertools
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from stretto.base.errors import ConfigError, DataError, EnvError, StrettoError
from stretto.base.foreign import guarded
from stretto.chat.backend import Message
from stretto.chat.render import Renderer, SftRendering
from stretto.config.root import SFTConfig
from stretto.config.sections.sft import Data, EnvData, FileData, LossMaskSection, PreferenceData
from stretto.config.sections.trainer import LinearScheduler, num_steps
from stretto.data.image_columns import column_of, with_images
from stretto.data.messages import check_column, columns_of, parse_messages, parse_tools, refuse_unread
from stretto.data.records import read_records
from stretto.envs.base import load_environment
from stretto.records.images import Image
from stretto.records.row_packing import pack_rows
from stretto.records.sample import MicroBatch, images_by_document

logger = logging.getLogger(__name__)

T = TypeVar("T")

INPUT_NAMES = ("prompt", "question", "instruction", "input", "query", "problem")
OUTPUT_NAMES = ("completion", "response", "answer", "output", "solution")
"""Keys under which rows for other programs hold question and reply."""


@dataclass(frozen=True)
class Row:
    """One conversation, and its source (`file:line`)."""

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Example:
    """One conversation as tokens. The first token is never trained: no token predicts it."""

    token_ids: np.ndarray  # int32 [tokens]
    is_trained: np.ndarray  # bool [tokens]
    images: tuple[Image, ...] = ()  # in the order of their placeholders


class Rows(Protocol):
    """What a run of `sft` trains on, as tokens: examples, or rows that an add-on has."""

    @property
    def num_tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def fingerprint(self) -> int:
        """A checksum of all tokens and masks."""
        ...


@dataclass(frozen=True)
class Examples:
    """All examples to train on, and how many were truncated or dropped."""

    examples: tuple[Example, ...]
    num_truncated: int
    num_dropped: int
    """Examples without a trained token (no message of a trained role within seq_len)."""
    num_left_out: int = 0
    """Replies that the chat template does not show as the model would sample them."""
    why: str = ""
    """The place of the first of these, what of it is not shown, and what to do."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    @property
    def num_tokens(self) -> int:
        return sum(len(example.token_ids) for example in self.examples)

    def fingerprint(self) -> int:
        """A checksum of all tokens and masks, to check that a resumed run has the same data."""
        crc = len(self.examples)
        for example in self.examples:
            crc = zlib.crc32(example.is_trained.data, zlib.crc32(example.token_ids.data, crc))
            for image in example.images:
                crc = zlib.crc32(image.hash.encode(), crc)
        return crc


def load_examples(
    data: Data, renderer: Renderer, loss_mask: LossMaskSection, max_tokens: int, seed: int, *, limit: str = "seq_len"
) -> Examples:
    """Read, check and render all rows; examples are truncated to max_tokens, which the key `limit` says.

    Raises: DataError with file and line of a malformed row, or when no row has a trained token.
    """
    parts = [_load_part(rows, renderer, loss_mask, max_tokens, limit) for rows in read_sources(data, seed)]
    mixed = parts[0].examples
    if isinstance(data, FileData) and parts[1:]:
        mixed = mix([part.examples for part in parts], data.probabilities, data.stopping_strategy)
    truncated, dropped, left_out = (
        sum(getattr(p, f"num_{what}") for p in parts) for what in ("truncated", "dropped", "left_out")
    )
    why = next((part.why for part in parts if part.why), "")
    examples = Examples(mixed, truncated, dropped, left_out, why)
    if examples.num_truncated or examples.num_dropped:
        logger.warning(
            "%d of %d examples were truncated to %d tokens; %d rows were dropped because they have no trained token",
            examples.num_truncated,
            sum(map(len, parts)),
            max_tokens,
            examples.num_dropped,
        )
    if examples.num_left_out:
        logger.warning("%d replies are not trained; the first is %s", examples.num_left_out, examples.why)
    return examples


def mix(
    parts: Sequence[tuple[T, ...]], shares: Sequence[float] | Literal["equal"] | None, strategy: str
) -> tuple[T, ...]:
    """The examples of an epoch from several data sets; those of small data sets may be repeated.

    shares: the share of each data set in an epoch; None: every example once.
    """
    if shares is None:
        return tuple(example for part in parts for example in part)
    weights = [1 / len(parts)] * len(parts) if shares == "equal" else list(map(float, shares))
    ends = [len(part) / weight for part, weight in zip(parts, weights)]
    total = max(ends) if strategy == "all_exhausted" else min(ends)
    counts = [max(1, round(total * weight)) for weight in weights]
    return tuple(part[i % len(part)] for part, count in zip(parts, counts) for i in range(count))


def _load_part(
    rows: Iterator[Row], renderer: Renderer, loss_mask: LossMaskSection, max_tokens: int, limit: str
) -> Examples:
    """The examples of one file or data set."""
    examples: list[Example] = []
    num_truncated = num_dropped = num_left_out = 0
    where, why = "the data", ""
    for row in rows:
        where = row.where
        rendered = render_row(row, renderer, loss_mask)
        num_left_out += rendered.num_left_out
        why = why or (rendered.why and f"{row.where}: {rendered.why}")
        num_dropped += not rendered.examples
        for part in rendered.examples:
            ids, mask = part.token_ids, part.is_trained.copy()
            images = renderer.images_of(row.messages[: part.num_messages])
            if is_truncated := len(ids) > max_tokens:
                mask[renderer.last_cut(ids, images, max_tokens) :] = False
            mask[:1] = False
            if not mask.any():
                num_dropped += 1
                continue
            num_truncated += is_truncated
            # Tokens after the last trained one cannot change the loss.
            end = int(np.flatnonzero(mask)[-1]) + 1
            images = renderer.images_within(ids, images, end)
            examples.append(Example(ids[:end].copy(), mask[:end].copy(), images))
    if not examples:
        way = f"the first: {why}" if why else f"check [loss_mask] and {limit} = {max_tokens}."
        raise DataError(f"{where}: no row has a token to train on ({num_dropped} rows read); {way}")
    return Examples(tuple(examples), num_truncated, num_dropped, num_left_out, why)


def render_row(row: Row, renderer: Renderer, loss_mask: LossMaskSection) -> SftRendering:
    """The tokens of a row, and which of them are trained: one example, or one per branch.

    Raises: DataError, ConfigError with the row's file and line if the model cannot take it.
    """
    try:
        renderer.refuse_rendered(row.messages, "give messages, or the text of the question alone")
        return renderer.render_sft(row.messages, loss_mask, row.tools)
    except StrettoError as cause:
        raise type(cause)(f"{row.where}: {cause}") from cause
    except (KeyError, TypeError, ValueError) as cause:
        raise DataError(f"{row.where}: cannot be rendered: {type(cause).__name__}: {cause}") from cause


def read_rows(data: Data, seed: int) -> Iterator[Row]:
    """The conversations of a data section, in order."""
    return itertools.chain.from_iterable(read_sources(data, seed))


def read_sources(data: Data, seed: int) -> list[Iterator[Row]]:
    """The conversations of every file or data set of a data section."""
    match data:
        case FileData():
            return [_rows_of(data, source) for source in data.sources]
        case EnvData():
            return [_rows_of_environment(data, seed)]
        case PreferenceData():
            raise AssertionError("pairs are read by the add-on that trains on them")


def _rows_of(data: FileData, source: str) -> Iterator[Row]:
    for where, record in read_records(source, "[data] name", is_streamed=data.streaming, convert=data.convert):
        row = parse_row(_renamed(record, data, where), where, data)
        read = (data.input_key, data.output_key, data.tool_key)
        refuse_unread(record, row.messages, read, where)
        yield row


def _rows_of_environment(data: EnvData, seed: int) -> Iterator[Row]:
    env = load_environment(data.id, data.args)
    if not hasattr(env, "sft_rows"):
        raise ConfigError(f"[data] environment {data.id!r} has no sft_rows: it cannot solve its own tasks.")
    with guarded(EnvError, f"[data] environment {data.id!r}: sft_rows"):
        rows = list(env.sft_rows(data.num_rows, seed))
    if not rows:
        raise EnvError(
            f"[data] environment {data.id!r}: sft_rows({data.num_rows}, {seed}) returned no row. It is called as "
            'sft_rows(num_rows, seed), and returns num_rows times {"messages": [...]}'
        )
    for i, row in enumerate(rows):
        yield parse_row(row, f"environment {data.id}, row {i}")


def _renamed(record: dict[str, Any], data: FileData, where: str) -> dict[str, Any]:
    """The record with its conversation and tools under the keys that `parse_row` reads."""
    tools = record.get(data.tool_key)
    prompt_key = data.input_key or ("prompt" if data.output_key is not None else None)
    for key, setting in ((prompt_key, "input_key"), (data.output_key, "output_key")):
        if key is not None:
            check_column(record, key, setting, where)
    if data.output_key is not None:
        assert prompt_key is not None
        columns = {"prompt": record[prompt_key], "completion": record[data.output_key], "tools": tools}
        return columns | column_of(record)
    if data.input_key is None:
        return record if tools is None else record | {"tools": tools}
    messages = parse_messages(record[data.input_key], data.input_key, where)
    return {"messages": messages, "tools": tools} | column_of(record)


def parse_row(row: Any, where: str, data: FileData | None = None) -> Row:
    """Parse a row with `messages`, or with `prompt` and `completion`.

    data: what names the columns that these were, for messages. Raises: DataError if it is malformed.
    """
    pair, tool_key = ("prompt", "completion"), "tools" if data is None else data.tool_key
    if data is not None and data.output_key is not None:
        pair = (data.input_key or "prompt", data.output_key)
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object, got {type(row).__name__}.")
    if row.get("messages") is not None:
        messages = parse_messages(row["messages"], "messages", where)
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = [
            *parse_messages(row["prompt"], pair[0], where, role_of_text="user"),
            *parse_messages(row["completion"], pair[1], where, role_of_text="assistant"),
        ]
    else:
        for key in ("prompt", "completion") if {"prompt", "completion"} <= row.keys() else ("messages",):
            if key in row:
                check_column(row, key, "", where)
        raise DataError(
            f"{where}: a row needs `messages`, or `prompt` and `completion`; it has {columns_of(row)}. "
            f"{_keys_to_name(row)}"
        )
    messages = with_images(messages, row, where)
    return Row(where, messages, parse_tools(row.get("tools"), tool_key, where))


def _keys_to_name(row: Mapping[str, Any]) -> str:
    """How to name the keys of a row that is written for other programs."""
    if isinstance(row.get("conversations"), list):
        return "Rename conversations to messages, and in each of them `from` to `role` and `value` to `content`."
    found = [next((key for key in keys if row.get(key)), None) for keys in (INPUT_NAMES, OUTPUT_NAMES)]
    if found == ["instruction", "output"] and row.get("input"):
        return (
            "instruction and input are the question: join the two as `prompt` by the function that data.convert names."
        )
    if None not in found:
        return f'Here that is data.input_key = "{found[0]}" and data.output_key = "{found[1]}".'
    return "Other keys are named by data.input_key and data.output_key."


class ExampleOrder:
    """The order of examples: a new shuffle every epoch; batches may cross epochs.

    `num_drawn` is the whole state.
    """

    def __init__(self, num_examples: int, seed: int, num_drawn: int = 0, *, is_shuffled: bool = True):
        """is_shuffled: False keeps the examples in their order in every epoch."""
        self.num_examples, self._is_shuffled = num_examples, is_shuffled
        self.seed = seed
        self.num_drawn = num_drawn
        self._shuffled: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the data so far, with a fraction."""
        return self.num_drawn / self.num_examples

    def draw(self, count: int) -> list[int]:
        """Indices of the next examples."""
        drawn = []
        for number in range(self.num_drawn, self.num_drawn + count):
            epoch, position = divmod(number, self.num_examples)
            drawn.append(int(self._permutation(epoch)[position]) if self._is_shuffled else position)
        self.num_drawn += count
        return drawn

    def upcoming(self, count: int) -> set[int]:
        """Indices of the next examples, without drawing them."""
        seen = ExampleOrder(self.num_examples, self.seed, self.num_drawn, is_shuffled=self._is_shuffled)
        return set(seen.draw(min(count, 2 * self.num_examples)))  # two epochs have every example at any position

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._shuffled is None or self._shuffled[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)
            self._shuffled = (epoch, order)
        return self._shuffled[1]


def pack(examples: Sequence[Example], row_tokens: int) -> list[MicroBatch]:
    """Pack examples into rows of at most row_tokens tokens, first-fit-decreasing; no example is split.

    The documents of a row are sorted by length, so that attention computes equal ones in one call.
    """
    lengths = np.array([len(example.token_ids) for example in examples], np.int64)
    assert lengths.max(initial=0) <= row_tokens, f"example of {lengths.max()} tokens in rows of {row_tokens}"
    rows = pack_rows(lengths, row_tokens)
    return [micro_batch_of([examples[i] for i in row], map(str, row)) for row in rows]


def micro_batch_of(examples: Sequence[Example], sample_ids: Iterable[str]) -> MicroBatch:
    """A micro batch with the ce component only: no token was sampled by a policy, so loss_mask is False."""
    token_ids = np.concatenate([example.token_ids for example in examples])
    zeros = np.zeros(len(token_ids), np.float32)
    return MicroBatch(
        token_ids=token_ids,
        cu_seqlens=np.cumsum([0, *(len(example.token_ids) for example in examples)]).astype(np.int32),
        loss_mask=np.zeros(len(token_ids), bool),
        logprobs=zeros,
        advantages=zeros,
        temperatures=np.ones(len(token_ids), np.float32),
        sample_ids=tuple(sample_ids),
        envs=("sft",) * len(examples),
        ce_weights=np.concatenate([example.is_trained for example in examples]).astype(np.float32),
        **images_by_document([example.images for example in examples]),
    )


# -- how long a run is --


def find_last_step(cfg: SFTConfig, num_examples: int, step: int = 0, num_drawn: int = 0) -> int:
    """The last step: max_steps, or the step that ends max_epochs if that is earlier.

    step, num_drawn: steps done and examples drawn so far. The last batch may be smaller than the others.
    """
    by_epochs = by_steps = math.inf
    if cfg.max_epochs is not None:
        num_left = max(0, cfg.max_epochs * num_examples - num_drawn)
        by_epochs = step + math.ceil(num_left / cfg.batch_size)
    if cfg.max_steps is not None:
        by_steps = cfg.max_steps
    return int(min(by_epochs, by_steps))


def check_schedule(cfg: SFTConfig, num_examples: int, last_step: int) -> None:
    """Check that a schedule that falls fits into the steps of a run whose epochs end it; rules check max_steps.

    Raises: ConfigError.
    """
    scheduler = cfg.scheduler
    if cfg.max_epochs is None or scheduler.type == "constant":
        return
    warmup, decay, keys = num_steps(scheduler.warmup_steps, last_step), 1, f"warmup_steps = {scheduler.warmup_steps}"
    if isinstance(scheduler, LinearScheduler):
        decay = num_steps(scheduler.decay_steps, last_step)
        keys = f"warmup_steps + decay_steps = {scheduler.warmup_steps} + {scheduler.decay_steps}"
    if decay and warmup + decay > last_step:
        raise ConfigError(
            f"[scheduler] {keys}, but max_epochs = {cfg.max_epochs} of {num_examples:,} examples in batches of "
            f"{cfg.batch_size:,} are {last_step} step{'s' * (last_step != 1)}; lower them, or give shares such as 0.1"
        )
