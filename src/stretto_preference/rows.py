"""Preference pairs: read, rendered to tokens, packed with both replies of a pair in one row.

A row of data has a prompt, a better and another reply, in the forms that TRL reads: messages, or texts; without a
prompt the replies are whole conversations. `DPO` trains the replies' tokens; a reward model is read at the end of the
whole conversation, as the chat template shows it. A row may say of a reply that it was cut (`chosen_is_cut`): it was
sampled without its end, which is then not trained. A pair is one item, so nothing splits it; a document is one reply
with its prompt, the better one first.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.base.errors import DataError, StrettoError
from stretto.chat.backend import Message
from stretto.chat.render import Renderer
from stretto.chat.tokenizer import END_OF_TEXT, Tokenizer
from stretto.config.sections.sft import LossMaskSection, PreferenceData, RewardSection
from stretto.data.image_columns import with_images
from stretto.data.messages import check_column, parse_messages, parse_tools, refuse_unread
from stretto.data.records import read_records
from stretto.records.images import Image
from stretto.records.row_packing import pack_rows
from stretto.records.sample import MicroBatch
from stretto_sft.rows import Example, micro_batch_of, mix

if TYPE_CHECKING:
    from jaxtyping import Bool, Float64, Int32

    from stretto.config.root import SFTConfig

logger = logging.getLogger(__name__)

STEP_MASK = "step_loss_mask"


@dataclass(frozen=True)
class PairRow:
    """One row of data, and its source (`file:line`); the replies are messages, or texts that are tokens as they are."""

    where: str
    prompt: list[Message] | str
    replies: tuple[list[Message], list[Message]] | tuple[str, str]
    tools: list[dict[str, Any]] | None = None
    margin: float = 0.0
    is_cut: tuple[bool, bool] = (False, False)
    """Whether a reply was sampled without its end."""


@dataclass(frozen=True)
class Pair:
    """Two replies as tokens, the better one first; of each, the last token is one that is trained or scored."""

    replies: tuple[Example, Example]
    margin: float = 0.0

    def __len__(self) -> int:
        """Tokens of both."""
        return sum(len(each.token_ids) for each in self.replies)


@dataclass(frozen=True)
class Pairs:
    """All pairs to train on."""

    examples: tuple[Pair, ...]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Pair:
        return self.examples[index]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.examples))

    def fingerprint(self) -> int:
        """A checksum of all tokens, masks and margins, to check that a resumed run has the same data."""
        crc = len(self.examples)
        for pair in self.examples:
            crc = zlib.crc32(np.float64(pair.margin).tobytes(), crc)
            for example in pair.replies:
                crc = zlib.crc32(example.is_trained.data, zlib.crc32(example.token_ids.data, crc))
                for image in example.images:
                    crc = zlib.crc32(image.hash.encode(), crc)
        return crc


@dataclass(frozen=True)
class PairBatch:
    """A packed row: documents 2 i and 2 i + 1 are the replies of its pair i."""

    micro_batch: MicroBatch
    indices: np.ndarray  # int64 [pairs], of each pair among all
    margins: np.ndarray  # float32 [pairs]
    reference: np.ndarray | None = None  # float64 [pairs, 2]: the replies' log-probabilities under the reference, nats

    @property
    def num_tokens(self) -> int:
        return self.micro_batch.num_tokens


# -- reading --


def read_pair_rows(data: PreferenceData) -> list[Iterator[PairRow]]:
    """The rows of every file or data set, in order."""
    return [_rows_of(data, source) for source in data.sources]


def _rows_of(data: PreferenceData, source: str) -> Iterator[PairRow]:
    for where, record in read_records(source, "[data] name", is_streamed=data.streaming, convert=data.convert):
        yield parse_pair(record, data, where)


def parse_pair(record: Any, data: PreferenceData, where: str) -> PairRow:
    """Parse a row of data.

    Raises: DataError if it is malformed.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: a row must be an object, got {type(record).__name__}.")
    for key, setting in ((data.chosen_key, "chosen_key"), (data.rejected_key, "rejected_key")):
        check_column(record, key, f"data.{setting}", where)
    prompt, chosen, rejected = (record.get(key) for key in (data.prompt_key, data.chosen_key, data.rejected_key))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: {data.chosen_key} and {data.rejected_key} must both be messages, or both texts.")
    margin = _margin(record.get(data.margin_key), data.margin_key, where)
    is_cut = _is_cut(record, data.chosen_key, where), _is_cut(record, data.rejected_key, where)
    if data.text == "raw":
        return replace(_raw_row(prompt, chosen, rejected, data, where, margin), is_cut=is_cut)
    tools = parse_tools(record.get(data.tool_key), data.tool_key, where)
    if prompt is None and isinstance(chosen, str):
        raise DataError(
            f"{where}: no {data.prompt_key!r} (data.prompt_key), and {data.chosen_key} is text. If the texts hold the "
            'whole conversation, set data.text = "raw"; else name the prompt\'s key.'
        )
    replies = tuple(
        parse_messages(value, key, where, role_of_text="assistant")
        for value, key in ((chosen, data.chosen_key), (rejected, data.rejected_key))
    )
    # Some data sets have the prompt as text, and again at the beginning of both conversations.
    is_repeated = isinstance(prompt, str) and not isinstance(chosen, str) and replies[0][0]["role"] != "assistant"
    if prompt is None or is_repeated:
        start = _common(*replies)
        if not start or start in map(len, replies):
            what = "are the same, or one begins the other" if start else "begin with different messages"
            raise DataError(
                f"{where}: {data.chosen_key} and {data.rejected_key} {what}, so no prompt and two replies can be told "
                f"apart; give the prompt as {data.prompt_key!r}."
            )
        messages, replies = replies[0][:start], tuple(each[start:] for each in replies)
    else:
        messages = parse_messages(prompt, data.prompt_key, where, role_of_text="user")
    read = (data.prompt_key, data.chosen_key, data.rejected_key, data.tool_key, data.margin_key)
    refuse_unread(record, messages, read, where)
    shown = with_images([*messages], record, where)
    return PairRow(where, shown, (replies[0], replies[1]), tools, margin, is_cut)


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
    shortest = min(len(first), len(second))
    return next((i for i in range(shortest) if first[i] != second[i]), shortest)


def _margin(value: Any, key: str, where: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise DataError(f"{where}: {key} must be a number, got {value!r} (data.margin_key).")
    return float(value)


def _is_cut(record: dict[str, Any], key: str, where: str) -> bool:
    """What the row says of the reply `key`: whether it was cut, False without a word."""
    value = record.get(name := f"{key}_is_cut")
    if value is None or isinstance(value, bool):
        return bool(value)
    raise DataError(f"{where}: {name} must be true or false, got {value!r}: whether the reply {key!r} was cut.")


def _raw_row(prompt: Any, chosen: Any, rejected: Any, data: PreferenceData, where: str, margin: float) -> PairRow:
    """A row of texts that are the model's tokens as they are."""
    for value, key in ((prompt or "", data.prompt_key), (chosen, data.chosen_key), (rejected, data.rejected_key)):
        if not isinstance(value, str):
            raise DataError(f'{where}: {key} must be text with data.text = "raw", got {type(value).__name__}.')
    if prompt is None:
        start = _common(chosen, rejected)
        # As TRL: a space at the end belongs to the replies, because tokens begin with it.
        start -= start > 0 and chosen[start - 1] == " "
        if not start:
            raise DataError(
                f"{where}: {data.chosen_key} and {data.rejected_key} begin with different text, so they have no "
                f"prompt; give it as {data.prompt_key!r}."
            )
        prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
    return PairRow(where, prompt, (chosen, rejected), None, margin)


# -- rendering --


def render_pair(row: PairRow, renderer: Renderer, loss_mask: LossMaskSection, *, is_scored: bool) -> Pair | str:
    """The tokens of a pair, of any length; or why it cannot be trained on.

    is_scored: for a reward model. Its replies end with one more token than the conversation has, at whose place the
    score of all before is read.

    Raises: DataError, ConfigError with the row's file and line if the model cannot take it.
    """
    try:
        found = [_render_reply(row, side, renderer, loss_mask, is_scored) for side in (0, 1)]
    except StrettoError as cause:
        raise type(cause)(f"{row.where}: {cause}") from cause
    except (KeyError, TypeError, ValueError) as cause:
        raise DataError(f"{row.where}: cannot be rendered: {type(cause).__name__}: {cause}") from cause
    first, second = found
    if isinstance(first, str) or isinstance(second, str):
        return first if isinstance(first, str) else str(second)
    if isinstance(row.prompt, str) and not is_scored:
        first, second = _from_where_they_differ(row.prompt, first, second, renderer)
    if np.array_equal(first.token_ids, second.token_ids) and first.images == second.images:
        return "are equal, so that none is the better one"
    return Pair((first, second), row.margin)


def _render_reply(
    row: PairRow, side: int, renderer: Renderer, loss_mask: LossMaskSection, is_scored: bool
) -> Example | str:
    reply, is_cut = row.replies[side], row.is_cut[side]
    if isinstance(reply, str):
        assert isinstance(row.prompt, str)
        return _raw_example(row.prompt + reply, renderer, is_scored, is_cut)
    assert not isinstance(row.prompt, str)
    messages = [*row.prompt, *reply]
    renderer.refuse_rendered(messages, 'set data.text = "raw", or give messages')
    if is_scored:
        ids = renderer.render_leading([{k: v for k, v in m.items() if k != STEP_MASK} for m in messages], row.tools)
        return scored_example(ids, renderer.images_of(messages))
    masked = [*({**message, STEP_MASK: 0} for message in row.prompt), *reply]
    found = renderer.render_sft(masked, loss_mask, row.tools)
    if found.num_left_out or not found.examples:
        return "are shown otherwise by the chat template than the model would sample them"
    if len(found.examples) > 1:
        return "have several turns, of which the chat template rewrites the earlier ones"
    ids, mask, num_messages = found.examples[0]
    mask = mask.copy()
    mask[:1] = False
    if is_cut:
        mask &= ~_ends(ids, mask, renderer, reply[-1])
    if not mask.any():
        return "have no trained token"
    end = int(np.flatnonzero(mask)[-1]) + 1
    images = renderer.images_of(masked[:num_messages])
    return Example(ids[:end].copy(), mask[:end], renderer.images_within(ids, images, end))


def _ends(
    ids: Int32[np.ndarray, " tokens"], mask: Bool[np.ndarray, " tokens"], renderer: Renderer, last: Message
) -> Bool[np.ndarray, " tokens"]:
    """Which tokens a cut reply was sampled without: its end, and what closes the thought in which it was cut.

    last: the message that was cut.
    """
    others = np.flatnonzero(mask & ~np.isin(ids, renderer.stop_ids))
    end = int(others[-1]) if len(others) else -1
    thought = str(last.get("reasoning_content") or "").strip()
    if thought and end > 0 and not last.get("content") and not last.get("tool_calls"):
        start = int(np.flatnonzero(~mask[:end])[-1]) + 1
        while end > start and thought in renderer.decode(ids[start:end]):
            end -= 1
    return np.arange(len(ids)) > end


def scored_example(ids: Int32[np.ndarray, " tokens"], images: tuple[Image, ...] = ()) -> Example:
    """A conversation with one more token, which is the only one that counts: the score is read before it."""
    mask = np.zeros(len(ids) + 1, bool)
    mask[-1] = True
    return Example(np.append(ids, ids[-1]).astype(np.int32), mask, images)


def _raw_example(text: str, renderer: Renderer, is_scored: bool, is_cut: bool) -> Example:
    """A text with the end token behind it unless it was cut; every token but the first is trained, or it is scored."""
    ids, end = _raw_ids(text, renderer), renderer.tokenizer.eos_token_id
    if end is not None and not is_cut and ids[-1:].tolist() != [end]:
        ids = np.append(ids, end).astype(np.int32)
    if is_scored:
        return scored_example(ids)
    mask = np.ones(len(ids), bool)
    mask[:1] = False
    return Example(ids, mask)


def _raw_ids(text: str, renderer: Renderer) -> np.ndarray:
    """The tokens of a text, with what the tokenizer begins texts with, unless the text has it."""
    plain = renderer.tokenizer.encode(text)
    ids = renderer.tokenizer.encode(text, add_special_tokens=True)
    return np.asarray(plain if ids[:1] == plain[:1] else ids, np.int32)


def _from_where_they_differ(prompt: str, first: Example, second: Example, renderer: Renderer) -> tuple[Example, ...]:
    """The replies of texts with their prompt's tokens not trained: those that both begin with, at most the prompt's."""
    own = _raw_ids(prompt, renderer).tolist()
    start = min(_common(own, example.token_ids.tolist()) for example in (first, second))
    masks = [example.is_trained & (np.arange(len(example.token_ids)) >= start) for example in (first, second)]
    return tuple(replace(example, is_trained=mask) for example, mask in zip((first, second), masks))


def load_rows(cfg: SFTConfig, data: PreferenceData, renderer: Renderer, longest: int, limit: str) -> Pairs:
    """The pairs of a data section as tokens; longest: of one sequence, as the key `limit` says."""
    is_scored = isinstance(cfg.pair_loss, RewardSection)
    limit, most = f"{limit} = {longest}", tokens_per_reply(cfg.seq_len, is_scored=is_scored)
    if most < longest:
        longest, limit = most, f"seq_len = {cfg.seq_len}"
    return load_pairs(data, renderer, cfg.loss_mask, longest, is_scored=is_scored, limit=limit)


def load_pairs(
    data: PreferenceData,
    renderer: Renderer,
    loss_mask: LossMaskSection,
    max_tokens: int,
    *,
    is_scored: bool,
    limit: str = "seq_len",
) -> Pairs:
    """Read, check and render all rows.

    max_tokens: of one reply with its prompt, which follows from the setting `limit`. Longer ones are cut; for a reward
    model the pair is dropped, because the end of a conversation is what is scored.

    Raises: DataError with file and line of a malformed row, or when no pair is left.
    """
    parts, num_rows, num_cut = [], 0, 0
    left_out: dict[str, int] = {}
    where = "the data"
    for rows in read_pair_rows(data):
        pairs = []
        for row in rows:
            where, num_rows = row.where, num_rows + 1
            pair = render_pair(row, renderer, loss_mask, is_scored=is_scored)
            if not isinstance(pair, str):
                is_long = any(len(example.token_ids) > max_tokens + is_scored for example in pair.replies)
                pair = cut_pair(pair, renderer, max_tokens, is_scored=is_scored) if is_long else pair
                num_cut += is_long and not isinstance(pair, str)
            if isinstance(pair, str):
                left_out[pair] = left_out.get(pair, 0) + 1
            else:
                pairs.append(pair)
        parts.append(tuple(pairs))
    reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
    if not all(parts):
        raise DataError(
            f"{where}: no pair is left to train on ({num_rows} rows read{f': {reasons}' if reasons else ''}); "
            f"check [loss_mask] and {limit}: a reply with its prompt has {max_tokens} tokens at most."
        )
    if left_out:
        logger.warning("%d of %d pairs are left out: %s", sum(left_out.values()), num_rows, reasons)
    if num_cut:
        logger.warning("%d of %d pairs were cut to %d tokens per reply (%s)", num_cut, num_rows, max_tokens, limit)
    mixed = mix(parts, data.probabilities, data.stopping_strategy) if parts[1:] else parts[0]
    return Pairs(mixed)


def cut_pair(pair: Pair, renderer: Renderer, max_tokens: int, *, is_scored: bool) -> Pair | str:
    """A pair whose replies have at most max_tokens, prompts included; or why it is left out."""
    if is_scored:
        return f"are longer than {max_tokens} tokens, prompt included, and their end is what is scored"
    cut = []
    for example in pair.replies:
        ids, mask = example.token_ids, example.is_trained.copy()
        if len(ids) > max_tokens:
            mask[renderer.last_cut(ids, example.images, max_tokens) :] = False
        if not mask.any():
            return f"have a prompt that is longer than {max_tokens} tokens"
        end = int(np.flatnonzero(mask)[-1]) + 1
        cut.append(Example(ids[:end].copy(), mask[:end], renderer.images_within(ids, example.images, end)))
    return Pair((cut[0], cut[1]), pair.margin)


def find_padding(config: dict[str, Any], tokenizer: Tokenizer, pairs: Pairs) -> int:
    """The token of padding for a reward model's config.json, with which transformers finds where a text ends.

    It is none with which a scored text ends: transformers reads the score at the last token that is no padding.
    """
    ends = {int(example.token_ids[-2]) for pair in pairs.examples for example in pair.replies}
    names = [tokenizer.template_tokens.get("pad_token"), END_OF_TEXT, tokenizer.template_tokens.get("bos_token")]
    known = [config.get("pad_token_id"), *(tokenizer.token_id(name) for name in names if name)]
    free = (i for i in range(tokenizer.vocab_size) if i not in ends)
    return next((i for i in known if isinstance(i, int) and i not in ends), None) or next(free, 0)


# -- packing --


def tokens_per_reply(row_tokens: int, *, is_scored: bool) -> int:
    """The most tokens of a reply with its prompt: a row holds both, and the places where scores are read."""
    return row_tokens // 2 - is_scored


def pack_pairs(
    pairs: Pairs, indices: Sequence[int], row_tokens: int, reference: Float64[np.ndarray, "all 2"] | None = None
) -> list[PairBatch]:
    """Pack pairs into rows of at most row_tokens tokens, first-fit-decreasing; no pair is split.

    reference: float64 [all pairs, 2], what the reference says of them.
    """
    lengths = np.array([len(pairs[i]) for i in indices], np.int64)
    assert lengths.max(initial=0) <= row_tokens, f"pair of {lengths.max()} tokens in rows of {row_tokens}"
    packed = []
    for row in pack_rows(lengths, row_tokens):
        chosen = np.array([indices[i] for i in row], np.int64)
        packed.append(
            PairBatch(
                micro_batch_of(
                    [example for i in chosen for example in pairs[i].replies],
                    (f"{i}/{side}" for i in chosen for side in ("chosen", "rejected")),
                ),
                chosen,
                np.array([pairs[i].margin for i in chosen], np.float32),
                None if reference is None else reference[chosen],
            )
        )
    return packed
